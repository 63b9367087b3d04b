"""The chunk plan covers what it is given, cheaply, and always in the same way."""
from __future__ import annotations

import ast
import inspect
from itertools import product

from _planner import bound
from _planner import SETTINGS
from _planner import SMALL
from hypothesis import given
from hypothesis import strategies as st
import pytest

from flashrt_core.errors import ConfigError
from flashrt_core.errors import PromptEmpty
from flashrt_core.errors import PromptTooLong
from flashrt_core.planners.chunks import check_keys
from flashrt_core.planners.chunks import Chunk
from flashrt_core.planners.chunks import cuts
from flashrt_core.planners.chunks import graph_keys
from flashrt_core.planners.chunks import plan_chunks
from flashrt_core.planners.chunks import span_of
from flashrt_core.planners.qwen3_5 import fast
from flashrt_core.planners.qwen3_5 import model
from flashrt_core.runtime import cpu_backend

KEYS = (16, 64, 256, 1024, 2048)
OPTIONS = {'keys': KEYS, 'context': 16384, 'ridge': 192, 'smallest_span': 2048}


def cost(found: tuple[tuple[int, int], ...], ridge: int) -> int:
    return sum(max(key, ridge) for key, _ in found)


@pytest.mark.parametrize(('count', 'expected'), [
    (1, ((16, 1),)),
    (64, ((64, 64),)),
    (66, ((256, 66),)),                    # 64 and 16 would read the weights twice
    (258, ((256, 256), (16, 2))),
    (1000, ((1024, 1000),)),
    (1100, ((1024, 1024), (256, 76))),     # cheaper than 2048, and than 1024, 64, 16
    (4100, ((2048, 2048), (2048, 2048), (16, 4))),
])
def test_some_plans_at_the_shipped_keys(count, expected):
    assert cuts(count, KEYS, 192) == expected


@given(count=st.integers(1, 9000), start=st.integers(0, 7000))
def test_a_plan_covers_every_token_once_and_pads_only_its_last_chunk(count, start):
    found = plan_chunks(count, start, **OPTIONS)
    at = start
    for chunk in found:
        assert chunk.start == at and 1 <= chunk.length <= chunk.tokens
        assert chunk.length == chunk.tokens or chunk is found[-1]
        assert chunk.start + chunk.length <= chunk.span <= OPTIONS['context']
        at += chunk.length
    assert at == start + count


@given(count=st.integers(1, 30), ridge=st.integers(0, 12))
def test_no_cover_of_up_to_four_chunks_is_cheaper(count, ridge):
    keys = (3, 4, 16)
    best = min(sum(max(k, ridge) for k in chosen) for n in range(1, 5)
               for chosen in product(keys, repeat=n) if sum(chosen) >= count)
    assert cost(cuts(count, keys, ridge), ridge) <= best


@given(count=st.integers(1, 5000), start=st.integers(0, 9000),
       keys=st.sampled_from([KEYS, (1,), (4, 8), (16, 2048), (5, 7, 1000)]))
def test_every_plan_names_only_graph_keys_that_were_captured(count, start, keys):
    captured = graph_keys(keys, 512, 16000)
    assert len(captured) == len(set(captured))
    for chunk in plan_chunks(count, start, keys=keys, context=16000, ridge=192,
                             smallest_span=512):
        assert chunk.key in captured


def test_the_plan_depends_on_count_and_position_alone():
    again = [plan_chunks(1100, 300, **{**OPTIONS, 'keys': keys})
             for keys in (KEYS, KEYS[::-1], list(KEYS))]
    assert again[0] == again[1] == again[2]
    assert again[0] == (Chunk(1024, 1024, 300, 2048), Chunk(256, 76, 1324, 2048))
    moved = plan_chunks(1100, 2000, **OPTIONS)
    assert [(c.tokens, c.length) for c in moved] == [(c.tokens, c.length) for c in again[0]]
    assert [c.span for c in moved] == [4096, 4096]


def test_spans_double_up_to_the_context_whatever_it_is():
    assert [span_of(end, 256, 1000) for end in (1, 256, 257, 600, 1000)] == [
        256, 256, 512, 1000, 1000]


def test_what_does_not_fit_or_is_empty_is_refused_with_the_numbers():
    with pytest.raises(PromptTooLong, match=r'101 tokens after the 16284 .* at most 100'):
        plan_chunks(101, 16284, **OPTIONS)
    assert plan_chunks(100, 16284, **OPTIONS)[-1].span == 16384
    with pytest.raises(PromptEmpty, match='at least one'):
        plan_chunks(0, 5, **OPTIONS)


@pytest.mark.parametrize('changes', [
    {'keys': ()}, {'keys': (16, 16)}, {'keys': (0, 4)}, {'keys': (True,)}, {'ridge': -1},
    {'keys': (64,), 'context': 32}, {'smallest_span': 0}])
def test_keys_that_make_no_plan_are_refused(changes):
    given = {'keys': KEYS, 'context': 4096, 'ridge': 192, 'smallest_span': 256, **changes}
    with pytest.raises(ConfigError, match='key'):
        check_keys(**given)


def test_a_family_that_does_not_read_the_span_has_one_graph_a_chunk_size(monkeypatch):
    keys = graph_keys(SETTINGS.prefill_keys, SETTINGS.smallest_span, SMALL.context)
    graphs = {}
    for reads in (True, False):
        monkeypatch.setattr(model, 'READS_SPAN', reads, raising=False)
        with bound(cpu_backend()) as session:
            plans = {key: session._plans['chunk', *key] for key in keys}
            graphs[reads] = {segment.key for plan in plans.values() for segment in plan.segments}
            assert all(plan.segments[0].key[0] == key[0] for key, plan in plans.items())
            session.prefill(range(40)).result(20)  # keys of two spans
            assert session.position == 40
    assert graphs[True] == set(keys)
    assert graphs[False] == {(tokens, SMALL.context) for tokens in SETTINGS.prefill_keys}
    assert len(graphs[False]) < len(graphs[True])


def test_the_kernels_of_a_chunk_say_that_they_do_not_read_the_span():
    assert fast.READS_SPAN is False
    assert not [node for node in ast.walk(ast.parse(inspect.getsource(fast.chunk)))
                if isinstance(node, ast.Name) and node.id == 'span']
