"""Parameters as a schema: one table declares, checks, documents and reports them.

rclpy checks type, range and read-only by itself but answers in its own words and counts nothing;
the table checks first, so that every refusal names the parameter, the value and the remedy.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
import difflib
import math
from typing import Any

from rcl_interfaces.msg import FloatingPointRange
from rcl_interfaces.msg import IntegerRange
from rcl_interfaces.msg import ParameterDescriptor
from rcl_interfaces.msg import SetParametersResult
from rclpy.exceptions import InvalidParameterTypeException
from rclpy.exceptions import InvalidParameterValueException
from rclpy.node import Node
from rclpy.parameter import Parameter

from flashrt_core.errors import ConfigError
from flashrt_core.errors import ParameterInvalid
from flashrt_ros import qos

Value = bool | int | float | str

_TYPES: Mapping[type, Parameter.Type] = {
    bool: Parameter.Type.BOOL,
    int: Parameter.Type.INTEGER,
    float: Parameter.Type.DOUBLE,
    str: Parameter.Type.STRING,
}


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter: its type is that of the default, its unit stands in the name."""

    name: str
    default: Value
    description: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    read_only: bool = False  # a change would need a new capture or new entities

    @property
    def type(self) -> Parameter.Type:
        """Type of the parameter in rclpy."""
        return _TYPES[type(self.default)]

    def descriptor(self) -> ParameterDescriptor:
        """Return what ``ros2 param describe`` shows."""
        message = ParameterDescriptor(
            name=self.name,
            type=self.type.value,
            description=self.description,
            read_only=self.read_only,
            additional_constraints=f'one of {", ".join(self.choices)}' if self.choices else '',
        )
        if self.minimum is not None and self.maximum is not None:
            if self.type is Parameter.Type.DOUBLE:
                message.floating_point_range = [
                    FloatingPointRange(from_value=self.minimum, to_value=self.maximum)]
            else:
                message.integer_range = [
                    IntegerRange(from_value=int(self.minimum), to_value=int(self.maximum))]
        return message

    def range_text(self) -> str:
        """Return the allowed values in words."""
        if self.choices:
            return ', '.join(self.choices)
        if self.minimum is None or self.maximum is None:
            return ''
        return f'{self.minimum:g} .. {self.maximum:g}'

    def check(self, parameter: Parameter) -> None:
        """Check type and range of a new value.

        :raises ParameterInvalid: naming parameter, value and remedy.
        """
        value = parameter.value
        if parameter.type_ != self.type:
            hint = f' (write {value}.0)' if (
                self.type is Parameter.Type.DOUBLE
                and parameter.type_ == Parameter.Type.INTEGER) else ''
            article = 'an' if self.type is Parameter.Type.INTEGER else 'a'
            raise ParameterInvalid(
                f'parameter {self.name} is {value!r:.200} of type {parameter.type_.name}; '
                f'give {article} {self.type.name}{hint}')
        if isinstance(value, float) and not math.isfinite(value):
            raise ParameterInvalid(f'parameter {self.name} is {value}; give a finite number')
        if self.choices and value not in self.choices:
            raise ParameterInvalid(
                f'parameter {self.name} is {value!r}; give one of {", ".join(self.choices)}')
        if self.minimum is not None and self.maximum is not None and not (
                self.minimum <= value <= self.maximum):
            raise ParameterInvalid(
                f'parameter {self.name} is {value:g}; give a value in {self.range_text()}')


class ParameterUnknown(ConfigError):
    """A parameter given at start is none of the node's."""

    def __init__(self, name: str, node: str, value: object, remedy: str) -> None:
        super().__init__(f'parameter {name} is unknown to {node}, {value!r:.80} was not taken; '
                         f'{remedy} or remove it')
        self.name, self.node, self.value = name, node, value


