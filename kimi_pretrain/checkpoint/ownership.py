"""Ownership of a checkpoint location, recorded in `owner.json` and checked before every commit."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

OWNER = "owner.json"


class Owner(NamedTuple):
    """Owner of a location, as in owner.json: the run's id, and an id of this start of the run."""

    run: str
    start: str


def ownership_conflict(uri: str, text: str, run: str, start: str | None = None) -> str | None:
    """Return why a location does not belong to this run, or None if it does.

    Args:
        uri: the location.
        text: contents of its owner.json.
        run: id of this run.
        start: id of the start that must have claimed the location last; None for any start.
    """
    try:
        owner: Mapping[str, Any] = json.loads(text)
        if owner["run"] == run and start in (None, owner.get("start")):
            return None
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{uri}/{OWNER} is {text[:100]!r}, expected the id of a run; remove the file"
    folder = f"run folder {owner.get('run_dir', 'unknown')} on {owner.get('host', 'unknown host')}"
    if owner["run"] == run:
        return (
            f"{uri} was taken by another start of this run ({folder}), which saves there now; end "
            "one of the two; where that folder is a copy, give it a checkpoint.place of its own"
        )
    return (
        f"{uri} holds the checkpoints of another run ({owner['run']}, {folder}); choose "
        f"another checkpoint.place, or remove {OWNER} there if that run will never go on"
    )
