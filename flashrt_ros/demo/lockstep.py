"""Episodes under the conductor's clock: policy, rollback and its proof, fork, scripted expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flashrt_core.tabletop import draw_filmstrip
from flashrt_core.tabletop import encode_png
from flashrt_core.tabletop import Expert
from flashrt_core.tabletop import World
from flashrt_core.tabletop import WorldState
from flashrt_ros.conductor import Answer
from flashrt_ros.conductor import chunk_array
from flashrt_ros.conductor import chunk_digest
from flashrt_ros.conductor import Conductor
from flashrt_ros.conductor import input_digests
from flashrt_ros.conductor import Observation
from flashrt_ros.conductor import to_ns
from flashrt_ros.conductor import to_stamp
from flashrt_ros.demo.record import Capsule
from flashrt_ros.demo.record import Episode
from flashrt_ros.demo.record import ForkResult
from flashrt_ros.demo.record import ReplayProof
from flashrt_ros.demo.record import Run
from flashrt_ros.demo.record import spread_of
from flashrt_ros.demo.record import VerbCall
from flashrt_ros.demo.terminal import Terminal
from flashrt_ros.msg import ActionChunk
from flashrt_ros.msg import TickInput

STRIP_FRAMES = 8
STRIP_SIZE_PX = 150


@dataclass
class Segment:
    """A few steps of the policy: what it saw and what it answered."""

    observations: list[Observation]
    chunks: list[ActionChunk]
    inputs: list[TickInput]


class LockStep:
    """Conducts episodes and writes them into the run. Main thread only.

    A ``World`` of the same seed follows the commands beside the robot: the tabletop is
    deterministic, so its joints must equal the measured ones to the bit, and it draws the strips.
    """

    def __init__(self, conductor: Conductor, run: Run, terminal: Terminal) -> None:
        self.conductor = conductor
        self.run = run
        self.terminal = terminal
        self._world: World
        self._states: list[WorldState] = []
        self._stamp_ns = 0
        self._observation: Observation
        self._episode: Episode
        self._total = 0
        self._solved = False

    # -- episodes -----------------------------------------------------------------------------

    def policy_episode(self, number: int, steps: int, *, story: str) -> None:
        """Reset mind and world, then run ``steps`` steps with one of the stories in the middle.

        :param story: ``rollback`` (and its proof), ``fork``, or ``''``.
        """
        self._begin(f'Episode {number}', 'policy', seed=number, steps=steps)
        reset = self._verb('reset', '', set_seed=True, seed=number)
        self._episode.epochs.append(reset.reply.epoch)
        middle = steps // 2
        self._run_policy(middle)
        if story == 'rollback':
            self._rollback_story(f'episode_{number}_middle')
        elif story == 'fork':
            self._fork_story(f'episode_{number}_middle')
        self._run_policy(steps - self._episode.steps)
        self._end()

    def expert_episode(self, seed: int, limit: int = 500) -> bool:
        """Let the scripted expert solve the task through the topic the executor commands."""
        self._begin('Scripted expert', 'expert', seed=seed, steps=limit)
        expert = Expert(self._world)
        names = list(self._observation.joints.name)
        while not self._solved and self._episode.steps < limit:
            action = expert.action()
            self.conductor.publish(action.tolist(), names, self._stamp_ns)
            self._robot_step(action.tolist())
        self._episode.solved = self._solved
        self._end()
        return self._solved

    def _begin(self, title: str, driver: str, *, seed: int, steps: int) -> None:
        self.terminal.stage(title)
        self._total = steps
        answer = self.conductor.robot('reset_world', seed=seed, blocks=1, task='')
        self._world = World(seed, 1, answer.reply.task)
        self._states = [self._world.snapshot()]
        self._solved = False
        self._observe(to_ns(answer.reply.stamp))
        self._episode = Episode(title, driver, seed, answer.reply.task)
        self._episode.began_s = self.terminal.seconds
        self.run.episodes.append(self._episode)

    def _end(self) -> None:
        episode = self._episode
        episode.ended_s = self.terminal.seconds
        strip = draw_filmstrip(self._states, frames=STRIP_FRAMES, size=STRIP_SIZE_PX)
        episode.strip_png = encode_png(strip)
        text = f'{episode.steps} steps'
        if episode.driver == 'policy':
            text += f', {episode.ticks} ticks, epochs {", ".join(map(str, episode.epochs))}'
        else:
            text += f', "{episode.task}" {"solved" if episode.solved else "NOT solved"}'
        good = episode.driver == 'policy' or episode.solved
        self.terminal.done(f'{text}{"; " + episode.note if episode.note else ""}', good=good)
        if not good:
            self.run.failures.append(f'{episode.title}: the task was not solved')

    # -- one step -----------------------------------------------------------------------------

    def _observe(self, stamp_ns: int) -> None:
        self._stamp_ns = stamp_ns
        self._observation = self.conductor.observation(stamp_ns)

    def _policy_step(self, stamp_ns: int) -> list[float]:
        reply = self.conductor.executor_step(stamp_ns)
        self._episode.ticks += int(reply.ticked)
        return [float(p) for p in reply.positions]

    def _robot_step(self, command: Sequence[float]) -> None:
        wait = to_stamp(self._stamp_ns) if len(command) else to_stamp(0)
        reply = self.conductor.robot('step', steps=1, command_stamp=wait).reply
        self._observe(to_ns(reply.stamp))
        self._solved = bool(reply.solved)
        self._episode.steps += 1
        if len(command):
            self._world.step(np.asarray(command))
        measured = np.asarray(self._observation.joints.position)
        if not np.array_equal(measured, self._world.joints):
            self._follow_measured(measured)
        self._states.append(self._world.snapshot())
        self.terminal.progress(self._episode.steps, self._total, self._episode.task)

    def _follow_measured(self, measured: np.ndarray) -> None:
        """Put the arm of the drawing where the robot says it is."""
        self._world.displace(measured)
        if 'drawn arm' not in self._episode.note:
            self._episode.note = 'the drawn arm follows the measured joints'

    def _run_policy(self, steps: int) -> Segment:
        """Run live steps and return what was seen and answered."""
        before = (len(self.conductor.heard.chunks), len(self.conductor.heard.inputs))
        ticks = self._episode.ticks
        seen = []
        for _ in range(steps):
            seen.append(self._observation)
            command = self._policy_step(self._stamp_ns)
            self._robot_step(command)
        return self._segment(seen, before, self._episode.ticks - ticks)

    def _show_again(self, observations: Sequence[Observation]) -> Segment:
        """Show recorded observations to the executor while the robot stands still."""
        before = (len(self.conductor.heard.chunks), len(self.conductor.heard.inputs))
        ticks = self._episode.ticks
        for index, observation in enumerate(observations, start=1):
            # Later than what the robot has sent, earlier than what it will send.
            stamp_ns = self._stamp_ns + index
            self.conductor.show(observation, stamp_ns)
            self._policy_step(stamp_ns)
        return self._segment(list(observations), before, self._episode.ticks - ticks)

    def _segment(self, seen: list[Observation], before: tuple[int, int], ticks: int) -> Segment:
        heard = self.conductor.heard
        first_chunk, first_input = before

        def all_there() -> bool:
            return (
                len(heard.chunks) - first_chunk >= ticks
                and len(heard.inputs) - first_input >= ticks
            )

        self.conductor.wait(all_there, 5.0, f'{ticks} chunks on ~/chunk and ~/tick_input')
        return Segment(seen, heard.chunks[first_chunk:], heard.inputs[first_input:])

    # -- stories ------------------------------------------------------------------------------

    def _rollback_story(self, capsule: str) -> None:
        """Snapshot, go on, roll back, go on otherwise, roll back and show the same again."""
        self._verb('snapshot', capsule, id=capsule, label='mid-episode', tier='gpu', pin=False)
        self._run_policy(8)
        first = self._verb('rollback', capsule, to=capsule).reply.epoch
        live = self._run_policy(17)
        second = self._verb('rollback', capsule, to=capsule).reply.epoch
        again = self._show_again(live.observations)
        self._episode.epochs += [first, second]
        proof = ReplayProof(
            capsule=capsule,
            ticks=len(live.chunks),
            first_epoch=live.chunks[0].epoch if live.chunks else first,
            second_epoch=again.chunks[0].epoch if again.chunks else second,
            first_digest=chunk_digest(live.chunks),
            second_digest=chunk_digest(again.chunks),
            inputs_equal=input_digests(live.inputs) == input_digests(again.inputs),
        )
        self.run.proofs.append(proof)
        outcome = 'bit for bit' if proof.equal else 'NOT equal'
        self._episode.note = f'rollback to {capsule}: {proof.ticks} ticks replayed {outcome}'
        if not proof.equal:
            self.run.failures.append(
                f'{capsule}: the replay after the rollback differs '
                f'(inputs equal: {proof.inputs_equal})'
            )

    def _fork_story(self, capsule: str) -> None:
        """Look at four seeds on the present observation; commit none."""
        self._verb('snapshot', capsule, id=capsule, label='before the fork', tier='gpu', pin=True)
        seeds = [11, 12, 13, 14]
        answer = self._verb(
            'fork', capsule, capsule_id=capsule, n=len(seeds), seeds=seeds, commit_branch=-1
        )
        reply = answer.reply
        chunks = [chunk_array(chunk) for chunk in reply.chunks]
        result = ForkResult(
            capsule=capsule,
            seeds=seeds,
            scores=[float(score) for score in reply.scores],
            spread=float(reply.spread),
            selected=int(reply.selected),
            distinct=spread_of(chunks),
            chunks=[chunk.tolist() for chunk in chunks],
            joint_names=list(reply.chunks[0].joint_names) if reply.chunks else [],
        )
        self.run.forks.append(result)
        self._episode.note = (
            f'fork of {len(seeds)}: {result.distinct} different chunks, spread {result.spread:.3f}'
        )

    def _verb(self, verb: str, capsule: str, **fields: object) -> Answer:
        answer = self.conductor.executor(verb, **fields)
        reply = answer.reply
        status = self.conductor.heard.status
        info = getattr(reply, 'info', None)
        epoch = int(getattr(reply, 'epoch', status.epoch if status is not None else 0))
        self.run.verbs.append(
            VerbCall(
                verb=verb,
                capsule=capsule or 'c0',
                episode=len(self.run.episodes),
                epoch=epoch,
                at_s=self.terminal.seconds,
                round_trip_us=answer.round_trip_us,
                service_us=float(reply.duration_us),
                restore_us=float(getattr(reply, 'restore_us', 0.0)),
                bytes=int(info.size_bytes) if info is not None else 0,
            )
        )
        return answer

    def list_capsules(self) -> None:
        """Note what the executor holds."""
        reply = self.conductor.executor('list_capsules').reply
        self.run.capsules = [
            Capsule(
                id=c.id,
                label=c.label,
                tier=c.tier,
                parent=c.parent,
                position=int(c.position),
                bytes=int(c.size_bytes),
                pinned=bool(c.pinned),
            )
            for c in reply.capsules
        ]
