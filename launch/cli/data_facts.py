"""Commands `kimi-pretrain data facts` and `data count`: statistics of sources and versions."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.cli.data_inspect import (
    FramePatchesOption,
    ImagePatchesOption,
    LimitsOption,
    SeqLenOption,
    SourceOption,
    UriArgument,
    limits_of,
    write_page,
)
from launch.cli.options import EndpointOption, JsonOption
from launch.local.user_errors import one_line_errors

if TYPE_CHECKING:
    from data_pipeline.inspect.facts import FactsFile
    from data_pipeline.store.open import Store
    from moonvit3d.geometry import PatchLimits

FolderOption = Annotated[
    Path | None,
    typer.Option(
        "--facts",
        help="Folder of all facts; else KIMI_PRETRAIN_FACTS, else ~/.cache/kimi-pretrain/facts.",
    ),
]


def facts(
    uri: UriArgument,
    source: SourceOption = None,
    config: LimitsOption = None,
    image_patches: ImagePatchesOption = None,
    frame_patches: FramePatchesOption = None,
    folder: FolderOption = None,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the facts of sources to Parquet: one row per sample and one per item.

    `data count` writes missing facts itself. Facts are written once for each content
    and set of patch limits. They need only the index and little memory. Any tool that
    reads Parquet can query them (docs/PLATFORM.md lists the columns).

    \b
    kimi-pretrain data facts s3://corpus/captions_3
    kimi-pretrain data facts s3://corpus --config my.yaml --facts /shared/facts
    """
    with one_line_errors():
        limits, _, _ = limits_of(config, None, image_patches, frame_patches)
        store, names = _opened(uri, endpoint, source or ())
        told = []
        for name in names:
            file, new = _written(store, name, limits, folder)
            size = file.path.stat().st_size
            typer.echo(f"{file.path}: {name}{'' if new else ', was there'}")
            told.append({"name": name, "path": str(file.path), "bytes": size, "new": new})
        if as_json:
            typer.echo(json.dumps(told, ensure_ascii=False))


def count(
    uri: UriArgument,
    source: SourceOption = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="Compare the one source with this: of the same root, its own URI, or captions@2."
        ),
    ] = None,
    versions: Annotated[
        bool,
        typer.Option(
            "--versions", help="Compare each version with the one before it: pairs_2 with pairs."
        ),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="HTML file to write, with plots.")] = None,
    config: LimitsOption = None,
    seq_len: SeqLenOption = None,
    image_patches: ImagePatchesOption = None,
    frame_patches: FramePatchesOption = None,
    folder: FolderOption = None,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
) -> None:
    """Count sources of any size and compare versions in seconds, from their facts.

    Shows the figures of `data stats` by source and category, and the share of tokens
    in the longest samples. Lists samples and media that look alike (same length and
    CRC-32; `data stats` reads them to be sure). Compares versions: samples added,
    removed or changed, and how far the distributions drifted.

    \b
    kimi-pretrain data count s3://corpus --out count.html
    kimi-pretrain data count s3://corpus --source captions_3 --against captions_2
    kimi-pretrain data count captions@3 --against captions@2
    kimi-pretrain data count s3://corpus --versions --json
    """
    with one_line_errors():
        try:
            from data_pipeline.inspect.count import count_sources
        except ModuleNotFoundError as error:
            from launch.local.versions import needs_extra

            raise needs_extra(error, "data count") from None

        limits, seq_len, data = limits_of(config, seq_len, image_patches, frame_patches)
        store, names = _opened(uri, endpoint, source or ())
        if against is not None and len(names) != 1:
            raise ValueError(
                f"--against {against}: give the one source to compare with it by --source; there "
                f"are {len(names)}: {', '.join(names)}"
            )
        pairs = _pairs(names) if versions else []
        other = None if against is None else _other(store, against, limits, folder, endpoint)
        files = {name: _written(store, name, limits, folder)[0] for name in names}
        choices = {name: data.chosen(name) if data else None for name in names}
        extra = None if other is None else (names[0], other)
        found = {"uri": store.uri} | count_sources(files, limits, seq_len, choices, pairs, extra)
        if out is not None:
            from launch.pages.count_page import count_page

            write_page(out, count_page(found, f"Sources at {store.uri}"))
        for line in _lines(found):
            typer.echo(line)
        if as_json:
            typer.echo(json.dumps(found, ensure_ascii=False))


def _opened(uri: str, endpoint: str | None, wanted: Sequence[str]) -> "tuple[Store, list[str]]":
    """Open sources like `open_sources`; `uri` and `wanted` may name catalogue versions."""
    from launch.cli.sources import open_sources
    from launch.local.versions import open_version

    if "@" in uri and "/" not in uri:
        if wanted:
            raise ValueError(f"--source {wanted[0]}: {uri} is one source already; leave it out")
        store, name = open_version(uri, endpoint=endpoint)
        return store, [name]
    named = [one for one in wanted if "@" in one]
    if not named:
        return open_sources(uri, endpoint, wanted)
    root = open_sources(uri, endpoint, ())[0].uri
    folders = {one: open_version(one, root, endpoint)[1] for one in named}
    return open_sources(uri, endpoint, [folders.get(one, one) for one in wanted])


