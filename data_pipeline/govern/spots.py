"""Locates the samples of several sources in the shards that they share.

A shard and all its replacements share one place (`own_keys.place_of`), and a sample keeps its
offset in all of them. Place and offset therefore identify a sample across sources, versions and
redactions without reading the shards.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from data_pipeline.index.columns import ShardInfo, SourceIndex
from data_pipeline.index.manifest import read_index, read_manifest, sources_at
from data_pipeline.index.own_keys import folder_of, place_of
from data_pipeline.index.redacted import erased
from data_pipeline.names import listed
from data_pipeline.store.open import Store

Erasure = tuple[int, bytes]
"""Offset in a shard, and the bytes to write there."""
Spot = tuple[str, int]
"""Place of a shard (`place_of`), and offset of a sample's document in it."""
Spots = dict[str, dict[int, list[Erasure]]]
"""Place of a shard -> offset of a sample's document -> bytes to write."""


class Root:
    """Manifests of all finished sources under a root, and the places of their shards."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.manifests = {name: read_manifest(store, name) for name in sources_at(store)}
        self.places = {
            name: {place_of(shard["key"]) for shard in manifest["shards"]}
            for name, manifest in self.manifests.items()
        }
        self._indices: dict[str, SourceIndex] = {}

    def index(self, name: str) -> SourceIndex:
        """Return the index of a source; reads it once."""
        if name not in self._indices:
            self._indices[name] = read_index(self.store, name)
        return self._indices[name]

    def redacted(self, name: str, *, own: bool) -> list[int]:
        """Return a source's redacted samples in order, in its own folder or in other folders."""
        if "redacted" not in self.manifests[name]:
            return []
        index = self.index(name)
        return [n for n in index.redacted if (folder_of(spot_of(index, n)[0]) == name) == own]

    def owner(self, place: str) -> str | None:
        """Return the source whose folder and manifest have a shard, or None."""
        name = folder_of(place)
        return name if place in self.places.get(name, ()) else None

    def owners_first(self) -> list[str]:
        """Return the sources, each after the sources whose shards it refers to.

        A derived source names all shards that its parent names, and its own, so sorting by the
        number of other folders suffices.
        """

        def others(name: str) -> int:
            return len({folder_of(place) for place in self.places[name]} - {name})

        return sorted(self.manifests, key=lambda name: (others(name), name))


def spot_of(index: SourceIndex, number: int) -> Spot:
    """Return the place and offset of a sample."""
    return place_of(index.shards[index.shard[number]].key), int(index.json_offset[number])


def add_spots(spots: Spots, root: Root, index: SourceIndex, numbers: Sequence[int]) -> None:
    """Add the spots of samples and the bytes to write there."""
    for number in numbers:
        place, offset = spot_of(index, number)
        there = list(erased(index, number))
        if spots.setdefault(place, {}).setdefault(offset, there) != there:
            raise _disagree(root, place, offset)


def check_spots(root: Root, name: str, spots: Spots) -> None:
    """Check that a source agrees with the other sources on some spots.

    It must also list every spot in its own shards.

    Raises:
        ValueError: bytes of other samples would be overwritten.
    """
    index = root.index(name)
    numbers = samples_at(index, spots)
    add_spots(spots, root, index, numbers)
    known = {spot_of(index, number) for number in numbers}
    for place in sorted(root.places[name] & spots.keys()):
        if folder_of(place) == name and (strange := {(place, at) for at in spots[place]} - known):
            raise _disagree(root, *min(strange))


def _disagree(root: Root, place: str, offset: int) -> ValueError:
    names = sorted(name for name, places in root.places.items() if place in places)
    return ValueError(
        f"{root.store.uri}/{place}: the sources that hold this shard do not agree on the sample at "
        f"offset {offset}: {listed(names)}; nothing was changed: kimi-pretrain data verify tells "
        "which is unsound, remove that one"
    )


def refuse_other_shards(root: Root, changed: Mapping[str, SourceIndex]) -> None:
    """Raise if two sources name a shard with different hashes; one of them is corrupt."""
    known: dict[str, tuple[str, ShardInfo]] = {}
    for name, index in changed.items():
        for shard in index.shards:
            first, info = known.setdefault(shard.key, (name, shard))
            if (info.size, info.sha256) != (shard.size, shard.sha256):
                raise ValueError(
                    f"{root.store.uri}/{shard.key}: has sha256 {info.sha256} by the manifest of "
                    f"{first!r}, {shard.sha256} by that of {name!r}; nothing was changed: "
                    "kimi-pretrain data verify tells which is unsound, remove that one"
                )


def samples_at(index: SourceIndex, spots: Mapping[str, Collection[int]]) -> list[int]:
    """Return the samples of a source at the given spots (place -> offsets of documents)."""
    found: list[int] = []
    for number, shard in enumerate(index.shards):
        if (offsets := spots.get(place_of(shard.key))) is None:
            continue
        first, end = np.searchsorted(index.shard, [number, number + 1]).tolist()
        there = np.isin(index.json_offset[first:end], list(offsets))
        found += (first + np.flatnonzero(there)).tolist()
    return found
