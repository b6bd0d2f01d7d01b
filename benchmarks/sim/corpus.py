"""Data of a simulated run: a mix with real sizes, synthetic texts, and the planned steps.

The project's data planner makes the steps. It draws sources so that media reach the requested share
of tokens, shrinks media that do not fit in a row, and packs rows. It needs only sizes, so no data
is read.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.synthetic_index import synthetic_index
from data_pipeline.config import DataConfig
from data_pipeline.index.columns import SourceIndex
from data_pipeline.plan.planner import Planner
from data_pipeline.plan.step_plan import GlobalPlan
from moonvit3d.config import MoonViTConfig
from moonvit3d.flops import flops
from moonvit3d.geometry import (
    KIND_IMAGE,
    KIND_VIDEO,
    MAX_FRAMES,
    TOKEN,
    PatchLimits,
    grids,
    num_tokens,
)

Ints = NDArray[np.int64]

MIX = Path(__file__).parent / "mix.csv"
MEDIA, TEXT = "multimodal", "text"  # the sources of configs/kimi_k25_1t.yaml

# Text around media in a row: tokens before an item's pads (a chunk's include its timestamp), text
# tokens of a document, and the log-normal length of text-only samples.
ITEM_PREFIX = 3
CHUNK_PREFIX = 12
DOCUMENT_TEXT = 60
TEXT_MEDIAN, TEXT_SPREAD, TEXTS = 700, 1.0, 20_000


@dataclass(frozen=True)
class Mix:
    """Media items (images and video chunks) in document order, as columns of equal length.

    Attributes:
        kind: KIND_IMAGE or KIND_VIDEO.
        frames: 1 for an image, 1 to 4 for a chunk.
        width, height: pixels.
        document: number of the item's document, ascending.
    """

    kind: Ints
    frames: Ints
    width: Ints
    height: Ints
    document: Ints

    def __getitem__(self, index: Ints | NDArray[np.bool_]) -> "Mix":
        return Mix(*(column[index] for column in vars(self).values()))

    def grids(self, limits: PatchLimits) -> Ints:
        """Return the patch grids (frames, height, width) of the items, int64 [items, 3]."""
        return grids(self.kind, self.frames, self.height, self.width, limits)

    def tokens(self, limits: PatchLimits) -> Ints:
        """Return the language-model tokens of the items, int64 [items]."""
        grid = self.grids(limits)
        return num_tokens(grid[:, 0], grid[:, 1], grid[:, 2])


def read_mix(path: Path = MIX) -> Mix:
    """Read a table of sizes and cut clips into chunks of at most four frames."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    items: list[tuple[int, int, int, int, int]] = []
    for line in csv.DictReader(lines):
        width, height, document = (int(line[name]) for name in ("width", "height", "document"))
        frames, kind = int(line["frames"]), KIND_VIDEO if line["kind"] == "video" else KIND_IMAGE
        for first in range(0, frames, MAX_FRAMES):
            items.append((kind, min(MAX_FRAMES, frames - first), width, height, document))
    return Mix(*np.array(items, np.int64).T)


def media_source(mix: Mix, limits: PatchLimits, seq_len: int) -> SourceIndex:
    """Return the mix as a source of samples that fit in a row.

    Longer documents are cut between their items, as data preparation would do. Otherwise the
    planner would shrink all media of a sample that does not fit, and frames of long clips would
    become tiny. Only a single page that needs more than a row is still shrunk.
    """
    prefix = np.where(mix.kind == KIND_VIDEO, CHUNK_PREFIX, ITEM_PREFIX)
    room = mix.tokens(limits) + prefix + 1
    first = _first_of_samples(room, mix.document, seq_len - 2 - DOCUMENT_TEXT)
    samples = int(first.sum())
    return synthetic_index(
        MEDIA,
        np.full(samples, DOCUMENT_TEXT),
        category="caption",
        item_ptr=np.append(np.flatnonzero(first), len(first)),
        item_prefix=prefix,
        item_kind=mix.kind,
        item_media=np.arange(len(first)),
        item_frames=mix.frames,
        item_height=mix.height,
        item_width=mix.width,
    )


