"""The robot side of a policy: joints by name, units, limits and cameras, from a YAML file.

The schema is in config/embodiments/README.md. Two frames: *robot* values are what ``joint_states``
and ``joint_trajectory`` carry, *policy* values are the physical units the model was trained in, in
the order of the file:

    policy = sign * scale * (robot - offset)      robot = policy / (sign * scale) + offset
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray
import yaml

from flashrt_core.errors import ActionError
from flashrt_core.errors import BadJoints
from flashrt_core.errors import ConfigError

FORMAT = 1
UNITS = ('rad', 'm', 'ratio')
_TOP = {
    'format',
    'name',
    'control_rate_hz',
    'actions',
    'unknown_joints',
    'pose_gap',
    'joints',
    'views',
}
_JOINT = {
    'name',
    'unit',
    'sign',
    'offset',
    'scale',
    'gripper',
    'position',
    'max_velocity',
    'max_step',
    'pose_gap',
    'action',
}
_JOINT_NAME = re.compile(r'[A-Za-z0-9_./-]{1,128}')
_VIEW_NAME = re.compile(r'[A-Za-z][A-Za-z0-9_]{0,63}')

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class JointSpec:
    """One joint; positions, steps and gaps in the robot's unit."""

    name: str
    unit: str  # rad, m or ratio (0..1)
    sign: int  # 1 or -1
    offset: float
    scale: float
    minimum: float
    maximum: float
    max_velocity: float  # unit per second
    max_step: float  # unit per control period, never above max_velocity / control_rate_hz
    pose_gap: float  # largest distance from the measured pose at which a motion may begin
    relative: bool  # the policy's action is added to the state its tick observed


class Embodiment:
    """A robot as the executor sees it. Immutable; all methods may be called from any thread."""

    def __init__(
        self,
        name: str,
        control_rate_hz: float,
        joints: tuple[JointSpec, ...],
        views: Mapping[str, str],
        ignore_unknown_joints: bool,
        source: str,
    ) -> None:
        """Keep checked values; use :func:`load_embodiment` or :func:`parse_embodiment`."""
        self.name = name
        self.control_rate_hz = control_rate_hz
        self.joints = joints
        self.views = dict(views)
        self.ignore_unknown_joints = ignore_unknown_joints
        self.source = source
        self.names = tuple(joint.name for joint in joints)
        self.index = {joint.name: at for at, joint in enumerate(joints)}
        self.minimum = _frozen(joint.minimum for joint in joints)
        self.maximum = _frozen(joint.maximum for joint in joints)
        self.max_velocity = _frozen(joint.max_velocity for joint in joints)
        self.max_step = _frozen(joint.max_step for joint in joints)
        self.pose_gap = _frozen(joint.pose_gap for joint in joints)
        self._offset = _frozen(joint.offset for joint in joints)
        self._factor = _frozen(joint.sign * joint.scale for joint in joints)
        self._relative = _frozen(float(joint.relative) for joint in joints)
        self.any_relative = any(joint.relative for joint in joints)

    @property
    def step_period_s(self) -> float:
        """Control period."""
        return 1.0 / self.control_rate_hz

    def check_dims(self, state_dim: int, action_dim: int) -> None:
        """Check at configure that the policy's state and action have room for all joints.

        :raises ConfigError: when one has fewer elements than there are joints.
        """
        for port, dim in (('state', state_dim), ('action', action_dim)):
            if dim < len(self.joints):
                raise ConfigError(
                    f'{self.source}: joints lists {len(self.joints)} joints, the {port} of the policy '
                    f'has {dim} elements; use a policy with more, or list fewer joints'
                )

    def check_views(self, policy_views: tuple[str, ...]) -> None:
        """Check at configure that exactly the policy's views are mapped to image topics.

        A view of the policy that is left out is given to it as absent (masked), so it is allowed.

        :raises ConfigError: when a mapped view is not one of the policy's.
        """
        for view in self.views:
            if view not in policy_views:
                raise ConfigError(
                    f'{self.source}: views.{view} is not a view of the policy; it has '
                    f'{", ".join(policy_views)}'
                )

    def to_policy(self, joints: Vector) -> Vector:
        """Turn robot positions [..., n] float64 into policy units, same shape."""
        return (np.asarray(joints, dtype=np.float64) - self._offset) * self._factor

    def to_robot(self, values: NDArray[Any], observed: Vector | None = None) -> Vector:
        """Turn policy actions into absolute robot positions; the inverse of :meth:`to_policy`.

        :param values: [..., >= n], policy units; columns beyond the joints are the model's
            padding.
        :param observed: robot positions [n] of the state the actions are relative to; needed when
            a joint is relative.
        :return: float64 [..., n], not limited.
        :raises ActionError: when a relative joint has no observed state, or columns are missing.
        """
        count = len(self.joints)
        actions = np.asarray(values, dtype=np.float64)
        if actions.shape[-1] < count:
            raise ActionError(
                f'actions have {actions.shape[-1]} columns, {self.name} has {count} joints; '
                'use a policy with as many actions'
            )
        actions = actions[..., :count]
        if self.any_relative:
            if observed is None:
                raise ActionError(
                    f'{self.name} has relative actions, which need the observed joint positions; '
                    'give observed'
                )
            actions = actions + self._relative * self.to_policy(observed)
        return actions / self._factor + self._offset

    def fill_state(self, joints: Vector, out: NDArray[np.float32]) -> None:
        """Write the policy's state: the joints in policy units, then zeros as in training.

        :param joints: robot positions float64 [n].
        :param out: float32 [state_dim], state_dim >= n.
        :raises BadJoints: when the sizes do not fit.
        """
        count = len(self.joints)
        if np.shape(joints) != (count,) or out.ndim != 1 or len(out) < count:
            raise BadJoints(
                f'{np.shape(joints)} joint positions into a state of shape {out.shape}; '
                f'{self.name} has {count} joints'
            )
        out[:count] = self.to_policy(joints)
        out[count:] = 0.0


