"""The small policy at the arm, in lock-step: pictures in, joint targets out, some steps a tick."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
import torch

from flashrt_core.capsule import CapsuleStore
from flashrt_core.capsule import Mark
from flashrt_core.policies import make_policy
from flashrt_core.policies.done import DoneWatch
from flashrt_core.policies.preprocess import letterbox
from flashrt_core.policies.protocol import SubgoalWrite
from flashrt_core.policies.protocol import TickInput
from flashrt_core.runtime import pick_backend
from flashrt_core.tabletop.kinematics import LOWER_LIMITS
from flashrt_core.tabletop.kinematics import UPPER_LIMITS
from flashrt_core.tabletop.scene import render_state
from flashrt_core.tabletop.state import WorldState
from flashrt_core.tabletop.subgoals import CAMERA
from flashrt_core.tabletop.subgoals import DONE
from flashrt_core.tabletop.subgoals import encode_subgoal
from flashrt_core.tabletop.subgoals import REPLAN
from flashrt_core.tabletop.tasks import Goal

START = 'start'          # the capsule of a session that has not ticked yet
STORE_BYTES = 16 << 20


class Driver:
    """One bound policy and what is left of its chunk. One thread.

    :param config: of the policy, see ``policies.pi0.load_config``.
    :param camera: width and height that the cameras send; the policy gets them letterboxed.
    :param best_of: candidates of each tick, of which the config's selector keeps one.
    ``done``: whether the policy says that its subgoal is done, see ``policies.done``.
    """

    def __init__(self, config: Any, device: str = 'cpu', camera: int = CAMERA,
                 best_of: int = 1) -> None:
        backend = pick_backend(device)
        self.session = make_policy('pi0').bind(
            backend, str(config) if isinstance(config, Path) else config)
        self.store = CapsuleStore(backend, STORE_BYTES, STORE_BYTES)
        boundary = self.session.boundary
        self.session.lane.at_boundary(
            lambda: self.store.snapshot(boundary, START, pin=True)).result()
        self._size, self._camera = self.session.config.vision.image_size, camera
        self._best_of = best_of
        self._goal: Goal | None = None  # the latched one
        self._sequence = 0
        self._played = 0
        self._seed = 0
        self._chunk: NDArray[np.float32] | None = None
        self._watch = DoneWatch(DONE)
        self.done = False

    def act(self, state: WorldState, goal: Goal | None) -> NDArray[np.float64]:
        """Return the joint target of the next step, float64 [4]; a new goal is a new chunk."""
        if self._chunk is None or goal != self._goal or self._played == REPLAN:
            self._tick(state, goal)
        assert self._chunk is not None
        target = self._chunk[self._played, :4].astype(np.float64)
        self._played += 1
        return np.clip(target, LOWER_LIMITS, UPPER_LIMITS)

    def reset(self, seed: int) -> None:
        """Begin anew from the capsule of the start: what follows depends on ``seed`` alone."""
        boundary = self.session.boundary
        self.session.lane.at_segment_end(lambda: self.store.restore(boundary, START)).result()
        self.forget(seed)

    def forget(self, seed: int) -> None:
        """Drop what is left of the chunk; the next one is drawn by ``seed``, the goal told again.

        It goes with a session that was brought to another state.
        """
        self._chunk, self._played, self._seed = None, 0, seed
        self.tell_anew()

    def tell_anew(self) -> None:
        """Have the goal written again with the next step, as a new subgoal."""
        self._goal = None
        self._watch.clear()
        self.done = False

    def mark(self) -> Mark:
        """Return a point to go back to; between two chunks."""
        boundary = self.session.boundary
        return self.session.lane.at_boundary(lambda: self.store.mark(boundary)).result()

    def rollback(self, mark: Mark, seed: int) -> None:
        """Take the policy back to a mark, the world stays; the next chunk is drawn by ``seed``."""
        boundary = self.session.boundary
        self.session.lane.at_segment_end(lambda: self.store.rollback(boundary, mark)).result()
        self.forget(seed)

    def _tick(self, state: WorldState, goal: Goal | None) -> None:
        subgoal = None
        if goal != self._goal:
            self._goal, self._sequence = goal, self._sequence + 1
            self._watch.clear()
            subgoal = SubgoalWrite(self._sequence, encode_subgoal(goal))
        images = {view: letterbox(render_state(state, view, self._camera), self._size)
                  for view in ('top', 'wrist')}
        chunk = self.session.tick(TickInput(
            images, state.joints.astype(np.float32), steps_executed=self._played,
            subgoal=subgoal, seed=self._seed if self._chunk is None else None,
            best_of=self._best_of))
        self._chunk, self._played = chunk.actions[0], 0
        self.done = self._watch.observe(self._chunk)

    def close(self) -> None:
        """Free the session and its capsules."""
        self.session.close()
        self.store.close()


def one_thread() -> None:
    """Have this process compute on one core: there are as many processes as cores."""
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
