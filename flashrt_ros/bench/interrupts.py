"""Interrupts at random moments: from the service call to the first command of the new goal.

The parts follow each other without a gap, each from the moment where the one before has ended:
the request on its way, the tick that is dropped, the inference, the wait for the next step.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
from dataclasses import dataclass
import random
import threading
import time
from typing import Any

from rclpy.client import Client

from flashrt_ros.bench.pair import Pair
from flashrt_ros.executor_engine import Engine
from flashrt_ros.msg import Subgoal
from flashrt_ros.srv import SetSubgoal

PARTS = ('call to acceptance', 'acceptance to tick', 'tick to chunk in play', 'chunk to command',
         'call to first new command')
TOKENS = tuple(range(2, 10))  # what the goal says does not matter to a policy of random weights
WRITE_PAUSE_S = 0.005
PAUSE_S = 0.2  # at most, between an answer and the next call
ANSWER_S = 30.0


@dataclass(frozen=True)
class Taken:
    """One interrupt: milliseconds of each of PARTS, and what passed meanwhile."""

    parts_ms: tuple[float, ...]
    steps_meanwhile: int


class Moments:
    """Steady nanoseconds of what happens to one interrupt at a time; ``watching`` puts it in."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.done = threading.Event()
        self.begin(0)

    def begin(self, sequence: int) -> None:
        """Watch for what becomes of the next interrupt."""
        self.accepted_ns = self.in_play_ns = self.command_ns = 0
        self.answer: Mapping[str, Any] | None = None
        self._sequence = sequence
        self.done.clear()

    def event(self, kind: str, name: str, detail: Mapping[str, Any]) -> None:
        """Hear an event of the executor, on the thread that tells it."""
        if name != str(self._sequence):
            return
        if kind == 'subgoal':
            self.accepted_ns = time.monotonic_ns()
        elif kind == 'interrupt':
            self.answer = detail
            self._look()

    def swapped(self) -> None:
        """A chunk came into play."""
        if self.accepted_ns and not self.in_play_ns and (
                self._engine.slot.latched >= self._sequence):
            self.in_play_ns = time.monotonic_ns()

    def commanded(self) -> None:
        """A command has left."""
        if self.in_play_ns and not self.command_ns:
            self.command_ns = time.monotonic_ns()
            self._look()

    def _look(self) -> None:
        if self.command_ns and self.answer is not None:
            self.done.set()


@contextlib.contextmanager
def watching(engine: Engine) -> Iterator[Moments]:
    """Give the moments of an engine whose player and commands tell them."""
    moments = Moments(engine)
    player, outputs = engine.control.player, engine.control.outputs
    swap, command = player.swap, outputs.command

    def swap_and_tell(*arguments: Any) -> Any:
        result = swap(*arguments)
        moments.swapped()
        return result

    def command_and_tell(position: Any) -> None:
        command(position)
        moments.commanded()

    with contextlib.ExitStack() as undo:
        for thing, name, told in ((player, 'swap', swap_and_tell),
                                  (outputs, 'command', command_and_tell)):
            setattr(thing, name, told)
            undo.callback(delattr, thing, name)
        yield moments


def interrupt(run: Pair, count: int) -> list[Taken]:
    """Interrupt so often, each time when the one before is answered.

    :raises TimeoutError: one was lost: no command of its goal came.
    """
    engine, chance = run.executor.engine, random.Random(0)
    assert engine is not None
    client = run.caller.create_client(SetSubgoal, 'executor/set_subgoal')
    run.group.wait_for(client.service_is_ready, ANSWER_S, 'the service')
    taken = []
    with watching(engine) as moments:
        run.executor.outputs.listeners.append(moments.event)
        try:
            for _ in range(count):
                threading.Event().wait(chance.random() * PAUSE_S)
                taken.append(_one(client, engine, moments))
                run.group.check()
        finally:
            run.executor.outputs.listeners.remove(moments.event)
            run.caller.destroy_client(client)
    return taken


def _one(client: Client, engine: Engine, moments: Moments) -> Taken:
    sequence = engine.slot.requested + 1
    moments.begin(sequence)
    request = SetSubgoal.Request(subgoal=Subgoal(
        sequence=sequence, tokens=TOKENS, priority=Subgoal.PRIORITY_INTERRUPT))
    called_ns = time.monotonic_ns()
    future = client.call_async(request)
    if not moments.done.wait(ANSWER_S) or moments.answer is None:
        why = future.result().message if future.done() else 'no reply'
        raise TimeoutError(f'interrupt {sequence} was not answered in {ANSWER_S:g} s: {why}')
    to_tick_ms = moments.answer['to_tick_us'] / 1e3
    in_play_ms = (moments.in_play_ns - called_ns) / 1e6
    accepted_ms = (moments.accepted_ns - called_ns) / 1e6
    whole_ms = (moments.command_ns - called_ns) / 1e6
    return Taken((accepted_ms, to_tick_ms, in_play_ms - accepted_ms - to_tick_ms,
                  whole_ms - in_play_ms, whole_ms), moments.answer['steps_meanwhile'])


def written(run: Pair, count: int) -> list[float]:
    """Return the microseconds of writes into the slot as the bound planner makes them.

    A policy with a tokenizer gets words, as from a plan; one without gets ids.
    """
    words = '' if run.executor.engine.session.tokenizer is None else 'go home'
    found = []
    for _ in range(count):
        threading.Event().wait(WRITE_PAUSE_S)
        subgoal = Subgoal(text=words, tokens=() if words else TOKENS)
        begun = time.perf_counter()
        run.executor.services_made.subgoal(subgoal)
        found.append((time.perf_counter() - begun) * 1e6)
    return found
