"""YAML for reading and writing the configuration: decimal numbers only, no duplicate keys.

PyYAML follows YAML 1.1: 010 is 8, 10:30 is 630, `no` is false, and 1e-6 is a text. Here plain
values follow the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema) without its
octal and hexadecimal forms: 010 is 10, and 10:30, 0x10, 1_000 and `no` are texts, which a numeric
key refuses. `dump` quotes a text that either version would read as another type.
"""

import math
import re
from typing import Any

import yaml

_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?[0-9]+$")
_FLOAT = re.compile(
    r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_DIGITS = list("-+.0123456789")
_PLAIN = (
    ("null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", _INT, _DIGITS),
    ("float", _FLOAT, _DIGITS),
    ("merge", re.compile(r"<<$"), ["<"]),
)


def parse(text: str) -> Any:
    """Return the value of a YAML text.

    Raises:
        ValueError: one line that explains the syntax error, or names the duplicate key or the
            number that is too large.
    """
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None


def dump(value: Any) -> str:
    """Return a plain value as YAML that `parse` reads back unchanged; keys keep their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


def one_line(value: Any) -> str:
    """Return a plain value as one line of YAML, as in an override `key=value`."""
    text = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, default_flow_style=True, width=math.inf
    )
    return text.removesuffix("\n...\n").removesuffix("\n")


class _Loader(yaml.SafeLoader):
    """YAML loader with the rules above."""

    yaml_implicit_resolvers: dict[Any, Any] = {}

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping; check for duplicates before merge keys (`<<`) are expanded.

        Keys from a merge may be overridden.
        """
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                raise yaml.YAMLError(
                    f"key {key.value!r} stands twice, in lines {lines[name]} and {line}; the "
                    "second would replace the first; keep one"
                )
            lines[name] = line
        return node


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes texts of another type in YAML 1.1 or by the rules above."""


def _number(loader: _Loader, node: yaml.ScalarNode) -> int | float:
    """Convert a node that is tagged as a number, by its form or by the user."""
    text = node.value
    if node.tag == f"{_TAG}int" and _INT.match(text):
        return int(text)
    if node.tag != f"{_TAG}float" or not _FLOAT.match(text):
        raise ValueError(f"{text!r:.60} is no decimal number")
    if text[-1] in "fFnN":  # .inf, .nan
        return float(text.replace(".", ""))
    if math.isinf(value := float(text)):
        raise ValueError(f"{text!r:.60} is larger than any number; write a text in quotes")
    return value


for _name, _form, _first in _PLAIN:
    _Loader.add_implicit_resolver(f"{_TAG}{_name}", _form, _first)  # pyright: ignore[reportUnknownMemberType]
    _Dumper.add_implicit_resolver(f"{_TAG}{_name}", _form, _first)  # pyright: ignore[reportUnknownMemberType]
for _name in ("int", "float"):
    _Loader.add_constructor(f"{_TAG}{_name}", _number)  # pyright: ignore[reportUnknownMemberType]
