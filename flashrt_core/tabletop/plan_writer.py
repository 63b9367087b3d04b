"""The small planner as a scene and an instruction go in and a plan comes out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
import time

from flashrt_core.capsule import CapsuleStore
from flashrt_core.errors import ParameterInvalid
from flashrt_core.planners import make_planner
from flashrt_core.planners import Options
from flashrt_core.planners.qwen3_5.config import load_config
from flashrt_core.planners.vocabularies import json_tokenizer
from flashrt_core.runtime import pick_backend
from flashrt_core.tabletop.instructions import parse_plan
from flashrt_core.tabletop.instructions import prompt
from flashrt_core.tabletop.instructions import Scene
from flashrt_core.tabletop.planner_data import END
from flashrt_core.tabletop.tasks import Goal

SCENE = 'scene'
STORE_BYTES = 16 << 20
MOST_TOKENS = 160


@dataclass(frozen=True)
class Written:
    """A plan as written. ``first_s``: to the first tokens, ``rest_s``: from there to the end.

    ``steps`` of decoding; ``drafted`` and ``accepted`` tokens of speculation.
    """

    text: str
    tokens: tuple[int, ...]
    first_s: float
    rest_s: float
    steps: int
    drafted: int
    accepted: int
    ended: bool  # by the planner itself

    @property
    def goals(self) -> tuple[Goal, ...] | None:
        """The goals, none for "cannot."; None where the text is no plan."""
        try:
            return parse_plan(self.text)
        except ParameterInvalid:
            return None


class PlanWriter:
    """A bound planner that writes greedily. One thread.

    :param config: ``planner.yaml``. :param drafts: tokens drafted a step, 0 for none.
    """

    def __init__(self, config: Path, device: str = 'cpu', drafts: int = 0) -> None:
        backend = pick_backend(device)
        loaded, settings = load_config(config)
        self.session = make_planner('qwen3_5').bind(backend, (loaded, settings))
        self.tokenizer = json_tokenizer(config.with_name('tokenizer.json'))
        self.options = Options(max_tokens=MOST_TOKENS, draft_tokens=drafts)
        self._end = self.tokenizer.special[END]
        self._store = CapsuleStore(backend, STORE_BYTES, STORE_BYTES)
        self._scene: str | None = None

    def write(self, scene: Scene, instruction: str) -> Written:
        """Write a plan from the empty state."""
        started = time.perf_counter()
        self.session.prefill(self.tokenizer.encode(prompt(scene, instruction))).result()
        return self._decode(started)

    def keep_scene(self, scene: Scene) -> None:
        """Read a scene and keep it as a capsule."""
        head, _ = self._parts(scene, '')
        self.session.prefill(head).result()
        boundary = self.session.boundary
        if self._scene is not None:
            self._store.drop(SCENE, boundary.session)
        self.session.lane.at_boundary(
            lambda: self._store.snapshot(boundary, SCENE, pin=False)).result()
        self._scene = str(scene)

    def write_from_scene(self, scene: Scene, instruction: str) -> Written:
        """Write a plan from the capsule of the scene that was kept: a restore and an append."""
        assert self._scene == str(scene)
        started = time.perf_counter()
        boundary = self.session.boundary
        self.session.lane.at_segment_end(lambda: self._store.restore(boundary, SCENE)).result()
        self.session.append(self._parts(scene, instruction)[1]).result()
        return self._decode(started)

    def write_cold(self, scene: Scene, instruction: str) -> Written:
        """Write a plan from the same two pieces of text, both read anew."""
        head, tail = self._parts(scene, instruction)
        started = time.perf_counter()
        self.session.prefill(head).result()
        self.session.append(tail).result()
        return self._decode(started)

    def close(self) -> None:
        """Free the session and its capsule."""
        self.session.close()
        self._store.close()

    def _parts(self, scene: Scene, instruction: str) -> tuple[list[int], list[int]]:
        head = str(scene)
        tail = prompt(scene, instruction)[len(head):]
        return self.tokenizer.encode(head), self.tokenizer.encode(tail)

    def _decode(self, started: float) -> Written:
        found: list[int] = []
        steps = drafted = accepted = 0
        first = started
        while self._end not in found and len(found) < MOST_TOKENS:
            step = self.session.decode(self.options).result()
            if not steps:
                first = time.perf_counter()
            found += step.tokens
            steps, drafted = steps + 1, drafted + step.drafted
            accepted += step.accepted
        kept = found[: found.index(self._end)] if self._end in found else found
        return Written(self.tokenizer.decode(kept), tuple(kept), first - started,
                       time.perf_counter() - first, steps, drafted, accepted,
                       self._end in found)

