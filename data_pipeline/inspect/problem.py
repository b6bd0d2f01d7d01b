"""Source defects and their messages."""

import json
from dataclasses import dataclass
from typing import NamedTuple

# Kind of a problem -> its description, in the order of reports.
KINDS = {
    "index": "the index cannot be read, or is not the one its manifest names",
    "tokenizer": "the index was made with another tokenizer than the one given",
    "key": "a sample key that is not allowed, or stands twice",
    "region": "a region that does not lie in its picture",
    "shard missing": "a shard is gone",
    "shard changed": "a shard was overwritten while it was read",
    "shard size": "a shard has another size than the index says",
    "shard hash": "a shard has another SHA-256 than the index says",
    "tar": "a tar header is not where, or not what, the index says",
    "lost": "a sample lies past the end of its shard",
    "json crc": "bytes of a document changed",
    "media crc": "bytes of a media file changed",
    "document": "a document is not what the index says, or not in the format",
    "tokens": "other token counts than the tokenizer gives",
    "media": "a media file is not what the index says, or does not decode",
}


class Fault(NamedTuple):
    """A defect without its location: a kind, and the found and expected values."""

    kind: str
    detail: str


@dataclass(frozen=True)
class Problem:
    """A defect of a source; `kind` is one of `KINDS`.

    `shard` and `sample` are "" if the defect concerns the whole source or shard.
    """

    source: str
    kind: str
    detail: str
    shard: str = ""
    sample: str = ""

    def as_json(self) -> str:
        """Return the problem as one JSON line of a report."""
        return json.dumps(vars(self), ensure_ascii=False)
