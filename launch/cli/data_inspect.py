"""Commands `kimi-pretrain data verify`, `stats` and `show`, which check and show sources."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.cli.options import EndpointOption, JsonOption
from launch.local.user_errors import one_line_errors

if TYPE_CHECKING:
    from data_pipeline.config import DataConfig
    from data_pipeline.index.columns import SourceIndex
    from data_pipeline.inspect.verify import Checks
    from data_pipeline.store.open import Store
    from launch.cli.data_findings import Findings
    from moonvit3d.geometry import PatchLimits

UriArgument = Annotated[
    str,
    typer.Argument(help="Where the sources lie: s3://bucket/prefix or a folder; or one source."),
]
SourceOption = Annotated[
    list[str] | None, typer.Option("--source", help='A source\'s name; repeatable. "all" is usual.')
]
LimitsOption = Annotated[
    str | None, typer.Option("--config", help="Take limits and seq_len from this config.")
]
SeqLenOption = Annotated[int | None, typer.Option(min=1, help="Count samples longer than this.")]
ImagePatchesOption = Annotated[
    int | None, typer.Option(min=1, help="Most patches of an image; 16384 unless given.")
]
FramePatchesOption = Annotated[
    int | None, typer.Option(min=1, help="Most patches of a video frame; 4096 unless given.")
]
OutOption = Annotated[Path, typer.Option(help="HTML file to write.")]


def verify(
    uri: UriArgument,
    source: SourceOption = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Rank file to count tokens with; else the sources' own, if it is there."),
    ] = None,
    sample_share: Annotated[
        float, typer.Option(help="Share of the samples to read; below 1 no hashes of shards.")
    ] = 1.0,
    decode: Annotated[bool, typer.Option("--decode", help="Decode all media as well.")] = False,
    first: Annotated[int, typer.Option(min=0, help="Problems to list of each kind.")] = 5,
    report: Annotated[
        Path | None, typer.Option(help="File for all problems, one JSON object a line.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Shards read at once.")] = 4,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check every entry of a source's index against its shards.

    Checks the sizes, SHA-256 and tar structure of the shards, the CRCs of documents
    and media, and keys and regions. Compares documents, token counts and media with
    the index. Reports all problems, not only the first. Exit code 0: sound, 1:
    problems, 2: could not be checked.

    \b
    kimi-pretrain data verify s3://corpus
    kimi-pretrain data verify /data/corpus --source digits --decode \\
        --report problems.jsonl
    kimi-pretrain data verify s3://corpus --sample-share 0.01 --json
    """
    with one_line_errors():
        from data_pipeline.inspect.verify import Checks
        from launch.cli.data_findings import Findings
        from launch.cli.sources import named_tokenizer, open_sources

        checks = Checks(None, sample_share, decode, threads)  # fails before anything is read
        store, names = open_sources(uri, endpoint, source or ())
        if tokenizer:
            checks = replace(checks, tokenizer=named_tokenizer(tokenizer, store, endpoint))
        if report is not None:
            report.parent.mkdir(parents=True, exist_ok=True)
        with report.open("w") if report is not None else nullcontext() as lines:
            findings = Findings(first, lines)
            for name in names:
                _verify_source(store, name, checks, findings)
            for line in findings.lines():
                typer.echo(line)
        if as_json:
            typer.echo(json.dumps(findings.as_dict(), ensure_ascii=False))
        if findings.total:
            raise typer.Exit(1)


def _verify_source(store: "Store", name: str, checks: "Checks", findings: "Findings") -> None:
    """Check one source with a progress bar; use its own tokenizer unless one is given."""
    from data_pipeline.inspect.verify import Problem, open_source, verify_source
    from launch.cli.progress import byte_bar
    from launch.cli.sources import num_shard_bytes, own_tokenizer

    index = open_source(store, name)
    if isinstance(index, Problem):
        findings.add(index)
        return
    checks = replace(checks, tokenizer=checks.tokenizer or own_tokenizer(store, index))
    if checks.tokenizer is None:
        typer.echo(
            f"{name}: tokenizer {index.tokenizer_name!r} is not under {store.uri}/tokenizer: "
            "tokens are not counted; give it by --tokenizer",
            err=True,
        )
    about = {"content_hash": index.content_hash, "sample_share": checks.share}
    about |= {"decoded": checks.decode, "tokens_counted": checks.tokenizer is not None}
    findings.begin(name, about)
    with byte_bar(name, int(checks.share * num_shard_bytes([index]))) as advance:
        for shard in verify_source(store, index, checks, advance):
            findings.add_report(name, shard)


