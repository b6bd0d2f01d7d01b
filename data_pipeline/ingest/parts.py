"""Index columns of a source during ingest: one part per shard, merged at the end.

A part holds all index data of a finished shard. The journal keeps it until the source is finished,
so that a resumed ingest need not read the shard again.
"""

import io
import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.index.columns import COLUMNS, GROUPS, ShardInfo, SourceIndex
from data_pipeline.ingest.prepare import Prepared
from data_pipeline.ingest.samples import Rejection
from data_pipeline.store.json_objects import parse_json
from data_pipeline.text import Tokenizer

# Entries per sample in each group: one integer column per group.
_COUNTS = {f"{group}_count": np.int64 for group in GROUPS}
_KINDS: dict[str, Any] = {name: kind for name, kind in COLUMNS.items() if name != "shard"} | _COUNTS


class Columns:
    """Growing columns of samples, as typed arrays: they take a tenth of the memory of lists."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self._columns = {
            name: array(np.dtype(kind).char.replace("?", "B")) for name, kind in _KINDS.items()
        }

    def add(self, sample: Prepared, start: int) -> None:
        """Append a sample whose blocks begin at byte `start` of the shard."""
        self.keys.append(sample.key)
        for name, values in sample.columns.items():
            if name in ("json_offset", "item_offset"):
                values = [start + value for value in values]
            self._columns[name].extend(values)
        for group, names in GROUPS.items():
            self._columns[f"{group}_count"].append(len(sample.columns[next(iter(names))]))

    @property
    def num_items(self) -> int:
        """Number of images and video chunks so far."""
        return len(self._columns["item_kind"])

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the columns by name."""
        return {name: np.array(self._columns[name], kind) for name, kind in _KINDS.items()}


@dataclass(frozen=True, eq=False)
class Part:
    """A shard, the columns of its samples, and the input position of the next shard.

    Attributes:
        columns: from `Columns.arrays`.
        rejections: samples rejected since the previous part.
        turned: images and clips with an orientation tag.
        cursor: cursor of the first sample of the next shard, None in the last part.
        last: True if the input ends here.
    """

    shard: ShardInfo
    keys: list[str]
    columns: dict[str, NDArray[Any]]
    rejections: list[Rejection]
    turned: int
    cursor: Any
    last: bool

    def to_bytes(self) -> bytes:
        """Serialize the part for `from_bytes`."""
        head = {
            "shard": asdict(self.shard),
            "keys": self.keys,
            "rejections": [asdict(rejection) for rejection in self.rejections],
            "turned": self.turned,
            "cursor": self.cursor,
            "last": self.last,
        }
        sink = io.BytesIO()
        text = np.frombuffer(json.dumps(head).encode(), np.uint8)
        arrays: dict[str, Any] = {"head": text, **self.columns}
        np.savez(sink, **arrays)
        return sink.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Part":
        """Read a part from the output of `to_bytes`."""
        with np.load(io.BytesIO(data), allow_pickle=False) as found:
            columns = {name: found[name] for name in _KINDS}
            head = parse_json(found["head"].tobytes(), "a part of the journal")
        return cls(
            shard=ShardInfo(**head["shard"]),
            keys=head["keys"],
            columns=columns,
            rejections=[Rejection(**rejection) for rejection in head["rejections"]],
            turned=head["turned"],
            cursor=head["cursor"],
            last=head["last"],
        )


def merged(name: str, category: str, tokenizer: Tokenizer, parts: Sequence[Part]) -> SourceIndex:
    """Return the index of a source made of these parts (at least one), in order."""

    def column(of: str) -> NDArray[Any]:
        return np.concatenate([part.columns[of] for part in parts])

    def pointer(group: str) -> NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(column(f"{group}_count"))]).astype(np.int64)

    return SourceIndex(
        name=name,
        category=category,
        shards=tuple(part.shard for part in parts),
        key=list(chain.from_iterable(part.keys for part in parts)),
        shard=np.repeat(np.arange(len(parts)), [len(part.keys) for part in parts]).astype(np.int32),
        tokenizer_name=tokenizer.name,
        tokenizer_hash=tokenizer.hash,
        index_sha256="",
        redacted=(),
        made_as="",
        **{f"{group}_ptr": pointer(group) for group in GROUPS},
        **{of: column(of) for of in COLUMNS if of != "shard"},
    )
