"""Resolves versions that a configuration names, such as captions@3, to folders once before a run.

Ranks and restarts get the folders. If each rank queried the catalogue, a query after a promotion
would read other data, and an unavailable catalogue would keep a run from resuming. For the same
reason a run folder keeps its first resolution (`data.asked` of its config.yaml).
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kimi_pretrain.config import Config, ConfigError, load_config, read_yaml
from typed_config.yaml_text import one_line

if TYPE_CHECKING:
    from data_pipeline.store.open import Store

# Keys of `data` that name sources.
_KEYS = ("sources", "past_sources", "heldout", "max_epochs", "augment")


def load_pinned(
    config: str | Path,
    overrides: Sequence[str] = (),
    run_dir: Path | None = None,
    machines: int = 1,
) -> tuple[Config, tuple[str, ...]]:
    """Load a configuration and resolve its versions.

    Args:
        config: YAML file or name of a preset.
        overrides: `section.key=value`.
        run_dir: folder of a run to resume, which keeps its first resolution.
        machines: number of machines that run this command.

    Returns:
        The configuration, and the overrides with which every other process loads the same one.

    Raises:
        ConfigError: see `load_config`; two versions resolve to one folder; or this process is a
            rank, or one of several machines, which could query at different times and read
            different data.
        CatalogError, IndexMismatch, StoreError: see `catalog.lookup.resolve`.
    """
    loaded = load_config(config, overrides)
    data = loaded.data.model_dump(mode="json")
    places = [data, *data["schedule"]]
    asked = {name for one in places for key in _KEYS for name in one.get(key, ()) if "@" in name}
    if not asked:
        return loaded, tuple(overrides)
    if "RANK" in os.environ or machines > 1:
        raise ConfigError(
            f"data.sources names {min(asked)}: a rank that torchrun or srun started, or one "
            f"machine of several, must not ask the catalogue by itself; give the folder: "
            f"kimi-pretrain data catalog resolve {min(asked)} --root {loaded.data.root}"
        )
    names = _resolve(loaded, asked, {} if run_dir is None else _resolved_before(run_dir))
    for one in places:
        for key in _KEYS:
            if key in one:
                one[key] = _renamed(one[key], names, f"data.{key}")
    data["asked"] |= {folder: name for name, folder in sorted(names.items())}
    keys = (*_KEYS, "schedule", "asked")
    pinned = (*overrides, *(f"data.{key}={one_line(data[key])}" for key in keys if data[key]))
    return load_config(config, pinned), pinned


def _resolve(config: Config, asked: set[str], before: Mapping[str, str]) -> dict[str, str]:
    """Return the folder of each requested name."""
    names = {name: before[name] for name in asked & before.keys()}
    if missing := sorted(asked - before.keys()):
        from data_pipeline.store.open import open_store

        data = config.data
        store = open_store(data.root, endpoint=data.endpoint, patience=data.patience)
        names |= {name: folder_of(name, store, data.endpoint) for name in missing}
    for name in sorted(asked & before.keys()):
        typer.echo(f"{name}: {before[name]}, as this run began", err=True)
    return names


def folder_of(name: str, store: "Store", endpoint: str | None) -> str:
    """Return the folder under a store's root for a version's name.

    Raises:
        CatalogError, IndexMismatch, StoreError: see `catalog.lookup.resolve`.
    """
    try:
        from data_pipeline.catalog.engine import Catalog
        from data_pipeline.catalog.lookup import resolve

        catalog = Catalog()
    except ModuleNotFoundError as error:
        raise needs_extra(error) from None
    found = resolve(catalog, store, endpoint, name)
    catalog.close()
    told = "" if found.state == "active" else f", which is {found.state}"
    typer.echo(f"{name}: {found.version}, {store.uri}/{found.name}{told}", err=True)
    return found.name


def open_version(
    name: str, root: str | None = None, endpoint: str | None = None
) -> "tuple[Store, str]":
    """Open the store of a version in any state, as the catalogue locates it.

    Args:
        name: captions@3 or captions@active.
        root: use only the copy under this root (`Store.uri`); None: any readable copy.
        endpoint: of an object store, instead of the registered endpoint.

    Returns:
        The store at the root of the copy, and the copy's folder.

    Raises:
        CatalogError: no such version.
        ValueError: no copy can be read; the message gives the reason for each.
    """
    from data_pipeline.index.manifest import IndexMismatch, expect, read_manifest
    from data_pipeline.store.open import StoreError, open_store

    try:
        from data_pipeline.catalog.engine import Catalog
        from data_pipeline.catalog.lookup import copies
    except ModuleNotFoundError as error:
        raise needs_extra(error) from None
    catalog = Catalog()
    try:
        found = copies(catalog, name)
    finally:
        catalog.close()
    problems = []
    for copy in found:
        if root is not None and copy.root != root:
            problems.append(f"it lies under {copy.root}, not under {root}")
            continue
        try:
            store = open_store(copy.root, endpoint=endpoint or copy.endpoint or None)
            content = read_manifest(store, copy.folder)["content_hash"]
            expect(f"{copy.root}/{copy.folder}", "content_hash", content, copy.content)
        except (StoreError, IndexMismatch) as error:
            problems.append(str(error))
            continue
        typer.echo(f"{name}: {copy.version}, {store.uri}/{copy.folder}", err=True)
        return store, copy.folder
    raise ValueError(f"{name}: no copy of it can be read: {'; '.join(problems)}")


def needs_extra(error: ModuleNotFoundError, what: str = "the catalogue") -> ValueError:
    """Return the error for a missing package of the extra `platform`."""
    return ValueError(
        f"{what} needs {error.name}, which is not installed: pip install 'kimi-pretrain[platform]'"
    )


def _resolved_before(run_dir: Path) -> dict[str, str]:
    """Return name -> folder as first resolved by the run of this folder."""
    file = run_dir / "config.yaml"
    noted = read_yaml(file).get("data", {}).get("asked") if file.is_file() else None
    return {name: folder for folder, name in (noted or {}).items()}


def _renamed(values: Mapping[str, Any], names: Mapping[str, str], where: str) -> dict[str, Any]:
    """Return values by folder, in the given order."""
    renamed: dict[str, Any] = {}
    for name, value in values.items():
        folder = names.get(name, name)
        if folder in renamed:
            raise ConfigError(f"{where}: {name} is {folder}, which is named there already")
        renamed[folder] = value
    return renamed
