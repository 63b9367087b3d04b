"""The error tree: every error has a code of its own and a sentence that says what it means."""
from __future__ import annotations

import inspect
import re

import pytest

from flashrt_core import errors

ALL = [value for value in vars(errors).values()
       if inspect.isclass(value) and issubclass(value, errors.FlashrtError)]


def test_codes_are_unique_and_snake_case():
    codes = [error.code for error in ALL]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r'[a-z][a-z0-9]*(_[a-z0-9]+)*', code) for code in codes)


@pytest.mark.parametrize('error', ALL, ids=lambda e: e.__name__)
def test_each_error_declares_its_code_and_says_what_it_means(error):
    assert 'code' in vars(error)
    assert error.__doc__ and error.__doc__.strip().endswith('.')


def test_the_public_tree_is_caught_by_its_root():
    for error in ALL:
        with pytest.raises(errors.FlashrtError, match='said'):
            raise error('said')


def test_the_package_exports_what_it_lists():
    import flashrt_core
    assert flashrt_core.FlashrtError is errors.FlashrtError
    assert set(flashrt_core._ROOM_OF) <= set(flashrt_core.__all__)
    for name in flashrt_core.__all__:
        assert getattr(flashrt_core, name) is not None
    with pytest.raises(AttributeError, match='nothing'):
        _ = flashrt_core.nothing
