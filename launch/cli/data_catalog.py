"""Commands `kimi-pretrain data catalog ...`: versions of sources, their states and their users."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.cli.options import EndpointOption, JsonOption
from launch.local.user_errors import one_line_errors

if TYPE_CHECKING:
    from data_pipeline.catalog.engine import Catalog

catalog = typer.Typer(
    help="Keep account of sources: versions, states, licences, which run used what.",
    no_args_is_help=True,
)

CatalogOption = Annotated[
    str | None,
    typer.Option(
        "--catalog", help="A file, or postgresql://USER@HOST/DATABASE; else KIMI_PRETRAIN_CATALOG."
    ),
]
VersionArgument = Annotated[str, typer.Argument(help="captions@3, or captions@active.")]
RevisionOption = Annotated[
    int | None, typer.Option(help="Only if it is still of this revision, as `show` tells it.")
]
LicenceOption = Annotated[str | None, typer.Option(help="SPDX, such as CC-BY-4.0.")]
OwnerOption = Annotated[str | None, typer.Option(help="Person or team that answers for it.")]
TagOption = Annotated[list[str] | None, typer.Option("--tag", help="Repeatable.")]
ParentOption = Annotated[
    str | None, typer.Option(help="Version that it was made from, as captions@2.")
]


@catalog.command()
def register(
    uri: Annotated[str, typer.Argument(help="The source: s3://bucket/prefix/NAME or a folder.")],
    name: Annotated[
        str | None,
        typer.Option("--as", help="Its version; else by the folder: captions_3 is captions@3."),
    ] = None,
    licence: LicenceOption = None,
    owner: OwnerOption = None,
    tag: TagOption = None,
    parent: ParentOption = None,
    where: CatalogOption = None,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
) -> None:
    """Register a finished source as a staged version.

    The command reads its index and compares it with its manifest. A copy of a known
    version under another root becomes another replica of that version. The first
    registration creates the catalogue.

    \b
    kimi-pretrain data catalog register s3://corpus/captions_3 --owner vision \\
        --licence CC-BY-4.0 --tag web
    kimi-pretrain data catalog register /data/corpus/pairs --as captions@4
    """
    with opened(where) as found:
        from data_pipeline.catalog.names import check_licence, parse
        from data_pipeline.catalog.register import look
        from data_pipeline.catalog.register import register as take
        from data_pipeline.store.open import open_store
        from launch.cli.sources import split_source

        wanted = None if name is None else parse(name)
        if wanted is not None and wanted.number is None:
            raise ValueError(f"--as {name}: give a number; {name} is for who asks")
        governed: dict[str, Any] = {"owner": owner, "tags": sorted(set(tag or ()))}
        governed["licence"] = None if licence is None else check_licence(licence)
        if parent is not None:
            from data_pipeline.catalog.lookup import version

            with found.read() as connection:
                governed["parent"] = version(connection, parent).content_hash
        root, source = split_source(uri)
        seen = look(open_store(root, endpoint=endpoint), endpoint, source)
        given = {key: value for key, value in governed.items() if value}
        taken, changed = take(found, seen, wanted, **given)
        told = {"version": taken, "content_hash": seen.columns["content_hash"], "new": changed}
        _print(told | {"uri": f"{seen.root}/{seen.name}"}, as_json)


@catalog.command("list")
def list_versions(
    dataset: Annotated[str | None, typer.Argument(help="Only this one's versions.")] = None,
    where: CatalogOption = None,
    as_json: JsonOption = False,
) -> None:
    """List versions with state, samples, licence, owner and tags.

    \b
    kimi-pretrain data catalog list
    kimi-pretrain data catalog list captions --json
    """
    with opened(where) as found:
        from data_pipeline.catalog.show import versions

        with found.read() as connection:
            rows = versions(connection, dataset)
        for row in rows:
            tags = ", ".join(row["tags"])
            typer.echo(
                f"{row['version']:24s} {row['state']:10s} {row['samples']:>14,} samples  "
                f"{row['licence'] or '-':16s} {row['owner'] or '-':12s} {tags}".rstrip()
            )
        if as_json:
            typer.echo(json.dumps(rows, ensure_ascii=False))


@catalog.command()
def show(
    name: VersionArgument,
    where: CatalogOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a version: its replicas, its origin, its changes, and the runs that used it.

    \b
    kimi-pretrain data catalog show captions@active
    """
    with opened(where) as found:
        from data_pipeline.catalog.show import details

        with found.read() as connection:
            one = details(connection, name)
        if as_json:
            typer.echo(json.dumps(one, ensure_ascii=False))
            return
        for key, value in one.items():
            if isinstance(value, list) and value and isinstance(value[0], dict):
                typer.echo(key)
                for entry in value:
                    typer.echo(f"  {' '.join(str(part) for part in entry.values())}")
            else:
                text = json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value
                typer.echo(f"{key:16s} {'-' if text in (None, []) else text}")


