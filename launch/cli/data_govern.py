"""Commands `kimi-pretrain data exposure`, `redact` and `hold`: trace, erase and protect samples."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.cli.options import EndpointOption, JsonOption
from launch.local.user_errors import one_line_errors, user_message

if TYPE_CHECKING:
    from data_pipeline.catalog.engine import Catalog
    from data_pipeline.govern.redact import Done, Plan
    from data_pipeline.store.open import Store
    from kimi_pretrain.tools.exposure import Exposure

Wanted = dict[str, list[str]]

SourceOption = Annotated[str | None, typer.Option("--source", help="Of the samples of --key.")]
KeyOption = Annotated[list[str] | None, typer.Option("--key", help="Of a sample; repeatable.")]
ListOption = Annotated[
    Path | None,
    typer.Option("--list", help='Samples as JSON lines {"source", "key"}; a list of tombstones.'),
]
_SHOWN = 20  # lines of each kind on the terminal


def exposure(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUNS...", help="Run folders, or folders of those.")
    ],
    source: SourceOption = None,
    key: KeyOption = None,
    samples: ListOption = None,
    out: Annotated[
        Path | None, typer.Option(help="File for all uses, one JSON object a line.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Report the runs, steps and rows that used given samples.

    The command plans the steps of each run again, from its config.yaml and the
    indices. It reads no data and needs no log. It names each run that it cannot plan
    again, and exits with code 1. The exit code is also 1 if a source of the run or of
    the samples no longer exists. A source that no run and no root knows is an error.

    \b
    kimi-pretrain data exposure /shared/runs --source captions --key sea-1
    kimi-pretrain data exposure runs/mine --list request-17.jsonl --out uses.jsonl
    """
    with one_line_errors():
        from data_pipeline.index.manifest import run_folders
        from kimi_pretrain.tools.exposure import exposure as look
        from launch.cli.progress import item_bar

        folders = run_folders(runs)
        wanted = _by_run(folders, _wanted(source, key, samples))
        told: list[dict[str, Any]] = []
        lines: list[str] = []
        failed = untold = 0
        for folder in folders:
            try:
                with item_bar(folder.name) as show:
                    found = look(folder, wanted[folder], show)
            except Exception as error:
                if (message := user_message(error)) is None:
                    raise
                typer.echo(f"left out: {message}", err=True)
                failed += 1
                continue
            told.append(_tell_exposure(found, "" if out else ": see --out"))
            lines += [json.dumps({"run": found.run, **use._asdict()}) for use in found.uses]
            untold += len(found.untold)
        if out is not None:
            out.write_text("".join(f"{line}\n" for line in lines))
        if as_json:
            typer.echo(json.dumps({"runs": told, "failed": failed}))
        if failed or untold:
            raise typer.Exit(1)


def _by_run(folders: Sequence[Path], wanted: Wanted) -> dict[Path, Wanted]:
    """Return for each run the samples whose sources the run or its data root knows.

    Raises:
        ValueError: no run knows a source; suggests the nearest name.
    """
    from data_pipeline.names import did_you_mean
    from kimi_pretrain.tools.exposure import known_names

    known: dict[Path, set[str]] = {}
    for folder in folders:
        try:
            known[folder] = known_names(folder)
        except Exception as error:
            if user_message(error) is None:
                raise  # the caller reports user errors when it replays this run
            known[folder] = {*wanted}
    every = set[str]().union(*known.values())
    if nowhere := sorted({*wanted} - every):
        raise ValueError(
            f"no run here, nor the root of its data, knows a source {nowhere[0]!r}; "
            + did_you_mean(nowhere[0], sorted(every))
        )
    return {
        folder: {name: keys for name, keys in wanted.items() if name in known[folder]}
        for folder in folders
    }


def _tell_exposure(found: "Exposure", hint: str) -> dict[str, Any]:
    """Print the uses of a run; return its summary for --json."""
    uses, steps = len(found.uses), len({use.step for use in found.uses})
    typer.echo(
        f"{found.run}: {uses:,} uses in {steps:,} of steps {found.first} to {found.last}"
        + "".join(f", held out in {name}" for name in found.heldout)
    )
    for use in found.uses[:_SHOWN]:
        masked = "  masked" if use.masked else ""
        typer.echo(f"  step {use.step} row {use.row}  {use.source} {use.key}{masked}")
    if uses > _SHOWN:
        typer.echo(f"  and {uses - _SHOWN:,} more{hint}")
    for name in found.untold:
        typer.echo(
            f"{found.run}: whether held-out source {name!r} held them cannot be told: it is not "
            "there any more, or holds other data",
            err=True,
        )
    summary = {"run": found.run, "first": found.first, "last": found.last}
    return summary | {
        "uses": uses, "steps": steps, "heldout": found.heldout, "untold": found.untold,
    }  # fmt: skip


