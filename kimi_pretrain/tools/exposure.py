"""Exposure: finds the steps and rows of a run that used given samples.

No log of samples is needed, and no data bytes are read: the steps of the run folder are planned
again from its config.yaml, its mixtures, its quarantine and its tombstones.json. tombstones.json
records the step from which each sample was removed; the current lists and manifests do not matter.
Each checkpoint that still exists records the data position at its step; if a plan disagrees with
one, there is no result but an error. Samples are found by shard and offset, so a run also shows up
if it drew them from a source that was extended or reindexed after they were ingested.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_pipeline.access import open_data
from data_pipeline.govern.redact import held
from data_pipeline.index.columns import SourceIndex
from data_pipeline.index.manifest import (
    RUN_BEGAN_AT,
    RUN_MIXTURES,
    RUN_SOURCES,
    RUN_TOMBSTONES,
    read_index,
    sources_at,
)
from data_pipeline.names import did_you_mean, listed
from data_pipeline.plan.change import renumbered
from data_pipeline.plan.planner import GlobalPlan, Planner, State
from data_pipeline.plan.tombstones import (
    Tombstones,
    recorded_tombstones,
    samples_of,
    tombstones_of,
)
from data_pipeline.store.open import Store
from kimi_pretrain.checkpoint.storage_read import open_place
from kimi_pretrain.config import Config, load_config
from kimi_pretrain.reliability.run_history import METRICS, noted_place
from kimi_pretrain.reliability.status import read_status
from kimi_pretrain.telemetry.jsonl import first_step, last_step

QUARANTINE = "quarantine.jsonl"
HELDOUT = "heldout.jsonl"
# Keys of a loader state that give the data position.
_WHERE = ("window", "row", "opened", "step", "tokens")
# Keys of a loader state that a change of mixture may change.
_DATA = ("manifest", "sources", "packing")
_MOST = 1 << 20  # the largest data.max_quarantined that a configuration may have


class Use(NamedTuple):
    """One use of a sample: step (from 1), row (from 0), and the part of a split text.

    `masked`: the sample could not be read, so its loss did not count.
    """

    step: int
    row: int
    source: str
    key: str
    part: int
    epoch: int
    masked: bool


@dataclass
class Exposure:
    """The uses of some samples in a run.

    Attributes:
        run: the run's folder.
        first, last: first and last trained step; 0 if there is none.
        uses: sorted by step and row.
        heldout: held-out sources, of any start of the run, that contain such samples; validations
            read them.
        untold: held-out sources that no longer exist, so their samples are unknown.
    """

    run: str
    first: int = 0
    last: int = 0
    uses: list[Use] = field(default_factory=list)
    heldout: list[str] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)


def exposure(
    run_dir: Path,
    wanted: Mapping[str, Sequence[str]],
    progress: Callable[[int, int], None] = lambda step, last: None,
) -> Exposure:
    """Return the uses of samples in a run.

    Args:
        run_dir: folder of the run.
        wanted: source -> keys, for sources under the root of the run's data.
        progress: called with the current step and the last step.

    Raises:
        ValueError, IndexMismatch, StoreError, CheckpointError: the run folder or its sources have
            changed, so its steps cannot be planned again, or neither the run nor its root knows a
            source. The message names the difference.
    """
    if not (config := _config_of(run_dir)):
        return Exposure(str(run_dir))
    found, states = Exposure(str(run_dir), *_steps(run_dir)), _states(run_dir, config)
    found.last = max(found.last, _done(run_dir), *(one["step"] for one in states[-1:]))
    if not found.last and not (run_dir / HELDOUT).is_file():
        return found
    store = _open(config)
    _check_names(run_dir, config, store, wanted)
    there = held(store, wanted)
    found.heldout, found.untold = _held_out(run_dir, store, there)
    if not found.last or not {*there} & {*config.data.source_names}:
        return found
    planner, state, masked = _replay(run_dir, config, store, states)
    anchors = {one["step"]: one for one in states}
    for step in range(state["step"] + 1, found.last + 1):
        plan, state = planner.plan(state)
        _compare(run_dir, state, anchors.get(step))
        if step >= found.first:
            found.uses += _uses(planner, plan, there, masked)
        progress(step, found.last)
    return found


def known_names(run_dir: Path) -> set[str]:
    """Return the names of sources that a run or the root of its data knows.

    They include sources that were garbage-collected: the run recorded their names, or their folders
    still hold shards that other sources use.

    Raises:
        ValueError, StoreError: the run folder or its root cannot be read.
    """
    config = _config_of(run_dir)
    return _noted_names(run_dir, config) | ({*_open(config).list_folders()} if config else set())


def replay(run_dir: Path, config: Config, store: Store) -> tuple[Planner, State]:
    """Return the planner of a run with its quarantine, and the state before the run's first step.

    Args:
        run_dir: folder of the run.
        config: from its config.yaml.
        store: of its data.

    Raises:
        ValueError, IndexMismatch, StoreError, CheckpointError: as in `exposure`.
    """
    return _replay(run_dir, config, store, _states(run_dir, config))[:2]


def _replay(
    run_dir: Path, config: Config, store: Store, states: Sequence[State]
) -> tuple[Planner, State, set[tuple[int, int, int]]]:
    """Return the result of `replay` and (step from 0, source, sample) of all unreadable samples."""
    indices = [read_index(store, name) for name in config.data.source_names]
    planner = _planner(run_dir, config, indices)
    begin = _begin(run_dir, config, planner)
    return planner, begin, _quarantine(run_dir, planner, [begin, *states[-1:]])


def _config_of(run_dir: Path) -> Config | None:
    """Return a run's configuration; None if its start only recorded its sources and did no step."""
    files = (run_dir / "config.yaml", run_dir / METRICS)
    return load_config(files[0]) if any(file.is_file() for file in files) else None


