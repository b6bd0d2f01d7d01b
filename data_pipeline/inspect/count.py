"""Statistics of sources of any size, computed from their facts files.

`count_source` gives the results of `stats.source_stats` without the index in memory: integers are
equal, floats agree up to the last digits. In addition, this module reports heavy tails, likely
duplicates, and the differences between two versions. JSON can represent all values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.config import ChosenSource
from data_pipeline.inspect.distribution import (
    ValueCounts,
    drift,
    merged,
    spread_of,
    tail,
    weighted_sum,
)
from data_pipeline.inspect.facts import CHUNK, REGIONS, FactsFile
from data_pipeline.inspect.query import (
    FILES,
    IMAGE_FILES,
    ITEMS,
    SAMPLES,
    VIDEO_FILES,
    Facts,
)
from data_pipeline.inspect.stats import (
    ASPECT_BINS_PER_OCTAVE,
    BINS_PER_OCTAVE,
    LONGEST,
    PERCENTILES,
    REGION_NAMES,
    bins_between,
    totals,
)
from data_pipeline.plan.source import within
from moonvit3d.geometry import PatchLimits

# Measure -> (column or expression, condition on the rows).
MEASURES = {
    "tokens_per_sample": ("tokens", SAMPLES),
    "text_tokens_per_sample": ("text_tokens", SAMPLES),
    "media_tokens_per_sample": ("media_tokens", SAMPLES),
    "items_per_sample": ("items", SAMPLES),
    "tokens_per_item": ("tokens", ITEMS),
    "image_longer_side": ("greatest(height, width)", IMAGE_FILES),
    "video_longer_side": ("greatest(height, width)", VIDEO_FILES),
}
TAILED = ("tokens_per_sample", "media_tokens_per_sample", "tokens_per_item")
"""Measures with a `tail`; their large values unbalance rows, microbatches and ranks."""

_SUMS = (
    "json_bytes", "media_bytes", "tokens", "text_tokens", "region_tokens", "media_tokens", "items",
    "images", "videos", *REGIONS, "texts_with_variants", "variants",
)  # fmt: skip
_FLAGS = ("flip_ok", "turn_ok")
_LISTED = 50  # maximum number of listed groups, and of places per group
_EXAMPLES = 5  # maximum number of example keys per kind of difference
_ASPECT = "width / greatest(height, 1)"
_MEGAPIXELS = "height::BIGINT * width / 1e6"


@dataclass(frozen=True)
class Counted:
    """Statistics of a source, and the distributions they were computed from.

    Attributes:
        figures: result of `stats.source_stats`, plus `tails` (see `tail`).
        measures: measure -> distribution.
    """

    figures: dict[str, Any]
    measures: dict[str, ValueCounts]


def count_source(
    file: FactsFile,
    seq_len: int | None = None,
    choice: ChosenSource | None = None,
    threads: int | None = None,
) -> Counted:
    """Compute the statistics of one source.

    Args:
        file: facts of the source.
        seq_len, choice: as for `stats.source_stats`.
        threads: DuckDB threads; None for one per core.

    Raises:
        FactsError: the file cannot be read.
    """
    with Facts(file, threads=threads) as facts:
        measures = {name: facts.counted(*asked) for name, asked in MEASURES.items()}
        return Counted(_figures(facts, measures, seq_len, choice), measures)


def _figures(
    facts: Facts,
    measures: Mapping[str, ValueCounts],
    seq_len: int | None,
    choice: ChosenSource | None,
) -> dict[str, Any]:
    file, about = facts.file, facts.file.about
    flags = [f"{name}::INT" for name in _FLAGS]
    sums = facts.sums([*_SUMS, *flags], SAMPLES)
    total, pads, text = (sums[name] for name in ("tokens", "media_tokens", "text_tokens"))
    items = facts.sums(["scaled_down::INT"], ITEMS)
    spreads = {name: spread_of(found, BINS_PER_OCTAVE) for name, found in measures.items()}
    chunks = facts.sums(["frames"], f"kind = {CHUNK}")
    figures: dict[str, Any] = {
        "name": file.name,
        "category": about["category"],
        "tokenizer": {"name": file.tokenizer, "sha256": about["tokenizer_hash"]},
        "samples": sums["rows"],
        "shards": about["shards"],
        "bytes": about["bytes"],
        **{name: sums[name] for name in ("json_bytes", "media_bytes", "tokens", "text_tokens")},
        "region_tokens": sums["region_tokens"],
        "media_tokens": pads,
        "markup_tokens": total - text - pads,
        "media_share": pads / total if total else 0.0,
        **{name: spreads[name] for name in ("tokens_per_sample", "text_tokens_per_sample")},
        "tokens_per_item": spreads["tokens_per_item"],
        "items": sums["items"],
        "scaled_down": items["scaled_down::INT"],
        "images": _media(facts, IMAGE_FILES, spreads["image_longer_side"]),
        "videos": _media(facts, VIDEO_FILES, spreads["video_longer_side"])
        | {"chunks": chunks["rows"], "frames": chunks["frames"]},
        "regions": dict(zip(REGION_NAMES, (sums[name] for name in REGIONS), strict=True)),
        "texts_with_variants": sums["texts_with_variants"],
        "variants": sums["variants"],
        **{name: sums[flag] for name, flag in zip(_FLAGS, flags, strict=True)},
        "longest": _longest(facts),
        "tails": {name: tail(measures[name]) for name in TAILED},
    }
    lengths = measures["tokens_per_sample"]
    if seq_len is not None:
        over = _part(lengths, lengths.values > seq_len)
        figures["over_seq_len"] = {"seq_len": seq_len, **over}
    if choice is not None:
        chosen = _part(lengths, within(lengths.values, choice))
        figures["chosen"] = {"bounds": choice.bounds, **chosen}
    return figures


def _part(found: ValueCounts, chosen: NDArray[np.bool_]) -> dict[str, Any]:
    """Return number, share and tokens of the samples with the chosen lengths."""
    part = ValueCounts(found.values[chosen], found.counts[chosen])
    share = part.total / found.total if found.total else 0.0
    return {"samples": part.total, "share": share, "tokens": weighted_sum(part)}


def _longest(facts: Facts) -> list[list[Any]]:
    top = facts.rows(
        f"SELECT sample, tokens FROM facts WHERE {SAMPLES} ORDER BY tokens DESC, sample "
        f"LIMIT {LONGEST}"
    )
    keys = facts.keys([sample for sample, _ in top])
    return [[keys[sample], tokens] for sample, tokens in top]


def _media(facts: Facts, where: str, longer_side: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same values as `stats._media`."""
    percents = [percent / 100 for percent in PERCENTILES]
    asked = ", ".join(
        f"avg({value}), min({value}), quantile_cont({value}, {percents}), max({value})"
        for value in (_MEGAPIXELS, _ASPECT)
    )
    (row,) = facts.rows(
        f"SELECT count(*), coalesce(sum(bytes), 0)::BIGINT, {asked} FROM facts WHERE {where}"
    )
    files, size, *found = row
    megapixels, aspect = (_spread(files, *found[at : at + 4]) for at in (0, 4))
    if files:
        # The bins equal numpy's, because no ratio is close to an edge except exact powers of two.
        places = facts.counted(f"floor(log2({_ASPECT}) * {ASPECT_BINS_PER_OCTAVE})::BIGINT", where)
        bins = bins_between(places.values, places.counts, ASPECT_BINS_PER_OCTAVE)
        aspect["histogram"] = {"zeros": [0.0], **bins}
    side = {"longer_side": dict(longer_side), "aspect": aspect}
    return {"files": files, "bytes": size, "megapixels": megapixels, **side}