def _frozen(values: Any) -> Vector:
    array = np.array(list(values), dtype=np.float64)
    array.flags.writeable = False
    return array


def load_embodiment(path: str | Path) -> Embodiment:
    """Read an embodiment file.

    :raises ConfigError: naming file, key, value and remedy.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding='utf-8')
    except (OSError, UnicodeDecodeError) as reason:
        raise ConfigError(
            f'embodiment file {path} cannot be read ({reason}); give the path of a YAML file, '
            'see config/embodiments'
        ) from reason
    return parse_embodiment(text, source=path.name)


def parse_embodiment(text: str, *, source: str = 'embodiment') -> Embodiment:
    """Check the text of an embodiment file.

    :param source: what messages call the file.
    :raises ConfigError: naming file, key, value and remedy.
    """
    try:
        document = yaml.load(text, Loader=_StrictLoader)  # noqa: S506 (a SafeLoader)
    except yaml.YAMLError as reason:
        raise ConfigError(f'{source} is not valid YAML: {reason}') from reason
    top = _Section(source, '', document)
    top.allow(_TOP)
    if top.integer('format') != FORMAT:
        top.refuse('format', f'this version reads format {FORMAT}')
    rate = top.number('control_rate_hz', low=0.1, high=2000.0)
    relative = top.choice('actions', ('absolute', 'relative'), default='absolute') == 'relative'
    gap = top.number('pose_gap', low=0.0, default=None)
    joints = tuple(_joint(section, rate, relative, gap) for section in top.sections('joints'))
    seen: set[str] = set()
    for at, joint in enumerate(joints):
        if joint.name in seen:
            raise ConfigError(
                f'{source}: joints[{at}].name is {joint.name!r} for the second time; list each '
                'joint once'
            )
        seen.add(joint.name)
    return Embodiment(
        name=top.text('name'),
        control_rate_hz=rate,
        joints=joints,
        views=_views(top),
        ignore_unknown_joints=top.choice('unknown_joints', ('refuse', 'ignore'), default='refuse')
        == 'ignore',
        source=source,
    )


def _joint(
    section: '_Section', rate: float, relative: bool, default_gap: float | None
) -> JointSpec:
    section.allow(_JOINT)
    name = section.text('name')
    if not _JOINT_NAME.fullmatch(name):
        section.refuse('name', 'use letters, digits and ._/- as in the robot description')
    sign, offset, scale = _map(section)
    position = section.section('position')
    position.allow({'min', 'max'})
    minimum, maximum = position.number('min'), position.number('max')
    if not minimum < maximum:
        position.refuse('min', f'it must lie below max, which is {maximum}')
    velocity = section.number('max_velocity', above=0.0)
    step = section.number('max_step', above=0.0, default=velocity / rate)
    assert step is not None
    gap = section.number('pose_gap', above=0.0, default=default_gap)
    if gap is None:
        section.refuse('pose_gap', 'give one per joint, or one for all at the top', missing=True)
    action = section.choice(
        'action', ('absolute', 'relative'), default='relative' if relative else 'absolute'
    )
    return JointSpec(
        name=name,
        unit=section.choice('unit', UNITS),
        sign=sign,
        offset=offset,
        scale=scale,
        minimum=minimum,
        maximum=maximum,
        max_velocity=velocity,
        max_step=min(step, velocity / rate),
        pose_gap=gap,
        relative=action == 'relative',
    )


def _map(section: '_Section') -> tuple[int, float, float]:
    """Sign, offset and scale, given as such or as a gripper's closed and open position."""
    if 'gripper' not in section.values:
        sign = section.integer('sign', default=1)
        if sign not in (1, -1):
            section.refuse('sign', 'give 1 or -1')
        return (
            sign,
            section.number('offset', default=0.0),
            section.number('scale', above=0.0, default=1.0),
        )
    for key in ('sign', 'offset', 'scale'):
        if key in section.values:
            section.refuse(key, 'gripper sets it already; remove one of the two')
    gripper = section.section('gripper')
    gripper.allow({'closed', 'open'})
    closed, opened = gripper.number('closed'), gripper.number('open')
    if closed == opened:
        gripper.refuse('open', 'it must differ from closed')
    return (1 if opened > closed else -1), closed, 1.0 / abs(opened - closed)