def facts_folder(given: Path | None) -> Path:
    """Return the folder of facts: the given one, else the environment's, else the user cache."""
    if given is not None:
        return given
    if named := os.environ.get("KIMI_PRETRAIN_FACTS"):
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "kimi-pretrain" / "facts"


def _written(
    store: "Store", name: str, limits: "PatchLimits", folder: Path | None
) -> "tuple[FactsFile, bool]":
    """Write the facts of a source unless they exist; show a progress bar."""
    from data_pipeline.inspect.facts import write_facts
    from launch.cli.progress import item_bar

    with item_bar(f"facts of {name}") as show:
        return write_facts(store, name, limits, facts_folder(folder), show)


def _other(
    store: "Store", against: str, limits: "PatchLimits", folder: Path | None, endpoint: str | None
) -> "FactsFile":
    """Return the facts of the source to compare with."""
    from data_pipeline.store.open import open_store
    from launch.cli.sources import split_source

    if "@" in against and "/" not in against:
        from launch.local.versions import open_version

        store, against = open_version(against, endpoint=endpoint)
    elif "/" in against:
        root, against = split_source(against)
        store = open_store(root, endpoint=endpoint)
    return _written(store, against, limits, folder)[0]


def _pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return (version, previous version) pairs, derived from the folder names.

    Raises:
        ValueError: there is no such pair.
    """
    from data_pipeline.catalog.names import of_folder

    order = sorted(names, key=of_folder)
    pairs = [
        (new, old) for old, new in zip(order, order[1:]) if of_folder(old)[0] == of_folder(new)[0]
    ]
    if not pairs:
        raise ValueError(
            f"--versions: no two of {', '.join(order)} are versions of one source, as pairs and "
            "pairs_2 are; compare two by --source and --against"
        )
    return pairs


# The terminal -----------------------------------------------------------------------------------


def _lines(found: Mapping[str, Any]) -> Iterable[str]:
    from launch.pages.count_page import MEASURES, drift_word, tail_words
    from launch.pages.html import amount, num_bytes, percent

    head = ["", "samples", "size", "items", "tokens", "media", "a sample", "p50", "p99", "longest"]

    def row(name: str, one: Mapping[str, Any]) -> list[str]:
        spread = one["tokens_per_sample"]
        shown = [amount(spread.get(key, 0)) for key in ("mean", "p50", "p99", "max")]
        return [name, f"{one['samples']:,}", num_bytes(one["bytes"]), f"{one['items']:,}",
                f"{one['tokens']:,}", percent(one["media_share"]), *shown]  # fmt: skip

    categories = found["totals"]["categories"]
    yield from _table([
        head,
        *(row(one["name"], one) for one in found["sources"]),
        *(row(f"all {name}", one) for name, one in categories.items()),
    ])  # fmt: skip
    for one in found["sources"]:
        if told := tail_words(one["tails"]["tokens_per_sample"], "tokens", "samples"):
            yield f"{one['name']}: {told}"
        over = one.get("over_seq_len")
        if over and over["samples"]:
            yield f"{one['name']}: {over['samples']:,} samples longer than {over['seq_len']:,}"
        if chosen := one.get("chosen"):
            yield (
                f"{one['name']}: {chosen['samples']:,} samples with {chosen['tokens']:,} tokens "
                f"chosen by {chosen['bounds']}"
            )
    for kind, name in (("media", "media files"), ("samples", "samples")):
        part = found["alike"][kind]
        yield (
            f"alike {name}: {part['groups']:,} groups, {part['redundant']:,} copies beyond the "
            f"first ({num_bytes(part['redundant_bytes'])})"
        )
    if left_out := found["alike"]["left_out"]:
        yield f"alike: without {', '.join(left_out)}, whose shards are those of others"
    for one in found["compared"]:
        yield ""
        keys = one["keys"]
        told = ", ".join(f"{keys[fate]:,} {fate}" for fate in
                         ("added", "removed", "changed", "recounted", "same"))  # fmt: skip
        yield f"{one['new']} after {one['old']}: {told}"
        rows = [["", "mean", "was", "p50", "was", "p99", "was", "PSI", "distance"]]
        for name, apart in one["drift"].items():
            if apart is not None:
                pairs = [amount(apart[which][key]) for key in ("mean", "p50", "p99")
                         for which in ("new", "old")]  # fmt: skip
                marks = [
                    f"{apart['psi']:.3f}{drift_word(apart['psi'])}",
                    f"{apart['distance']:.3f}",
                ]
                rows.append([MEASURES[name], *pairs, *marks])
        yield from _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        line = [name.ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells, widths[1:]))]
        yield "  ".join(line).rstrip()