def _spread(
    count: int, mean: float, least: float, at: Sequence[float], most: float
) -> dict[str, Any]:
    if not count:
        return {"count": 0}
    found = {f"p{percent}": value for percent, value in zip(PERCENTILES, at, strict=True)}
    return {"count": count, "mean": mean, "min": least, **found, "max": most}


def count_sources(
    files: Mapping[str, FactsFile],
    limits: PatchLimits,
    seq_len: int | None,
    choices: Mapping[str, ChosenSource | None],
    pairs: Sequence[tuple[str, str]] = (),
    other: tuple[str, FactsFile] | None = None,
) -> dict[str, Any]:
    """Compute the statistics of several sources, separately and together.

    Args:
        files: name -> facts, all with the same limits.
        limits: patch limits of the token counts.
        seq_len: tokens of a row; None omits the count of longer samples.
        choices: name -> length bounds by which a config chooses samples.
        pairs: (version, previous version) to compare.
        other: (name of a source, facts of another root) to compare.

    Returns:
        limits, seq_len, sources, totals, alike, compared: as in `data count --json`.

    Raises:
        FactsError: a file cannot be read. ValueError: as for `compare`.
    """
    counted = {name: count_source(file, seq_len, choices.get(name)) for name, file in files.items()}
    figures = [one.figures for one in counted.values()]
    compared = [compare(files[new], files[old], (counted[new], counted[old])) for new, old in pairs]
    if other is not None:
        compared.append(compare(files[other[0]], other[1]))
    return {
        "limits": {"image": limits.image, "frame": limits.frame, "side": limits.side},
        "seq_len": seq_len,
        "sources": figures,
        "totals": totals(figures) | {"categories": by_category(list(counted.values()))},
        "alike": count_alike(list(files.values())),
        "compared": compared,
    }


