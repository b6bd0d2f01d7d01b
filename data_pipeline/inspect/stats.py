"""Statistics of sources, computed from their indices without reading any data.

All results are plain values that JSON can represent. Token counts are those of the stored samples
under given patch limits; a run may choose other text variants and other image sizes (see
`plan.variation`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from data_pipeline.augment.regions import NAMES as REGION_NAMES
from data_pipeline.config import ChosenSource
from data_pipeline.index.columns import PIECE_REGION, SourceIndex
from data_pipeline.plan.layout import lay_out
from data_pipeline.plan.source import choose
from moonvit3d.geometry import KIND_IMAGE, KIND_VIDEO, PatchLimits, grids

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
BINS_PER_OCTAVE = 2
ASPECT_BINS_PER_OCTAVE = 4
LONGEST = 10  # number of longest samples listed
# Effectively no limits: larger images are rejected before decoding.
_NO_LIMITS = PatchLimits(image=2**40, frame=2**40, side=2**30)
# Figures that are summed over sources.
_SUMS = ("samples", "shards", "bytes", "items", "tokens", "text_tokens", "media_tokens")


def source_stats(
    index: SourceIndex,
    limits: PatchLimits,
    seq_len: int | None = None,
    choice: ChosenSource | None = None,
) -> dict[str, Any]:
    """Return the statistics of one source.

    Args:
        index: index of the source.
        limits: patch limits, which determine the tokens of images and frames.
        seq_len: tokens of a row, to count the longer samples.
        choice: length bounds by which a run chooses samples, to count the chosen samples.

    Returns:
        name, category, tokenizer; samples, shards; bytes (of the shards), json_bytes, media_bytes;
        tokens and their parts: text_tokens (including written regions), region_tokens,
        media_tokens (pads), markup_tokens (tokens around samples and media), media_share;
        tokens_per_sample, text_tokens_per_sample, tokens_per_item: see `spread`, with a histogram;
        items, scaled_down (items that the limits make smaller), images and videos (`_media`);
        regions by shape, texts_with_variants, variants (after the first of each text); flip_ok and
        turn_ok (samples); longest: [key, tokens] of the longest samples; with a seq_len:
        over_seq_len {seq_len, samples, share, tokens}; with a choice: chosen {bounds, samples,
        share, tokens}.
    """
    samples = np.arange(index.num_samples)
    sizes = lay_out(index, limits, samples, np.zeros(samples.size, np.int8))
    total, pads = int(sizes.length.sum()), int(sizes.vision.sum())
    text = int(index.text_tokens.sum())
    last = np.argsort(-sizes.length, kind="stable")[:LONGEST]
    first_chunk = index.item_chunk == 0  # every media file has one
    found: dict[str, Any] = {
        "name": index.name,
        "category": index.category,
        "tokenizer": {"name": index.tokenizer_name, "sha256": index.tokenizer_hash},
        "samples": index.num_samples,
        "shards": len(index.shards),
        "bytes": sum(shard.size for shard in index.shards),
        "json_bytes": int(index.json_length.sum()),
        "media_bytes": int(index.item_length[first_chunk].sum()),
        "tokens": total,
        "text_tokens": text,
        "region_tokens": int(index.piece_tokens[index.piece_kind == PIECE_REGION].sum()),
        "media_tokens": pads,
        "markup_tokens": total - text - pads,
        "media_share": pads / total if total else 0.0,
        "tokens_per_sample": spread(sizes.length, BINS_PER_OCTAVE),
        "text_tokens_per_sample": spread(index.text_tokens, BINS_PER_OCTAVE),
        "tokens_per_item": spread(sizes.tokens, BINS_PER_OCTAVE),
        "items": index.num_items,
        "scaled_down": int(scaled_down(index, sizes.grid).sum()),
        "images": _media(index, first_chunk & (index.item_kind == KIND_IMAGE)),
        "videos": _media(index, first_chunk & (index.item_kind == KIND_VIDEO))
        | {
            "chunks": int((index.item_kind == KIND_VIDEO).sum()),
            "frames": int(index.item_frames[index.item_kind == KIND_VIDEO].sum(dtype=np.int64)),
        },
        "regions": {
            name: int((index.region_shape == code).sum()) for code, name in enumerate(REGION_NAMES)
        },
        "texts_with_variants": int((index.piece_variants > 1).sum()),
        "variants": len(index.variant_tokens),
        "flip_ok": int(index.flip_ok.sum()),
        "turn_ok": int(index.turn_ok.sum()),
        "longest": [[index.key_of(i), int(sizes.length[i])] for i in last],
    }
    if seq_len is not None:
        over = sizes.length > seq_len
        found["over_seq_len"] = {
            "seq_len": seq_len,
            "samples": int(over.sum()),
            "share": float(over.mean()) if over.size else 0.0,
            "tokens": int(sizes.length[over].sum()),
        }
    if choice is not None:
        chosen = choose(index.name, sizes.length, choice)
        found["chosen"] = {
            "bounds": choice.bounds,
            "samples": int(chosen.sum()),
            "share": float(chosen.mean()) if chosen.size else 0.0,
            "tokens": int(sizes.length[chosen].sum()),
        }
    return found


def scaled_down(index: SourceIndex, grid: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return bool [items], True for items that the limits make smaller."""
    whole = grids(
        index.item_kind, index.item_frames, index.item_height, index.item_width, _NO_LIMITS
    )
    return np.any(grid < whole, axis=1)


