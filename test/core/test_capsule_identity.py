"""Identities: digests, differences, numerics of the machine, digests of weights."""
from __future__ import annotations

from pathlib import Path
import subprocess
import sys

import pytest
import torch

from flashrt_core.capsule import config_fields
from flashrt_core.capsule import Identity
from flashrt_core.capsule import numerics_of
from flashrt_core.capsule import weights_digest
from flashrt_core.capsule.identity import describe_diff
from flashrt_core.errors import ConfigError


def test_digests_depend_on_content_not_on_order() -> None:
    one = Identity({'a': '1', 'b': '2'}, {'c': '3'})
    two = Identity({'b': '2', 'a': '1'}, {'c': '3'})
    assert one == two and hash(one) == hash(two)
    assert one.layout_digest == two.layout_digest and len(one.layout_digest) == 64
    assert one.layout_digest != Identity({'a': '1', 'b': '3'}).layout_digest
    assert one.layout_digest != Identity({'a': '1b', '': '2'}).layout_digest


def test_differences_name_level_field_and_both_values() -> None:
    mine = Identity({'config': 'a', 'only': 'x'}, {'torch': '2.11'})
    theirs = Identity({'config': 'b'}, {'torch': '2.12'})
    assert mine.diff(theirs) == [
        ('layout', 'config', 'a', 'b'), ('layout', 'only', 'x', '-'),
        ('numerics', 'torch', '2.11', '2.12')]
    text = describe_diff(mine.diff(theirs))
    assert "layout.config: here 'a', capsule 'b'" in text and 'numerics.torch' in text


def test_a_long_difference_is_cut() -> None:
    mine = Identity({f'f{number}': 'x' * 500 for number in range(40)})
    text = describe_diff(mine.diff(Identity({})))
    assert 'and 28 more' in text and len(text) < 2500


@pytest.mark.parametrize('fields', [{'a': 1}, {1: 'a'}, {'a': None}, {'a': 'x' * 5000}])
def test_fields_are_text(fields: dict) -> None:
    with pytest.raises(ConfigError, match='str'):
        Identity(fields)


def test_an_identity_cannot_be_changed() -> None:
    fields = {'a': '1'}
    identity = Identity(fields)
    fields['a'] = '2'
    assert identity.layout['a'] == '1'
    with pytest.raises(TypeError):
        identity.layout['a'] = '2'  # type: ignore[index]


def test_numerics_name_the_libraries_and_the_processor() -> None:
    fields = numerics_of('cpu', {'chunk_plan': '256'})
    assert fields['torch'] == torch.__version__ and fields['chunk_plan'] == '256'
    assert {'arch', 'triton', 'backend', 'threads'} <= set(fields)
    assert all(isinstance(value, str) for value in fields.values())


def test_config_becomes_fields() -> None:
    assert config_fields({'width': 8, 'name': 'x'}) == {
        'config.width': '8', 'config.name': "'x'"}


def test_weight_digests_see_names_types_shapes_and_bytes() -> None:
    weights = {'a': torch.arange(12.).reshape(3, 4), 'b': torch.ones(5, dtype=torch.bfloat16)}
    known = weights_digest(weights)
    assert known == weights_digest(dict(reversed(weights.items())))
    for change in ({'a': weights['a'].reshape(4, 3)}, {'a': weights['a'].view(torch.int32)},
                   {'a': weights['a'].clone().index_fill_(0, torch.tensor([2]), 9.)}):
        assert weights_digest({**weights, **change}) != known
    assert weights_digest({'c': weights['a'], 'b': weights['b']}) != known
    assert weights_digest({'a': weights['a'].t().contiguous().t(), 'b': weights['b']}) == known


def test_weights_larger_than_a_piece_are_hashed_whole() -> None:
    large = torch.zeros(9 << 20, dtype=torch.int32)
    known = weights_digest({'w': large})
    large[-1] = 1
    assert weights_digest({'w': large}) != known


FORKED = """
import os, signal
from flashrt_core.capsule import hashing
data = memoryview(bytes(3 * hashing.GROUP_BYTES))
known = hashing.digest(data)
child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(0 if hashing.digest(data) == known else 1)
assert os.waitpid(child, 0)[1] == 0, 'the child did not finish'
"""


def test_a_forked_child_hashes_with_threads_of_its_own() -> None:
    done = subprocess.run([sys.executable, '-c', FORKED], cwd=Path(__file__).parents[2],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
