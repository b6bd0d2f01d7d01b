"""Journal of an unfinished ingest, from which a killed ingest resumes.

`NAME/.ingest/request.json` holds the arguments. `NAME/.ingest/000012.npz` is the part of shard 12
(`ingest.parts`), written after the shard. A shard without a part is written again, with the same
bytes. The journal is removed when the source is finished.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from data_pipeline.ingest.parts import Part
from data_pipeline.store.json_objects import read_json
from data_pipeline.store.open import FolderStore, MissingBucket, MissingKey, Store

_THREADS = 8


class Journal:
    """The journal of one source.

    `request` is JSON with everything that determines the bytes of the source; with None, no journal
    is kept.
    """

    def __init__(self, store: Store, name: str, request: dict[str, Any] | None) -> None:
        self._store, self._folder = store, f"{name}/.ingest"
        # Convert to what a reader of the file gets: JSON has no tuples.
        self._request = json.loads(json.dumps(request))

    @property
    def kept(self) -> bool:
        """True if a journal is kept."""
        return self._request is not None

    def begun(self) -> bool:
        """Return whether an ingest with any request has left files here."""
        for name in ("request.json", "lock"):
            with suppress(MissingKey, MissingBucket):
                self._store.head(f"{self._folder}/{name}")
                return True
        return False

    def found(self) -> bool:
        """Return whether an unfinished ingest with the same request exists.

        Raises:
            ValueError: one with another request exists and has finished shards; the message names
                the differences.
        """
        try:
            found = read_json(self._store, f"{self._folder}/request.json")
        except (MissingKey, MissingBucket):
            return False
        if self._request is not None and found == self._request:
            return True
        if self._name(0) not in self._store.list(f"{self._folder}/"):
            self._store.delete(f"{self._folder}/request.json")
            return False
        where = f"{self._store.uri}/{self._folder}"
        if self._request is None:
            raise ValueError(
                f"{where}: an unfinished ingest of this name lies here; finish it with its own "
                "arguments, delete that folder, or choose another name"
            )
        differing = [
            f"{name} ({_shown(found.get(name))}, now {_shown(self._request.get(name))})"
            for name in sorted({*found, *self._request})
            if found.get(name) != self._request.get(name)
        ]
        raise ValueError(
            f"{where}: the unfinished ingest of this name was begun with another "
            f"{', '.join(differing)}; finish it with the same arguments, delete that folder to "
            "start afresh, or choose another name"
        )

    def begin(self) -> None:
        """Write the request."""
        if self.kept:
            self._store.put(f"{self._folder}/request.json", json.dumps(self._request).encode())

    def parts(self) -> list[Part]:
        """Return the parts of the finished shards, from the first up to the first gap."""
        names = set(self._store.list(f"{self._folder}/"))
        number = 0
        while self._name(number) in names:
            number += 1
        with ThreadPoolExecutor(_THREADS) as pool:
            parts = list(pool.map(self._read, range(number)))
            whole = list(pool.map(self._is_there, parts))
        return parts[: whole.index(False)] if False in whole else parts

    def write(self, number: int, part: Part) -> None:
        """Write the part of shard `number`; the shard itself must have been written before."""
        if self.kept:
            self._store.put(self._name(number), part.to_bytes())

    def remove(self) -> None:
        """Remove the journal, the request last, so that an interrupted removal can be repeated."""
        if not self.kept:
            return
        parts = [name for name in self._store.list(f"{self._folder}/") if name.endswith(".npz")]
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(self._store.delete, parts))
        if isinstance(self._store, FolderStore):
            for folder in (self._folder, self._folder.rpartition("/")[0]):
                self._store.remove_unfinished(folder)
        self._store.delete(f"{self._folder}/request.json")

    def _name(self, number: int) -> str:
        return f"{self._folder}/{number:06d}.npz"

    def _read(self, number: int) -> Part:
        return Part.from_bytes(self._store.get(self._name(number)))

    def _is_there(self, part: Part) -> bool:
        """Return whether the shard exists with its size; a user may have deleted it."""
        try:
            return self._store.head(part.shard.key).size == part.shard.size
        except MissingKey:
            return False


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
