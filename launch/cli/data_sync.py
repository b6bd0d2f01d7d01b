"""The `kimi-pretrain data sync` command, which copies sources between roots or compares them."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from launch.cli.data_catalog import CatalogOption
from launch.cli.data_collect import tell_what_came_back
from launch.cli.data_govern import configured_catalog
from launch.cli.options import JsonOption
from launch.local.user_errors import one_line_errors


def sync(
    source: Annotated[
        str, typer.Argument(metavar="A", help="Root of sources: s3://bucket/prefix or a folder.")
    ],
    target: Annotated[str, typer.Argument(metavar="B", help="Root that is to have them, too.")],
    names: Annotated[
        list[str] | None,
        typer.Option("--source", help="Name of a source; repeatable; all unless given."),
    ] = None,
    from_endpoint: Annotated[
        str | None, typer.Option(help="S3 endpoint of A; else its profile's, or AWS_ENDPOINT_URL.")
    ] = None,
    from_profile: Annotated[
        str | None, typer.Option(help="Profile of boto3's files with the keys of A.")
    ] = None,
    to_endpoint: Annotated[str | None, typer.Option(help="The same of B.")] = None,
    to_profile: Annotated[str | None, typer.Option(help="The same of B.")] = None,
    parallel: Annotated[int, typer.Option(min=1, help="Files at a time.")] = 8,
    max_mb_s: Annotated[
        float | None, typer.Option("--max-mb-s", help="Bandwidth in all, in MiB a second.")
    ] = None,
    verify_only: Annotated[
        bool, typer.Option("--verify-only", help="Compare both sides; copy nothing.")
    ] = False,
    where: CatalogOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy finished sources to another folder or bucket, on any server.

    The command compares each file with its SHA-256 during the copy, and again at the
    destination. It writes a source's manifest last, so B never shows an incomplete
    source. It does not copy files that B already has. The same command continues a
    sync that was interrupted or killed. Shards in the folder of another source
    (--append-to, reindex) are copied too, under the same keys. Nothing in B is ever
    overwritten, except samples that were redacted in A: they are redacted in B, too.
    Samples redacted in B stay redacted. If there is a catalogue, it records sources
    that a collection removed from B and that now exist there again.

    --verify-only reads all files on both sides; the exit code is 1 if any file differs.

    \b
    kimi-pretrain data sync /data/corpus s3://corpus --source captions_3
    kimi-pretrain data sync s3://corpus s3://mirror/corpus \\
        --from-profile home --to-profile cloud \\
        --to-endpoint https://storage.example.com --max-mb-s 200
    kimi-pretrain data sync /data/corpus s3://corpus --verify-only
    """
    with one_line_errors(), configured_catalog(where, begun=True) as catalog:
        from data_pipeline.store.open import S3Store
        from data_pipeline.sync.compare import compare
        from data_pipeline.sync.places import Place, open_places
        from data_pipeline.sync.sync import LOOK_THREADS, Options, SyncReport
        from data_pipeline.sync.sync import sync as copy
        from launch.cli.progress import total_bar

        limit = None if max_mb_s is None else max_mb_s * (1 << 20)
        options = Options(parallel, limit)
        places = (
            Place("from", source, from_endpoint, from_profile),
            Place("to", target, to_endpoint, to_profile),
        )
        stores = open_places(*places, max(LOOK_THREADS, parallel))
        do = compare if verify_only else copy
        try:
            with total_bar("compare" if verify_only else "sync") as show:
                report = do(*stores, names or (), options, show)
            if catalog is not None and isinstance(report, SyncReport):
                endpoint = to_endpoint
                if to_profile and isinstance(stores[1], S3Store):  # the profile's endpoint
                    endpoint = stores[1].endpoint
                tell_what_came_back(catalog, stores[1], endpoint, list(report.sources))
        except KeyboardInterrupt:
            typer.echo("interrupted; the same command goes on where it was", err=True)
            raise typer.Exit(130) from None
        finally:
            for store in stores:
                store.close()
        told = {"from": stores[0].uri, "to": stores[1].uri, **asdict(report)}
        problems = told.get("problems", ())
        for problem in problems:
            typer.echo(problem)
        if as_json:
            typer.echo(json.dumps(told))
        else:
            _print(told)
        for line in told.get("not_removed", ()):
            typer.echo(f"not removed: {line}", err=True)
        if problems or told.get("not_removed"):
            raise typer.Exit(1)


def _print(told: dict[str, object]) -> None:
    """Print the summary; the caller has already printed the problems."""
    for key, value in told.items():
        if key == "sources" and isinstance(value, dict):
            for name, state in value.items():
                typer.echo(f"{name:20s} {state}")
        elif key == "problems":
            typer.echo(f"{key:20s} {len(value) if isinstance(value, list | tuple) else value}")
        elif value or key not in ("without_tokenizer", "not_removed"):
            shown = ", ".join(value) if isinstance(value, list | tuple) else value
            text = f"{shown:.1f}" if isinstance(shown, float) else shown
            typer.echo(f"{key:20s} {text}")
