"""Which run owns a checkpoint place: `owner.json`, which is checked before every commit."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

OWNER = "owner.json"


class Owner(NamedTuple):
    """The owner of a place, as in owner.json: the run's id, and an id of this start of it."""

    run: str
    start: str


def ownership_conflict(uri: str, text: str, run: str, start: str | None = None) -> str | None:
    """Return why a place is not this run's, from the text of its owner.json; None: it is.

    `start` must have been the last to claim it; None: any.
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
