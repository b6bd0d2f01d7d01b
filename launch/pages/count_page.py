"""The page of `data count`: sources, categories, heavy tails, similar samples and versions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launch.pages.html import amount, num_bytes, page, percent, table, text
from launch.pages.stats_page import (
    equal_ones,
    limits_note,
    overview,
    plots,
    source_section,
)
from launch.pages.svg_plots import histogram, two_histograms

MEASURES = {
    "tokens_per_sample": "tokens per sample",
    "text_tokens_per_sample": "text tokens per sample",
    "media_tokens_per_sample": "media tokens per sample",
    "items_per_sample": "items per sample",
    "tokens_per_item": "tokens per media item",
    "image_longer_side": "longer side of an image, pixels",
    "video_longer_side": "longer side of a video, pixels",
}
"""Titles of the measures of `data_pipeline.inspect.count`."""

_FIGURES = {
    "samples": "samples",
    "items": "items",
    "tokens": "tokens",
    "text_tokens": "text tokens",
    "media_tokens": "media tokens",
    "bytes": "size",
}
_FATES = {
    "added": "added",
    "removed": "removed",
    "changed": "changed: other bytes under the same key",
    "recounted": "recounted: the same bytes, other tokens",
    "same": "same",
}
# Conventional thresholds in the monitoring of production models.
_MODERATE, _LARGE = 0.1, 0.25


def count_page(found: Mapping[str, Any], title: str) -> str:
    """Return the HTML page.

    Args:
        found: the object of `data count --json`.
        title: title of the page.
    """
    return page(title, count_body(found))


def count_body(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the body of the page as HTML."""
    yield limits_note(found)
    yield from overview(found["sources"], found["totals"])
    yield from tails(found["sources"])
    for comparison in found["compared"]:
        yield from compared(comparison)
    yield "<h2>By category</h2>"
    for category, one in found["totals"]["categories"].items():
        spreads = {
            told: one[name] for name, told in MEASURES.items() if one.get(name, {}).get("count")
        }
        drawn = [
            histogram(spread["histogram"], f"{category}: {told}", "", "")
            for told, spread in spreads.items()
        ]
        yield plots(drawn)
    for source in found["sources"]:
        yield from source_section(source)
    yield "<h2>Alike, by length and CRC-32</h2>"
    yield '<p class="note">Not read: <code>data stats</code> compares their SHA-256.</p>'
    yield from equal_ones(found["alike"], "alike", "fingerprint", "fingerprint")


def tails(sources: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the shares of the few largest samples or items, by source."""
    yield "<h2>Heavy tails</h2>"
    rows = [
        [source["name"], MEASURES[name], *_tail_cells(one)]
        for source in sources
        for name, one in source["tails"].items()
        if "half" in one
    ]
    if not rows:
        yield "<p>Nothing to count.</p>"
        return
    found = [one for source in sources for one in source["tails"].values() if "largest" in one]
    shares = [part["share"] for part in found[0]["largest"]]  # the same for all
    head = ["source", "of", *(f"in the largest {_share(share)}" for share in shares)]
    yield table([*head, "half is in the largest"], rows)


def _tail_cells(one: Mapping[str, Any]) -> list[str]:
    half = one["half"]
    return [
        *(f"{percent(part['part'])} ({part['count']:,})" for part in one["largest"]),
        f"{_share(half['share'])} ({half['count']:,})",
    ]


def tail_words(one: Mapping[str, Any], what: str, of: str) -> str:
    """Return one line about a heavy tail, or "" if there is nothing to count."""
    if "half" not in one:
        return ""
    parts = [f"{percent(part['part'])} in {_share(part['share'])}" for part in one["largest"]]
    half = one["half"]
    return (
        f"{what} in the longest {of}: {', '.join(parts)}; half in {_share(half['share'])} "
        f"({half['count']:,})"
    )


def _share(share: float) -> str:
    return f"{100 * share:.3g} %"


def drift_word(psi: float) -> str:
    """Return a word for a population stability index, after a space, or "" for no drift."""
    return " large" if psi > _LARGE else " moderate" if psi > _MODERATE else ""


def compared(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differences between two versions, from an object of `compare`."""
    new, old, keys = found["new"], found["old"], found["keys"]
    yield f"<section>\n<h2>{text(new)} after {text(old)}</h2>"
    yield table(
        ["", old, new, "change"],
        [[_FIGURES[name], *_change(name, *pair)] for name, pair in found["figures"].items()],
    )
    yield table(
        ["samples", "number", "such as"],
        [
            [told, f"{keys[fate]:,}", ", ".join(keys["examples"].get(fate, []))]
            for fate, told in _FATES.items()
        ],
    )
    drifts = {name: one for name, one in found["drift"].items() if one is not None}
    yield table(
        ["", *(f"{key}, {name}" for key in ("mean", "p50", "p99") for name in (old, new)),
         "PSI", "drift", "distance"],
        [
            [MEASURES[name],
             *(amount(one[which][key]) for key in ("mean", "p50", "p99")
               for which in ("old", "new")),
             f"{one['psi']:.3f}", drift_word(one["psi"]).strip() or "none",
             f"{one['distance']:.3f}"]
            for name, one in drifts.items()
        ],
    )  # fmt: skip
    yield plots([
        two_histograms(
            (one["old"]["histogram"], one["new"]["histogram"]), (old, new), MEASURES[name]
        )
        for name, one in drifts.items()
    ])  # fmt: skip
    yield "</section>"


def _change(name: str, old: float, new: float) -> list[str]:
    shown = num_bytes if name == "bytes" else amount
    return [shown(old), shown(new), f"{100 * (new - old) / old:+.1f} %" if old else ""]