def _media(index: SourceIndex, chosen: NDArray[np.bool_]) -> dict[str, Any]:
    """Return number, bytes and sizes of media files; `aspect` is width / height."""
    height = index.item_height[chosen].astype(np.int64)
    width = index.item_width[chosen].astype(np.int64)
    return {
        "files": len(height),
        "bytes": int(index.item_length[chosen].sum()),
        "megapixels": spread(height * width / 1e6),
        "longer_side": spread(np.maximum(height, width), BINS_PER_OCTAVE),
        "aspect": spread(width / np.maximum(height, 1), ASPECT_BINS_PER_OCTAVE),
    }


def spread(values: ArrayLike, bins_per_octave: int | None = None) -> dict[str, Any]:
    """Return count, mean, min, p1 ... p99 and max of numbers; only the count if there are none.

    Args:
        values: [n].
        bins_per_octave: if given, add a `histogram` with this many bins per factor of two.
    """
    numbers = np.asarray(values, np.float64)
    if not numbers.size:
        return {"count": 0}
    at = np.percentile(numbers, PERCENTILES).tolist()
    found: dict[str, Any] = {
        "count": int(numbers.size),
        "mean": float(numbers.mean()),
        "min": float(numbers.min()),
        **{f"p{percent}": value for percent, value in zip(PERCENTILES, at, strict=True)},
        "max": float(numbers.max()),
    }
    if bins_per_octave is not None:
        found["histogram"] = histogram(numbers, bins_per_octave)
    return found


def histogram(values: ArrayLike, bins_per_octave: int) -> dict[str, list[float]]:
    """Return a histogram with logarithmic edges, which are the same for all sources.

    Args:
        values: [n], non-negative; zeros are counted separately.
        bins_per_octave: bins per factor of two.

    Returns:
        zeros [1]: the number of zeros. counts [b], edges [b + 1]: bin i holds edges[i] <= value <
        edges[i + 1]; the first and last bins are not empty.
    """
    numbers = np.asarray(values, np.float64)
    return binned(numbers, np.ones(numbers.shape, np.int64), bins_per_octave)


def binned(
    values: NDArray[np.float64], counts: NDArray[np.int64], bins_per_octave: int
) -> dict[str, list[float]]:
    """Return the histogram of values [n] with their counts [n]."""
    positive = values > 0
    zeros = [float(counts[~positive].sum())]
    if not positive.any():
        return {"zeros": zeros, "counts": [], "edges": []}
    place = np.floor(np.log2(values[positive]) * bins_per_octave).astype(np.int64)
    return {"zeros": zeros, **bins_between(place, counts[positive], bins_per_octave)}


def bins_between(
    place: NDArray[np.int64], counts: NDArray[np.int64], bins_per_octave: int
) -> dict[str, list[float]]:
    """Return the edges and counts of bins, from the lowest to the highest given bin.

    Args:
        place: [n] bin numbers floor(log2(value) * bins_per_octave), n >= 1.
        counts: [n] number of values per entry of `place`.
        bins_per_octave: bins per factor of two.
    """
    low, high = int(place.min()), int(place.max())
    edges = 2.0 ** (np.arange(low, high + 2) / bins_per_octave)
    found = np.bincount(place - low, weights=counts)
    return {"counts": found.tolist(), "edges": edges.tolist()}


def totals(sources: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return sums over the statistics of sources, for all sources and by category."""

    def add(chosen: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        found = {name: sum(source[name] for source in chosen) for name in _SUMS}
        share = found["media_tokens"] / found["tokens"] if found["tokens"] else 0.0
        return {"sources": len(chosen), **found, "media_share": share}

    categories = sorted({source["category"] for source in sources})
    return {
        "all": add(sources),
        "categories": {
            category: add([source for source in sources if source["category"] == category])
            for category in categories
        },
    }
