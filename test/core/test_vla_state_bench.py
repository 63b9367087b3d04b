"""What the VLA bench says of state: every verb's bytes are checked, a lost byte is told."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from _pi0 import observation
from _pi0 import SMALL
import pytest

from flashrt_core.bench._vla_state import BRANCHES
from flashrt_core.bench._vla_state import state_rows
from flashrt_core.bench._vla_state import with_branches
from flashrt_core.capsule import CapsuleStore
from flashrt_core.policies.pi0 import Pi0Policy
from flashrt_core.policies.pi0 import Pi0Session
from flashrt_core.runtime import Backend

INPUTS = [observation(draw=i, steps_executed=1) for i in range(8)]


@pytest.fixture
def session(backend: Backend) -> Iterator[Pi0Session]:
    made = Pi0Policy().bind(backend, with_branches(SMALL))
    yield made
    made.close()


def test_ticks_and_verbs_are_timed_and_every_verb_leaves_the_bytes_it_should(session):
    rows = {row['what']: row for row in state_rows(session, INPUTS)}
    assert list(rows) == [
        'other ticks', 'first tick after a new prompt', 'one candidate', f'best of {BRANCHES}',
        'snapshot, gpu', 'restore, gpu', 'restore, host', 'rollback to a mark',
        f'fork into {BRANCHES} rows']
    ticks = [row for row in rows.values() if row['table'] == 'ticks, 2 views']
    assert len(ticks) == 4 and all(0 < row['p50_ms'] <= row['p99_ms'] for row in ticks)
    verbs = [row for row in rows.values() if row['table'] == 'state, 2 views']
    assert len(verbs) == 5 and all(row['exact'] and row['p50_us'] > 0 for row in verbs)
    assert rows['restore, gpu']['bytes'] == sum(n for _, n in session.boundary.ranges())
    assert rows[f'fork into {BRANCHES} rows']['bytes'] == BRANCHES * rows['restore, gpu']['bytes']


@pytest.mark.parametrize(('verb', 'lost'), [
    ('restore', {'snapshot, gpu', 'restore, gpu', 'restore, host', f'fork into {BRANCHES} rows'}),
    ('rollback', {'rollback to a mark'})])
def test_a_verb_that_loses_a_byte_is_told(session, monkeypatch, verb, lost):
    real = getattr(CapsuleStore, verb)

    def careless(self, *args, **options):
        report = real(self, *args, **options)
        session.buffers['previous_chunk'].row(0).view(-1)[0] += 1
        return report

    monkeypatch.setattr(CapsuleStore, verb, careless)
    rows = state_rows(session, INPUTS)
    assert {row['what'] for row in rows if not row.get('exact', True)} == lost


def test_the_plans_of_one_row_are_those_without_branches(session, backend):
    alone = Pi0Policy().bind(backend, replace(SMALL, rows=1, row_keys=(1,)))
    try:
        for given in INPUTS[:3]:
            assert session.tick(given).actions.tobytes() == alone.tick(given).actions.tobytes()
    finally:
        alone.close()