def redact(
    uri: Annotated[
        str, typer.Argument(help="Root of the sources: s3://bucket/prefix or a folder.")
    ],
    source: SourceOption = None,
    key: KeyOption = None,
    samples: ListOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; else it is only told.")] = False,
    request: Annotated[
        str | None, typer.Option(help="Number of the deletion request, for the catalogue.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="Configuration of runs: its data.cache is purged, too.")
    ] = None,
    purge_only: Annotated[
        bool, typer.Option("--purge-only", help="Only purge: for the other nodes.")
    ] = False,
    where: Annotated[
        str | None, typer.Option("--catalog", help="Of sources; else KIMI_PRETRAIN_CATALOG.")
    ] = None,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
) -> None:
    """Overwrite samples in all shards under a root, permanently.

    Every source that uses one of their shards gets new shards of equal length and a
    manifest that names them. Nothing moves, no other sample changes, and runs
    continue: they count redacted samples as tombstones. The replaced shards are
    removed with their old versions. The command reports objects that the store
    refuses to remove, with exit code 1. Repeat the same command to finish an
    interrupted redaction.

    \b
    kimi-pretrain data redact s3://corpus --list request-17.jsonl
    kimi-pretrain data redact s3://corpus --list request-17.jsonl --request 17 \\
        --config my.yaml --yes
    kimi-pretrain data redact s3://corpus --config my.yaml --purge-only
    """
    with one_line_errors():
        from data_pipeline.govern.redact import Done, carry_out, plan
        from data_pipeline.store.open import open_store

        wanted = {} if purge_only else _wanted(source, key, samples)
        store = open_store(uri, endpoint=endpoint)
        if purge_only:
            if config is None:
                raise ValueError("--purge-only: give --config, whose data.cache is to be purged")
            _purge(uri, endpoint, config)
            return
        with configured_catalog(where) as catalog:
            todo = plan(store, wanted)
            _tell_plan(store, todo)
            if not yes:
                typer.echo("nothing was changed; --yes does it")
                if as_json:
                    typer.echo(json.dumps({"samples": _counts(todo), "done": False}))
                return
            done: Done = carry_out(store, wanted, lambda what: typer.echo(f"  {what}", err=True))
            if config is not None:
                _purge(uri, endpoint, config)
            if catalog is not None:
                _record(catalog, store, endpoint, wanted, request)
        _tell_done(done)
        if as_json:
            typer.echo(json.dumps({"done": True, **vars(done)}))
        if done.kept:
            raise typer.Exit(1)


def hold(
    uri: Annotated[str, typer.Argument(help="The source: s3://bucket/prefix/NAME or a folder.")],
    name: Annotated[str, typer.Argument(help="Of the hold, such as a case number.")],
    shard: Annotated[
        list[str] | None, typer.Option("--shard", help="Key of a shard; repeatable. Else all.")
    ] = None,
    release: Annotated[bool, typer.Option("--release", help="End the hold.")] = False,
    lock: Annotated[
        bool, typer.Option("--lock", help="The bucket's legal hold, too, where it is enforced.")
    ] = False,
    where: Annotated[
        str | None, typer.Option("--catalog", help="For its audit; else KIMI_PRETRAIN_CATALOG.")
    ] = None,
    endpoint: EndpointOption = None,
) -> None:
    """Protect shards of a source from redaction and removal until the hold ends.

    The hold also covers other sources that share the shards. --lock also sets or ends
    the bucket's own legal hold, after a probe has shown that the store enforces it. If
    there is a catalogue, its audit log records the hold.

    \b
    kimi-pretrain data hold s3://corpus/captions case-9 --lock
    kimi-pretrain data hold s3://corpus/captions case-9 --lock --release
    """
    with one_line_errors():
        from data_pipeline.govern.holds import end_hold, put_hold, read_holds
        from data_pipeline.govern.holds import lock as set_lock
        from data_pipeline.store.open import open_store
        from launch.cli.sources import split_source

        root, source = split_source(uri)
        store = open_store(root, endpoint=endpoint)
        with configured_catalog(where) as catalog:
            found = (
                end_hold(store, source, name)
                if release
                else put_hold(store, source, name, shard or ())
            )
            done = "ended" if release else "put"
            told = f"{store.uri}/{source}: hold {name!r} {done}, {len(found.shards):,} shards"
            typer.echo(told)
            locked = None
            try:
                if lock:
                    locked = set_lock(store, found, on=not release, others=read_holds(store))
                    typer.echo(locked)
            finally:
                if catalog is not None:
                    from data_pipeline.catalog.redactions import note_hold

                    note_hold(catalog, store.uri, endpoint, found, done, locked)


def _wanted(source: str | None, keys: Sequence[str] | None, samples: Path | None) -> Wanted:
    """Return {source: keys} of the samples to process."""
    if (samples is None) == (source is None) or (source is None) != (not keys):
        raise ValueError("give --source with --key, or --list")
    if samples is None:
        assert source is not None
        return {source: list(dict.fromkeys(keys or ()))}
    from data_pipeline.plan.tombstones import parse_entries

    found: Wanted = {}
    for _, entry in parse_entries(str(samples), samples.read_text(), steps=False):
        found.setdefault(entry.source, []).append(entry.key)
    if not found:
        raise ValueError(f"{samples}: no sample in it; expected JSON lines")
    return {name: list(dict.fromkeys(found[name])) for name in sorted(found)}


def _counts(todo: "Plan") -> dict[str, int]:
    return {name: len(found) for name, found in todo.samples.items()}


def _tell_plan(store: "Store", todo: "Plan") -> None:
    for name, count in _counts(todo).items():
        typer.echo(f"{store.uri}/{name}: {count:,} samples to be redacted")
    sizes = {s.key: s.size for index in todo.indices.values() for s in index.shards}
    size = sum(sizes.get(key, 0) for key in todo.shards)
    typer.echo(f"{len(todo.shards):,} shards to be written anew, {size / 2**20:,.1f} MiB")
    for twin in todo.twins[:_SHOWN]:
        typer.echo(f"maybe the same bytes as {twin.of!r}: {twin.source} {twin.key!r}, which stays")
    if len(todo.twins) > _SHOWN:
        typer.echo(f"and {len(todo.twins) - _SHOWN:,} more that may hold the same bytes")
    for one in todo.elsewhere[:_SHOWN]:
        typer.echo(
            f"redacted in {one.of}, which shares its shard, and not in {one.source}: {one.key!r}, "
            "which stays: name it if it is to be redacted there, too"
        )
    if len(todo.elsewhere) > _SHOWN:
        typer.echo(f"and {len(todo.elsewhere) - _SHOWN:,} more that are redacted elsewhere alone")


def _tell_done(done: "Done") -> None:
    for name, count in done.samples.items():
        before, after = done.contents[name]
        typer.echo(f"{name}: {count:,} samples redacted, content {before[:12]} is {after[:12]} now")
    typer.echo(f"{len(done.shards):,} shards written, {len(done.removed):,} old ones removed")
    for key, reason in done.kept:
        typer.echo(f"not removed: {key}: {' '.join(reason.split())}", err=True)


def _purge(uri: str, endpoint: str | None, config: str) -> None:
    """Remove the blocks of replaced shards from the cache of a configuration."""
    from data_pipeline.govern.redact import purge
    from data_pipeline.store.open import open_store
    from kimi_pretrain.config import load_config

    cache = load_config(config).data.cache
    if cache is None:
        raise ValueError(f"--config {config}: it has no data.cache; nothing is to be purged here")
    count = purge(open_store(uri, endpoint=endpoint), cache)
    typer.echo(f"cache: no block of {count:,} replaced shards is left on this node")


@contextmanager
def configured_catalog(where: str | None, *, begun: bool = False) -> "Iterator[Catalog | None]":
    """Open the catalogue if one is configured, and check first that it can be read.

    Args:
        where: as for `Catalog`.
        begun: if True, yield None for a catalogue that was never created; else raise an error.
    """
    default = Path("~/.local/share/kimi-pretrain/catalog.sqlite").expanduser()
    if where is None and "KIMI_PRETRAIN_CATALOG" not in os.environ and not default.exists():
        yield None
        return
    try:
        from data_pipeline.catalog.engine import Catalog, NoCatalog

        catalog = Catalog(where)
    except ModuleNotFoundError as error:
        from launch.local.versions import needs_extra

        raise needs_extra(error) from None
    try:
        known = True
        try:
            with catalog.read():
                pass
        except NoCatalog:
            if not begun:
                raise
            known = False
        yield catalog if known else None
    finally:
        catalog.close()


def _record(
    catalog: "Catalog",
    store: "Store",
    endpoint: str | None,
    wanted: Mapping[str, Sequence[str]],
    request: str | None,
) -> None:
    """Record the request and the redacted sources under the root in the catalogue."""
    from data_pipeline.catalog.redactions import follow, note_request
    from data_pipeline.catalog.register import look
    from data_pipeline.index.manifest import read_manifest, sources_at

    redacted = [name for name in sources_at(store) if "redacted" in read_manifest(store, name)]
    note_request(catalog, request or "none", wanted, "redacted")
    moved = follow(catalog, [look(store, endpoint, name) for name in redacted], request)
    for before, after in moved:
        typer.echo(f"catalogue: {before} is {after} now: verify and promote it")
