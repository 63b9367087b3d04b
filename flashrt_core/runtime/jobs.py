"""What waits in a lane, and the futures that answer."""
from __future__ import annotations

from collections.abc import Callable
from collections.abc import Container
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import InvalidStateError
from dataclasses import dataclass
from dataclasses import field
from typing import Any
from typing import Generic
from typing import TYPE_CHECKING
from typing import TypeVar

from flashrt_core.errors import LaneError
from flashrt_core.runtime.plan import Plan

if TYPE_CHECKING:
    from flashrt_core.runtime.lane import Lane

T = TypeVar('T')


@dataclass(frozen=True)
class LaneResult(Generic[T]):
    """
    What one run of a plan gave.

    ``segments_us`` is the device time of each segment by label; ``total_us`` spans before, replay
    and after on the lane thread; ``value`` is what ``after`` returned.
    """

    plan: str
    segments_us: Mapping[str, float]
    total_us: float
    value: T


class LaneFuture(Future[T]):
    """
    A future of a lane. Callbacks added before it is done run on the lane thread: keep them short.

    Waiting for it on the lane thread would wait for ever, so that raises LaneError.
    """

    def __init__(self, lane: Lane) -> None:
        super().__init__()
        self._lane = lane
        self._told = False

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result; not on the lane thread."""
        self._refuse_own_thread()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the error or None; not on the lane thread."""
        self._refuse_own_thread()
        return super().exception(timeout)

    def begin(self) -> bool:
        """Mark it as running; False where it was cancelled, or failed by close(), meanwhile."""
        with self._condition:
            if self.done():
                self.tell_cancelled()
                return False
            return self.set_running_or_notify_cancel()

    def tell_cancelled(self) -> None:
        """Wake those who wait for it in ``concurrent.futures.wait`` if it was cancelled; once."""
        with self._condition:
            if self.cancelled() and not self._told:
                self._told = True
                self.set_running_or_notify_cancel()

    def _refuse_own_thread(self) -> None:
        if not self.done() and self._lane.on_thread:
            raise LaneError(
                f'lane {self._lane.name!r} would wait for itself; use add_done_callback there')


@dataclass
class Call:
    """A function that waits in the queue."""

    fn: Callable[[], Any]
    future: LaneFuture[Any]


@dataclass
class Run:
    """A run of a plan that waits in the queue; its future stays cancellable to the end."""

    plan: Plan
    before: Callable[[], None] | None
    after: Callable[[], Any] | None
    timeout_s: float
    future: LaneFuture[Any]
    skip: Callable[[], Container[str]] | None = None


@dataclass
class Verb:
    """The one pending verb; ``dropped`` are the runs that it takes out of the queue."""

    fn: Callable[[], Any]
    future: LaneFuture[Any]
    name: str
    cuts: bool
    dropped: list[Run] = field(default_factory=list)


def resolve(future: LaneFuture[Any], value: Any) -> None:
    """Set the result unless the future was cancelled, or failed by close(), meanwhile."""
    try:
        future.set_result(value)
    except InvalidStateError:
        future.tell_cancelled()


def reject(future: LaneFuture[Any], error: BaseException) -> None:
    """Set the error unless the future was cancelled, or failed by close(), meanwhile."""
    try:
        future.set_exception(error)
    except InvalidStateError:
        future.tell_cancelled()