@catalog.command("set")
def set_fields(
    name: VersionArgument,
    licence: LicenceOption = None,
    owner: OwnerOption = None,
    tag: TagOption = None,
    parent: ParentOption = None,
    revision: RevisionOption = None,
    where: CatalogOption = None,
) -> None:
    """Set licence, owner, tags or parent of a version; an empty text clears licence or owner.

    \b
    kimi-pretrain data catalog set captions@3 --licence CC-BY-4.0 --owner vision
    kimi-pretrain data catalog set captions@3 --tag web --tag english
    """
    with opened(where) as found:
        from data_pipeline.catalog.states import set_fields as change

        given = {"licence": licence, "owner": owner, "parent": parent}
        values: dict[str, Any] = {key: one or None for key, one in given.items() if one is not None}
        if tag is not None:
            values["tags"] = sorted({one for one in tag if one})
        if not values:
            raise ValueError("give --licence, --owner, --tag or --parent")
        typer.echo(change(found, name, values, revision))


@catalog.command()
def promote(
    name: VersionArgument,
    state: Annotated[
        str,
        typer.Argument(help="staged, verified, active, deprecated or archived."),
    ],
    report: Annotated[
        Path | None,
        typer.Option(help="For verified: what `data verify --json` printed, in a file."),
    ] = None,
    revision: RevisionOption = None,
    where: CatalogOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move a version to its next state.

    The state verified needs a report on the whole version without a problem; active
    needs a licence and an owner. The previously active version becomes deprecated.
    Only `data collect` sets the state deleted: it deletes the bytes of an archived
    version.

    \b
    kimi-pretrain data verify s3://corpus/captions_3 --json > verify.txt
    kimi-pretrain data catalog promote captions@3 verified --report verify.txt
    kimi-pretrain data catalog promote captions@3 active
    """
    with opened(where) as found:
        from data_pipeline.catalog.states import promote as change
        from data_pipeline.catalog.states import read_report

        seen = None if report is None else read_report(report)
        done = change(found, name, state, report=seen, revision=revision)
        for one, before, after in done:
            typer.echo(f"{one}: {before} -> {after}")
        if as_json:
            keys = ("version", "before", "after")
            typer.echo(json.dumps([dict(zip(keys, one, strict=True)) for one in done]))


@catalog.command()
def audit(
    head: Annotated[
        str | None, typer.Option(help="Hash of an entry as you noted it: must be in the chain.")
    ] = None,
    last: Annotated[int, typer.Option(min=0, help="Entries to show.")] = 20,
    where: CatalogOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the audit log and the catalogue's versions for changes; show the last entries.

    Write the head down elsewhere from time to time: only a known head reveals that
    the end of the log was cut off.

    \b
    kimi-pretrain data catalog audit --head 8c1f...
    """
    with opened(where) as found:
        from data_pipeline.catalog.audit import check, entries

        with found.read() as connection:
            number, end = check(connection, head)
            shown = [one for one in entries(connection) if one.seq > number - last]
        for one in shown:
            typer.echo(f"{one.seq} {one.at} {one.who} {json.dumps(one.what, ensure_ascii=False)}")
        typer.echo(f"sound: {number:,} entries, head {end or 'none'}")
        if as_json:
            told = [one._asdict() for one in shown]
            typer.echo(json.dumps({"entries": number, "head": end, "last": told}))


@catalog.command("request")
def note_request(
    name: Annotated[str, typer.Argument(help="Number or name of the request.")],
    samples: Annotated[
        Path, typer.Option("--list", help='Samples as JSON lines {"source", "key"}.')
    ],
    where: CatalogOption = None,
) -> None:
    """Record a deletion request in the audit log, with sample counts and hashes of keys.

    \b
    kimi-pretrain data catalog request 17 --list request-17.jsonl
    """
    with opened(where) as found:
        from data_pipeline.catalog.redactions import note_request as note
        from data_pipeline.plan.tombstones import parse_entries

        wanted: dict[str, list[str]] = {}
        for _, entry in parse_entries(str(samples), samples.read_text(), steps=False):
            wanted.setdefault(entry.source, []).append(entry.key)
        note(found, name, wanted, "received")
        typer.echo(f"request {name}: {sum(map(len, wanted.values())):,} samples, received")


@catalog.command()
def rebuild(
    uris: Annotated[
        list[str], typer.Argument(metavar="URI...", help="Roots of sources, which lie in them.")
    ],
    where: CatalogOption = None,
    endpoint: EndpointOption = None,
) -> None:
    """Register all sources under some roots from their own files, to replace a lost catalogue.

    Versions get the names of their folders and are staged. States, licences, owners
    and tags exist only in a catalogue, so keep copies of it.

    \b
    kimi-pretrain data catalog rebuild s3://corpus /data/more
    """
    with opened(where) as found:
        from data_pipeline.catalog.register import rebuild as take_all
        from data_pipeline.store.open import open_store

        wrong = 0
        for uri in uris:
            taken, problems = take_all(found, open_store(uri, endpoint=endpoint), endpoint)
            for name, changed in taken:
                typer.echo(f"{name}{'' if changed else ': was there'}")
            for problem in problems:
                typer.echo(f"left out: {problem}", err=True)
            wrong += len(problems)
        if wrong:
            raise typer.Exit(1)


@catalog.command()
def scan(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUNS...", help="Run folders, or folders of those.")
    ],
    where: CatalogOption = None,
) -> None:
    """Record the versions and steps that runs used, from the files in their run folders.

    \b
    kimi-pretrain data catalog scan /shared/runs
    """
    with opened(where) as found:
        from data_pipeline.catalog.runs import read_run
        from data_pipeline.catalog.runs import scan as take
        from data_pipeline.index.manifest import run_folders

        seen = [read_run(folder) for folder in run_folders(runs)]
        take(found, seen)
        for run in seen:
            typer.echo(f"{run.folder}: {run.state}, step {run.step}, {len(run.inputs)} sources")


