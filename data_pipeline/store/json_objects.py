"""Reads JSON objects under a root, with limits on size and nesting.

Without limits, anyone who can write under a root could exhaust the memory of all readers, or crash
them with a deeply nested text. All JSON from a root is read through this module
(`tests/house/test_json.py`), and writers refuse JSON that would exceed the limits.
"""

import json
from contextlib import suppress
from typing import Any

from data_pipeline.store.objects import AccessDenied, Store

MOST_BYTES = 256 << 20
"""Maximum size of a JSON object or of a sample's document, in bytes."""
MOST_NESTED = 64
"""Maximum nesting depth of lists and objects."""


class UnsoundJson(ValueError):
    """The text is not JSON, too large, or nested too deeply; the message is one line."""


def read_json(store: Store, key: str, most: int = MOST_BYTES) -> Any:
    """Return the value of a JSON object.

    Raises:
        UnsoundJson: the object is larger than `most` bytes (checked before it is read), or
            `parse_json` refuses it.
        StoreError: as in `Store.get`.
    """
    return parse_json(read_bounded(store, key, most), f"{store.uri}/{key}")


def read_bounded(store: Store, key: str, most: int = MOST_BYTES) -> bytes:
    """Return the bytes of an object for `parse_json`; errors are as in `read_json`."""
    with suppress(AccessDenied):  # `get` below reports the reason, which a HEAD response lacks
        size = store.head(key).size
        if size > most:
            raise UnsoundJson(f"{store.uri}/{key}: {size} bytes, at most {most} are read")
    return store.get(key)


def parse_json(data: bytes | str, where: str) -> Any:
    """Return the value of a JSON text.

    Args:
        data: the text.
        where: name of the text, for errors.

    Raises:
        UnsoundJson: the text is not JSON, too large, or nested too deeply.
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
    """Raise UnsoundJson if a plain value is nested more than `MOST_NESTED` levels deep."""
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
