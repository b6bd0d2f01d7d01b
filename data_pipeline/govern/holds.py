"""Holds: shards that must not be redacted or removed until the hold ends.

`NAME/holds.json` in the source's folder lists them, so that a hold needs no catalogue and covers
every source that shares the shards. No command of this project redacts or removes a held shard. On
buckets with object lock, the shards also get the bucket's legal hold, which binds other software.
Only a probe proves that the hold works: some servers accept a hold and delete the object anyway.
"""

import json
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from data_pipeline.index.manifest import folders_with, read_manifest
from data_pipeline.ingest.claim import Claim
from data_pipeline.names import did_you_mean, listed
from data_pipeline.store.json_objects import parse_json, read_bounded
from data_pipeline.store.open import (
    AccessDenied,
    MissingKey,
    ObjectChanged,
    RequestRefused,
    S3Store,
    Store,
)

_PROBE = ".hold-probe"


class Hold(NamedTuple):
    """A hold: its name, the source it was put on, its start time, and its shards."""

    name: str
    source: str
    since: str
    shards: tuple[str, ...]


def holds_key(source: str) -> str:
    """Return the key of a source's holds file."""
    return f"{source}/holds.json"


def read_holds(store: Store, sources: Iterable[str] | None = None) -> list[Hold]:
    """Return the holds of sources; None: of all folders under the root, finished or not.

    Raises:
        ValueError: a holds file is malformed; nothing may be removed then.
    """
    found: list[Hold] = []
    for source in folders_with(store.list(), "holds.json") if sources is None else sources:
        try:
            given = parse_json(_read(store, holds_key(source)), holds_key(source))
            entries = [(one["hold"], source, one["since"], one["shards"]) for one in given["holds"]]
            if not isinstance(given["holds"], list) or not all(map(_is_hold, entries)):
                raise TypeError
        except MissingKey:
            continue
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{store.uri}/{holds_key(source)}: expected {{holds: [{{hold, since, shards}}]}}; "
                "as long as nobody knows what is held, nothing is redacted or removed"
            ) from None
        found += [Hold(a, b, c, tuple(keys)) for a, b, c, keys in entries]
    return found


def _is_hold(entry: tuple[Any, str, Any, Any]) -> bool:
    name, _, since, shards = entry
    keys = isinstance(shards, list) and all(isinstance(key, str) for key in shards)
    return keys and isinstance(name, str) and isinstance(since, str)


def _read(store: Store, key: str) -> bytes:
    """Return the current holds file, which may change while a process runs."""
    try:
        return read_bounded(store, key)
    except ObjectChanged:  # the file changed since this store first read it
        return store.get(key, etag=store.head(key).etag)


def refuse_held(store: Store, shards: Iterable[str]) -> None:
    """Raise ValueError if a shard is under a hold; the message names both."""
    wanted = {*shards}
    for hold in read_holds(store) if wanted else ():
        if under := sorted(wanted & {*hold.shards}):
            raise ValueError(
                f"{store.uri}: {under[0]} is under hold {hold.name!r} since {hold.since}: nothing "
                f"was changed; whoever may end it: kimi-pretrain data hold "
                f"{store.uri}/{hold.source} {hold.name} --release"
            )


def put_hold(store: Store, source: str, name: str, shards: Sequence[str] = ()) -> Hold:
    """Put a hold on the given shards of a source, or on all its shards.

    Raises:
        ValueError: a hold of this name exists, or the source has no such shard.
    """
    with Claim(store, source):
        there = [shard["key"] for shard in read_manifest(store, source)["shards"]]
        for key in shards:
            if key not in there:
                raise ValueError(
                    f"{store.uri}/{source}: no shard {key!r}; {did_you_mean(key, there)}"
                )
        holds = read_holds(store, [source])
        if any(hold.name == name for hold in holds):
            raise ValueError(f"{store.uri}/{source}: there is a hold {name!r} already")
        hold = Hold(name, source, time.strftime("%Y-%m-%d %H:%M:%S %z"), tuple(shards or there))
        _write(store, source, [*holds, hold])
    return hold


def end_hold(store: Store, source: str, name: str) -> Hold:
    """End a hold.

    Raises:
        ValueError: the source has no hold of this name.
    """
    with Claim(store, source):
        holds = read_holds(store, [source])
        ended = next((hold for hold in holds if hold.name == name), None)
        if ended is None:
            names = listed(hold.name for hold in holds)
            raise ValueError(f"{store.uri}/{source}: no hold {name!r}; there are: {names}")
        _write(store, source, [hold for hold in holds if hold is not ended])
    return ended


def lock(store: Store, hold: Hold, *, on: bool, others: Sequence[Hold] = ()) -> str:
    """Set or release the store's legal hold on a hold's shards; return a message on the outcome.

    Args:
        others: holds that remain; their shards stay locked.
    """
    if not isinstance(store, S3Store):
        return "the store has no locks: this software alone keeps to the hold"
    if not enforces(store):
        return "the store does not enforce legal holds: this software alone keeps to the hold"
    stays = {key for other in others for key in other.shards}
    keys = [key for key in hold.shards if on or key not in stays]
    for key in keys:
        store.set_hold(key, on=on)
    return f"legal hold {'set on' if on else 'ended of'} {len(keys):,} shards; it is enforced"


def enforces(store: S3Store) -> bool:
    """Return True if a probe shows that a bucket refuses to delete an object under legal hold."""
    key = f"{_PROBE}/{secrets.token_hex(8)}"
    store.put(key, b"may be removed once it is not under hold\n")
    held = False
    try:
        store.set_hold(key, on=True)
        held = True
        store.delete_versions(key)
        held = False  # the object is gone, and its hold with it
    except AccessDenied:
        return held
    except RequestRefused:  # a bucket without object lock refuses any hold
        return False
    else:
        return False
    finally:
        if held:
            _release(store, key)
        else:
            store.delete_versions(key)


def _release(store: S3Store, key: str) -> None:
    try:
        store.set_hold(key, on=False)
    except MissingKey:  # it was deleted in spite of the hold
        return
    store.delete_versions(key)


def _write(store: Store, source: str, holds: Sequence[Hold]) -> None:
    """Write the holds of a source; deletes the file if there are none."""
    if not holds:
        store.delete(holds_key(source))
        return
    told: list[dict[str, Any]] = [
        {"hold": hold.name, "since": hold.since, "shards": list(hold.shards)} for hold in holds
    ]
    text = json.dumps({"holds": told}, indent=1, ensure_ascii=False) + "\n"
    store.put(holds_key(source), text.encode())