def _open(config: Config) -> Store:
    return open_data(config.data.replace(cache=None, requests_per_second=None))


def _noted_names(run_dir: Path, config: Config | None) -> set[str]:
    """Return the sources that a run recorded for any use, or that its configuration names."""
    noted = {one["name"] for one in _noted(run_dir)}
    return noted if config is None else noted | {*config.data.source_names, *config.data.heldout}


def _noted(run_dir: Path) -> list[dict[str, Any]]:
    """Return what a run has noted of its sources.

    Raises:
        ValueError: the file is not as a run writes it.
    """
    file = run_dir / RUN_SOURCES
    try:
        noted: list[dict[str, Any]] = json.loads(file.read_text())
        for one in noted:
            _ = one["name"], one["use"], one["content_hash"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{file}: expected what a run writes of its sources; restore it from a backup"
        ) from None
    return noted


def _check_names(
    run_dir: Path, config: Config, store: Store, wanted: Mapping[str, Sequence[str]]
) -> None:
    """Raise if a source of the run or of the samples is missing; 0 uses would be a wrong answer."""
    here, noted = {*sources_at(store)}, _noted_names(run_dir, config)
    if gone := sorted({*config.data.source_names} - here):
        raise ValueError(
            f"{run_dir}: its uses cannot be told: it drew from {listed(gone)}, not under "
            f"{store.uri} any more, so its steps cannot be planned again; restore the source"
        )
    missing = sorted({*wanted} - here)
    if known := [name for name in missing if name in noted | {*store.list_folders()}]:
        raise ValueError(
            f"{run_dir}: uses of samples of {listed(known)} cannot be told: under {store.uri} "
            "there is no finished source of this name, or no longer; restore it, or name the "
            "samples by a source that holds the same shards"
        )
    if missing:
        raise ValueError(
            f"{run_dir}: neither this run nor {store.uri} knows a source {missing[0]!r}; "
            + did_you_mean(missing[0], sorted(here | noted))
        )