def _views(top: '_Section') -> dict[str, str]:
    views = top.section('views', default={})
    mapping: dict[str, str] = {}
    for view in views.values:
        suffix = views.text(view)
        if not _VIEW_NAME.fullmatch(str(view)):
            views.refuse(view, 'a policy view is named with letters, digits and _')
        if not _VIEW_NAME.fullmatch(suffix):
            views.refuse(
                view, 'give the last part of images/<part>: letters, digits and _, no slash'
            )
        if suffix in mapping.values():
            views.refuse(view, 'another view uses that topic; give each its own camera')
        mapping[view] = suffix
    return mapping


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, where plain YAML lets the last one win."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f'key {key!r} is given twice; remove one', node.start_mark
                )
        return super().construct_mapping(node, deep)


_REQUIRED = object()


class _Section:
    """One mapping of the file; its refusals name file, key, value and remedy."""

    def __init__(self, source: str, place: str, values: Any) -> None:
        self.source, self.place = source, place
        if not isinstance(values, dict):
            raise ConfigError(
                f'{source}: {place or "the document"} is {values!r}; give a mapping of keys to '
                'values'
            )
        self.values = values

    def key(self, key: str) -> str:
        return f'{self.place}.{key}' if self.place else str(key)

    def refuse(self, key: str, remedy: str, *, missing: bool = False) -> Any:
        state = 'is missing' if missing else f'is {self.values.get(key)!r}'
        raise ConfigError(f'{self.source}: {self.key(key)} {state}; {remedy}')

    def allow(self, keys: set[str]) -> None:
        for key in self.values:
            if key not in keys:
                self.refuse(key, f'no such key; known are {", ".join(sorted(keys))}')

    def get(self, key: str, default: Any, remedy: str) -> Any:
        if key in self.values:
            return self.values[key]
        if default is _REQUIRED:
            self.refuse(key, remedy, missing=True)
        return default

    def number(
        self,
        key: str,
        *,
        low: float | None = None,
        high: float | None = None,
        above: float | None = None,
        default: Any = _REQUIRED,
    ) -> Any:
        if key not in self.values and default is not _REQUIRED:
            return default
        value = self.get(key, default, 'give a number')
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            self.refuse(key, 'give a finite number')
        if low is not None and value < low:
            self.refuse(key, f'give at least {low}')
        if high is not None and value > high:
            self.refuse(key, f'give at most {high}')
        if above is not None and not value > above:
            self.refuse(key, f'give more than {above}')
        return float(value)

    def integer(self, key: str, default: Any = _REQUIRED) -> int:
        value = self.get(key, default, 'give a whole number')
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(key, 'give a whole number')
        return value

    def text(self, key: str) -> str:
        value = self.get(key, _REQUIRED, 'give a text')
        if not isinstance(value, str) or not value.strip():
            self.refuse(key, 'give a text (quote it where YAML reads it as something else)')
        return value

    def choice(self, key: str, choices: tuple[str, ...], default: Any = _REQUIRED) -> str:
        value = self.get(key, default, f'give one of {", ".join(choices)}')
        if value not in choices:
            self.refuse(key, f'give one of {", ".join(choices)}')
        return value

    def section(self, key: str, default: Any = _REQUIRED) -> '_Section':
        value = self.get(key, default, 'give a mapping')
        return _Section(self.source, self.key(key), value)

    def sections(self, key: str) -> list['_Section']:
        value = self.get(key, _REQUIRED, 'give a list of mappings')
        if not isinstance(value, list) or not value:
            self.refuse(key, 'give a list with at least one joint')
        return [
            _Section(self.source, f'{self.key(key)}[{at}]', item) for at, item in enumerate(value)
        ]
