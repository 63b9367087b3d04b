"""What every service of a node shares: who takes a request, which thread answers, how one fails.

A reply never says success for a partial effect and carries the code of the error otherwise;
nothing raises out of here. Requests are taken by a thread of their own; handlers that wait run on
worker threads, which send their replies themselves.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
import time
import traceback
from typing import Any

from flashrt_core.errors import FlashrtError
from flashrt_core.errors import WrongState
from flashrt_ros.attendant import Attendant
from flashrt_ros.attendant import Reply
from flashrt_ros.futures import run_in_pool
from flashrt_ros.lifecycle import ACTIVE
from flashrt_ros.lifecycle import INACTIVE

CONFIGURED = (INACTIVE, ACTIVE)
_WORKERS = 4


class ServiceFrame:
    """Serves a node's services, made with it; they answer ``wrong_state`` until it is configured.

    Every reply type has success, code, message and duration_us.
    """

    def __init__(self, node: Any) -> None:
        """Serve nothing yet.

        :param node: ``state_label``, ``configured`` (what the handlers need is there),
            ``now_text()``, ``outputs.event``, ``count_refusal``.
        """
        self._node = node
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix='verb')
        self._attendant = Attendant(node, 'services')

    def serve(self, name: str, srv_type: Any, handler: Callable[[Any, Any], str],
              states: tuple[str, ...], *, waits: bool) -> None:
        """Add ``~/name``; before ``start``.

        :param handler: fills the response and returns its message; raises to refuse.
        :param waits: it may wait for the device, so a worker runs it.
        """
        def answer(request: Any, reply: Reply, begun: float) -> None:
            response = srv_type.Response()
            try:
                self.require(states, f'~/{name}')
                response.message = handler(request, response)
                response.success, response.code = True, 'ok'
            except Exception as error:
                if not (isinstance(error, FlashrtError) or self._node.configured):
                    error = WrongState(f'~/{name} was given up: the node was cleaned up meanwhile')
                response = self._failed(name, srv_type.Response(), error)
            response.duration_us = (time.perf_counter() - begun) * 1e6
            reply(response)

        def take(request: Any, reply: Reply) -> None:
            begun = time.perf_counter()
            if waits:
                self._pool.submit(answer, request, reply, begun)
            else:
                answer(request, reply, begun)

        service = self._node.create_service(
            srv_type, f'~/{name}', lambda *_: None, callback_group=self._attendant.group)
        self._attendant.serve(service, take)

    def start(self) -> None:
        """Take requests from now on."""
        self._attendant.start()

    def close(self) -> None:
        """Take no more requests and let the workers end."""
        self._attendant.close()
        self._pool.shutdown(wait=False)

    def run(self, function: Callable[[], Any]) -> Any:
        """Run a blocking verb on a worker; returns what to await."""
        return run_in_pool(self._node, self._pool, function)

    def require(self, states: tuple[str, ...], what: str) -> None:
        """Refuse outside the given lifecycle states.

        :raises WrongState: naming the state and the remedy.
        """
        state = self._node.state_label
        if state not in states or not self._node.configured:
            raise WrongState(f'{what} is refused in state {state}; bring the node to '
                             f'{" or ".join(states)} (lifecycle configure, activate)')

    def _failed(self, name: str, response: Any, error: Exception) -> Any:
        response.success = False
        if isinstance(error, FlashrtError):
            response.code = error.code
            response.message = f'{error}; {self._node.now_text()}'
        else:
            response.code = 'internal'
            response.message = (
                f'~/{name} failed unexpectedly: {error!r}; {self._node.now_text()}')
            self._node.get_logger().error(traceback.format_exc())
        self._node.count_refusal(error)
        self._node.outputs.event('refused', f'~/{name}', {
            'code': response.code, 'message': response.message})
        return response
