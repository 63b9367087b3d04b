"""Demonstrations for the small policy: states, what it is told, and what the expert would do.

A sample holds a state of the world, not pictures: the cameras are drawn from it by the run-time
code. Its label is the expert's next actions from that very state, played forward in a world of
their own, so that states somebody else went to (perturbed, or the policy itself) teach recovery.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file
from safetensors.numpy import save_file

from flashrt_core.errors import ActionOutOfLimits
from flashrt_core.errors import ConfigError
from flashrt_core.policies.preprocess import letterbox
from flashrt_core.tabletop.expert import expert_action
from flashrt_core.tabletop.kinematics import inverse
from flashrt_core.tabletop.kinematics import LOWER_LIMITS
from flashrt_core.tabletop.kinematics import UPPER_LIMITS
from flashrt_core.tabletop.scene import render_state
from flashrt_core.tabletop.scene import VIEWS
from flashrt_core.tabletop.state import VECTOR_SIZE
from flashrt_core.tabletop.state import WorldState
from flashrt_core.tabletop.subgoals import CAMERA
from flashrt_core.tabletop.subgoals import draw_goal
from flashrt_core.tabletop.subgoals import encode_subgoal
from flashrt_core.tabletop.subgoals import in_held_out_spot
from flashrt_core.tabletop.subgoals import settled
from flashrt_core.tabletop.subgoals import SLOTS
from flashrt_core.tabletop.tasks import Goal
from flashrt_core.tabletop.tasks import goal_reached
from flashrt_core.tabletop.workers import pool
from flashrt_core.tabletop.world import World

HORIZON = 16      # steps of a label
ACTIONS = 5       # joints, gripper, done
EVERY = 3         # steps from one sample of an episode to the next
LONGEST = 220     # steps that a goal may take
LINGER = 30       # steps that an episode goes on after a goal is reached
GOALS = 3         # goals in a row on one table
IDLE = 24         # steps without a goal, which some tables begin with or come to in between
IDLE_SHARE = 0.12
CROWDED_SHARE = 0.3  # of the goals to put a block find another one in the zone already

Act = Callable[[WorldState, Goal | None], NDArray[np.float64]]

# A forked process would inherit locks that torch's and the lanes' threads hold at that moment.


@dataclass(frozen=True)
class Samples:
    """N samples.

    ``states`` float64 [N, VECTOR_SIZE]; ``text`` int32 [N, SLOTS] and ``length`` int32 [N];
    ``actions`` float32 [N, HORIZON, ACTIONS]: absolute joint targets (rad), gripper, and whether
    the goal is settled before that step (0 or 1).
    """

    states: NDArray[np.float64]
    text: NDArray[np.int32]
    length: NDArray[np.int32]
    actions: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, rows: slice) -> 'Samples':
        return Samples(*(values[rows] for values in vars(self).values()))

    @property
    def joints(self) -> NDArray[np.float32]:
        """Return the measured joints, float32 [N, 4]."""
        return self.states[:, :4].astype(np.float32)


def label(state: WorldState, goal: Goal | None, world: World) -> NDArray[np.float32]:
    """Return what the expert does from ``state`` on; ``world`` is used up."""
    world.set_task('go home')
    world.restore(state)
    rows = []
    for _ in range(HORIZON):
        now = world.snapshot()
        target = expert_action(now, _only(goal))
        rows.append([*target, float(settled(goal, now))])
        world.step(target)
    return np.array(rows, np.float32)


def _only(goal: Goal | None) -> tuple[Goal, ...]:
    return () if goal is None else (goal,)


def draw_world(rng: np.random.Generator) -> World:
    """Draw a table of 1 to 3 blocks and zones; seeds below 2**40 are the training's.

    No block lies in a held-out spot, and some tables find the arm away from home.
    """
    while True:
        seed = int(rng.random() * 2**40)
        world = World(seed, blocks=1 + int(rng.random() * 3), zones=1 + int(rng.random() * 3))
        if in_held_out_spot(world.snapshot()):
            continue
        world.set_task('go home')  # of every table
        if rng.random() < 0.5:
            world.displace(draw_pose(rng))
        return world


def draw_pose(rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw joints float64 [4] that hold the tool over the table, the gripper mostly open."""
    gripper = rng.random() if rng.random() < 0.3 else 0.0
    while True:
        x, y = 0.22 + 0.38 * rng.random(), 0.6 * (rng.random() - 0.5)
        try:
            yaw = float(np.arctan2(y, x)) + 1.5 * (rng.random() - 0.5)
            return np.array([*inverse(x, y, yaw), gripper])
        except ActionOutOfLimits:
            continue


def perturb(rng: np.random.Generator, world: World) -> None:
    """Now and then move the arm by hand, or let the block slip."""
    draw = rng.random()
    if draw < 0.006:
        joints = world.joints + (rng.random(4) - 0.5) * (0.5, 0.5, 0.5, 0.3)
        world.displace(np.clip(joints, LOWER_LIMITS, UPPER_LIMITS))
    elif draw < 0.008:
        world.displace(draw_pose(rng))
    elif draw < 0.011:
        world.slip()
    elif draw < 0.013:
        state = world.snapshot()
        index = int(rng.random() * len(state.blocks))
        x, y = (state.blocks[index, :2] + 0.12 * (rng.random(2) - 0.5)).tolist()
        if index != state.held:
            world.move_block(state.block_names[index], x, y)


