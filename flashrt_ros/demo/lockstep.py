"""One lock-step episode under the conductor's clock: instructions, steps, subgoals, capsule verbs.

The order of all that happens depends on nothing but the models: the conductor waits for the
planner before each step, and the executor's reply says which subgoal its tick has called done.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
import hashlib

import numpy as np

from flashrt_core.tabletop import CONTROL_PERIOD_S
from flashrt_core.tabletop import draw_filmstrip
from flashrt_core.tabletop import encode_png
from flashrt_core.tabletop import Expert
from flashrt_core.tabletop import frames_shown
from flashrt_core.tabletop import Goal
from flashrt_core.tabletop import goal_reached
from flashrt_core.tabletop import parse_task
from flashrt_core.tabletop import task_solved
from flashrt_core.tabletop import World
from flashrt_core.tabletop import WorldState
from flashrt_core.tabletop.instructions import describe
from flashrt_ros.conductor import Answer
from flashrt_ros.conductor import chunk_digest
from flashrt_ros.conductor import Conductor
from flashrt_ros.conductor import input_digests
from flashrt_ros.conductor import Observation
from flashrt_ros.conductor import to_ns
from flashrt_ros.conductor import to_stamp
from flashrt_ros.demo import view
from flashrt_ros.demo.brain import Brain
from flashrt_ros.demo.record import Comparison
from flashrt_ros.demo.record import Episode
from flashrt_ros.demo.record import PlanMade
from flashrt_ros.demo.record import Run
from flashrt_ros.demo.record import Subgoal
from flashrt_ros.demo.record import VerbCall
from flashrt_ros.demo.terminal import Terminal
from flashrt_ros.msg import ActionChunk
from flashrt_ros.msg import Subgoal as SubgoalMessage
from flashrt_ros.msg import SubgoalOutcome
from flashrt_ros.msg import TickInput
from flashrt_ros.planner_client import PlanCall
from flashrt_ros.planner_client import PlannerClient

STRIP_FRAMES = 8
STRIP_SIZE_PX = 150
BLOCKS = 2


class LockStep:
    """Conducts one episode after the other and writes them into the run. Main thread only.

    A ``World`` of the same seed follows the commands beside the robot: the tabletop is
    deterministic, so its joints must equal the measured ones to the bit. It draws the strips,
    describes the scene to the planner, and says what really happened: all that is an oracle.
    """

    def __init__(self, conductor: Conductor, brain: Brain, run: Run, terminal: Terminal,
                 steps: int) -> None:
        """Work with an active robot, executor and planner.

        :param steps: that an episode may take.
        """
        assert conductor.planner is not None
        self.conductor, self.brain, self.run, self.terminal = conductor, brain, run, terminal
        self.planner: PlannerClient = conductor.planner
        self.limit = steps
        self.episode: Episode
        self.world: World
        self.states: list[WorldState] = []
        self._call: tuple[PlanCall, PlanMade] | None = None
        self.asked: tuple[Goal, ...] = ()  # what the newest instruction means
        self._stamp_ns = 0
        self._observation: Observation
        self._tick_steps: list[int] = []
        self._commands: list[list[float]] = []
        self._heard_before = (0, 0)

    # -- episodes -----------------------------------------------------------------------------

    def begin(self, title: str, *, seed: int, blocks: int = BLOCKS, driver: str = 'policy',
              limit: int = 0) -> None:
        """Make a new world and, where the policy drives, put its mind back by a capsule."""
        self.terminal.stage(title)
        answer = self.conductor.robot('reset_world', seed=seed, blocks=blocks, task='')
        self.world = World(seed, blocks, answer.reply.task)
        self.states = [self.world.snapshot()]
        self._call, self.asked = None, self.world.goals
        self._commands, self._tick_steps = [], []
        self._limit = limit or self.limit
        self.episode = Episode(title, driver, seed, answer.reply.task)
        self.episode.began_s = self.terminal.seconds
        self.run.episodes.append(self.episode)
        self._observe(to_ns(answer.reply.stamp))
        heard = self.conductor.heard
        self._heard_before = len(heard.chunks), len(heard.inputs)
        if driver == 'policy':
            self.verb('reset', '', set_seed=True, seed=seed)

    def end(self, text: str = '') -> None:
        """End what runs, draw the strip, say how it went."""
        episode = self.episode
        if self._call is not None:
            self.planner.cancel(self._call[0])
            self._plan_ended()
        for item in episode.subgoals:
            if item.outcome == 'open':
                item.ended = episode.steps
        self._find_latches()
        episode.ended_s = self.terminal.seconds
        episode.solved = task_solved(self.asked, self.states[-1])
        strip = draw_filmstrip(
            self.states, frames=STRIP_FRAMES, size=STRIP_SIZE_PX, captions=())
        episode.strip_png = encode_png(strip)
        episode.frame_times_s = [self.states[i].step * CONTROL_PERIOD_S
                                 for i in frames_shown(len(self.states), STRIP_FRAMES)]
        words = ['solved' if episode.solved else 'NOT solved']
        if text:
            words.append(text)
        if episode.driver == 'policy':
            words.append(f'{len(episode.subgoals)} subgoals, {episode.ticks} ticks')
        words.append(f'{episode.steps} steps at {episode.real_time_factor:.1f}x real time')
        if episode.note:
            words.append(episode.note)
        # Only a trained policy is expected to solve its task.
        expected = episode.driver == 'expert' or not self.brain.untrained
        self.terminal.done('; '.join(words), good=episode.solved or not expected)
        if expected and not episode.solved:
            self.run.failures.append(f'{episode.title}: "{episode.task}" was not solved')

    def expert_episode(self, seed: int) -> None:
        """Let the scripted expert do the task through the topic that the executor commands."""
        self.begin('Scripted expert', seed=seed, blocks=1, driver='expert', limit=500)
        expert = Expert(self.world)
        names = list(self._observation.joints.name)
        while not self.world.solved() and self.episode.steps < self._limit:
            action = expert.action().tolist()
            self.conductor.publish(action, names, self._stamp_ns)
            self._robot_step(action)
        self.end()

    # -- instructions -------------------------------------------------------------------------

    def instruct(self, instruction: str, goals: tuple[Goal, ...], *, interrupt: bool = False
                 ) -> None:
        """Give the planner an instruction and wait until its first subgoal is in the slot.

        One that the planner cannot plan goes to the policy as it is meant, without a plan.

        :param goals: what it means, to judge the end by.
        """
        episode = self.episode
        episode.marks.append((episode.steps, f'“{instruction}”'))
        if not episode.subgoals:
            episode.task = instruction
        before, scene = self._newest(), str(describe(self.world.snapshot()))
        self.asked = goals
        if self._call is not None and not interrupt:
            self.planner.cancel(self._call[0])
            self._plan_ended()
        call = self.planner.plan(
            instruction, scene=scene, preempt=interrupt, priority=int(interrupt))
        if self._call is not None:
            self.planner.wait_for_end(self._call[0])
            self._plan_ended()
        made = PlanMade(len(self.run.episodes), instruction, scene, episode.steps)
        self._call = call, made
        self.run.plans.append(made)
        self.planner.settle(call, before)
        self._note_written(interrupt)
        if self._newest() == before:
            self._plan_ended()
            self._write_myself(goals[0], interrupt)

    def _write_myself(self, goal: Goal, interrupt: bool) -> None:
        reply = self.conductor.executor('set_subgoal', subgoal=SubgoalMessage(
            text=str(goal), priority=int(interrupt))).reply
        self._add(Subgoal(int(reply.sequence), str(goal), 'conductor', self.episode.steps,
                          interrupt))
        self.note(f'the planner says {self.run.plans[-1].code}')

    def _newest(self) -> int:
        return max((item.sequence for item in self.episode.subgoals), default=0)

    def _note_written(self, interrupt: bool = False) -> None:
        """Take over the subgoals that the plan has written since the last look."""
        if self._call is None:
            return
        known = self._newest()
        for sequence, text in sorted(self._call[0].subgoals.items()):
            if sequence > known:
                self._add(Subgoal(sequence, text, 'planner', self.episode.steps, interrupt))

    def _add(self, item: Subgoal) -> None:
        for old in self.episode.subgoals:
            if old.outcome == 'open':
                old.outcome, old.ended = 'superseded', self.episode.steps
        self.episode.subgoals.append(item)

    def _plan_ended(self) -> None:
        if self._call is not None and self._call[0].result is not None:
            call, made = self._call
            made.take(call.result)
            self._call = None

    # -- steps --------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do, or no step to do it in."""
        items = self.episode.subgoals
        waits = self._call is not None or (bool(items) and items[-1].outcome == 'open')
        return self.episode.steps >= self._limit or not waits

    def run_until(self, reached: Callable[[], bool] = lambda: False) -> None:
        """Step until ``reached`` or finished."""
        while not self.finished and not reached():
            self.step()

    def step(self, slip: bool = False) -> None:
        """Have the policy act once, and the planner on what came of it."""
        reply = self.conductor.executor_step(self._stamp_ns)
        if reply.ticked:
            self._ticked()
        seen = self.states[-1]
        self._robot_step([float(p) for p in reply.positions], slip)
        self._judge(int(reply.subgoal_done), seen)

    def ticked_by_fork(self) -> None:
        """Count the committed branch of a fork, whose chunk is played like a tick's."""
        self._ticked()

    def _ticked(self) -> None:
        self.episode.ticks += 1
        self._tick_steps.append(self.episode.steps)
        for item in self.episode.subgoals:
            if item.latched is None and item.outcome == 'open':
                item.latched = self.episode.steps

    def _judge(self, done: int, seen: WorldState) -> None:
        """Take the policy's word that a subgoal is done, or end one that takes too long."""
        if not self.episode.subgoals:
            return
        item = self.episode.subgoals[-1]
        if item.outcome != 'open':
            return
        late = self.episode.steps - item.written >= self.brain.subgoal_limit
        if done == item.sequence:
            item.outcome, item.holds = 'done', goal_reached(parse_task(item.text)[0], seen)
        elif late:
            item.outcome = 'timed out'
            if item.writer == 'planner':
                self.planner.tell(item.sequence, SubgoalOutcome.TIMED_OUT,
                                  f'{self.brain.subgoal_limit} steps were not enough')
        else:
            return
        item.ended = self.episode.steps
        if self._call is not None:
            self.planner.settle(self._call[0], item.sequence)
            self._note_written()
            self._plan_ended()

    def _robot_step(self, command: Sequence[float], slip: bool = False) -> None:
        reply = self.conductor.robot(
            'step', steps=1, command_stamp=to_stamp(self._stamp_ns), slip=slip).reply
        self._observe(to_ns(reply.stamp))
        self.episode.steps += 1
        if slip:
            self.world.slip()
        self.world.step(np.asarray(command))
        self._commands.append(list(command))
        measured = np.asarray(self._observation.joints.position)
        if not np.array_equal(measured, self.world.joints):
            self.world.displace(measured)
            self.note('the drawn arm follows the measured joints')
        if bool(reply.solved) != self.world.solved():
            failure = f"{self.episode.title}: the drawn world is not the robot's"
            if failure not in self.run.failures:
                self.run.failures.append(failure)
        self.states.append(self.world.snapshot())
        self.terminal.progress(self.episode.steps, self._limit, self.episode.task, self._panel)

    def _observe(self, stamp_ns: int) -> None:
        self._stamp_ns = stamp_ns
        self._observation = self.conductor.observation(stamp_ns)

    def _panel(self) -> list[str]:
        episode = self.episode
        seconds = max(1e-9, self.terminal.seconds - episode.began_s)
        epoch = episode.epochs[-1] if episode.epochs else 0
        lines = [text for _, text in episode.marks[-4:]]
        lines += ['', *view.subgoal_lines(episode.subgoals[-6:]), '']
        lines.append(f'tick {episode.ticks}, epoch {epoch}, {episode.steps * 0.02:.2f} s of the '
                     f"robot's time at {episode.steps * 0.02 / seconds:.1f}x")
        return view.beside(view.half_blocks(self.world.render('top', 2 * view.COLUMNS)), lines)

    def note(self, text: str) -> None:
        """Add a remark to the episode, once."""
        if text not in self.episode.note:
            self.episode.note += f'{"; " if self.episode.note else ""}{text}'

    # -- what was heard -----------------------------------------------------------------------

    def _heard(self) -> tuple[list[ActionChunk], list[TickInput]]:
        """Return the episode's chunks and tick inputs, once all are there."""
        heard, ticks = self.conductor.heard, len(self._tick_steps)
        first_chunk, first_input = self._heard_before
        self.conductor.wait(
            lambda: len(heard.chunks) - first_chunk >= ticks
            and len(heard.inputs) - first_input >= ticks,
            5.0, f'{ticks} chunks on ~/chunk and ~/tick_input')
        return heard.chunks[first_chunk:], heard.inputs[first_input:]

    def _find_latches(self) -> None:
        """Say of each subgoal which tick's chunk was the first to carry its sequence."""
        chunks, _ = self._heard()
        first: dict[int, int] = {}
        for chunk, step in zip(chunks, self._tick_steps, strict=True):
            first.setdefault(int(chunk.subgoal_sequence), step)
        for item in self.episode.subgoals:
            item.latched = first.get(item.sequence)

    def digests(self) -> dict[str, tuple[int, str]]:
        """Return count and digest of all that went in and came out of this episode, by name."""
        self._find_latches()
        chunks, inputs = self._heard()
        plans = [(i.text, i.written, i.latched, i.ended, i.outcome) for i in self.episode.subgoals]
        commands = np.asarray(self._commands, dtype=np.float64)
        states = np.stack([state.to_vector() for state in self.states])
        return {
            'subgoals: text, written, latched, ended': (len(plans), _digest(repr(plans).encode())),
            'observations of the ticks': (len(inputs),
                                          _digest(repr(input_digests(inputs)).encode())),
            'actions of the ticks': (len(chunks), chunk_digest(chunks)),
            'commands': (len(commands), _digest(commands.tobytes())),
            'states of the world': (len(states), _digest(states.tobytes())),
        }

    def compare(self, first: str, before: dict[str, tuple[int, str]]) -> None:
        """Compare the present episode with an earlier one."""
        now = self.digests()
        found = Comparison(first, self.episode.title)
        for name, (count, digest) in before.items():
            found.rows.append((name, count, digest, now[name][1]))
        self.run.comparisons.append(found)
        if found.equal:
            self.note(f'bit for bit as {first}')
            return
        wrong = ', '.join(name for name, _, one, two in found.rows if one != two)
        self.note(f'NOT as {first}: {wrong}')
        self.run.failures.append(f'{self.episode.title} differs from {first} in {wrong}')

    def verb(self, verb: str, capsule: str, **fields: object) -> Answer:
        """Call a capsule verb of the executor and note what it took."""
        if verb == 'fork':  # of what the robot shows now, not of what came before
            answer = self.conductor.executor_on(verb, self._stamp_ns, **fields)
        else:
            answer = self.conductor.executor(verb, **fields)
        reply = answer.reply
        status = self.conductor.heard.status
        info = getattr(reply, 'info', None)
        epoch = int(getattr(reply, 'epoch', status.epoch if status is not None else 0))
        if hasattr(reply, 'epoch'):
            self.episode.epochs.append(epoch)
        if verb != 'reset':
            self.episode.marks.append((self.episode.steps, verb))
        self.run.verbs.append(VerbCall(
            verb=verb, capsule=capsule or 'c0', episode=len(self.run.episodes), epoch=epoch,
            at_s=self.terminal.seconds, round_trip_us=answer.round_trip_us,
            service_us=float(reply.duration_us),
            restore_us=float(getattr(reply, 'restore_us', 0.0)),
            bytes=int(info.size_bytes) if info is not None else 0))
        return answer


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
