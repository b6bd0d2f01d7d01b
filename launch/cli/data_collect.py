"""The `kimi-pretrain data collect` command, which removes unused data after a grace period."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.cli.data_catalog import CatalogOption, opened
from launch.cli.options import EndpointOption, JsonOption

if TYPE_CHECKING:
    from data_pipeline.catalog.collect import Ledger, Runs
    from data_pipeline.catalog.engine import Catalog
    from data_pipeline.govern.collect import Collected
    from data_pipeline.store.open import Store

_SHOWN = 20


def collect(
    uri: Annotated[
        str, typer.Argument(metavar="ROOT", help="Of the sources: s3://bucket/prefix or a folder.")
    ],
    plan: Annotated[
        Path | None, typer.Option(help="Write into this file what may be removed, and when.")
    ] = None,
    apply: Annotated[
        Path | None, typer.Option(help="Remove what is in this file and still unneeded.")
    ] = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option(help="Run folders, or folders of those: what they use stays; repeatable."),
    ] = None,
    grace_days: Annotated[
        float, typer.Option(min=0, help="Between plan and removal, at least.")
    ] = 7.0,
    keep_archived_days: Annotated[
        float, typer.Option(min=0, help="How long an archived version stays.")
    ] = 30.0,
    archive_deprecated_days: Annotated[
        float | None,
        typer.Option(min=0, help="Archive what is deprecated for so long; else nothing."),
    ] = None,
    facts: Annotated[
        Path | None,
        typer.Option(help="Folder of facts: those of archived and unknown contents go, too."),
    ] = None,
    where: CatalogOption = None,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove unused data: archived sources and leftovers of killed commands.

    --plan only writes a plan. After its grace period, --apply checks each entry
    again. An entry stays if a version, hold, run or other source needs it by then,
    or if it was rewritten. --apply uses the options stored in the plan. It reports
    objects that the store refuses to remove, with exit code 1. Repeat the same
    command to finish an interrupted removal.

    \b
    kimi-pretrain data collect s3://corpus --runs /shared/runs --plan old.json
    kimi-pretrain data collect s3://corpus --apply old.json
    """
    with opened(where) as found:
        from data_pipeline.store.open import open_store

        if (plan is None) == (apply is None):
            raise ValueError("give --plan FILE, which changes nothing, or --apply FILE")
        store = open_store(uri, endpoint=endpoint)
        if plan is not None:
            options = {
                "runs": [str(one.resolve()) for one in runs or ()],
                "keep_archived_days": keep_archived_days,
                "archive_deprecated_days": archive_deprecated_days,
                "facts": None if facts is None else str(facts.resolve()),
            }
            told = _propose(found, store, endpoint, plan, grace_days, options)
        else:
            assert apply is not None
            told = _apply(found, store, endpoint, apply)
        if as_json:
            typer.echo(json.dumps(told))
        if told.get("kept_by_store"):
            raise typer.Exit(1)


