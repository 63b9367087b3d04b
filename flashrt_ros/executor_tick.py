"""What one tick takes in and gives out: observations to TickInput, Chunk to robot actions.

No locks and no ROS here; the engine calls it on the tick side under its own rules.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt_core.errors import ConfigError
from flashrt_core.policies.done import done_column
from flashrt_core.policies.protocol import Chunk
from flashrt_core.policies.protocol import Modality
from flashrt_core.policies.protocol import PortSpec
from flashrt_core.policies.protocol import SubgoalWrite
from flashrt_core.policies.protocol import TickInput
from flashrt_ros.control_loop import TickStart
from flashrt_ros.embodiment import Embodiment
from flashrt_ros.executor_observation import Observation
from flashrt_ros.observations import StreamVerdict
from flashrt_ros.statistics import Ring
from flashrt_ros.subgoals import SubgoalSlot


@dataclass(frozen=True)
class Ports:
    """What the executor needs to know of a policy, read from its ports."""

    state_dim: int
    action_dim: int
    horizon: int
    views: Mapping[str, tuple[int, int]]  # view -> (height, width)
    subgoal_tokens: int  # 0: the policy has no subgoal slot
    prompt_tokens: int  # 0: the policy takes no text
    done_column: int | None = None  # of the action that says whether the subgoal is done
    guidance: bool = False  # whether the strength of the task can be set
    subgoal_embedding: tuple[int, int] = (0, 0)  # most rows, width; none: it reads tokens alone

    @staticmethod
    def of(ports: Sequence[PortSpec]) -> 'Ports':
        """Read the ports of a policy.

        :raises ConfigError: when state or action is missing, or an image port is not [H, W, 3].
        """
        def one(modality: Modality) -> PortSpec | None:
            return next((p for p in ports if p.modality == modality), None)

        state, action = one(Modality.STATE), one(Modality.ACTION)
        if state is None or action is None or len(action.shape) != 2:
            raise ConfigError(
                f'policy ports are {[p.name for p in ports]}; a robot policy needs a '
                'state port and an action port [horizon, action_dim]')
        views = {}
        for port in ports:
            if port.modality == Modality.IMAGE:
                if len(port.shape) != 3 or port.shape[2] != 3:
                    raise ConfigError(
                        f'image port {port.name} has shape {port.shape}; give [height, width, 3]')
                views[port.name] = (port.shape[0], port.shape[1])
        subgoal, text = one(Modality.SUBGOAL), one(Modality.TEXT)
        return Ports(
            state_dim=state.shape[0], action_dim=action.shape[1], horizon=action.shape[0],
            views=views, subgoal_tokens=subgoal.shape[0] if subgoal else 0,
            prompt_tokens=text.shape[0] if text else 0, done_column=done_column(ports),
            guidance=one(Modality.GUIDANCE) is not None,
            subgoal_embedding=embedding_port(ports))


def embedding_port(ports: Sequence[PortSpec]) -> tuple[int, int]:
    """Return how many rows a policy reads in the place of a subgoal's tokens, and their width."""
    shapes = [p.shape for p in ports if p.modality is Modality.SUBGOAL_EMBEDDING]
    return (shapes[0][0], shapes[0][1]) if shapes else (0, 0)


@dataclass(frozen=True)
class Pending:
    """Writes that the next committed tick takes over into latched state."""

    prompt: tuple[int, ...] | None = None
    seed: int | None = None
    guidance: float | None = None


@dataclass(frozen=True)
class Prepared:
    """One tick, ready to be submitted."""

    tick_input: TickInput
    observation: Observation
    verdicts: tuple[StreamVerdict, ...]
    start: TickStart
    pending: Pending
    subgoal_sequence: int  # in the slot, or latched when nothing there counts
    seed: Callable[[], int]  # in force; known once the tick has ended
    resync: bool
    started_ns: int  # steady
    left_overs: int  # generation of the left-overs when it was prepared
    digests: dict[str, int] = field(default_factory=dict)  # filled while the tick runs


class TickFacts:
    """What the ticks drew from, chose and reused; tick side notes, any thread reads."""

    def __init__(self, views: Iterable[str]) -> None:
        self.seed = 0
        self.best_of, self.selected = 1, 0
        self.spread = Ring()  # of the candidates, in standard deviations of the actions
        self.reused = dict.fromkeys(views, 0)  # view -> ticks that took its vision result over

    def note(self, prepared: Prepared, chunk: Chunk) -> None:
        """Note one committed tick."""
        self.seed = prepared.seed()
        for view in chunk.reused_views:
            self.reused[view] += 1
        found = chunk.candidates
        self.best_of, self.selected = 1, 0
        if found is not None:
            self.best_of, self.selected = len(found.actions), found.selected
            self.spread.record(found.spread)

    def figures(self) -> dict[str, object]:
        """Return all of it by the names that diagnostics give it."""
        figures: dict[str, object] = {
            'seed': self.seed, 'best_of': self.best_of, 'best_of_selected': self.selected}
        spread = self.spread.summary()
        if spread.count:
            figures |= {'best_of_spread': spread.last, 'best_of_spread_p50': spread.p50,
                        'best_of_spread_p99': spread.p99}
        return figures | {f'vision_reused_{view}': n for view, n in self.reused.items()}


