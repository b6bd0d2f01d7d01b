"""Carries redactions over to the target of a sync, and keeps the target's own redactions.

A source keeps its original identity (`made_as`) through all redactions, so the two sides may have
the same source with different samples redacted. Samples redacted only in the source store are
redacted in the target as well, with all effects of a redaction: it covers every source that shares
the shards and their old versions, and holds can forbid it. Samples redacted only in the target stay
redacted. The sync copies no bytes of such a source, and no shard under a key that a redaction in
the target has replaced, even for another source that shares the shard. It also refuses shards with
a sample that was erased in the target in a source collected since (`index.erased`).

Runs rely on the order of redactions (`plan.redactions`), so the target appends new ones in the
order of the source store.
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
    """Effects of redactions on a sync.

    Attributes:
        rest: sources to copy as usual.
        todo: source -> keys of the samples to redact in the target, in order.
        states: source -> "there", "redacted" (in the target, by this sync) or "redacted there" (the
            source store still has samples redacted in the target), for sources already in the
            target.
    """

    rest: list[Contents] = field(default_factory=list)
    todo: dict[str, list[str]] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)


def settle(source: Store, target: Store, found: Sequence[Contents]) -> Redactions:
    """Find the sources on both sides whose redactions must be reconciled; changes nothing.

    Raises:
        IndexMismatch: a manifest or an index is damaged.
    """
    settled = Redactions()
    for one in found:
        ours, theirs = parse_json(one.manifest, one.name), None
        with suppress(IndexMismatch):  # the survey reports the damage
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
            settled.rest.append(one)  # an error, which the survey reports
            continue
        if missing := [sample for sample in mine if sample not in other]:
            index = read_index(source, one.name)
            settled.todo[one.name] = [index.key_of(sample) for sample in missing]
        told = "redacted there" if other - mine else "redacted" if missing else "there"
        settled.states[one.name] = told
    return settled


def refuse_undoing(source: Store, target: Store, missing: Mapping[str, Set[str]]) -> None:
    """Raise if shards to copy have samples that were redacted in the target.

    Args:
        missing: source -> keys of its shards that the target does not have.

    Raises:
        OtherContent: names the first shard, or the samples; nothing was changed.
        IndexMismatch, ValueError: a manifest or a list of erased samples in the target cannot be
            read, so its redactions are unknown.
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
            return None  # the first write creates it
        raise


def _folders(store: Store) -> list[str]:
    with suppress(MissingBucket):
        return [name for name in store.list_folders() if "@" not in name]
    return []


def _samples(manifest: Mapping[str, Any]) -> KeysView[int]:
    """Return the redacted samples of a source, in order of redaction."""
    return dict.fromkeys(manifest.get("redacted", {}).get("samples", ())).keys()