def _first_of_samples(room: Ints, document: Ints, most: int) -> NDArray[np.bool_]:
    """Return a mask of the items that begin a sample.

    An item begins a sample if it is the first of a document or does not fit in the sample before.
    """
    first = np.zeros(len(room), np.bool_)
    filled = 0
    for item, (size, changed) in enumerate(zip(room, np.diff(document, prepend=-1))):
        first[item] = changed or filled + size > most
        filled = size if first[item] else filled + size
    return first


def text_source(seed: int) -> SourceIndex:
    """Return a source of synthetic texts with log-normal lengths."""
    draw = np.random.Generator(np.random.Philox(seed))
    lengths = draw.lognormal(np.log(TEXT_MEDIAN), TEXT_SPREAD, TEXTS)
    return synthetic_index(TEXT, lengths.clip(20, 100_000).astype(np.int64))


def steps(data: DataConfig, count: int, mix: Mix) -> Iterator[GlobalPlan]:
    """Yield the first steps of a run with this data configuration.

    Args:
        data: configuration; the mix and the synthetic texts replace its sources.
        count: number of steps.
        mix: sizes of the media.
    """
    indices = [media_source(mix, data.limits, data.seq_len), text_source(data.seed)]
    planner = Planner(indices, data.replace(sources={MEDIA: 1.0, TEXT: 1.0}))
    state = planner.state_dict()
    for _ in range(count):
        plan, state = planner.plan(state)
        yield plan


class Library:
    """Cache of planned steps, keyed by data configuration, for cases that share data.

    Args:
        mix: sizes of the media.
    """

    KEPT = 2

    def __init__(self, mix: Mix):
        self.mix = mix
        self._known: dict[str, list[GlobalPlan]] = {}

    def steps(self, data: DataConfig, count: int) -> list[GlobalPlan]:
        """Return the first steps of a run with this data configuration."""
        key = f"{count} {data}"
        if key not in self._known:
            while len(self._known) >= self.KEPT:
                del self._known[next(iter(self._known))]
            self._known[key] = list(steps(data, count, self.mix))
        return self._known[key]


def facts(mix: Mix, limits: PatchLimits, config: MoonViTConfig, seq_len: int) -> dict[str, Any]:
    """Return statistics of the mix under the limits.

    Document sizes are counted before the limits, with sides rounded to the nearest token, as in the
    first description of the mix.
    """
    before = document_tokens(mix)
    grid, tokens = mix.grids(limits), mix.tokens(limits)
    patches = grid.prod(axis=1)
    linear, quadratic = flops(grid, config)
    cost = (linear + quadratic).astype(np.float64)
    video = mix.kind == KIND_VIDEO
    p50, p90, p99 = np.percentile(before, [50, 90, 99])
    return {
        "mix_documents": len(before),
        "mix_items": len(tokens),
        "mix_samples": media_source(mix, limits, seq_len).num_samples,
        "mix_document_tokens_p50_p90_p99_max": [*map(float, (p50, p90, p99, before.max()))],
        "mix_tokens_in_top_tenth": round(share_of_top_tenth(before), 3),
        "mix_item_patches_p50_p90_p99_max": [
            *map(float, np.percentile(patches, [50, 90, 99, 100]))
        ],
        "mix_patches_per_token": round(float(patches.sum() / tokens.sum()), 2),
        "mix_video_share_of_tokens": round(float(tokens[video].sum() / tokens.sum()), 3),
        "mix_video_share_of_cost": round(float(cost[video].sum() / cost.sum()), 3),
        "mix_attention_share_of_cost": round(float(quadratic.sum() / cost.sum()), 3),
    }


def document_tokens(mix: Mix) -> Ints:
    """Return the tokens of each document without any limit, int64 [documents]."""
    sides = [np.maximum(1, np.rint(side / TOKEN)) for side in (mix.width, mix.height)]
    return np.bincount(mix.document, sides[0] * sides[1]).astype(np.int64)


def share_of_top_tenth(sizes: Ints) -> float:
    """Return the share of the total that the largest tenth holds."""
    largest = np.sort(sizes)[::-1][: len(sizes) // 10]
    return float(largest.sum() / sizes.sum())
