"""Quality of service: one profile per kind of stream, overridable, mismatches reported.

After REP-2003: sensors best effort, commands reliable and never queued, status latched.
"""

from collections.abc import Callable
from collections.abc import Mapping
import os
from pathlib import Path

from rclpy.duration import Duration
from rclpy.event_handler import PublisherEventCallbacks
from rclpy.event_handler import SubscriptionEventCallbacks
from rclpy.qos import DurabilityPolicy
from rclpy.qos import HistoryPolicy
from rclpy.qos import qos_policy_name_from_kind
from rclpy.qos import QoSProfile
from rclpy.qos import ReliabilityPolicy
from rclpy.qos_overriding_options import QoSOverridingOptions

from flashrt_core.errors import ConfigError
from flashrt_ros.config_files import config_path

Report = Callable[[str, str], None]  # topic, sentence
OVERRIDES = 'qos_overrides.'
_DEPTHS = range(1, 10_001)
_POLICIES: Mapping[str, tuple[str, ...]] = {
    'history': ('keep_last', 'keep_all', 'system_default'),
    'reliability': ('reliable', 'best_effort', 'system_default'),
}

_PROFILES_VARIABLES = ('FASTRTPS_DEFAULT_PROFILES_FILE', 'FASTDDS_DEFAULT_PROFILES_FILE')


def _profile(
    reliability: ReliabilityPolicy, durability: DurabilityPolicy, depth: int
) -> QoSProfile:
    return QoSProfile(history=HistoryPolicy.KEEP_LAST, depth=depth,
                      reliability=reliability, durability=durability)


def sensor() -> QoSProfile:
    """Cameras and joint states in: matches best effort and reliable publishers, newest only."""
    return _profile(ReliabilityPolicy.BEST_EFFORT, DurabilityPolicy.VOLATILE, 1)


def command() -> QoSProfile:
    """Commands out and subgoals in: a queue of old ones is worse than a lost one."""
    return _profile(ReliabilityPolicy.RELIABLE, DurabilityPolicy.VOLATILE, 1)


def status() -> QoSProfile:
    """Latched state."""
    return _profile(ReliabilityPolicy.RELIABLE, DurabilityPolicy.TRANSIENT_LOCAL, 1)


def record() -> QoSProfile:
    """Chunks, tick inputs and events: a recorder that is slow for a moment loses none."""
    return _profile(ReliabilityPolicy.RELIABLE, DurabilityPolicy.VOLATILE, 50)


def heartbeat(deadline_s: float = 0.0) -> QoSProfile:
    """Sign of life; with ``deadline_s`` subscribers may ask to be told when it stops."""
    profile = _profile(ReliabilityPolicy.BEST_EFFORT, DurabilityPolicy.VOLATILE, 1)
    if deadline_s > 0.0:
        profile.deadline = Duration(nanoseconds=int(deadline_s * 1e9))
    return profile


def overridable() -> QoSOverridingOptions:
    """Let the user override history, depth and reliability as ``qos_overrides.<topic>...``."""
    return QoSOverridingOptions.with_default_policies()


def check_override(name: str, value: object) -> None:
    """Check one ``qos_overrides.<topic>.<publisher|subscription>.<policy>`` parameter.

    :raises ConfigError: naming the parameter, its value and the remedy.
    """
    parts = name.split('.')
    if len(parts) != 4 or not parts[1].startswith('/') or parts[2] not in (
            'publisher', 'subscription') or parts[3] not in ('depth', *_POLICIES):
        raise ConfigError(
            f'parameter {name} is {value!r:.80}; write qos_overrides./<full topic>.'
            '<publisher|subscription>.<depth|history|reliability>')
    if parts[3] == 'depth':
        if isinstance(value, bool) or not isinstance(value, int) or value not in _DEPTHS:
            raise ConfigError(
                f'parameter {name} is {value!r:.80}; give {_DEPTHS.start} to {_DEPTHS.stop - 1}')
    elif value not in _POLICIES[parts[3]]:
        raise ConfigError(
            f'parameter {name} is {value!r:.80}; give one of {", ".join(_POLICIES[parts[3]])}')


def incompatible_text(topic: str, policy_kind: int, side: str) -> str:
    """Return the sentence a diagnostic carries; ``side`` is publisher or subscription."""
    policy = qos_policy_name_from_kind(policy_kind).lower()
    remedy = (f'set parameter qos_overrides.{topic}.{side}.{policy} or change the peer'
              if policy in _POLICIES else 'change the peer')
    return f'{topic}: this {side} and its peer disagree on {policy}, so no data flows; {remedy}'


def subscription_events(topic: str, report: Report) -> SubscriptionEventCallbacks:
    """Report an incompatible publisher of ``topic`` once it is discovered."""
    return SubscriptionEventCallbacks(
        incompatible_qos=lambda event: report(topic, incompatible_text(
            topic, event.last_policy_kind, 'subscription')))


def publisher_events(topic: str, report: Report) -> PublisherEventCallbacks:
    """Report an incompatible subscription to ``topic`` once it is discovered."""
    return PublisherEventCallbacks(
        incompatible_qos=lambda event: report(topic, incompatible_text(
            topic, event.last_policy_kind, 'publisher')))


def use_large_message_profile() -> Path | None:
    """Make Fast DDS carry megabyte images through shared memory; call before ``rclpy.init``.

    Leaves a profile that the user has set, and other middlewares, alone; returns the file in use.
    """
    if os.environ.get('RMW_IMPLEMENTATION', 'rmw_fastrtps_cpp') != 'rmw_fastrtps_cpp':
        return None
    for variable in _PROFILES_VARIABLES:
        if os.environ.get(variable):
            return Path(os.environ[variable])
    path = config_path('fastdds_shm.xml')
    for variable in _PROFILES_VARIABLES:
        os.environ[variable] = str(path)
    return path