def crowd(rng: np.random.Generator, world: World, goal: Goal) -> None:
    """Lay another block into the zone of a goal to put one, as an earlier goal would have."""
    state = world.snapshot()
    zone = state.zone_index(goal.zone)
    others = [name for at, name in enumerate(state.block_names)
              if name != goal.block and at != state.held]
    if zone is None or not others or any(
            goal_reached(Goal('put', name, goal.zone), state) for name in others):
        return
    x, y = (state.zones[zone] + 0.03 * (rng.random(2) - 0.5)).tolist()
    world.move_block(others[int(rng.random() * len(others))], x, y)


def episode(seed: int, act: Act | None = None) -> Samples:
    """Record a few goals in a row on one table.

    :param act: what drives the arm; None is the expert with noise on its targets.
    Whoever drives, the arm is pushed and blocks slip or are moved now and then.
    """
    rng = np.random.default_rng([seed, 3])
    world, scratch = draw_world(rng), World(0)
    states: list[NDArray[np.float64]] = []
    texts, actions = [], []
    for _ in range(GOALS):
        idle = rng.random() < IDLE_SHARE
        goal = None if idle else draw_goal(rng, world.snapshot(), pairs='seen')
        if goal is None and not idle:
            continue
        if goal is not None and rng.random() < CROWDED_SHARE:
            crowd(rng, world, goal)
        # Some goals are cut short, as by an interrupt.
        limit = int(rng.random() * LONGEST) if rng.random() < 0.15 else LONGEST
        limit = IDLE if idle else limit
        noise, left = np.zeros(4), LINGER
        size = (0.0, 0.02, 0.06, 0.2)[int(rng.random() * 4)]
        for step in range(limit):
            state = world.snapshot()
            if step % EVERY == 0:
                states.append(state.to_vector())
                texts.append(encode_subgoal(goal))
                actions.append(label(state, goal, scratch))
            left -= settled(goal, state)
            if left < 0:
                break
            if act is not None:
                world.step(act(state, goal))
            else:
                noise = 0.9 * noise + size * (rng.random(4) - 0.5) * (1, 1, 1, 0.5)
                target = expert_action(state, _only(goal)) + noise
                world.step(np.clip(target, LOWER_LIMITS, UPPER_LIMITS))
            perturb(rng, world)
    return pack(states, texts, actions)


def pack(states: list[NDArray[np.float64]], texts: list[list[int]],
         actions: list[NDArray[np.float32]]) -> Samples:
    """Return lists of single samples as one."""
    text = np.zeros((len(texts), SLOTS), np.int32)
    for row, tokens in zip(text, texts, strict=True):
        row[: len(tokens)] = tokens
    return Samples(
        np.array(states).reshape(-1, VECTOR_SIZE),
        text,
        np.array([len(tokens) for tokens in texts], np.int32),
        np.array(actions, np.float32).reshape(-1, HORIZON, ACTIONS),
    )


def join(parts: Iterable[Samples]) -> Samples:
    """Return all samples one after the other."""
    kept = list(parts)
    return Samples(*(np.concatenate([getattr(p, name) for p in kept]) for name in
                     ('states', 'text', 'length', 'actions')))


def generate(first: int, episodes: int, workers: int, done: Callable[[int], None]) -> Samples:
    """Record ``episodes`` of the expert from seed ``first`` on, in processes of their own."""
    parts = []
    with pool(workers) as processes:
        seeds = range(first, first + episodes)
        for count, part in enumerate(processes.map(episode, seeds, chunksize=4), start=1):
            parts.append(part)
            done(count)
    return join(parts)


def draw_frames(states: NDArray[np.float64], size: int) -> NDArray[np.uint8]:
    """Draw both cameras of every state as a policy gets them: uint8 [N, views, size, size, 3]."""
    out = np.empty((len(states), len(VIEWS), size, size, 3), np.uint8)
    for row, vector in zip(out, states, strict=True):
        state = WorldState.from_vector(vector)
        for at, view in enumerate(VIEWS):
            row[at] = letterbox(render_state(state, view, CAMERA), size)
    return out


def frames_in_parallel(states: NDArray[np.float64], size: int, workers: int,
                       done: Callable[[int], None]) -> Iterator[NDArray[np.uint8]]:
    """Give the frames of ``states`` piece by piece, in order."""
    pieces = [states[at : at + 256] for at in range(0, len(states), 256)]
    with pool(workers) as processes:
        count = 0
        for frames in processes.map(partial(draw_frames, size=size), pieces):
            count += len(frames)
            done(count)
            yield frames


def save(samples: Samples, path: str | Path) -> None:
    """Write samples as one safetensors file."""
    save_file({name: np.ascontiguousarray(value) for name, value in vars(samples).items()},
              str(path))


def load(path: str | Path) -> Samples:
    """Read samples.

    :raises ConfigError: unreadable, or not of this version's shapes.
    """
    try:
        stored = load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f'samples {path} cannot be read: {error}; generate them') from error
    count = len(stored.get('states', ()))
    shapes = {'states': (count, VECTOR_SIZE), 'text': (count, SLOTS), 'length': (count,),
              'actions': (count, HORIZON, ACTIONS)}
    found = {name: tensor.shape for name, tensor in stored.items()}
    if found != shapes:
        raise ConfigError(f'samples {path} have {found}, this version needs {shapes}; generate '
                          'them again')
    return Samples(**stored)
