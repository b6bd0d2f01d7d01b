"""Finds files of sources that the target of a sync has, lacks, or has with other content.

Nothing is changed here, so all conflicts in the target are found before the first write of a sync.
A file costs one HEAD request if a manifest in the target or the journal of a killed sync vouches
for it. A manifest can vouch for its files because it is written last, after all of them were
compared. Any other file of the right size is read and hashed.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from data_pipeline.index.manifest import manifest_key
from data_pipeline.index.own_keys import folder_of
from data_pipeline.store.json_objects import parse_json, read_bounded
from data_pipeline.store.open import FolderStore, MissingBucket, MissingKey, ObjectInfo, Store
from data_pipeline.sync.contents import Contents, Item
from data_pipeline.sync.rate import Meter, Rate
from data_pipeline.sync.sync_journal import SyncJournal, digest_of
from data_pipeline.sync.transfer import hash_of


class OtherContent(ValueError):
    """The target has other content under the key of a file or source; nothing was changed."""


@dataclass(frozen=True)
class Survey:
    """State of one source in the target.

    Attributes:
        published: its manifest is in the target.
        missing: files missing in the target, in copy order.
        journal: a sync that was killed, or failed to clean up, has left a journal.
    """

    contents: Contents
    published: bool
    missing: tuple[Item, ...]
    journal: bool


def survey(
    source: Store,
    target: Store,
    found: Sequence[Contents],
    rate: Rate,
    meter: Meter,
    threads: int,
) -> list[Survey]:
    """Look for all files of some sources in the target, with the given number of threads.

    Raises:
        OtherContent: another source, other bytes under a key, or an unfinished ingest.
    """
    items = distinct(found)
    look = _Look(source, target, found, rate, meter)
    with ThreadPoolExecutor(threads, thread_name_prefix="sync survey") as pool:
        futures = [pool.submit(look.is_there, item) for item in items]
        try:
            there = dict(zip((item.key for item in items), [one.result() for one in futures]))
        except BaseException:
            rate.stop()
            pool.shutdown(cancel_futures=True)
            raise
    surveys = []
    for one in found:
        missing = tuple(item for item in one.items if not there[item.key])
        surveys.append(Survey(one, one.name in look.published, missing, one.name in look.journals))
    return surveys


def distinct(found: Iterable[Contents]) -> list[Item]:
    """Return all files of some sources, without duplicates.

    Raises:
        OtherContent: two sources expect different bytes under one key.
    """
    items: dict[str, Item] = {}
    for one in found:
        for item in one.items:
            first = items.setdefault(item.key, item)
            if (first.size, first.sha256) != (item.size, item.sha256):
                raise OtherContent(
                    f"{item.key}: sha256 is {item.sha256} by the manifest of {one.name!r}, "
                    f"expected {first.sha256} as by another source's; ingest one of them again"
                )
    return list(items.values())


class _Look:
    """Files that the target's manifests and journals vouch for, and checks of single files."""

    def __init__(
        self, source: Store, target: Store, found: Sequence[Contents], rate: Rate, meter: Meter
    ) -> None:
        self._source, self._target, self._rate, self._meter = source, target, rate, meter
        self.published: set[str] = set()
        self.journals: set[str] = set()
        self._vouched: dict[str, tuple[object, object]] = {}  # key -> size, SHA-256
        self._small: set[str] = set()  # keys of a published source's files other than shards
        self._noted: set[str] = set()
        for one in found:
            self._read_source(one)
        owners = {item.folder for one in found for item in one.shards}
        for folder in sorted(owners - self.published):
            self._vouch(self._manifest(folder), folder)

    def _manifest(self, name: str) -> bytes | None:
        try:
            return read_bounded(self._target, manifest_key(name))
        except MissingKey:
            return None
        except MissingBucket:
            if isinstance(self._target, FolderStore):
                return None  # the first write creates it
            raise

    def _read_source(self, one: Contents) -> None:
        there = self._manifest(one.name)
        notes = SyncJournal(self._target, one.name).digests()
        if notes:
            self.journals.add(one.name)
            self._noted |= notes
        if there is None:
            self._refuse_ingest(one.name)
        elif there != one.manifest:
            raise self._other_source(one, there)
        else:
            self.published.add(one.name)
            self._small |= {item.key for item in one.others}
            self._vouch(there)

    def _refuse_ingest(self, name: str) -> None:
        key = f"{name}/.ingest/request.json"
        if self._head(key) is not None:
            raise OtherContent(
                f"{self._target.uri}/{key}: an ingest of source {name!r} did not finish there, "
                "expected nothing of this name; finish it, or delete that folder"
            )

    def _other_source(self, one: Contents, there: bytes) -> OtherContent:
        where = f"{self._target.uri}/{manifest_key(one.name)}"
        ours, theirs = parse_json(one.manifest, one.name), _parsed(there)
        for what in ("content_hash", "index_sha256"):
            if theirs.get(what) != ours[what]:
                return OtherContent(
                    f"{where}: {what} is {theirs.get(what)}, expected {ours[what]} as in "
                    f"{self._source.uri}; a source that is finished never changes: choose another "
                    "place, or delete the folder first"
                )
        return OtherContent(
            f"{where}: is written otherwise than in {self._source.uri}, expected the same bytes; "
            "somebody changed one of them by hand: restore it"
        )

    def _vouch(self, manifest: bytes | None, folder: str | None = None) -> None:
        """Trust a manifest's shard entries; with `folder`, only entries in that folder."""
        shards = _parsed(manifest or b"").get("shards")
        for shard in shards if isinstance(shards, list) else ():
            key = shard.get("key") if isinstance(shard, dict) else None
            if isinstance(key, str) and folder in (None, folder_of(key)):
                self._vouched[key] = shard.get("size"), shard.get("sha256")

    def _head(self, key: str) -> ObjectInfo | None:
        try:
            return self._target.head(key)
        except MissingKey:
            return None
        except MissingBucket:
            if isinstance(self._target, FolderStore):
                return None
            raise

    def is_there(self, item: Item) -> bool:
        """Return True if the target has a file.

        Raises:
            OtherContent: the target has another file under this key.
        """
        info = self._head(item.key)
        if info is None:
            return False
        where = f"{self._target.uri}/{item.key}"
        if info.size != item.size:
            raise _other(where, "size", info.size, item.size)
        vouched = self._vouched.get(item.key)
        if vouched is not None and vouched != (item.size, item.sha256):
            raise _other(where, "sha256 (by a manifest there)", vouched[1], item.sha256)
        if vouched or item.key in self._small or digest_of(item, info.etag) in self._noted:
            return True
        found = hash_of(self._target, item, self._rate, self._meter)
        expected = item.sha256 or hash_of(self._source, item, self._rate, self._meter)
        if found != expected:
            raise _other(where, "sha256", found, expected)
        return True


def _parsed(manifest: bytes) -> dict[str, Any]:
    try:
        found = parse_json(manifest, "a manifest")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _other(where: str, what: str, found: object, expected: object) -> OtherContent:
    return OtherContent(
        f"{where}: {what} is {found}, expected {expected}; nothing was changed: delete it, or "
        "choose another place"
    )
