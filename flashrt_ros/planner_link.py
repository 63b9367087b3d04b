"""The planner's way to an executor: into its input slot in the same process, or over ROS.

Bound: the subgoal is admitted by the executor's own slot, between two replays, without a message.
It is handed over as words, on the host. A copy from the planner's device buffers would hand over
the wrong numbers: its ids are of another vocabulary than the policy's. Nor would it spare a copy:
each id is read on the host anyway, where the grammar makes the next one's mask of it and the text
says where a subgoal ends; slot and ~/events need them there to judge and to replay; and a tick's
copy-in takes the slot to the device whether something new is in it or not.
An embedding in the words' place may lie on the device: it is copied there as it is handed over,
and from that copy into the policy's input by the tick that latches it.
Over ROS the executor's answer is awaited: the reply of ~/set_subgoal, or on the topic the event
that tells of the acceptance or refusal.
"""

from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import astuple
import json
import queue
import threading
import time
from typing import Any

from flashrt_core.errors import ServiceError
from flashrt_core.errors import SubgoalRefused
from flashrt_core.errors import WrongState
from flashrt_core.policies import Embedding
from flashrt_ros import qos
from flashrt_ros.conversions import float_field
from flashrt_ros.conversions import stamp_to_ns
from flashrt_ros.lifecycle import ACTIVE
from flashrt_ros.lifecycle import INACTIVE
from flashrt_ros.msg import Event
from flashrt_ros.msg import ExecutorStatus
from flashrt_ros.msg import Subgoal
from flashrt_ros.planner_plan import Base
from flashrt_ros.srv import SetSubgoal

Heard = Callable[[str, str, Mapping[str, Any]], None]  # kind, name, detail of an executor's event
_CONFIGURED = (INACTIVE, ACTIVE)
_KNOWS = (*_CONFIGURED, 'activating', 'deactivating')  # states in which a slot keeps its marks
_LOOK_S = 0.02


class LinkTimeout(ServiceError):
    """The executor did not answer a subgoal."""

    code = 'executor_silent'


def _message(text: str, sequence: int, base: Base, priority: int, deadline_s: float) -> Subgoal:
    return Subgoal(sequence=sequence, epoch=base.epoch, episode=base.episode, text=text,
                   priority=priority, deadline_s=float(deadline_s))


def _check_known(base: Base, sequence: int) -> None:
    if base.sequence < sequence:
        raise WrongState(f'the executor was configured anew and knows nothing of subgoal '
                         f'{sequence}; give the instruction again')


class BoundLink:
    """To an executor node of this process."""

    kind = 'bound'

    def __init__(self, executor: Any, heard: Heard) -> None:
        """Listen to the executor's events.

        :param executor: the executor node.
        :param heard: called on a thread of this link, in the order of the events.
        """
        self._executor = executor
        self._heard = heard
        self._events: queue.SimpleQueue[tuple[str, str, Mapping[str, Any]] | None] = (
            queue.SimpleQueue())
        # The executor tells under its locks, so the event is only put down there.
        self._tell = lambda kind, name, detail: self._events.put((kind, name, detail))
        executor.outputs.listeners.append(self._tell)
        threading.Thread(target=self._run, name='planner link', daemon=True).start()

    def base(self) -> Base:
        """Return the executor's epoch, episode and mark.

        :raises WrongState: it is not configured.
        """
        engine, control = self._executor.engine, self._executor.control
        if engine is None or control is None:
            raise WrongState(f'the executor is {self._executor.state_label}; configure it first')
        return Base(control.progress.episode, engine.slot.requested, control.progress.epoch)

    def write(self, text: str, sequence: int, base: Base, priority: int,
              deadline_s: float, embedding: Any = None) -> None:
        """Admit a subgoal into the executor's slot.

        :param base: what it was planned on; it is refused once another epoch has begun.
        :param embedding: float32 [n, width] that the policy reads in the text's place, array or
            tensor; one on the policy's device gets into the slot without leaving it. Call with
            the stream current that makes it; it may be overwritten after the return.
        :raises FlashrtError: it was refused; nothing has changed.
        """
        services = self._executor.services_made
        services.frame.require(_CONFIGURED, 'a subgoal')
        services.subgoal(_message(text, sequence, base, priority, deadline_s), embedding)

    def check(self, sequence: int) -> None:
        """Look after a subgoal that was accepted. :raises WrongState: nobody will tell of it."""
        _check_known(self.base(), sequence)

    def close(self) -> None:
        """Listen no more."""
        if self._tell in self._executor.outputs.listeners:
            self._executor.outputs.listeners.remove(self._tell)
        self._events.put(None)

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            self._heard(*event)