class ParameterTable:
    """The declared parameters of one node; ``table['name']`` is the value now, from any thread."""

    def __init__(self, specs: Iterable[ParameterSpec]) -> None:
        self.specs = {spec.name: spec for spec in specs}
        self._values: dict[str, Any] = {spec.name: spec.default for spec in self.specs.values()}
        self._checks: list[Callable[[Mapping[str, Any]], None]] = []
        self._changed: list[Callable[[str, Any, Any], None]] = []
        self._refused: Callable[[ParameterInvalid], None] = lambda error: None

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def declare(self, node: Node) -> None:
        """Declare every parameter on ``node`` and check what the command line and YAML gave.

        :raises ConfigError: naming the parameter, its value and the remedy.
        """
        for name, parameter in node._parameter_overrides.items():
            if name.startswith(qos.OVERRIDES):
                qos.check_override(name, parameter.value)
            elif name not in self.specs and not node.has_parameter(name):
                raise ParameterUnknown(
                    name, node.get_name(), parameter.value, self._remedy(name))
        for spec in self.specs.values():
            given = node._parameter_overrides.get(spec.name)
            if given is not None:
                try:
                    spec.check(given)
                except ParameterInvalid as error:
                    raise ConfigError(str(error)) from None
            try:
                declared = node.declare_parameter(spec.name, spec.default, spec.descriptor())
            except (InvalidParameterTypeException, InvalidParameterValueException) as error:
                raise ConfigError(f'parameter {spec.name}: {error}; see `ros2 param describe`'
                                  ) from None
            self._values[spec.name] = declared.value
        self._guard(node)

    def add_check(self, check: Callable[[Mapping[str, Any]], None]) -> None:
        """Add a check of the values as a change would leave them; it raises ParameterInvalid."""
        self._checks.append(check)

    def on_change(self, changed: Callable[[str, Any, Any], None]) -> None:
        """Call ``changed(name, old, new)`` after each accepted change, on the setting thread."""
        self._changed.append(changed)

    def on_refusal(self, refused: Callable[[ParameterInvalid], None]) -> None:
        """Call ``refused(error)`` for each refused change."""
        self._refused = refused

    def check(self, parameters: Iterable[Parameter]) -> None:
        """Check a set of new values together.

        :raises ParameterInvalid: for the first that is refused.
        """
        proposed = dict(self._values)
        for parameter in parameters:
            spec = self.specs.get(parameter.name)
            if spec is None:
                continue
            if spec.read_only:
                raise ParameterInvalid(
                    f'parameter {spec.name} is read-only, {parameter.value!r} was not taken; '
                    'set it in the YAML file or with --ros-args -p and start the node anew')
            spec.check(parameter)
            proposed[spec.name] = parameter.value
        for check in self._checks:
            check(proposed)

    def markdown(self) -> str:
        """Return the table for doc/parameters.md."""
        lines = ['| parameter | type | default | range | fixed | meaning |',
                 '|---|---|---|---|---|---|']
        for spec in self.specs.values():
            default = f'`{spec.default!r}`' if spec.default != '' else 'empty'
            lines.append(
                f'| `{spec.name}` | {spec.type.name.lower()} | {default} | {spec.range_text()} | '
                f'{"yes" if spec.read_only else ""} | {spec.description} |')
        return '\n'.join(lines) + '\n'

    def _remedy(self, name: str) -> str:
        close = difflib.get_close_matches(name, self.specs, n=1)
        return (f'write {close[0]}' if close
                else 'give one of those that `ros2 param list` shows')

    def _guard(self, node: Node) -> None:
        # All set services and calls go through these methods, before rclpy's own checks.
        unguarded = node.set_parameters_atomically

        def refuse(error: ParameterInvalid) -> SetParametersResult:
            self._refused(error)
            return SetParametersResult(successful=False, reason=f'[{error.code}] {error}')

        def set_parameters_atomically(parameters: list[Parameter]) -> SetParametersResult:
            try:
                for parameter in parameters:
                    if not node.has_parameter(parameter.name):
                        raise ParameterInvalid(
                            f'parameter {parameter.name} is unknown to {node.get_name()}; '
                            f'{self._remedy(parameter.name)}')
                self.check(parameters)
            except ParameterInvalid as error:
                return refuse(error)
            result = unguarded(parameters)
            if not result.successful:
                return refuse(ParameterInvalid(
                    f'parameter {", ".join(p.name for p in parameters)}: {result.reason}'))
            self._take(parameters)
            return result

        def set_parameters(parameters: list[Parameter]) -> list[SetParametersResult]:
            return [set_parameters_atomically([parameter]) for parameter in parameters]

        node.set_parameters_atomically = set_parameters_atomically
        node.set_parameters = set_parameters

    def _take(self, parameters: Iterable[Parameter]) -> None:
        for parameter in parameters:
            if parameter.name in self._values:
                old, self._values[parameter.name] = (
                    self._values[parameter.name], parameter.value)
                for changed in self._changed:
                    changed(parameter.name, old, parameter.value)
