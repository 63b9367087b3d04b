"""YAML read key by key: each refusal names file, key, value and remedy."""

import sys
from typing import Any

import yaml

from flashrt_core.errors import ConfigError

_REQUIRED = object()
_LARGEST = sys.float_info.max


def parse_section(text: str, source: str) -> 'Section':
    """Return the document of a YAML text whose top is a mapping.

    :param source: what messages call the file.
    :raises ConfigError: when it is not YAML, gives a key twice, or its top is no mapping.
    """
    try:
        document = yaml.load(text, Loader=_StrictLoader)  # noqa: S506 (a SafeLoader)
    except (yaml.YAMLError, RecursionError, ValueError, TypeError) as reason:
        raise ConfigError(f'{source} is not valid YAML: {reason}') from reason
    return Section(source, '', document)


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


class Section:
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
        """Return the place of a key, as messages name it."""
        return f'{self.place}.{key}' if self.place else str(key)

    def refuse(self, key: str, remedy: str, *, missing: bool = False) -> Any:
        """Raise a ConfigError about one key.

        :raises ConfigError: always.
        """
        state = 'is missing' if missing else f'is {self.values.get(key)!r}'
        raise ConfigError(f'{self.source}: {self.key(key)} {state}; {remedy}')

    def allow(self, keys: set[str]) -> None:
        """Refuse keys that are not in the schema."""
        for key in self.values:
            if key not in keys:
                self.refuse(key, f'no such key; known are {", ".join(sorted(keys))}')

    def get(self, key: str, default: Any, remedy: str) -> Any:
        """Return a value, the default, or refuse a missing one."""
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
        """Return a finite number within the bounds as float."""
        if key not in self.values and default is not _REQUIRED:
            return default
        value = self.get(key, default, 'give a number')
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not -_LARGEST <= value <= _LARGEST
        ):
            self.refuse(key, 'give a finite number')
        if low is not None and value < low:
            self.refuse(key, f'give at least {low}')
        if high is not None and value > high:
            self.refuse(key, f'give at most {high}')
        if above is not None and not value > above:
            self.refuse(key, f'give more than {above}')
        return float(value)

    def integer(self, key: str, default: Any = _REQUIRED) -> int:
        """Return a whole number."""
        value = self.get(key, default, 'give a whole number')
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(key, 'give a whole number')
        return value

    def text(self, key: str) -> str:
        """Return a text that is not empty."""
        value = self.get(key, _REQUIRED, 'give a text')
        if not isinstance(value, str) or not value.strip():
            self.refuse(key, 'give a text (quote it where YAML reads it as something else)')
        return value

    def choice(self, key: str, choices: tuple[str, ...], default: Any = _REQUIRED) -> str:
        """Return one of the given words."""
        value = self.get(key, default, f'give one of {", ".join(choices)}')
        if value not in choices:
            self.refuse(key, f'give one of {", ".join(choices)}')
        return value

    def section(self, key: str, default: Any = _REQUIRED) -> 'Section':
        """Return a mapping below this one."""
        value = self.get(key, default, 'give a mapping')
        return Section(self.source, self.key(key), value)

    def sections(self, key: str) -> list['Section']:
        """Return a list of at least one mapping below this one."""
        value = self.get(key, _REQUIRED, 'give a list of mappings')
        if not isinstance(value, list) or not value:
            self.refuse(key, 'give a list with at least one joint')
        return [
            Section(self.source, f'{self.key(key)}[{at}]', item) for at, item in enumerate(value)
        ]