class RosLink:
    """To an executor of another process, below the same namespace unless its name is a full one.

    Made on any thread, its entities live as long as the node; callbacks run on the executor thread
    that spins it.
    """

    def __init__(self, node: Any, heard: Heard) -> None:
        """Create publisher, client and subscriptions.

        :param node: the planner node: ``parameters``, ``report``.
        :param heard: called with each event, on the thread that spins the node.
        """
        self._node = node
        self._heard = heard
        self.kind = str(node.parameters['link'])
        self._name = name = str(node.parameters['executor'])
        self._status: ExecutorStatus | None = None
        self._answered = threading.Condition()
        self._known = Base(0, 0)  # of what was heard last, status or event
        self._event_ns = 0  # stamp of the newest event
        self._awaited: Subgoal | None = None
        self._answer: str | None = None  # '' accepted, or why not
        resolved = node.resolve_topic_name('subgoal')
        self._publisher = node.create_publisher(
            Subgoal, 'subgoal', qos.command(), qos_overriding_options=qos.overridable(),
            event_callbacks=qos.publisher_events(resolved, node.report.qos_mismatch))
        self._client = node.create_client(SetSubgoal, f'{name}/set_subgoal')
        self._made = [
            node.create_subscription(ExecutorStatus, f'{name}/status', self._on_status,
                                     qos.status()),
            node.create_subscription(Event, f'{name}/events', self._on_event, qos.record())]

    def base(self) -> Base:
        """Return the executor's epoch, episode and mark, as its status and events say.

        Waits for an executor that is being discovered; not on the spinning thread.

        :raises WrongState: it has not been heard, or is not configured.
        """
        deadline = time.monotonic() + self._node.parameters['link_timeout_s']
        with self._answered:
            while not self._met() and time.monotonic() < deadline:
                self._answered.wait(_LOOK_S)  # nobody tells of a peer that was discovered
        status = self._status
        if status is None or status.state not in _CONFIGURED:
            state = 'silent' if status is None else status.state
            raise WrongState(f'executor {self._node.resolve_topic_name(self._name)} is {state}; '
                             'start and configure it, or set the parameter executor')
        return self._known

    def check(self, sequence: int) -> None:
        """Look after a subgoal that was accepted.

        :raises WrongState: the executor is gone, or was configured anew: nobody will tell of it.
        """
        with self._answered:
            status, known = self._status, self._known
        state = 'silent' if status is None else status.state
        if not self._node.count_publishers(self._made[0].topic_name):
            state = 'gone'
        if state not in _KNOWS:
            raise WrongState(f'executor {self._node.resolve_topic_name(self._name)} is {state}; '
                             f'what became of subgoal {sequence} is not known: start it and give '
                             'the instruction again')
        _check_known(known, sequence)

    def _met(self) -> bool:
        """Whether status, answers and subgoals can pass; a message sent before that is lost."""
        if self._status is None or self._status.state not in _CONFIGURED:
            return False
        if self.kind == 'service':
            return bool(self._client.service_is_ready())
        return self._publisher.get_subscription_count() > 0 and all(
            self._node.count_publishers(made.topic_name) > 0 for made in self._made)

    def write(self, text: str, sequence: int, base: Base, priority: int,
              deadline_s: float, embedding: Any = None) -> None:
        """Send a subgoal and wait for the executor's answer; not on the spinning thread.

        :param base: as of ``BoundLink.write``.
        :param embedding: as of ``BoundLink.write``; it goes out in the message, row by row.
        :raises ConfigError: an embedding that is none.
        :raises SubgoalRefused: it was refused, for the reason told.
        :raises LinkTimeout: no answer within ``link_timeout_s``.
        """
        message = _message(text, sequence, base, priority, deadline_s)
        message.header.stamp = self._node.get_clock().now().to_msg()
        if embedding is not None:
            message.embedding = float_field(Embedding(embedding).values)
        if self.kind == 'service':
            self._call(message)
            return
        with self._answered:
            self._awaited, self._answer = message, None
        self._publisher.publish(message)
        limit = self._node.parameters['link_timeout_s']
        with self._answered:
            self._answered.wait_for(lambda: self._answer is not None, limit)
            self._awaited, reason = None, self._answer
        if reason is None and self._status is not None and (
                self._status.subgoal_requested == sequence):
            return  # accepted, and the event was sent before this node had been discovered
        if reason is None:
            raise LinkTimeout(f'the executor has not told within {limit:g} s whether it accepts '
                              f'subgoal {sequence}; is it there, and listening on `subgoal`?')
        if reason:
            raise SubgoalRefused(reason)

    def close(self) -> None:
        """Destroy what was made."""
        for made in self._made:
            self._node.destroy_subscription(made)
        self._node.destroy_client(self._client)
        self._node.destroy_publisher(self._publisher)

    def _call(self, message: Subgoal) -> None:
        limit = self._node.parameters['link_timeout_s']
        if not self._client.service_is_ready():
            raise LinkTimeout(f'service {self._client.srv_name} is not there; start the executor')
        done = threading.Event()
        future = self._client.call_async(SetSubgoal.Request(subgoal=message))
        future.add_done_callback(lambda _: done.set())
        if not done.wait(limit):
            self._client.remove_pending_request(future)
            raise LinkTimeout(f'{self._client.srv_name} has not answered within {limit:g} s')
        reply = future.result()
        if not reply.success:
            raise SubgoalRefused(f'[{reply.code}] {reply.message}')

    def _on_status(self, message: ExecutorStatus) -> None:
        told = Base(message.episode, message.subgoal_requested, message.epoch)
        with self._answered:
            if message.state in _KNOWS and stamp_to_ns(message.header.stamp) <= self._event_ns:
                # A status leaves a few ms late: what an event has told since counts on.
                told = _newest(told, self._known)
            self._status, self._known = message, told
            self._answered.notify_all()

    def _on_event(self, message: Event) -> None:
        try:
            detail = json.loads(message.detail or '{}')
            sequence = int(detail.get('sequence', 0))
            if message.kind.startswith('subgoal'):
                int(message.name)
        except (AttributeError, TypeError, ValueError):
            self._node.report.refused('event_unreadable')
            return
        accepted = message.kind == 'subgoal'
        with self._answered:
            self._event_ns = stamp_to_ns(message.header.stamp)
            self._known = _newest(self._known, Base(
                message.episode, sequence if accepted else 0, message.epoch))
            awaited = self._awaited
            # Somebody else's subgoal may have taken the number first: theirs is another text.
            if awaited is not None and (sequence, detail.get('text')) == (
                    awaited.sequence, awaited.text):
                if accepted:
                    self._answer = ''
                elif message.kind == 'refused' and message.name == 'subgoal' and (
                        self._answer is None):
                    self._answer = f'[{detail.get("code")}] {detail.get("message")}'
            self._answered.notify_all()
        self._heard(message.kind, message.name, {**detail, 'epoch': message.epoch})


def _newest(one: Base, other: Base) -> Base:
    """Return the higher of each: all of them only grow while an executor lives."""
    return Base(*(max(pair) for pair in zip(astuple(one), astuple(other), strict=True)))
