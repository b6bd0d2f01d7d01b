"""Lists every key of a section: type, default, unit, purpose, and the file that reads it.

`kimi-pretrain config show`, the template and docs/CONFIG.md are generated from this list.
"""

import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from pydantic.fields import FieldInfo

from typed_config.section import Section, section_of
from typed_config.yaml_text import one_line


class Default(Enum):
    """Marker for a missing default."""

    REQUIRED = "required"


@dataclass(frozen=True)
class Key:
    """One key of the configuration.

    Attributes:
        path: "data.limits.image". In "data.augment.<name>.flip" the user chooses the name;
            "data.schedule[].sources" occurs in each item of a list.
        kind: "int > 0", "muon / adamw", "float or null".
        default: plain value, or `Default.REQUIRED`. A required key of an optional section is
            required only if the section is given.
        unit: "tokens", or "-".
        text: purpose of the key.
        reader: file that reads it.
        section: the section that is the key's value or inside it, if any.
    """

    path: str
    kind: str
    default: Any
    unit: str
    text: str
    reader: str
    section: type[Section] | None

    @property
    def default_text(self) -> str:
        """The default as YAML text, "required", or "as below" for a section with defaults."""
        if self.default is Default.REQUIRED:
            return "required"
        of_a_section = self.section is not None and self.default not in (None, {}, [])
        return "as below" if of_a_section else one_line(self.default)


def keys(section: type[Section], prefix: str = "") -> Iterator[Key]:
    """Yield every key below a section in source order; a section precedes its keys.

    Raises:
        ValueError: a field's docstring does not end with [unit; file].
    """
    for name, field in section.model_fields.items():
        key = _key(prefix + name, field)
        yield key
        if key.section is not None:
            yield from keys(key.section, key.path + _below(field.annotation))


def _key(path: str, field: FieldInfo) -> Key:
    told = " ".join((field.description or "").split())
    parts = re.fullmatch(r"(.+) \[([^\[\];]+); ([\w/]+\.py)\]", told)
    if parts is None:
        raise ValueError(f"{path}: its docstring must end with [unit; file], is {told!r}")
    text, unit, reader = parts.groups()
    section = section_of(field.annotation)
    return Key(path, _type(field), _default(field), unit, text, reader, section)


def _default(field: FieldInfo) -> Any:
    if field.is_required():
        return Default.REQUIRED
    value = field.get_default(call_default_factory=True)
    value = value.model_dump(mode="json") if isinstance(value, Section) else value
    return list(value) if isinstance(value, tuple) else value


def _below(kind: Any) -> str:
    """Return the separator between a section's key and its own keys: ".", ".<name>." or "[]."."""
    origins = {typing.get_origin(part) for part in (kind, *_parts(kind))}
    return ".<name>." if dict in origins else "[]." if list in origins else "."


def _parts(kind: Any) -> Iterator[Any]:
    for part in typing.get_args(kind):
        yield part
        yield from _parts(part)


_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "multiple_of": "a multiple of"}


def _type(field: FieldInfo) -> str:
    bounds = _bounds(field.metadata)
    return _name(field.annotation) + (f", {bounds}" if bounds else "")


def _bounds(metadata: typing.Iterable[Any]) -> str:
    found = [
        f"{sign} {_number(value)}"
        for one in metadata
        for name, sign in _BOUNDS.items()
        if (value := getattr(one, name, None)) is not None
    ]
    return ", ".join(found)


def _number(value: float) -> str:
    """Return a bound as text; large powers of two as 2^n."""
    for power, offset in ((value, ""), (value + 1, " - 1")):
        if isinstance(power, int) and power > 2**20 and power & (power - 1) == 0:
            return f"2^{power.bit_length() - 1}{offset}"
    return str(value)


def _name(kind: Any) -> str:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        metadata = [m for one in inner[1:] for m in getattr(one, "metadata", (one,))]
        bounds = _bounds(metadata)
        return _name(inner[0]) + (f" {bounds}" if bounds else "")
    if origin is Literal:
        return " / ".join(one_line(value) for value in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if part is type(None) else _name(part) for part in inner)
    if origin is dict:
        return f"{{name: {_name(inner[1])}}}"
    if origin is list:
        return f"[{_name(inner[0])}, ...]"
    if origin is tuple:
        return f"[{', '.join(map(_name, inner))}]"
    if isinstance(kind, type) and issubclass(kind, Section):
        return "section"
    return {str: "text", bool: "true / false"}.get(kind, getattr(kind, "__name__", str(kind)))
