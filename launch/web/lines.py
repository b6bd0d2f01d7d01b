"""Turns JSON lines of untrusted files into text for a page.

A line gives None if it is too long, is not a JSON object, or lacks a required field. A field that
is not a string is shown as JSON. No content of a file makes a page fail.
"""

import json
from collections.abc import Sequence
from typing import Any

from data_pipeline.store.json_objects import parse_json

LONGEST = 64 << 10
"""Most bytes of a readable line; longer lines are shown as unreadable."""

UNREADABLE = "unreadable line"
_SHOWN = 2_000  # characters of a field


def fields_of(line: bytes, names: Sequence[str]) -> dict[str, str] | None:
    """Return some fields of a JSON line as text, or None if the line does not have them."""
    if len(line) > LONGEST:
        return None
    try:
        found = parse_json(line, "a line")
        return {name: _text(found[name]) for name in names}
    except (ValueError, KeyError, TypeError):
        return None


def begin_of(line: bytes) -> str:
    """Return the beginning of an unreadable line, for the page."""
    return line[:200].decode("utf-8", "replace")


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."
