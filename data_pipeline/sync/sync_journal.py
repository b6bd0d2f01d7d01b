"""Journal that a killed sync leaves in the target, so that the next sync can continue.

`NAME/.sync/DIGEST` records that a file is in the target and was compared with its SHA-256. The
digest covers key, size, SHA-256 and the target's ETag, so a single listing shows all compared
files, and a file that was rewritten since does not match. An entry is written after its file and
removed after the manifest is written. It contains no address, because the location of either store
is private to the user.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress

from data_pipeline.index.own_keys import is_own
from data_pipeline.ingest.claim import Claim
from data_pipeline.store.objects import in_threads
from data_pipeline.store.open import FolderStore, MissingBucket, MissingKey, S3Store, Store
from data_pipeline.sync.contents import Item

_FOLDER = ".sync"
_THREADS = 8


class SyncJournal:
    """Journal of one source in the target."""

    def __init__(self, target: Store, name: str) -> None:
        self._target, self._name = target, name

    def digests(self) -> set[str]:
        """Return the digests that an earlier sync recorded."""
        return {key.rpartition("/")[2] for key in self._keys()}

    def note(self, item: Item, etag: str) -> None:
        """Record that a file is in the target and was compared with its hash."""
        about = {"key": item.key, "size": item.size, "sha256": item.sha256}
        text = json.dumps(about) + "\n"
        self._target.put(f"{self._name}/{_FOLDER}/{digest_of(item, etag)}", text.encode())

    def remove(self) -> None:
        """Delete all entries."""
        in_threads(self._target.delete, self._keys(), _THREADS)

    def tidy(self, claims: Mapping[str, Claim]) -> None:
        """Remove the partial files of a killed sync in the claimed folders."""
        for folder, claim in claims.items():
            if isinstance(self._target, FolderStore):
                claim.settle()
                for inside in (folder, f"{folder}/{_FOLDER}", f"{folder}/.ingest"):
                    self._target.remove_unfinished(inside)
            elif isinstance(self._target, S3Store):
                for one in self._target.unfinished(f"{folder}/"):
                    if is_own(folder, one.key):  # leave the uploads of other programs
                        claim.settle()
                        self._target.drop_unfinished(one)

    def _keys(self) -> list[str]:
        with suppress(MissingKey, MissingBucket):
            return self._target.list(f"{self._name}/{_FOLDER}/")
        return []


def digest_of(item: Item, etag: str) -> str:
    """Return the name of a file's journal entry."""
    parts = (item.key, str(item.size), item.sha256 or "", etag)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