def stats(
    uri: UriArgument,
    source: SourceOption = None,
    out: Annotated[Path | None, typer.Option(help="HTML file to write, with plots.")] = None,
    config: LimitsOption = None,
    seq_len: SeqLenOption = None,
    image_patches: ImagePatchesOption = None,
    frame_patches: FramePatchesOption = None,
    duplicates: Annotated[
        bool, typer.Option(help="Look for equal media and samples: reads what may be equal.")
    ] = True,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show statistics of sources: samples, tokens, sizes, aspect ratios, regions, duplicates.

    Only the search for duplicates reads data; all other figures come from the indices.

    \b
    kimi-pretrain data stats s3://corpus --out stats.html --config tiny_cpu
    kimi-pretrain data stats /data/corpus --source photos --seq-len 4096 \\
        --no-duplicates --json
    """
    with one_line_errors():
        from data_pipeline.index.manifest import read_index
        from data_pipeline.inspect.stats import source_stats, totals
        from launch.cli.sources import open_sources

        limits, seq_len, data = limits_of(config, seq_len, image_patches, frame_patches)
        store, names = open_sources(uri, endpoint, source or ())
        indices = [read_index(store, name) for name in names]
        sources = [
            source_stats(index, limits, seq_len, data.chosen(index.name) if data else None)
            for index in indices
        ]
        found = {
            "uri": store.uri,
            "limits": {"image": limits.image, "frame": limits.frame, "side": limits.side},
            "seq_len": seq_len,
            "sources": sources,
            "totals": totals(sources),
            "duplicates": _duplicates(store, indices) if duplicates else None,
        }
        if out is not None:
            from launch.pages.stats_page import stats_page

            write_page(out, stats_page(found, f"Sources at {store.uri}"))
        _print_stats(found)
        if as_json:
            typer.echo(json.dumps(found, ensure_ascii=False))


def limits_of(
    config: str | None, seq_len: int | None, image: int | None, frame: int | None
) -> "tuple[PatchLimits, int | None, DataConfig | None]":
    """Return patch limits, row length and data config; options override config and defaults."""
    from moonvit3d.geometry import PatchLimits

    limits, loaded = PatchLimits(), None
    if config is not None:
        from kimi_pretrain.config import load_config

        loaded = load_config(config).data
        limits, seq_len = loaded.limits, seq_len or loaded.seq_len
    limits = limits.replace(image=image or limits.image, frame=frame or limits.frame)
    return limits, seq_len, loaded


def _duplicates(store: "Store", indices: "Sequence[SourceIndex]") -> dict[str, Any]:
    from data_pipeline.inspect.duplicates import find_duplicates
    from launch.cli.progress import total_bar

    with total_bar("duplicates") as progress:
        return find_duplicates(store, indices, progress=progress).as_dict()


def _print_stats(found: dict[str, Any]) -> None:
    from launch.pages.html import amount, num_bytes, percent

    for one in found["sources"]:
        over, chosen = one.get("over_seq_len"), one.get("chosen")
        typer.echo(
            f"{one['name']} ({one['category']}): {one['samples']:,} samples, "
            f"{num_bytes(one['bytes'])}, {one['items']:,} items, {one['tokens']:,} tokens "
            f"({percent(one['media_share'])} media, "
            f"{amount(one['tokens_per_sample'].get('mean', 0))} a sample)"
            + (f", {over['samples']:,} longer than a row" if over else "")
            + (
                f", {chosen['samples']:,} with {chosen['tokens']:,} tokens chosen by "
                f"{chosen['bounds']}"
                if chosen
                else ""
            )
        )
    for kind, name in (("media", "media files"), ("samples", "samples")):
        if found["duplicates"] is not None:
            part = found["duplicates"][kind]
            typer.echo(
                f"equal {name}: {part['groups']:,} groups, {part['redundant']:,} copies beyond "
                f"the first ({num_bytes(part['redundant_bytes'])})"
            )


def show(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[URI | section.key=value ...]",
            help="With --config overrides of it; without, where the sources lie.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="Show rows as a run with this config gets them.")
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(min=1, help="Which step (with --config), as in metrics.jsonl: from 1."),
    ] = None,
    anomaly: Annotated[
        Path | None,
        typer.Option(
            help="A run's anomalies.jsonl (with --config): its last step, or that of --step."
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="How many rows of it.")] = 4,
    first_row: Annotated[int, typer.Option(min=0, help="From which row on.")] = 0,
    source: Annotated[str | None, typer.Option(help="Source (without --config).")] = None,
    sample: Annotated[
        list[str] | None, typer.Option(help="Key of a sample of it; repeatable.")
    ] = None,
    first: Annotated[int, typer.Option(min=1, help="Or its first samples.")] = 8,
    out: OutOption = Path("show.html"),
    endpoint: EndpointOption = None,
) -> None:
    """Show rows as the model gets them, or stored samples, in one HTML page.

    With --config, the page shows the tokens of a step's rows, the borders of
    documents, the loss mask, the pictures after augmentation, and the regions at the
    coordinates in the tokens. With the config.yaml in a run's folder, it shows the
    rows that the run drew, even if the run's data changed midway. Without --config,
    it shows the documents and media of a source. With --anomaly, it shows the rows of
    a step that a run skipped or stopped at, exactly as the run had them.

    \b
    kimi-pretrain data show --config tiny_cpu data.root=/data/corpus --step 100 \\
        --rows 2
    kimi-pretrain data show --config runs/a/config.yaml --step 100
    kimi-pretrain data show --config runs/a/config.yaml \\
        --anomaly runs/a/anomalies.jsonl --rows 8
    kimi-pretrain data show s3://corpus --source photos --sample photos-0003 \\
        --out photo.html
    kimi-pretrain data show /data/corpus --source pages --first 20
    """
    with one_line_errors():
        if config is not None:
            from launch.cli.data_show import find_anomaly, show_rows

            if source or sample:
                raise ValueError("--source and --sample show stored samples: leave out --config")
            chosen = range(first_row, first_row + rows)
            found = find_anomaly(anomaly, step) if anomaly is not None else None
            write_page(out, show_rows(config, tuple(arguments or ()), step or 1, chosen, found))
        elif anomaly is not None:
            raise ValueError("--anomaly needs --config: that of the run, RUN_DIR/config.yaml")
        else:
            from launch.cli.data_show import show_samples

            uris = arguments or []
            if len(uris) != 1 or source is None:
                raise ValueError(
                    "give --config CONFIG to show rows, or a URI and --source NAME to show samples"
                )
            write_page(out, show_samples(uris[0], endpoint, source, sample or (), first))


def write_page(out: Path, page: str) -> None:
    """Write a page; print its path and size."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    typer.echo(f"wrote {out} ({len(page.encode()) / 1e6:.1f} MB)")
