"""Records which versions the runs used, and at which steps, from the files in the run folders.

A run never accesses the catalogue while it trains. Rank 0 writes `sources.json` to the run folder,
and metrics.jsonl has the number of tokens trained per source for each step.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Connection, delete, insert, select

from data_pipeline.catalog.audit import append
from data_pipeline.catalog.engine import Catalog, CatalogError
from data_pipeline.catalog.tables import RUN, RUN_INPUT
from data_pipeline.index.manifest import RUN_SOURCES
from data_pipeline.names import did_you_mean


class Run(NamedTuple):
    """A run as read from its folder: rows of the tables `run` and `run_input`."""

    folder: str
    state: str
    step: int
    inputs: list[dict[str, Any]]


def read_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        ValueError: a file is malformed; names it.
    """
    where = str(folder.resolve())
    try:
        used = json.loads((folder / RUN_SOURCES).read_text())
        status = folder / "status.json"
        stands = json.loads(status.read_text()) if status.is_file() else {}
        steps = {one["name"]: _Steps() for one in used if one["use"] == "train"}
        last = 0
        for line in _lines(folder / "metrics.jsonl"):
            last = line["step"]
            for name, tokens in line["loss_tokens_by_source"].items():
                if tokens and name in steps:
                    steps[name].add(last, tokens)
        inputs = [
            {
                "folder": where,
                **{key: one[key] for key in ("name", "use", "asked", "content_hash")},
                "index_sha256": one["index_sha256"],
                **vars(steps.get(one["name"], _Steps()) if one["use"] == "train" else _Steps()),
            }
            for one in used
        ]
        return Run(where, str(stands.get("state", "unknown")), last, inputs)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        told = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{folder}: not as a run writes its files: {told}") from None


def scan(catalog: Catalog, runs: Sequence[Run]) -> None:
    """Record runs, replacing earlier records of them; all of them or none."""
    with catalog.write() as connection:
        for run in runs:
            connection.execute(delete(RUN_INPUT).where(RUN_INPUT.c.folder == run.folder))
            connection.execute(delete(RUN).where(RUN.c.folder == run.folder))
            values = {"folder": run.folder, "state": run.state, "step": run.step}
            connection.execute(insert(RUN).values(**values))
            if run.inputs:
                connection.execute(insert(RUN_INPUT), run.inputs)


def forget(catalog: Catalog, folder: str) -> tuple[str, int]:
    """Remove a run and record this in the audit log; return its folder and its number of sources.

    Raises:
        CatalogError: no run with this folder is known; suggests the nearest name.
    """
    with catalog.write() as connection:
        known = connection.execute(select(RUN).order_by(RUN.c.folder)).all()
        wanted = {folder, str(Path(folder).resolve())}
        found = next((run for run in known if run.folder in wanted), None)
        if found is None:
            hint = did_you_mean(folder, [run.folder for run in known])
            raise CatalogError(f"the catalogue knows no run {folder!r}; {hint}")
        mine = RUN_INPUT.c.folder == found.folder
        used = connection.execute(select(RUN_INPUT).where(mine).order_by("name", "use")).all()
        connection.execute(delete(RUN_INPUT).where(mine))
        connection.execute(delete(RUN).where(RUN.c.folder == found.folder))
        told = [[one.name, one.use, one.content_hash, one.steps] for one in used]
        what = {"run_forgotten": found.folder, "state": found.state, "step": found.step}
        append(connection, what | {"used": told})
    return found.folder, len(used)


def unfinished_with(connection: Connection, content: str) -> list[str]:
    """Return the folders of unfinished runs that use a content, sorted."""
    query = (
        select(RUN.c.folder)
        .join(RUN_INPUT, RUN_INPUT.c.folder == RUN.c.folder)
        .where(RUN_INPUT.c.content_hash == content, RUN.c.state != "finished")
    )
    return sorted(set(connection.execute(query).scalars()))


class _Steps:
    """Steps in which a source was trained on."""

    def __init__(self) -> None:
        self.steps, self.tokens = 0, 0
        self.first_step: int | None = None
        self.last_step: int | None = None

    def add(self, step: int, tokens: int) -> None:
        self.steps += 1
        self.tokens += tokens
        self.first_step = step if self.first_step is None else self.first_step
        self.last_step = step


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield complete lines; a running job may not have finished writing the last line."""
    if not file.is_file():
        return
    with file.open() as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)
