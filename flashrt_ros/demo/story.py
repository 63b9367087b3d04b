"""What the demo shows in lock-step: obey, be interrupted, the same again, fail and try again."""

from __future__ import annotations

import hashlib

from flashrt_core.tabletop import format_task
from flashrt_core.tabletop import Goal
from flashrt_core.tabletop import WorldState
from flashrt_ros.conductor import chunk_array
from flashrt_ros.demo.lockstep import LockStep
from flashrt_ros.demo.record import Capsule
from flashrt_ros.demo.record import ForkResult
from flashrt_ros.demo.record import RollbackProof
from flashrt_ros.demo.record import spread_of

CARRIED_STEPS = 6
HOME = Goal('home')
BEFORE_GRASP = 'before_grasp'
SELECTED, EVALUATE_ONLY = -2, -1


class Story:
    """Acts over one conducted robot; main thread only."""

    def __init__(self, stage: LockStep) -> None:
        self.stage = stage
        self._before: tuple[str, dict[str, tuple[int, str]]] | None = None

    def play(self, episodes: int) -> None:
        """Play the first ``episodes`` acts; beyond the third, instructions on other tables."""
        acts = (lambda: self.interrupted('Instruction, interrupt'), self.the_same_again,
                self.tried_again)
        for number in range(1, episodes + 1):
            if number <= len(acts):
                acts[number - 1]()
            else:
                self.obeyed(f'Table {number}', number)

    def obeyed(self, title: str, seed: int) -> None:
        """One instruction on one table, to its end."""
        stage = self.stage
        stage.begin(title, seed=seed)
        goals = (*stage.world.goals, HOME)
        stage.instruct(format_task(goals), goals)
        stage.run_until()
        stage.end()

    def interrupted(self, title: str) -> None:
        """Bring a block to one zone; in mid-motion it shall go to the other one."""
        stage = self.stage
        stage.begin(title, seed=1)
        state = stage.states[0]
        block, (zone, other) = state.block_names[0], state.zone_names
        goals = (Goal('put', block, zone), HOME)
        stage.instruct(format_task(goals), goals)
        stage.run_until(lambda: self._carries(block))
        if not stage.finished:
            goals = (Goal('put', block, other), HOME)
            stage.instruct(f'move the {block} block to the {other} zone, then go home', goals,
                           interrupt=True)
        else:
            stage.note('done before it was interrupted')
        stage.run_until()
        self._before = self._before or (title, stage.digests())
        if title != self._before[0]:
            stage.compare(*self._before)
        stage.end()

    def the_same_again(self) -> None:
        """Put mind and world back, the mind by its capsule, and play the first act again."""
        self.interrupted('Reset, the same again')

    def tried_again(self) -> None:
        """Let the block slip; roll the mind back to before the grasp, play the best of N."""
        stage = self.stage
        stage.begin('Slip, rollback, best of N', seed=3)
        state = stage.states[0]
        goals = (Goal('put', state.block_names[0], state.zone_names[0]), HOME)
        stage.instruct(format_task(goals), goals)
        stage.run_until(lambda: stage.episode.ticks > 0)
        stage.verb('snapshot', BEFORE_GRASP, id=BEFORE_GRASP, label='first tick of the subgoal',
                   tier='gpu', pin=True)
        stage.run_until(lambda: self._carries(state.block_names[0]))
        if stage.states[-1].held < 0:
            stage.note('nothing was held that could slip')
        stage.episode.marks.append((stage.episode.steps, 'slip'))
        if not stage.finished:
            stage.step(slip=True)
            until = stage.episode.steps + CARRIED_STEPS
            stage.run_until(lambda: stage.episode.steps >= until)
        self._roll_back_and_fork()
        stage.instruct(format_task(goals), goals)
        stage.run_until()
        stage.end()

    def _roll_back_and_fork(self) -> None:
        """Roll back twice on the same observation; commit the candidate that is chosen."""
        stage, found = self.stage, []
        for commit in (EVALUATE_ONLY, SELECTED):
            epoch = int(stage.verb('rollback', BEFORE_GRASP, to=BEFORE_GRASP).reply.epoch)
            reply = stage.verb('fork', BEFORE_GRASP, n=stage.brain.branches,
                               commit_branch=commit).reply
            chunks = [chunk_array(chunk) for chunk in reply.chunks]
            digest = hashlib.blake2b(b''.join(c.tobytes() for c in chunks), digest_size=16)
            found.append((epoch, digest.hexdigest()))
        stage.ticked_by_fork()
        (first, one), (second, two) = found
        names, units = list(reply.chunks[0].joint_names), stage.brain.units()
        proof = RollbackProof(BEFORE_GRASP, len(chunks), first, second, one, two)
        stage.run.proofs.append(proof)
        stage.run.forks.append(ForkResult(
            BEFORE_GRASP, [float(score) for score in reply.scores], float(reply.spread),
            int(reply.selected), spread_of(chunks), [chunk.tolist() for chunk in chunks],
            names, [units[name] for name in names]))
        stage.note(f'rolled back to {BEFORE_GRASP}, best of {len(chunks)}, '
                   f'{"bit for bit" if proof.equal else "NOT the same"} when rolled back twice')
        if not proof.equal:
            stage.run.failures.append(
                f'{BEFORE_GRASP}: candidates after two rollbacks on one observation differ')

    def list_capsules(self) -> None:
        """Note what executor and planner hold."""
        stage = self.stage
        held = {'executor': stage.conductor.executor('list_capsules').reply.capsules,
                'planner': stage.planner.capsules()}
        stage.run.capsules = [
            Capsule(owner, c.id, c.label, c.tier, c.parent, int(c.position), int(c.size_bytes),
                    bool(c.pinned))
            for owner, capsules in held.items() for c in capsules]

    def _carries(self, block: str) -> bool:
        """Whether the block is on its way; for a policy that never grasps, a third of the time."""
        states = self.stage.states
        if self.stage.episode.steps >= self.stage.limit // 3:
            return True
        return len(states) > CARRIED_STEPS and all(
            _is_held(state, block) for state in states[-CARRIED_STEPS:])


def _is_held(state: WorldState, block: str) -> bool:
    return state.held >= 0 and state.held == state.block_index(block) and state.lift > 0.9