def by_category(sources: Sequence[Counted]) -> dict[str, Any]:
    """Return sums, spreads and tails over all sources of each category."""
    found = totals([source.figures for source in sources])["categories"]
    for category, sums in found.items():
        parts = [source for source in sources if source.figures["category"] == category]
        whole = {name: merged(part.measures[name] for part in parts) for name in MEASURES}
        sums |= {name: spread_of(one, BINS_PER_OCTAVE) for name, one in whole.items()}
        sums["tails"] = {name: tail(whole[name]) for name in TAILED}
    return found


# Likely duplicates ------------------------------------------------------------------------------

_KINDS = {"media": (FILES, "media"), "samples": (SAMPLES, "-1")}


def count_alike(files: Sequence[FactsFile], threads: int | None = None) -> dict[str, Any]:
    """Find media files and samples that agree in length and CRC-32, within and across sources.

    They are likely duplicates; `duplicates.find_duplicates` reads them to be sure. A source is
    skipped if another source, such as a newer version, has all of its shards.

    Returns:
        The form of `duplicates.Duplicates.as_dict`, with a fingerprint instead of the SHA-256.
    """
    kept, left_out = _with_own_shards(files)
    opened = [Facts(file, threads=threads) for file in kept]
    try:
        found: dict[str, Any] = {kind: _alike(opened, *asked) for kind, asked in _KINDS.items()}
    finally:
        for facts in opened:
            facts.close()
    return found | {"left_out": left_out}


def _with_own_shards(files: Sequence[FactsFile]) -> tuple[list[FactsFile], list[str]]:
    kept: list[FactsFile] = []
    for file in sorted(files, key=lambda one: -len(one.shards)):  # stable: first of equals stays
        if not file.shards or not any(file.shards <= other.shards for other in kept):
            kept.append(file)
    names = {file.name for file in kept}
    left_out = [file.name for file in files if file.name not in names]
    return [file for file in files if file.name in names], left_out


def _alike(opened: Sequence[Facts], where: str, media: str) -> dict[str, Any]:
    """Return the groups among the rows that match; `media` is the SQL of the file's number."""
    query = f"SELECT fingerprint FROM facts WHERE {where}"
    whole = np.concatenate(
        [np.zeros(0, np.uint64), *(facts.columns(query)["fingerprint"] for facts in opened)]
    )
    whole.sort()
    again = np.flatnonzero(whole[1:] == whole[:-1])
    # A run of equal neighbours is one group.
    first = np.flatnonzero(np.diff(again, prepend=-2) > 1)
    copies = np.diff(first, append=again.size) + 1
    doubled = whole[again[first]]
    sizes = (doubled >> np.uint64(32)).astype(np.int64)
    redundant = sizes * (copies - 1)
    top = _largest(redundant, _LISTED)
    places = _places(opened, where, media, doubled[top]) if top.size else {}
    return {
        "groups": int(doubled.size),
        "redundant": int(again.size),
        "redundant_bytes": int(redundant.sum()),
        "largest": [
            {
                "fingerprint": f"{int(doubled[at]):016x}",
                "bytes": int(sizes[at]),
                "copies": int(copies[at]),
                "places": places[int(doubled[at])][:_LISTED],
            }
            for at in top
        ],
    }


