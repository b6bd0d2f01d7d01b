"""Puts something in the place of an object's attribute for a while; used to watch and to plant."""

from collections.abc import Iterator
from contextlib import contextmanager

_NOTHING = object()


@contextmanager
def replaced(owner: object, name: str, by: object) -> Iterator[None]:
    """Hide an attribute or method of this one object behind another; contexts may nest."""
    before = vars(owner).get(name, _NOTHING)
    setattr(owner, name, by)
    try:
        yield
    finally:
        if before is _NOTHING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
