"""What a tick costs that is bound otherwise: guided, and with cameras whose result is kept.

Both need other graphs, so each is a session of its own; the weights are bound again.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
import time
from typing import NamedTuple

from flashrt_core.bench._report import percentiles
from flashrt_core.bench._vla_state import Row
from flashrt_core.policies import TickInput
from flashrt_core.policies.pi0 import Pi0Config
from flashrt_core.policies.pi0 import Pi0Policy
from flashrt_core.policies.pi0 import Pi0Session
from flashrt_core.runtime import Backend

WARM_UP = 3
STRENGTH = 1.5  # of guidance: above 1, so that both halves of the rows count


@dataclass(frozen=True)
class Numbered:
    """A camera frame known by its number."""

    stamp_ns: int
    digest: int = 0


def variant_rows(backend: Backend, c: Pi0Config, inputs: Sequence[TickInput]) -> list[Row]:
    """Return rows of ticks in milliseconds; each kind is run once for each of ``inputs``.

    :param inputs: with noise and nothing of the chunk before blended in: actions then depend on
        the input alone.
    """
    guided = _times(backend, replace(c, guidance=True),
                    [replace(given, guidance=STRENGTH) for given in inputs])[0]
    fresh = [replace(given, frames={v: Numbered(i) for v in c.views})
             for i, given in enumerate(inputs)]
    first = c.views[0]
    image, frame = inputs[0].images[first], Numbered(-1)
    same = [replace(given, images={**given.images, first: image},
                    frames={**given.frames, first: frame}) for given in fresh]
    every, kept = _times(backend, replace(c, reuse_vision=True), fresh, same)
    rows = [_row('guided', guided), _row('each view encoded apart, all new', every),
            _row(f'1 of {len(c.views)} views kept', kept)]
    return [{'table': f'variants, {len(c.views)} views', **row} for row in rows]


class Kind(NamedTuple):
    """Milliseconds of ticks; how many views the last kept, and whether it gave the right bytes."""

    ms: list[float]
    kept: int
    exact: bool


def _times(backend: Backend, c: Pi0Config, *kinds: Sequence[TickInput]) -> list[Kind]:
    session = Pi0Policy().bind(backend, c)
    try:
        return [_kind(session, inputs) for inputs in kinds]
    finally:
        session.close()


def _kind(session: Pi0Session, inputs: Sequence[TickInput]) -> Kind:
    took = []
    for given in inputs:
        begun = time.perf_counter()
        chunk = session.tick(given)
        took.append((time.perf_counter() - begun) * 1e3)
    again = session.tick(replace(inputs[-1], frames={}))
    exact = not again.reused_views and again.actions.tobytes() == chunk.actions.tobytes()
    return Kind(took, len(chunk.reused_views), exact)


def _row(what: str, kind: Kind) -> Row:
    found = percentiles(kind.ms[WARM_UP:] or kind.ms)
    return {'what': what, 'n': int(found['n']), 'p50_ms': found['p50'], 'p99_ms': found['p99'],
            'kept_views': kind.kept, 'exact': kind.exact}