def _largest(values: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the indices of the largest values, descending; ties in their original order."""
    if values.size > count:
        # Preselect all candidates, so that the sort below is of few values.
        least = np.partition(values, values.size - count)[values.size - count]
        chosen = np.flatnonzero(values >= least)
    else:
        chosen = np.arange(values.size)
    return chosen[np.argsort(-values[chosen], kind="stable")][:count]


def _places(
    opened: Sequence[Facts], where: str, media: str, wanted: NDArray[np.uint64]
) -> dict[int, list[dict[str, Any]]]:
    """Return source, sample and file number (-1 for samples) of the copies in each group."""
    found: dict[int, list[dict[str, Any]]] = {int(one): [] for one in wanted}
    for facts in opened:
        rows = facts.members(f"fingerprint, sample, {media} AS media", where, wanted)
        order = np.lexsort((rows["media"], rows["sample"], rows["fingerprint"]))
        columns = [rows[name][order].tolist() for name in ("fingerprint", "sample", "media")]
        chosen = [one for one in zip(*columns, strict=True)]
        seen: dict[int, int] = {}
        listed = []
        for mark, sample, number in chosen:
            seen[mark] = seen.get(mark, 0) + 1
            if seen[mark] <= _LISTED:
                listed.append((mark, sample, number))
        keys = facts.keys([sample for _, sample, _ in listed])
        for mark, sample, number in listed:
            place = {"source": facts.file.name, "sample": keys[sample], "media": number}
            found[mark].append(place)
    return found


# Comparison of two versions ---------------------------------------------------------------------

_FIGURES = ("samples", "items", "tokens", "text_tokens", "media_tokens", "bytes")


def compare(
    new: FactsFile,
    old: FactsFile,
    counted: tuple[Counted, Counted] | None = None,
    threads: int | None = None,
) -> dict[str, Any]:
    """Return the differences between two versions of a source, or two sources.

    Args:
        new, old: facts with the same limits.
        counted: statistics of (new, old) if already computed.
        threads: DuckDB threads; None for one per core.

    Returns:
        new, old: names; figures: name -> [old, new]; keys: samples and tokens that were added or
        removed, samples that changed (another document or media file under the same key), were
        recounted (same bytes, other token counts) or are the same, and `examples` of their keys;
        drift: measure -> {psi, distance, old, new (a spread each)}, or None.

    Raises:
        ValueError: their limits differ.
        FactsError: a file cannot be read.
    """
    limits = [file.about["limits"] for file in (new, old)]
    if limits[0] != limits[1]:
        raise ValueError(
            f"{new.name} was counted under limits {limits[0]}, {old.name} under {limits[1]}: "
            "tokens of one are none of the other; count both under the same"
        )
    one, other = counted or (count_source(new, threads=threads), count_source(old, threads=threads))
    told: dict[str, Any] = {}
    for name in MEASURES:
        apart = drift(other.measures[name], one.measures[name], BINS_PER_OCTAVE)
        told[name] = apart and apart | {
            which: spread_of(part.measures[name], BINS_PER_OCTAVE)
            for which, part in (("old", other), ("new", one))
        }
    with Facts(new, other=old, threads=threads) as facts:
        keys = _keys(facts)
    figures = {name: [other.figures[name], one.figures[name]] for name in _FIGURES}
    return {"new": new.name, "old": old.name, "figures": figures, "keys": keys, "drift": told}


_JOINED = f"""
    SELECT coalesce(n.key, o.key) AS key, n.tokens AS new_tokens, o.tokens AS old_tokens, CASE
        WHEN o.sample IS NULL THEN 'added'
        WHEN n.sample IS NULL THEN 'removed'
        WHEN n.fingerprint <> o.fingerprint THEN 'changed'
        WHEN n.tokens <> o.tokens THEN 'recounted'
        ELSE 'same' END AS found
    FROM (SELECT key, sample, tokens, fingerprint FROM facts WHERE {SAMPLES}) AS n
    FULL JOIN (SELECT key, sample, tokens, fingerprint FROM other WHERE {SAMPLES}) AS o
    ON n.key = o.key
"""
_FATES = ("added", "removed", "changed", "recounted", "same")


def _keys(facts: Facts) -> dict[str, Any]:
    rows = facts.rows(
        "SELECT found, count(*), coalesce(sum(new_tokens), 0)::BIGINT, "
        f"coalesce(sum(old_tokens), 0)::BIGINT, min(key, {_EXAMPLES}) FROM ({_JOINED}) "
        "GROUP BY found"
    )
    by_fate = {fate: (count, new, old, keys) for fate, count, new, old, keys in rows}
    none: tuple[int, int, int, list[str]] = (0, 0, 0, [])
    counts = {fate: by_fate.get(fate, none)[0] for fate in _FATES}
    return {
        **counts,
        "added_tokens": by_fate.get("added", none)[1],
        "removed_tokens": by_fate.get("removed", none)[2],
        "examples": {fate: by_fate[fate][3] for fate in _FATES[:-1] if fate in by_fate},
    }