def _propose(
    catalog: "Catalog",
    store: "Store",
    endpoint: str | None,
    file: Path,
    grace_days: float,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Write a plan; return its summary for --json."""
    from data_pipeline.catalog.audit import check
    from data_pipeline.catalog.collect import note_plan, to_archive
    from data_pipeline.govern.collect import propose
    from data_pipeline.govern.collect_plan import Plan, boot_clock
    from data_pipeline.store.addresses import endpoint_of

    if file.exists() or not file.absolute().parent.is_dir():
        raise ValueError(f"--plan {file}: expected a file that is not there, in a folder that is")
    now, place = _now(), (store.uri, endpoint_of(store.uri, endpoint))
    things, kept = propose(store, _ledger(catalog, place, options, now), _facts(options))
    days = options["archive_deprecated_days"]
    old = [] if days is None else to_archive(catalog, *place, days, now)
    with catalog.read() as connection:
        head = check(connection)[1]
    made = Plan(
        *place, now.isoformat("T", "seconds"), grace_days, head, options, things, kept, tuple(old),
        clock=boot_clock(),
    )  # fmt: skip
    made.save(file)
    size, objects = sum(one.size for one in things), sum(len(one.spots) for one in things)
    about = {"in": store.uri, "endpoint": place[1], "objects": objects, "bytes": size}
    note_plan(catalog, made.id, about)
    for thing in things:
        typer.echo(
            f"{thing.kind:10s} {thing.name:24s} {len(thing.spots):>7,} objects "
            f"{thing.size / 2**20:>12,.1f} MiB  {thing.why}"
        )
    for name, why in kept:
        typer.echo(f"stays      {name:24s} {why}")
    for name, _, why in old:
        typer.echo(f"to archive {name:24s} {why}")
    typer.echo(
        f"{file}: {objects:,} objects, {size / 2**20:,.1f} MiB; nothing was changed; from "
        f"{made.due.isoformat()} on: kimi-pretrain data collect {store.uri} --apply {file}"
    )
    return {"plan": made.id, "due": made.due.isoformat(), **about, "stays": dict(kept)}


def _apply(catalog: "Catalog", store: "Store", endpoint: str | None, file: Path) -> dict[str, Any]:
    """Apply a plan; return a summary of the removal for --json."""
    from data_pipeline.catalog.audit import check
    from data_pipeline.catalog.collect import archive
    from data_pipeline.govern.collect import apply
    from data_pipeline.govern.collect_plan import Plan, boot_clock
    from data_pipeline.store.addresses import endpoint_of

    plan, now = Plan.read(file), _now()
    place = (store.uri, endpoint_of(store.uri, endpoint))
    if place != (plan.root, plan.endpoint):
        raise ValueError(
            f"{file}: is a plan of {plan.root} {plan.endpoint}".rstrip()
            + f", not of {' at '.join(filter(None, place))}"
        )
    with catalog.read() as connection:
        check(connection, plan.audit or None)
    ledger = _ledger(catalog, place, plan.options, now)
    progress = _echo_error
    facts, clock = _facts(plan.options), boot_clock()
    done = apply(store, plan, ledger, now, progress, facts, clock)
    refused = archive(catalog, plan.archive)
    _tell(done)
    for name, reason in refused:
        typer.echo(f"not archived: {name}: {reason}")
    return {
        "plan": plan.id,
        "objects": sum(len(one.spots) for one in done.removed),
        "bytes": done.size,
        "refused": [list(one) for one in done.refused],
        "not_archived": [list(one) for one in refused],
        "kept_by_store": [list(one) for one in done.kept],
    }


def _tell(done: "Collected") -> None:
    for thing in done.removed:
        typer.echo(
            f"removed    {thing.name:24s} {len(thing.spots):>7,} objects "
            f"{thing.size / 2**20:>12,.1f} MiB  {thing.kind}"
        )
    for kind, name, reason in done.refused:
        typer.echo(f"stays      {name:24s} {kind}: {reason}")
    for key, reason in done.kept[:_SHOWN]:
        typer.echo(f"not removed: {key}: {' '.join(reason.split())}", err=True)
    if len(done.kept) > _SHOWN:
        typer.echo(f"and {len(done.kept) - _SHOWN:,} more were not removed", err=True)


def tell_what_came_back(
    catalog: "Catalog", store: "Store", endpoint: str | None, names: Sequence[str]
) -> None:
    """Record in the catalogue which collected sources exist again.

    Args:
        store, endpoint: location of the sources; the endpoint as given by the user.
        names: names of sources to look for.
    """
    from data_pipeline.catalog.collect import give_back, let_go
    from data_pipeline.index.manifest import read_manifest
    from data_pipeline.store.addresses import endpoint_of

    place = (store.uri, endpoint_of(store.uri, endpoint))
    folders = {folder for folder, _ in let_go(catalog, *place)} & {*names}
    manifests = {folder: read_manifest(store, folder) for folder in sorted(folders)}
    sources = {
        folder: (manifest["content_hash"], manifest["index_sha256"])
        for folder, manifest in manifests.items()
    }
    for version, folder in give_back(catalog, *place, sources):
        typer.echo(f"catalogue: {version} lies in {store.uri}/{folder} again")


def _echo_error(text: str) -> None:
    typer.echo(f"  {text}", err=True)


def _now() -> datetime:
    return datetime.now(UTC)


def _facts(options: Mapping[str, Any]) -> "Store | None":
    from data_pipeline.store.open import FolderStore

    return None if options["facts"] is None else FolderStore(options["facts"])


def _ledger(
    catalog: "Catalog", place: tuple[str, str], options: Mapping[str, Any], now: datetime
) -> "Ledger":
    """Return the ledger, which combines the catalogue and the run folders."""
    from data_pipeline.catalog.collect import Ledger

    places = [Path(given) for given in options["runs"]]
    runs = partial(_needing, places)
    return Ledger(catalog, *place, options["keep_archived_days"], now, needs, runs)


def _needing(places: "Sequence[Path]") -> "Runs":
    """Return the runs under these folders that currently need their sources.

    Raises:
        ValueError: the needs of a run are unknown.
    """
    from data_pipeline.catalog.runs import read_run
    from data_pipeline.index.manifest import RUN_SOURCES, run_folders

    found: list[tuple[str, Sequence[Mapping[str, Any]]]] = []
    folders = run_folders(places)
    for place in places:
        for file in sorted(place.glob("**/status.json")):
            if file.parent.resolve() not in folders:
                raise ValueError(
                    f"{file.parent}: a run that has left no {RUN_SOURCES}, so nobody knows what it "
                    "needs; name the other runs one by one with --runs"
                )
    for folder in folders:
        if read_run(folder).state != "finished" or needs(str(folder)) is not None:
            found.append((str(folder), json.loads((folder / RUN_SOURCES).read_text())))
    return found


def needs(folder: str) -> str | None:
    """Return why a finished run still needs its sources, or None if it does not.

    A run whose folder this machine cannot see may still resume, so it needs them.
    """
    from kimi_pretrain.checkpoint.errors import CheckpointError, storage_errors
    from kimi_pretrain.checkpoint.storage_read import open_place
    from kimi_pretrain.reliability.run_history import places_of_run

    path = Path(folder)
    if not path.is_dir():
        return (
            "uses it and cannot be seen from here; if it is gone: kimi-pretrain data catalog "
            f"forget {folder}"
        )
    for place in places_of_run(path):
        try:
            with storage_errors(place):
                steps = open_place(place).steps()
        except CheckpointError as error:
            return f"uses it, and nobody knows whether it has checkpoints: {error}"
        if steps:
            return f"has checkpoints at {place} that resume with it"
    return None
