"""Locates the samples of several sources in the shards that they share.

A shard and all that took its place are one place (`own_keys.place_of`), and a sample lies at the
same offset in each of them. So samples are known across sources, versions and redactions by place
and offset, without a look at the shards.
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
"""Offset in a shard, and the bytes that are to be there."""
Spot = tuple[str, int]
"""Place of a shard (`place_of`), and offset of a sample's document in it."""
Spots = dict[str, dict[int, list[Erasure]]]
"""Place of a shard -> offset of a sample's document -> what is to be there."""


class Root:
    """The manifests of all finished sources under a root, and the places of their shards."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.manifests = {name: read_manifest(store, name) for name in sources_at(store)}
        self.places = {
            name: {place_of(shard["key"]) for shard in manifest["shards"]}
            for name, manifest in self.manifests.items()
        }
        self._indices: dict[str, SourceIndex] = {}

    def index(self, name: str) -> SourceIndex:
        """Return the index of a source, read once."""
        if name not in self._indices:
            self._indices[name] = read_index(self.store, name)
        return self._indices[name]

    def redacted(self, name: str, *, own: bool) -> list[int]:
        """Return the redacted samples of a source in order: those in its own folder, or others."""
        if "redacted" not in self.manifests[name]:
            return []
        index = self.index(name)
        return [n for n in index.redacted if (folder_of(spot_of(index, n)[0]) == name) == own]

    def owner(self, place: str) -> str | None:
        """Return the source in whose folder a shard lies, if it names it; None: there is none."""
        name = folder_of(place)
        return name if place in self.places.get(name, ()) else None

    def owners_first(self) -> list[str]:
        """Return the sources, those that hold shards of others after these.

        Whoever was made of another one names all that it names, and its own shards.
        """

        def others(name: str) -> int:
            return len({folder_of(place) for place in self.places[name]} - {name})

        return sorted(self.manifests, key=lambda name: (others(name), name))


def spot_of(index: SourceIndex, number: int) -> Spot:
    """Return where a sample lies."""
    return place_of(index.shards[index.shard[number]].key), int(index.json_offset[number])


def add_spots(spots: Spots, root: Root, index: SourceIndex, numbers: Sequence[int]) -> None:
    """Note of samples where they lie, and what is to be there."""
    for number in numbers:
        place, offset = spot_of(index, number)
        there = list(erased(index, number))
        if spots.setdefault(place, {}).setdefault(offset, there) != there:
            raise _disagree(root, place, offset)


def check_spots(root: Root, name: str, spots: Spots) -> None:
    """Compare what a source says of some spots with what others say; its own shards it must know.

    Raises:
        ValueError: bytes would be overwritten that belong to other samples.
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
    """Refuse sources that name a shard with other hashes than another one: one is unsound."""
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
    """Return the samples of a source that lie at some spots (place, offsets of documents)."""
    found: list[int] = []
    for number, shard in enumerate(index.shards):
        if (offsets := spots.get(place_of(shard.key))) is None:
            continue
        first, end = np.searchsorted(index.shard, [number, number + 1]).tolist()
        there = np.isin(index.json_offset[first:end], list(offsets))
        found += (first + np.flatnonzero(there)).tolist()
    return found
