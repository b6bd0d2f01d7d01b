"""Redactions on a sync: they travel, and those of the target are not undone.

A source keeps the identity that it was made with (`made_as`), whatever was redacted of it since. So
the two sides may hold one source with other samples redacted. What only the source's side has
redacted is redacted in the target, too, with all that redaction does there: every source that
shares the shards, old versions, holds that forbid it. What only the target has redacted stays so:
the source's bytes are not copied, neither for this source nor under the key of a shard that was
replaced there for one that shares it. Nor are shards with a sample that was erased there in a
source which was collected since (`index.erased`).

Runs know redactions by their order (`plan.redactions`), so the target takes them in the order of
the source's side, after those that it had.
"""

from collections.abc import KeysView, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from data_pipeline.index.erased import Erased, read_erased
from data_pipeline.index.manifest import IndexMismatch, identity_of, read_index, read_manifest
from data_pipeline.names import listed
from data_pipeline.store.json_objects import parse_json
from data_pipeline.store.open import FolderStore, MissingBucket, MissingKey, Store
from data_pipeline.sync.contents import Contents
from data_pipeline.sync.survey import OtherContent


@dataclass
class Redactions:
    """What redactions make of a sync.

    Attributes:
        rest: sources that are copied as any others.
        todo: source -> keys of the samples to be redacted in the target, in that order.
        states: source -> "redacted" (in the target, by this sync) or "redacted there" (samples that
            the source's side still has), of those that are in the target already.
    """

    rest: list[Contents] = field(default_factory=list)
    todo: dict[str, list[str]] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)


def settle(source: Store, target: Store, found: Sequence[Contents]) -> Redactions:
    """Find which sources are in both places with other samples redacted; changes nothing.

    Raises:
        IndexMismatch: a manifest or an index is damaged.
    """
    settled = Redactions()
    for one in found:
        ours, theirs = parse_json(one.manifest, one.name), None
        with suppress(IndexMismatch):  # the survey says what is there
            theirs = _manifest(target, one.name)
        if (
            theirs is None
            or "redacted" not in {*ours, *theirs}
            or identity_of(ours) != identity_of(theirs)
        ):
            settled.rest.append(one)
            continue
        mine, other = _samples(ours), _samples(theirs)
        if mine == other and ours["content_hash"] != theirs["content_hash"]:
            settled.rest.append(one)  # which is an error that the survey tells
            continue
        if missing := [sample for sample in mine if sample not in other]:
            index = read_index(source, one.name)
            settled.todo[one.name] = [index.key_of(sample) for sample in missing]
        told = "redacted there" if other - mine else "redacted" if missing else "there"
        settled.states[one.name] = told
    return settled


def refuse_undoing(source: Store, target: Store, missing: Mapping[str, Set[str]]) -> None:
    """Refuse to copy shards with samples that were redacted in the target, whatever became of it.

    Args:
        missing: source -> keys of its shards that the target does not have.

    Raises:
        OtherContent: names the first shard, or the samples; nothing was changed.
        IndexMismatch, ValueError: a manifest in the target, or what was erased there, cannot be
            read: nobody knows what it redacted.
    """
    wanted = set().union(*missing.values())
    for name in _folders(target) if wanted else ():
        manifest = _manifest(target, name) or {}
        gone = {one["key"] for one in manifest.get("redacted", {}).get("replaced", ())}
        for key in sorted(wanted & gone):
            raise OtherContent(
                f"{target.uri}/{key}: was replaced there by a redaction of {name!r}, and "
                f"{source.uri} still has the redacted samples in it; nothing was changed; "
                f"{_advice(source, f'{target.uri}/{name}')}"
            )
    erased = read_erased(target) if wanted else Erased()
    for name in sorted(one for one in missing if missing[one]) if erased.by_crc else ():
        index = read_index(source, name)
        keys = [
            index.key_of(sample)
            for sample in erased.among(index)
            if index.shards[index.shard[sample]].key in missing[name]
        ]
        if keys:
            raise OtherContent(
                f"{target.uri}/{name}: {len(keys):,} of its samples were erased there, and "
                f"{source.uri} still has them: {listed(keys)}; nothing was changed; "
                f"{_advice(source, f'what an erased.json says in {target.uri}')}"
            )


def _advice(source: Store, said: str) -> str:
    return (
        "if their deletion was asked for, redact them there, too: kimi-pretrain data redact "
        f"{source.uri}; if nobody did, do not trust {said}: remove it"
    )


def _manifest(store: Store, name: str) -> dict[str, Any] | None:
    try:
        return read_manifest(store, name)
    except MissingKey:
        return None
    except MissingBucket:
        if isinstance(store, FolderStore):
            return None  # the first write makes it
        raise


def _folders(store: Store) -> list[str]:
    with suppress(MissingBucket):
        return [name for name in store.list_folders() if "@" not in name]
    return []


def _samples(manifest: Mapping[str, Any]) -> KeysView[int]:
    """Return the redacted samples of a source, in the order in which they became so."""
    return dict.fromkeys(manifest.get("redacted", {}).get("samples", ())).keys()
