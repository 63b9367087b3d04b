"""Loading in parallel: all is done and told in order, and the first error ends it."""

import threading

import pytest

from flashrt_core.checkpoints.workers import in_parallel

NAMES = [str(i) for i in range(40)]


def test_all_names_are_worked_on_and_told_in_order():
    done: list[str] = []
    told: list[int] = []
    in_parallel(NAMES, done.append, told.append)
    assert sorted(done) == sorted(NAMES) and told == list(range(1, 41))


@pytest.mark.parametrize('who', ['work', 'told'])
def test_an_error_ends_it_and_what_has_not_begun_is_left(who):
    begun: list[str] = []
    given_up = threading.Event()

    def work(name: str) -> None:
        begun.append(name)
        if name != '0':
            given_up.wait(1.0)
        elif who == 'work':
            given_up.set()
            raise ValueError('no more')

    def told(count: int) -> None:
        given_up.set()
        raise ValueError('no more')

    with pytest.raises(ValueError, match='no more'):
        in_parallel(NAMES, work, told)
    assert len(begun) < len(NAMES)