def _held_out(
    run_dir: Path, store: Store, there: Mapping[str, Sequence[int]]
) -> tuple[list[str], list[str]]:
    """Return the held-out sources of all starts that contain samples, and those that are gone."""
    used = {one["name"]: one for one in _noted(run_dir) if one["use"] == "heldout"}
    here = {*sources_at(store)}
    same = {name for name in used if name in here and _same_data(used[name], store)}
    return sorted(same & {*there}), sorted({*used} - same)


def _same_data(noted: Mapping[str, Any], store: Store) -> bool:
    """Return whether a source still has the content that a run recorded, apart from redactions.

    This reads the index as well, because a manifest alone may claim any content.
    """
    index = read_index(store, noted["name"])
    return noted.get("made_as", noted["content_hash"]) in (index.content_hash, index.identity)


def _uses(
    planner: Planner,
    plan: GlobalPlan,
    there: Mapping[str, Sequence[int]],
    masked: set[tuple[int, int, int]],
) -> list[Use]:
    """Return the uses of samples in one step."""
    table, hits = plan.samples, np.zeros(len(plan.samples), np.bool_)
    for number, index in enumerate(planner.indices):
        if numbers := there.get(index.name):
            hits |= (table.source == number) & np.isin(table.index, numbers)
    uses = []
    for at in np.flatnonzero(hits).tolist():
        source, sample = int(table.source[at]), int(table.index[at])
        index = planner.indices[source]
        where = (plan.step + 1, int(table.row[at]), index.name, index.key_of(sample))
        bad = (plan.step, source, sample) in masked
        uses.append(Use(*where, int(table.part[at]), int(table.epoch[at]), bad))
    return uses


def _steps(run_dir: Path) -> tuple[int, int]:
    """Return the first and the last step of metrics.jsonl; (0, 0) if there is none."""
    first, last = (find(run_dir / METRICS) for find in (first_step, last_step))
    return first or 0, last or 0


def _done(run_dir: Path) -> int:
    """Return the last step of status.json, where it is the run's own; 0 of a run that did none.

    It is written, too, where metrics.jsonl could not be, or is lost.
    """
    status, file = read_status(run_dir), run_dir / RUN_BEGAN_AT
    began = json.loads(file.read_text())["step"] if file.is_file() else 0
    return status.step if status is not None and status.step > began else 0


def _states(run_dir: Path, config: Config) -> list[State]:
    """Return the loader states of the run's checkpoints by step, with current source numbers."""
    where = noted_place(run_dir) or config.checkpoint.place or str(run_dir / "checkpoints")
    place = open_place(where)
    if place.folder is not None and not place.folder.is_dir():
        return []
    try:
        found = [place.checkpoint(step).manifest().state.loader for step in place.steps()]
        return [renumbered(state, config.data.source_names) for state in found]
    finally:
        place.close()


def _planner(run_dir: Path, config: Config, indices: Sequence[SourceIndex]) -> Planner:
    """Return the planner of the run; it still draws samples redacted after the last start."""
    file = run_dir / RUN_SOURCES
    noted = {one["name"]: one for one in _noted(run_dir) if one["use"] == "train"}
    for index in indices:
        was = noted.get(index.name)
        known = {index.content_hash, index.identity}
        if was is None or was.get("made_as", was["content_hash"]) not in known:
            told = "is not in it" if was is None else f"was {was['content_hash'][:12]}"
            raise ValueError(
                f"{file}: source {index.name!r} {told}, under {config.data.root} it is "
                f"{index.identity[:12]}: its steps cannot be planned again; restore the source"
            )
    data = config.data.replace(max_quarantined=_MOST)
    return Planner(indices, data, _tombstones(run_dir, config, indices))


