"""The capsule services that every node with a session offers, and capsules as messages."""

from collections.abc import Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import datetime
from typing import Any

from flashrt_core.capsule import CapsuleInfo
from flashrt_core.capsule import CapsuleStore
from flashrt_core.capsule import check_id
from flashrt_core.errors import FlashrtError
from flashrt_core.errors import ParameterInvalid
from flashrt_core.errors import TierUnavailable
from flashrt_ros import srv
from flashrt_ros.conversions import fill_stamp
from flashrt_ros.msg import CapsuleInfo as CapsuleInfoMessage
from flashrt_ros.service_frame import CONFIGURED
from flashrt_ros.service_frame import ServiceFrame


class CapsuleServices:
    """``~/snapshot ~/restore ~/rollback ~/list_capsules ~/pin ~/drop ~/move``."""

    def __init__(self, frame: ServiceFrame, node: Any, *, kept: str, why_kept: str,
                 unit: str) -> None:
        """Add them to a frame.

        :param node: ``verbs`` (snapshot, restore, rollback; each blocks), ``store``,
            ``session_name``, ``epoch``, ``now_text()``.
        :param kept: capsule that is neither dropped nor unpinned, and ``why_kept``.
        :param unit: what a position counts, for messages.
        """
        self._node, self._unit = node, unit
        self._kept, self._why_kept = kept, why_kept
        for name, srv_type, handler in (
                ('snapshot', srv.Snapshot, self._snapshot),
                ('restore', srv.Restore, self._restore),
                ('rollback', srv.Rollback, self._rollback),
                ('list_capsules', srv.ListCapsules, self._list),
                ('pin', srv.Pin, self._pin), ('drop', srv.Drop, self._drop),
                ('move', srv.Move, self._move)):
            frame.serve(name, srv_type, handler, CONFIGURED, waits=True)

    def _restore(self, request: srv.Restore.Request, response: srv.Restore.Response) -> str:
        report = self._node.verbs.restore(check_id(request.id), request.numerics)
        response.restore_us, response.epoch = report.us, self._node.epoch
        response.bit_exact = report.bit_exact
        exact = '' if report.bit_exact else ' (not bit-exact)'
        return f'restored {report.id}{exact}; {self._node.now_text()}'

    def _rollback(self, request: srv.Rollback.Request, response: srv.Rollback.Response) -> str:
        to = check_id(request.to) if request.to else ''
        report = self._node.verbs.rollback(to, request.boundaries)
        response.restore_us, response.epoch = report.us, self._node.epoch
        response.tick = report.position
        return (f'rolled back to {report.id} at {self._unit} {report.position}; '
                f'{self._node.now_text()}')

    def _snapshot(self, request: srv.Snapshot.Request, response: srv.Snapshot.Response) -> str:
        name = check_id(request.id) if request.id else ''
        info = self._node.verbs.snapshot(name, request.label, request.tier, request.pin)
        response.info = info_message(info)
        where = f'{info.tier} and in its file' if request.tier == 'disk' else info.tier
        return f'{info.id} holds {self._unit} {info.position}, {info.size_bytes} bytes on {where}'

    def _list(self, request: srv.ListCapsules.Request,
              response: srv.ListCapsules.Response) -> str:
        store = self._node.store
        infos = store.list(request.tier or None, self._node.session_name)
        response.capsules = [info_message(info) for info in infos]
        for tier, use in store.usage().items():
            setattr(response, f'{tier}_used_bytes', use.used_bytes)
            setattr(response, f'{tier}_budget_bytes', use.budget_bytes)
        return f'{len(infos)} capsules'

    def _pin(self, request: srv.Pin.Request, response: srv.Pin.Response) -> str:
        if not request.pinned:
            self._refuse_kept(request.id)
        info = self._node.store.pin(
            check_id(request.id), request.pinned, self._node.session_name)
        response.info = info_message(info)
        return f'{info.id} is {"pinned" if info.pinned else "not pinned"}'

    def _drop(self, request: srv.Drop.Request, response: srv.Drop.Response) -> str:
        self._refuse_kept(request.id)
        self._node.store.drop(check_id(request.id), self._node.session_name)
        return f'{request.id} is gone'

    def _move(self, request: srv.Move.Request, response: srv.Move.Response) -> str:
        info = self._node.store.move(
            check_id(request.id), request.tier, self._node.session_name)
        response.info = info_message(info)
        return f'{info.id} is on {info.tier}'

    def _refuse_kept(self, capsule: str) -> None:
        if capsule == self._kept:
            raise ParameterInvalid(f'capsule {capsule!r} stays and stays pinned: it is what '
                                   f'{self._why_kept}; it goes with the cleanup transition')


def free_id(store: CapsuleStore, session: str, prefix: str, numbers: Iterator[int]) -> str:
    """Return ``prefix-n`` with the next number that no capsule of the session has.

    Capsules on disk outlive the process that has numbered them.
    """
    held = {info.id for info in store.list(None, session)}
    return next(name for n in numbers if (name := f'{prefix}-{n}') not in held)


def tell_snapshot(outputs: Any, store: CapsuleStore, info: CapsuleInfo, session: str,
                  tier: str, limit_s: float) -> CapsuleInfo:
    """Publish the event of a new capsule; where ``tier`` is disk, then wait for its file.

    :raises TierUnavailable: it could not be written in time; the capsule is kept in memory.
    """
    outputs.event('snapshot', info.id, {
        'label': info.label, 'tier': info.tier, 'position': info.position,
        'size_bytes': info.size_bytes, 'pinned': info.pinned})
    if tier != 'disk':
        return info
    try:
        return store.saved(info.id, session).result(limit_s)
    except (FlashrtError, OSError, FutureTimeout) as error:
        reason = f'no end within {limit_s:g} s' if isinstance(error, FutureTimeout) else error
        raise TierUnavailable(
            f'capsule {info.id!r} has no file ({reason}); it is kept in {info.tier} memory '
            'only: make room and ~/move it to disk, or ~/drop it') from error


def add_store_usage(section: Any, store: CapsuleStore) -> None:
    """Add bytes, budgets and counters of a store to a diagnostics section."""
    for tier, use in store.usage().items():
        section.add(f'{tier} used_bytes', use.used_bytes)
        section.add(f'{tier} budget_bytes', use.budget_bytes)
        section.add(f'{tier} pinned_bytes', use.pinned_bytes)
        section.add(f'{tier} capsules', use.capsules)
    section.add_counts(dict(store.counters))


def info_message(info: CapsuleInfo) -> CapsuleInfoMessage:
    """Return a capsule's record as a message."""
    message = CapsuleInfoMessage(
        id=info.id, label=info.label, tier=info.tier, parent=info.parent,
        layout_digest=info.layout_digest, numerics_digest=info.numerics_digest,
        position=info.position, size_bytes=info.size_bytes, pinned=info.pinned,
        bit_exact=info.bit_exact)
    fill_stamp(message.created, created_ns(info.created))
    return message


def created_ns(text: str) -> int:
    """Return an ISO 8601 time of a capsule as nanoseconds."""
    return int(datetime.fromisoformat(text).timestamp() * 1e6) * 1000
