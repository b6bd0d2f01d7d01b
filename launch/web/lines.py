"""JSON lines of files that anybody may have written, as text for a page.

A line that is too long, no JSON object, or without the fields that are wanted is None; a field of
another type is shown as its JSON. Nothing that a file holds makes a page fail.
"""

import json
from collections.abc import Sequence
from typing import Any

from data_pipeline.store.json_objects import parse_json

LONGEST = 64 << 10
"""Bytes of a line that is read; longer ones are shown as such."""

UNREADABLE = "unreadable line"
_SHOWN = 2_000  # characters of a field


def fields_of(line: bytes, names: Sequence[str]) -> dict[str, str] | None:
    """Return some fields of a JSON line as text; None for a line that does not have them."""
    if len(line) > LONGEST:
        return None
    try:
        found = parse_json(line, "a line")
        return {name: _text(found[name]) for name in names}
    except (ValueError, KeyError, TypeError):
        return None


def begin_of(line: bytes) -> str:
    """Return the begin of an unreadable line, for the page."""
    return line[:200].decode("utf-8", "replace")


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."