@catalog.command()
def forget(
    run: Annotated[str, typer.Argument(help="Folder of the run, as `scan` told it.")],
    where: CatalogOption = None,
) -> None:
    """Forget a run that will never resume, so that its sources may be archived and collected.

    The audit log still lists the sources that it used. If the run folder still exists,
    the next scan adds the run again.

    \b
    kimi-pretrain data catalog forget /shared/runs/old
    """
    with opened(where) as found:
        from data_pipeline.catalog.runs import forget as drop

        folder, inputs = drop(found, run)
        typer.echo(f"{folder}: forgotten, with {inputs} sources that it used")


@catalog.command()
def resolve(
    name: VersionArgument,
    root: Annotated[str, typer.Option(help="data.root of the run.")],
    where: CatalogOption = None,
    endpoint: EndpointOption = None,
) -> None:
    """Print the folder under a root that a version resolves to, as at the start of a run.

    \b
    kimi-pretrain data catalog resolve captions@active --root s3://corpus
    """
    with opened(where) as found:
        from data_pipeline.catalog.lookup import resolve as find
        from data_pipeline.store.open import open_store

        typer.echo(find(found, open_store(root, endpoint=endpoint), endpoint, name).name)


@catalog.command()
def migrate(where: CatalogOption = None) -> None:
    """Migrate the catalogue's tables to this release; earlier releases then refuse them.

    \b
    kimi-pretrain data catalog migrate --catalog postgresql://owner@db/catalog
    """
    with opened(where) as found:
        before, now = found.migrate()
        typer.echo(f"{found.where}: schema {now}, was {before or 'empty'}")


@contextmanager
def opened(where: str | None) -> "Iterator[Catalog]":
    """Open the catalogue; show errors in one line, including those of the caller's block."""
    with one_line_errors():
        try:
            from data_pipeline.catalog.engine import Catalog

            found = Catalog(where)
        except ModuleNotFoundError as error:
            from launch.local.versions import needs_extra

            raise needs_extra(error) from None
        try:
            yield found
        finally:
            found.close()


def _print(told: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(told))
        return
    for key, value in told.items():
        typer.echo(f"{key:14s} {value}")