class TickBook:
    """Keeps what the next TickInput depends on beside the session's state; tick side only.

    ``queue_index`` of the session is the delay that its last committed tick was told, so the steps
    played since that chunk came into play are counted from there. A dropped tick changes nothing.
    """

    def __init__(self, embodiment: Embodiment, ports: Ports, slot: SubgoalSlot,
                 seed: int) -> None:
        self._robot = embodiment
        self._ports = ports
        self._slot = slot
        self._state = np.zeros(ports.state_dim, dtype=np.float32)
        self._committed: tuple[int, int] | None = None  # (observation step, delay told)
        self.seed: Callable[[], int] = lambda: seed
        self.pending = Pending()
        self.facts = TickFacts(ports.views)
        self._left_overs, self._cleared = 1, 0

    def restored(self, seed: Callable[[], int], pending: Pending) -> None:
        """The session's state was replaced: no step of its previous chunk has been played here.

        :param seed: gives the restored seed once the next tick has ended.
        :param pending: what the next committed tick takes over.
        """
        self._committed = None
        self.seed, self.pending = seed, pending
        self.clear_left_overs()

    def clear_left_overs(self) -> None:
        """Let no tick that is prepared from now on be blended with a chunk of before.

        It stays so until one of them is committed: a tick that ran already changes nothing.
        """
        self._left_overs += 1

    def prepare(
        self,
        observation: Observation,
        verdicts: tuple[StreamVerdict, ...],
        start: TickStart,
        delay_steps: int,
        resync: bool,
        best_of: int = 1,
        reuse_vision: bool = False,
    ) -> Prepared:
        """Build the input of a tick.

        :param delay_steps: steps expected to pass before its chunk comes into play.
        :param best_of: candidates evaluated, of which one is kept.
        :param reuse_vision: a frame that the policy has encoded already need not be once more.
        :param resync: the robot stood still; what is left of the previous chunk is not its past.
        """
        self._robot.fill_state(observation.joints, self._state)
        subgoal = self._slot.pending()
        tick_input = TickInput(
            images={view: observation.image(view) for view in self._ports.views},
            state=self._state.copy(),
            steps_executed=self._steps_executed(start, resync),
            delay_steps=delay_steps,
            subgoal=None if subgoal is None else SubgoalWrite(
                subgoal.sequence, subgoal.tokens, subgoal.embedding),
            prompt=self.pending.prompt,
            seed=self.pending.seed,
            best_of=best_of,
            frames=observation.frames(self._ports.views) if reuse_vision else {},
            guidance=self.pending.guidance,
        )
        given = self.pending.seed
        return Prepared(tick_input, observation, verdicts, start, self.pending,
                        self._slot.latched if subgoal is None else subgoal.sequence,
                        self.seed if given is None else lambda: given, resync,
                        time.monotonic_ns(), self._left_overs)

    def committed(self, prepared: Prepared, chunk: Chunk) -> None:
        """Note that the tick's state was committed, whether or not its chunk is played."""
        self._committed = (prepared.start.at_step, prepared.tick_input.delay_steps)
        self.seed = prepared.seed
        self._cleared = prepared.left_overs
        self._slot.commit(chunk.subgoal_sequence)
        self.facts.note(prepared, chunk)
        if self.pending is prepared.pending:
            self.pending = Pending()

    def robot_actions(self, chunk: Chunk, prepared: Prepared, row: int = 0
                      ) -> NDArray[np.float64]:
        """Return a row of a chunk as absolute joint positions, float64 [horizon, joints]."""
        return self._robot.to_robot(chunk.actions[row], prepared.observation.joints)

    def _steps_executed(self, start: TickStart, resync: bool) -> int:
        if resync or self._cleared != self._left_overs:
            return self._ports.horizon
        if self._committed is None:
            return 0
        at_step, delay = self._committed
        return start.at_step - at_step - delay


class TickTimes:
    """Microseconds of each stage of the ticks, the first one left out; tick side records."""

    STAGES = ('collect', 'submit', 'inference', 'finish')

    def __init__(self, segments: Iterable[str]) -> None:
        names = [*self.STAGES, 'tick', 'received_to_submit', *(f'segment {s}' for s in segments)]
        self.rings = {name: Ring(warm_up=1) for name in names}

    def record(self, moments: tuple[float, ...], prepared: Prepared, chunk: Chunk) -> None:
        """Record one tick.

        :param moments: perf_counter seconds at the begin and after each of STAGES.
        """
        for stage, begin, end in zip(self.STAGES, moments, moments[1:], strict=False):
            self.rings[stage].record((end - begin) * 1e6)
        self.rings['tick'].record((moments[-1] - moments[0]) * 1e6)
        self.rings['received_to_submit'].record(
            (prepared.started_ns - prepared.observation.oldest_received_ns) / 1e3)
        for segment, microseconds in chunk.segments_us.items():
            self.rings[f'segment {segment}'].record(microseconds)


def graph_keys(chunk: Chunk) -> list[str]:
    """Return the graph keys of a chunk in the order of its segments, for messages."""
    return key_texts(chunk.graph_keys)


def key_texts(keys: Mapping[str, Any]) -> list[str]:
    """Return the graph keys of a plan by segment, as messages carry them."""
    return [f'{segment}{_key_text(key)}' for segment, key in keys.items()]


def _key_text(key: Any) -> str:
    return str(tuple(key)) if isinstance(key, tuple) else f'({key!r})'
