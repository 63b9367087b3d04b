"""What executor and planner share as nodes: a session of a model, its capsules, its configure."""

from collections.abc import Callable
import gc
import time
from typing import Any

from rclpy.lifecycle import LifecycleState
from rclpy.lifecycle import TransitionCallbackReturn

from flashrt_core.capsule import CapsuleStore
from flashrt_core.errors import ConfigError
from flashrt_core.errors import FlashrtError
from flashrt_core.runtime import Backend
from flashrt_ros.boot_log import BootLog
from flashrt_ros.capsule_parameters import Budgets
from flashrt_ros.lifecycle import SafeLifecycleNode
from flashrt_ros.main import EXIT_DEVICE_LOST
from flashrt_ros.main import StopRequest
from flashrt_ros.parameters import ParameterTable

# Shares of configure's progress by the stages that a session reports while it binds.
_STAGES = {'load': ('loading', 0.0, 0.5), 'bind': ('binding', 0.5, 0.1),
           'capture': ('capturing', 0.6, 0.25), 'warm up': ('warming up', 0.85, 0.05)}
_LAST = (0.9, 0.1)  # begin and share of what comes after them


class SessionNode(SafeLifecycleNode):
    """A lifecycle node that holds one session; subclasses load it and say what it does.

    They make ``report`` and ``outputs`` in their constructor and set ``engine`` once it serves.
    """

    report: Any
    outputs: Any
    engine: Any = None
    _session: Any = None

    def __init__(self, name: str, stop: StopRequest | None, parameters: ParameterTable,
                 **kwargs: Any) -> None:
        """Declare the parameters; nothing is loaded yet.

        :param stop: told when the device is lost; None in tests.
        :param kwargs: of rclpy's Node.
        :raises ConfigError: a parameter given at start is refused.
        """
        super().__init__(name, **kwargs)
        self._stop_request = stop or StopRequest()
        self.parameters = parameters
        self.parameters.declare(self)
        self.store: CapsuleStore | None = None
        self.ready_after_s = 0.0
        # Asked before a capture and before work; in bringup no node does one beside the other's.
        self.may_configure: Callable[[], None] = lambda: None
        self.may_activate: Callable[[], None] = lambda: None
        self._stage, self._stage_progress = '', 0.0
        self._boot: BootLog | None = None

    def load(self) -> str:
        """Load, bind, capture, set ``engine``; returns what is ready and where, in words.

        :raises FlashrtError: to stay unconfigured.
        """
        raise NotImplementedError

    # -- lifecycle, on the transition thread ----------------------------------------------------

    def configure(self) -> None:
        """Load everything, with progress in the status and the log."""
        begun = time.monotonic()
        self.may_configure()
        self._boot = boot = BootLog(self.get_logger().info)
        self._told('load', 0.0)
        ready = self.load()
        gc.collect()
        gc.freeze()
        self.ready_after_s = time.monotonic() - begun
        self._stage = ''
        self.get_logger().info(
            f'{ready}, ready after {self.ready_after_s:.1f} s: {boot.ended()}')

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Run ``activate``, unless that must wait: then the node stays configured."""
        try:
            self.may_activate()
        except FlashrtError as error:
            self.get_logger().warning(f'[{error.code}] {error}')
            return TransitionCallbackReturn.FAILURE
        return super().on_activate(state)

    def on_state_change(self) -> None:
        """Publish the status of the new state."""
        self.outputs.publish_status()

    def open_store(self, backend: Backend, marks: int,
                   room: Budgets | None = None) -> CapsuleStore:
        """Make the store that the parameters describe, with room for ``marks`` of the session.

        :param room: in memory, in place of the parameters'.
        """
        of = self.parameters
        gpu, host = ((of['capsule_gpu_bytes'], of['capsule_host_bytes']) if room is None
                     else (room.gpu, room.host))
        self.store = store = CapsuleStore(
            backend, gpu, host, of['capsule_disk_bytes'],
            of['capsule_directory'] or None, of['allow_disk_capsules'])
        store.prepare(self._session.boundary, marks)
        return store

    def free(self) -> None:
        """Close session and store, the last of a teardown; callable twice."""
        if self._session is not None:
            self._session.close()
        if self.store is not None:
            self.store.close()
        self._session = self.store = self.engine = None
        self._stage = ''
        gc.unfreeze()
        gc.collect()

    # -- what services and reports ask ----------------------------------------------------------

    @property
    def configuring(self) -> str:
        """What a configure does now, or 'failed' after one that was refused, else ''."""
        return self._stage or ('failed' if self.last_transition_error else '')

    @property
    def progress(self) -> float:
        """How far a configure is, 0 to 1."""
        return self._stage_progress if self._stage else float(self.configured)

    @property
    def configured(self) -> bool:
        """Whether there is a session to serve."""
        return self.engine is not None

    @property
    def session_name(self) -> str:
        """Name under which the store keeps this node's capsules."""
        return str(self._session.boundary.session)

    def count_refusal(self, error: Exception) -> None:
        """Count a refusal by its code, for diagnostics."""
        self.report.refused(error.code if isinstance(error, FlashrtError) else 'internal')

    # -- inside ---------------------------------------------------------------------------------

    def _warn_if_random(self, what: str, remedy: str) -> None:
        """Say once a configure that the session's weights are random, where it was given none.

        :param what: is measured, and what comes of it.
        """
        if not getattr(self._session.config, 'weights', ''):
            self.get_logger().warning(
                f'the weights are random: this {what} mean nothing; {remedy}')

    def _told(self, stage: str, fraction: float) -> None:
        """Take a session's progress; the place where a configure under way can be ended."""
        if self.ending:
            raise ConfigError('configure was given up because the node is ending; start it anew')
        words, begin, share = _STAGES.get(stage, (stage, *_LAST))
        if self._boot is not None:
            self._boot.told(words, fraction)
        progress = begin + share * min(max(fraction, 0.0), 1.0)
        if words != self._stage or progress - self._stage_progress >= 0.01:
            self._stage, self._stage_progress = words, progress
            self.outputs.publish_status()

    def _device_lost(self, error: FlashrtError) -> None:
        """Ask for the end of the process."""
        self.get_logger().fatal(
            f'[{error.code}] {error}; exit status {EXIT_DEVICE_LOST}, to be respawned')
        self._stop_request.set(f'{error.code}: {error}', EXIT_DEVICE_LOST)
