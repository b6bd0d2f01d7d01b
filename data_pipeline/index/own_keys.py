"""Checks which keys belong to a source and whether a manifest is well-formed.

A manifest is untrusted: it may come from another root or from a bucket with several writers, and
its hashes may still be right. So a manifest has authority only over files in its own folder whose
names match this project's patterns. It may reference shards of other sources for reading, but it
cannot cause their removal or replacement. All code that removes objects under a root asks this
module first.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

_NUMBER = r"(?:[0-9]{6}|[1-9][0-9]{6,8})"
_REDACTED = r"\.redacted-([0-9a-f]{12})"
_SHARD = re.compile(rf"([A-Za-z0-9_\-]{{1,80}}/{_NUMBER})(?:{_REDACTED})?\.tar")
_OURS = re.compile(
    rf"{_NUMBER}(?:{_REDACTED})?\.tar|(?:manifest|provenance)\.json|index\.parquet|rejected\.jsonl"
    rf"|\.ingest/(?:lock|request\.json|{_NUMBER}\.npz)|\.sync/[0-9a-f]{{32}}"
)
_SHA256 = re.compile(r"[0-9a-f]{64}")


def folder_of(key: str) -> str:
    """Return the top-level folder of a key."""
    return key.partition("/")[0]


def is_own(name: str, key: str) -> bool:
    """Return whether a key is in the folder of a source and matches this project's file names.

    `holds.json` and `erased.json` do not match, because they outlive the source.
    """
    return folder_of(key) == name and _OURS.fullmatch(key.partition("/")[2]) is not None


def is_shard(key: str) -> bool:
    """Return whether a key has the form NAME/000000.tar or NAME/000000.redacted-SHA.tar."""
    return _SHARD.fullmatch(key) is not None


def place_of(key: str) -> str:
    """Return a shard's key without suffixes, which the shard and its replacements share.

    All of these shards have their samples at the same offsets, because redaction moves nothing.
    """
    found = _SHARD.fullmatch(key)
    if found is None:
        raise ValueError(f"{key!r} is no key of a shard, expected such as NAME/000000.tar")
    return found[1]


def check_form(manifest: Mapping[str, Any]) -> None:
    """Check the fields of a manifest, including its shards and redactions.

    Reads no other file: readers compare the hashes with the bytes.

    Raises:
        ValueError: a field is missing or has another type, a shard key is malformed, or a replaced
            shard does not belong to this source; the message names it.
    """
    _expect(manifest, str, "name", "category", "content_hash", "index_sha256")
    _expect(manifest, int, "samples", "items")
    _expect(manifest, dict, "tokenizer")
    _expect(manifest["tokenizer"], str, "name", "sha256")
    shards = _entries(manifest, "shards", "samples")
    keys = _checked_keys(shards, "shard")
    for shard in shards:
        _expect(shard, int, "samples")
    if "redacted" not in manifest:
        return
    _expect(manifest, dict, "redacted")
    redacted = manifest["redacted"]
    _expect(redacted, str, "made_as")
    _expect(redacted, list, "samples")
    if not all(type(one) is int for one in redacted["samples"]):
        raise ValueError("redacted.samples is not a list of numbers")
    replaced = _entries(redacted, "replaced", "by")
    if both := keys & _checked_keys(replaced, "replaced shard"):
        raise ValueError(f"shard {min(both)!r} is said to be replaced, and to be there")
    if replaced and not redacted["made_as"]:
        raise ValueError("shards are said to be replaced, but redacted.made_as is empty")
    _check_replaced(shards, replaced)


def first_shards(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the shards of a checked manifest as they were before any redaction."""
    before = {one["by"]: one for one in manifest.get("redacted", {}).get("replaced", ())}
    found = []
    for shard in manifest["shards"]:
        first = shard
        while first["key"] in before:
            first = before[first["key"]]
        found.append({**shard, **{what: first[what] for what in ("key", "size", "sha256")}})
    return found


def _check_replaced(
    shards: Sequence[Mapping[str, Any]], replaced: Sequence[Mapping[str, Any]]
) -> None:
    """Check that each replaced shard leads to a shard of the source through its replacements.

    The name of a redacted shard is its predecessor's base key plus the start of its own SHA-256.
    """
    before: dict[str, Mapping[str, Any]] = {}
    for one in replaced:
        by = one["by"]
        if not isinstance(by, str) or not is_shard(by) or place_of(by) != place_of(one["key"]):
            raise ValueError(
                f"shard {one['key']!r} is said to be replaced by {by!r}, expected a redacted shard "
                "in its place"
            )
        if by in before:
            raise ValueError(f"shard {by!r} is said to replace two shards")
        before[by] = one
    led = 0
    for shard in shards:
        now = shard
        while (older := before.get(now["key"])) is not None:
            mark = _SHARD.fullmatch(now["key"])
            if mark is None or mark[2] != now["sha256"][:12]:
                raise ValueError(
                    f"shard {now['key']!r} is said to replace another, but its name does not "
                    f"begin its sha256 {now['sha256']}"
                )
            now, led = older, led + 1
    if led != len(replaced):
        raise ValueError(
            f"{len(replaced) - led} shards are said to be replaced, but not by shards of the source"
        )


def _checked_keys(entries: Sequence[Mapping[str, Any]], what: str) -> set[str]:
    """Return the keys of shards; check keys, sizes and hashes, and that no key occurs twice."""
    keys: set[str] = set()
    for one in entries:
        key, size, sha256 = one["key"], one["size"], one["sha256"]
        if not isinstance(key, str) or not is_shard(key):
            raise ValueError(
                f"{what} {key!r} is no key of a shard, expected such as NAME/000000.tar"
            )
        if type(size) is not int or size < 0:
            raise ValueError(f"{what} {key!r} has size {size!r}, expected a number of bytes")
        if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
            raise ValueError(f"{what} {key!r} has sha256 {sha256!r}, expected 64 hex digits")
        if key in keys:
            raise ValueError(f"names {what} {key!r} twice")
        keys.add(key)
    return keys


def _entries(about: Mapping[str, Any], field: str, last: str) -> list[dict[str, Any]]:
    """Return a list of shards, each with key, size, sha256 and one more field."""
    _expect(about, list, field)
    fields = {"key", "size", "sha256", last}
    for one in about[field]:
        if not isinstance(one, dict) or one.keys() != fields:
            raise ValueError(f"{field} has {one!r:.200}, expected objects of {sorted(fields)}")
    return about[field]


def _expect(about: Mapping[str, Any], kind: type, *fields: str) -> None:
    for field in fields:
        if type(found := about.get(field)) is not kind:
            told = type(found).__name__
            raise ValueError(f"{field} is of type {told}, expected {kind.__name__}")
