"""JSON objects under a root, read with bounds.

Whoever can write under a root could otherwise fill the memory of all who read there, or end them by
a text that is nested a thousand times. Every JSON from a root is read here
(`tests/house/test_json.py`); those who write refuse what they could not read again.
"""

import json
from contextlib import suppress
from typing import Any

from data_pipeline.store.objects import AccessDenied, Store

MOST_BYTES = 256 << 20
"""Bytes of a JSON object, and of a sample's document."""
MOST_NESTED = 64
"""Lists and objects inside one another."""


class UnsoundJson(ValueError):
    """A text that is no JSON, is too large, or is nested too deeply; one line that names it."""


def read_json(store: Store, key: str, most: int = MOST_BYTES) -> Any:
    """Return what an object holds.

    Raises:
        UnsoundJson: it is larger than `most` bytes, which is known before it is read, or no JSON
            that may be read.
        StoreError: as `Store.get`.
    """
    return parse_json(read_bounded(store, key, most), f"{store.uri}/{key}")


def read_bounded(store: Store, key: str, most: int = MOST_BYTES) -> bytes:
    """Return the bytes of an object for `parse_json`; raises as `read_json`."""
    with suppress(AccessDenied):  # the answer to `get` says why, that to `head` does not
        size = store.head(key).size
        if size > most:
            raise UnsoundJson(f"{store.uri}/{key}: {size} bytes, at most {most} are read")
    return store.get(key)


def parse_json(data: bytes | str, where: str) -> Any:
    """Return what a JSON text holds.

    Args:
        data: the text.
        where: names it in errors.

    Raises:
        UnsoundJson: it is no JSON, too large, or nested too deeply.
    """
    if len(data) > MOST_BYTES:
        raise UnsoundJson(f"{where}: {len(data)} bytes, at most {MOST_BYTES} are read")
    try:
        value = json.loads(data)
    except RecursionError:
        raise UnsoundJson(_too_deep(where)) from None
    except ValueError as error:
        raise UnsoundJson(f"{where}: not JSON: {error}") from None
    check_nesting(value, where)
    return value


def check_nesting(value: object, where: str) -> None:
    """Raise UnsoundJson if a plain value is nested more than `MOST_NESTED` times."""
    level = [value]
    for _ in range(MOST_NESTED):
        inner: list[object] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list | tuple):
                inner += one
        level = [one for one in inner if isinstance(one, dict | list | tuple)]
        if not level:
            return
    raise UnsoundJson(_too_deep(where))


def _too_deep(where: str) -> str:
    return f"{where}: not JSON that is read: nested more than {MOST_NESTED} times"
