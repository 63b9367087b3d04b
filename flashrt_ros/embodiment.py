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

from flashrt_core.errors import ActionError
from flashrt_core.errors import BadJoints
from flashrt_core.errors import ConfigError
from flashrt_ros.yaml_section import parse_section
from flashrt_ros.yaml_section import Section

FORMAT = 1
UNITS = ('rad', 'm', 'ratio')
ACTIONS = ('absolute', 'relative', 'displacement')
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
    'action_scale',
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
    step_scale: float = 0.0  # policy units that an action of 1 moves in a step; 0: no displacement


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
        self._step_scale = _frozen(joint.step_scale for joint in joints)
        self._displaced = np.flatnonzero(self._step_scale)
        self.needs_observed = any(joint.relative or joint.step_scale for joint in joints)

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
                    f'{self.source}: joints lists {len(self.joints)}, the {port} of the policy '
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

        :param values: [..., steps, >= n], policy units; columns beyond the joints are the model's
            padding. Displacements add up along the steps, the first one leading from `observed`.
        :param observed: robot positions [n] of the state the actions start from; needed when a
            joint's actions are relative or displacements.
        :return: float64 of the same shape with n columns, not limited.
        :raises ActionError: when such a joint has no observed state, or columns are missing.
        """
        count = len(self.joints)
        actions = np.asarray(values, dtype=np.float64)
        if actions.shape[-1] < count:
            raise ActionError(
                f'actions have {actions.shape[-1]} columns, {self.name} has {count} joints; use a '
                'policy with as many actions'
            )
        actions = actions[..., :count]
        if self.needs_observed:
            if observed is None:
                raise ActionError(
                    f'{self.name} has relative actions or displacements, which need the observed '
                    'joint positions; give observed'
                )
            if len(self._displaced):
                at = self._displaced
                actions = actions.copy()
                steps = actions[..., at] * self._step_scale[at]
                actions[..., at] = np.cumsum(steps, axis=-2) if actions.ndim > 1 else steps
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
            f'embodiment file {path} cannot be read ({reason}); give the path of a YAML file, see '
            'config/embodiments'
        ) from reason
    return parse_embodiment(text, source=path.name)


def parse_embodiment(text: str, *, source: str = 'embodiment') -> Embodiment:
    """Check the text of an embodiment file.

    :param source: what messages call the file.
    :raises ConfigError: naming file, key, value and remedy.
    """
    top = parse_section(text, source)
    top.allow(_TOP)
    if top.integer('format') != FORMAT:
        top.refuse('format', f'this version reads format {FORMAT}')
    rate = top.number('control_rate_hz', low=0.1, high=2000.0)
    actions = top.choice('actions', ACTIONS, default='absolute')
    gap = top.number('pose_gap', low=0.0, default=None)
    joints = tuple(_joint(section, rate, actions, gap) for section in top.sections('joints'))
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
    section: Section, rate: float, actions: str, default_gap: float | None
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
    action = section.choice('action', ACTIONS, default=actions)
    step_scale = 0.0
    if action == 'displacement':
        step_scale = section.number('action_scale', above=0.0, default=1.0)
    elif 'action_scale' in section.values:
        section.refuse('action_scale', f'it is of displacements, this joint has {action} actions')
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
        relative=action != 'absolute',
        step_scale=step_scale,
    )


def _map(section: Section) -> tuple[int, float, float]:
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


def _views(top: Section) -> dict[str, str]:
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