def _tombstones(run_dir: Path, config: Config, indices: Sequence[SourceIndex]) -> Tombstones:
    """Return the removed samples and the steps of their removal, as the run folder records them."""
    file = run_dir / RUN_TOMBSTONES
    if file.is_file():
        return recorded_tombstones(str(file), file.read_text(), indices)
    why = [f"samples are redacted in {index.name!r}" for index in indices if index.redacted]
    if config.data.tombstones is not None:
        why.append(f"data.tombstones names {config.data.tombstones}")
    if why:
        raise ValueError(
            f"{file} is missing: {', '.join(why)}, and nobody knows from which step on this run "
            "drew without them: its rows cannot be told; restore the file from a backup"
        )
    return tombstones_of(config.data, indices)


def _quarantine(
    run_dir: Path, planner: Planner, states: Sequence[State]
) -> set[tuple[int, int, int]]:
    """Repeat the run's quarantine in the planner; return (step from 0, source, sample) per fault.

    Args:
        states: the run's first state, which may inherit a quarantine, and its newest.
    """
    number = {index.name: at for at, index in enumerate(planner.indices)}
    faults = {(int(c), int(a), int(b)) for one in states for a, b, c in one["quarantine"]}
    file = run_dir / QUARANTINE
    # What follows the last end of a line was being written when the run was killed.
    lines = file.read_text().split("\n")[:-1] if file.is_file() else []
    for at, line in enumerate(lines, 1):
        step, source, sample = 0, 0, -1
        with suppress(ValueError, KeyError, TypeError):
            one = json.loads(line)
            step, source = int(one["step"]), number[one["source"]]
            [sample] = samples_of(planner.indices[source], [one["key"]]).tolist()
        if sample < 0:
            raise ValueError(
                f"{file}, line {at}: {line[:120]!r} is no sample of this run's sources; restore "
                "the file from a backup: its rows cannot be told without it"
            )
        faults.add((step - 1, source, sample))
    for step, source, sample in sorted(faults):
        planner.quarantine(source, sample, step)
    return faults


def _history(run_dir: Path, planner: Planner) -> State:
    """Return the mixture state from mixtures.json of a run whose data changed mid-run, else {}."""
    file = run_dir / RUN_MIXTURES
    noted = json.loads(file.read_text()) if file.is_file() else {"changes": []}
    if not noted["changes"]:
        return {}
    names = planner.config.source_names
    blend = [[start, [given.get(name, 0) for name in names]] for start, given in noted["blend"]]
    return {"blend": blend, "changes": noted["changes"]}


def _begin(run_dir: Path, config: Config, planner: Planner) -> State:
    """Return the loader's state before the run's first step."""
    history, here, file = _history(run_dir, planner), planner.state_dict(), run_dir / RUN_BEGAN_AT
    first = _steps(run_dir)[0]
    if not file.is_file():
        if first > 1 or config.train.start_optimizer == "keep":
            raise ValueError(
                f"{file} is missing: the data of this run go on from another run's, and nobody "
                "knows from where, so its steps cannot be planned again; restore the file"
            )
        return here | history
    began = renumbered(json.loads(file.read_text()), planner.config.source_names)
    if first and began["step"] + 1 != first:
        raise ValueError(
            f"{file} is of step {began['step']}, but {METRICS} begins with step {first}: its steps "
            "are of two courses and cannot be planned again"
        )
    # Its sources were compared with sources.json; more may have been added mid-run.
    return began | (history and {key: here[key] for key in _DATA} | history)


def _compare(run_dir: Path, state: State, saved: State | None) -> None:
    """Raise if a planned state differs from the state that a checkpoint saved."""
    if saved is None:
        return
    mine, was = ({key: one.get(key) for key in _WHERE} for one in (state, saved))
    if was["tokens"] is None:  # saved by an earlier version, which did not count tokens
        mine["tokens"] = None
    if mine != was:
        raise ValueError(
            f"{run_dir}: its checkpoint of step {saved['step']} is at {was}, by its config.yaml it "
            f"would be at {mine}: its keys of `data` were changed on the way, so its steps cannot "
            "be planned again"
        )
