"""The page of `data stats`: a table that compares sources, and plots for each source."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from data_pipeline.inspect.stats import PERCENTILES
from launch.pages.html import amount, num_bytes, page, percent, table, text
from launch.pages.svg_plots import histogram, shares

_KINDS = {"media": "media files", "samples": "samples"}
_PLURAL = {"point": "points", "box": "boxes", "polygon": "polygons", "turn": "turns"}
_MOST_PLACES = 4


def stats_page(found: Mapping[str, Any], title: str) -> str:
    """Return the HTML page.

    Args:
        found: the object of `data stats --json`: limits, sources, totals, duplicates (or None).
        title: title of the page.
    """
    body = [limits_note(found), *overview(found["sources"], found["totals"])]
    for source in found["sources"]:
        body += source_section(source)
    if found["duplicates"] is not None:
        body.append("<h2>Duplicates, byte for byte</h2>")
        body += equal_ones(found["duplicates"], "equal", "SHA-256", "sha256")
    return page(title, body)


def limits_note(found: Mapping[str, Any]) -> str:
    """Return a note on the patch limits of the token counts."""
    limits = found["limits"]
    said = (
        f"Media tokens under limits of {limits['image']:,} patches an image and "
        f"{limits['frame']:,} a video frame."
    )
    if found["seq_len"] is not None:
        said += f" Rows of {found['seq_len']:,} tokens."
    return f'<p class="note">{text(said)}</p>'


def overview(sources: Sequence[Mapping[str, Any]], totals: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tables that compare sources and categories."""
    head = ["source", "category", "samples", "shards", "size", "tokens", "media share",
            "tokens/sample", "items", "regions", "variants", "longer than a row"]  # fmt: skip
    yield "<h2>Sources</h2>"
    yield table(head, [_line(source) for source in sources])
    yield shares(
        [
            (source["name"], [source[f"{part}_tokens"] for part in ("text", "media", "markup")])
            for source in sources
        ],
        ("text", "media", "markup"),
        "Tokens",
    )
    yield "<h2>Categories</h2>"
    yield table(
        ["category", "sources", "samples", "size", "tokens", "media share"],
        [
            [name, part["sources"], amount(part["samples"]), num_bytes(part["bytes"]),
             amount(part["tokens"]), percent(part["media_share"])]
            for name, part in (*totals["categories"].items(), ("all", totals["all"]))
        ],
    )  # fmt: skip


def _line(source: Mapping[str, Any]) -> list[str]:
    over = source.get("over_seq_len")
    return [
        source["name"],
        source["category"],
        amount(source["samples"]),
        amount(source["shards"]),
        num_bytes(source["bytes"]),
        amount(source["tokens"]),
        percent(source["media_share"]),
        amount(source["tokens_per_sample"].get("mean", 0)),
        amount(source["items"]),
        amount(sum(source["regions"].values())),
        amount(source["variants"]),
        f"{over['samples']:,} ({percent(over['share'])})" if over else "",
    ]


def source_section(source: Mapping[str, Any]) -> Iterator[str]:
    """Yield the statistics and plots of one source."""
    images, videos = source["images"], source["videos"]
    yield f"<section>\n<h2>{text(source['name'])}</h2>"
    told = "<br>".join(text(fact) for fact in _facts(source))
    yield f'<p class="note">{told}</p>'
    spreads = {
        "tokens per sample": source["tokens_per_sample"],
        "text tokens per sample": source["text_tokens_per_sample"],
        "tokens per media item": source["tokens_per_item"],
        "longer side of an image, pixels": images["longer_side"],
        "width / height of an image": images["aspect"],
        "longer side of a video, pixels": videos["longer_side"],
    }
    spreads = {name: one for name, one in spreads.items() if one["count"]}
    columns = ["mean", "min", *(f"p{percent}" for percent in PERCENTILES), "max"]
    yield table(
        ["", *columns],
        [[name, *(amount(one[column]) for column in columns)] for name, one in spreads.items()],
    )
    yield plots([
        histogram(one["histogram"], name, "", "samples" if "sample" in name else "items")
        for name, one in spreads.items()
    ])  # fmt: skip
    yield "</section>"


def plots(drawings: Sequence[str]) -> str:
    """Return drawings side by side."""
    return '<div class="plots">\n' + "\n".join(drawings) + "\n</div>"


def _facts(source: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each kind of content in the source."""
    images, videos = source["images"], source["videos"]
    yield f"{source['category']}; tokenizer {source['tokenizer']['name']}"
    if images["files"]:
        yield (
            f"{images['files']:,} images of {num_bytes(images['bytes'])}; "
            f"{source['flip_ok']:,} samples may be mirrored, {source['turn_ok']:,} turned"
        )
    if videos["files"]:
        yield (
            f"{videos['files']:,} videos of {num_bytes(videos['bytes'])} in "
            f"{videos['chunks']:,} chunks, {videos['frames']:,} frames"
        )
    if source["items"]:
        yield f"{source['scaled_down']:,} of {source['items']:,} items scaled down"
    if any(source["regions"].values()):
        counted = source["regions"].items()
        yield ", ".join(f"{number:,} {_PLURAL[name]}" for name, number in counted if number)
    if source["variants"]:
        yield (f"{source['texts_with_variants']:,} texts with {source['variants']:,} more wordings")
    yield "longest: " + ", ".join(f"{key} ({tokens:,})" for key, tokens in source["longest"][:3])


def equal_ones(found: Mapping[str, Any], how: str, mark: str, key: str) -> Iterator[str]:
    """Yield the groups of media files and samples that are equal or look alike.

    Args:
        found: result of `find_duplicates` or `count_alike`.
        how: "equal" or "alike".
        mark, key: title and key in `found` of the value that a group shares.
    """
    if found["left_out"]:
        names = ", ".join(found["left_out"])
        yield f'<p class="note">Without {text(names)}: the shards are those of other sources.</p>'
    for kind, name in _KINDS.items():
        part = found[kind]
        yield (
            f"<p>{amount(part['groups'])} groups of {how} {name}: {amount(part['redundant'])} "
            f"copies beyond the first, {num_bytes(part['redundant_bytes'])}.</p>"
        )
        if part["largest"]:
            yield table(
                [mark, "bytes", "copies", "where"],
                [
                    [group[key][:16], amount(group["bytes"]), group["copies"],
                     _places(group)]
                    for group in part["largest"]
                ],
            )  # fmt: skip


def _places(group: Mapping[str, Any]) -> str:
    named = [
        f"{place['source']}/{place['sample']}"
        + (f".{place['media']}" if place["media"] >= 0 else "")
        for place in group["places"][:_MOST_PLACES]
    ]
    more = group["copies"] - len(named)
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")
