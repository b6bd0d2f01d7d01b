"""Reads the rows or samples for `kimi-pretrain data show`, and renders its page."""

import json
from collections.abc import Sequence
from contextlib import closing
from itertools import zip_longest
from pathlib import Path
from typing import Any

from data_pipeline.access import open_data, open_tokenizer
from data_pipeline.index.columns import SourceIndex
from data_pipeline.index.manifest import RUN_MIXTURES, RUN_SOURCES, read_index
from data_pipeline.index.reads import medium_of, read_checked, read_samples
from data_pipeline.names import listed
from data_pipeline.plan.planner import Planner
from data_pipeline.store.open import Store
from kimi_pretrain.config import Config, find_config, load_config
from kimi_pretrain.reliability.anomaly_guard import sample_names
from kimi_pretrain.tools.exposure import replay
from launch.cli.sources import find_sample, open_sources
from launch.local.versions import load_pinned
from launch.pages.rows_page import Step, rows_page
from launch.pages.samples_page import StoredSample, samples_page
from launch.pages.step_reader import StepReader

# Keys of `data` that change how data are read, but not which data.
_APART = {
    *("root", "endpoint", "tokenizer", "requests_per_second", "patience", "cache"),
    *("workers", "fetch_threads", "prefetch_steps", "prefetch_bytes", "same_decoders"),
}


def find_anomaly(file: Path, step: int | None) -> dict[str, Any]:
    """Return an entry of a run's anomalies.jsonl.

    Args:
        file: the anomalies.jsonl.
        step: as in metrics.jsonl, counted from 1; None for the last entry.

    Raises:
        ValueError: the file has no entry of this step, no entry at all, or a malformed line.
        FileNotFoundError: no such file.
    """
    # Drops an unfinished last line: the run was killed while it wrote that line.
    whole = file.read_text().split("\n")[:-1]
    try:
        lines = [{**json.loads(line)} for line in whole]
        steps = ", ".join(str(line["step"]) for line in lines)
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file}: expected the anomalies of a run, a line each") from None
    if not lines:
        raise ValueError(f"{file} is empty")
    chosen = [line for line in lines if step in (None, line["step"])]
    if not chosen:
        raise ValueError(f"{file} has nothing of --step {step}; it has steps {steps}")
    return chosen[-1]


def show_rows(
    config: str,
    overrides: tuple[str, ...],
    step: int,
    rows: range,
    anomaly: dict[str, Any] | None = None,
) -> str:
    """Return the HTML page of some rows of a step; `read_rows` explains the arguments."""
    found = read_rows(config, overrides, step, rows, anomaly)
    title = f"Step {step}" if anomaly is None else _title(anomaly)
    shown = found.batch.row_ids
    return rows_page(found, f"{title}, rows {shown[0]} to {shown[-1]}")


def read_rows(
    config: str,
    overrides: tuple[str, ...],
    step: int,
    rows: range,
    anomaly: dict[str, Any] | None = None,
) -> Step:
    """Return some rows of a step, read like a single-process run reads them.

    Args:
        config: YAML file or preset, for a new run with this configuration; or the config.yaml in a
            run's folder, for that run with its mixtures, its quarantine and later redactions.
        overrides: `section.key=value`.
        step: number from 1, as in metrics.jsonl.
        rows: row numbers within the step; numbers beyond the last row are ignored.
        anomaly: entry of anomalies.jsonl; its step, as the run had it, replaces `step`.

    Raises:
        ValueError: the config cannot run, the step has no such row, its samples differ from those
            of the anomaly, or the run's steps cannot be planned again.
    """
    # A single step needs no worker processes, no prefetch and no cache on disk.
    whole, _ = load_pinned(config, overrides)
    run = _run_of(config, whole)
    if anomaly is None and run is None and whole.train.start_optimizer == "keep":
        raise ValueError(
            "--step: with train.start_optimizer=keep steps and data count on from the stage "
            "before, or the data begin anew among them, which no configuration says; give that of "
            "the run, RUN_DIR/config.yaml"
        )
    data = whole.data.replace(workers=0, prefetch_steps=0, cache=None)
    if rows.start >= data.rows_per_step:
        raise ValueError(f"--first-row {rows.start}: a step has {data.rows_per_step} rows")
    rows = range(rows.start, min(rows.stop, data.rows_per_step))

    store = open_data(data)
    tokenizer, begin = open_tokenizer(data, store), None
    if run is not None:
        planner, begin = replay(run, whole.model_copy(update={"data": data}), store)
    else:
        planner = Planner([read_index(store, name) for name in data.source_names], data)
    with closing(StepReader(planner, store, tokenizer, data.fetch_threads, begin)) as reader:
        if anomaly is not None:
            if run is None:
                planner.load_state_dict(anomaly["loader"])
            state = anomaly["loader"]
        elif run is not None:
            state = reader.before(step - 1)
        else:
            state = planner.state_at(step - 1)
        found = reader.read(state, rows)
        if anomaly is not None:
            _check_samples(found, anomaly)
    return found


def _run_of(config: str, whole: Config) -> Path | None:
    """Return the run folder of a config.yaml, or None if its data differ from the run's.

    Raises:
        ValueError: the run's data changed midway, and overrides change them again.
    """
    file = find_config(config)
    if file.name != "config.yaml" or not (file.parent / RUN_SOURCES).is_file():
        return None
    mine, its = (one.data.model_dump(exclude=_APART) for one in (whole, load_config(file)))
    if mine == its:
        return file.parent
    mixtures = file.parent / RUN_MIXTURES
    if mixtures.is_file() and json.loads(mixtures.read_text())["changes"]:
        keys = listed(f"data.{key}" for key in its if mine[key] != its[key])
        raise ValueError(
            f"{keys}: the run of {file.parent} went over to other data on the way, so its steps "
            "are shown as they were, and its config.yaml is not that of one that would begin "
            "anew: leave the overrides out"
        )
    return None


def _check_samples(step: Step, anomaly: dict[str, Any]) -> None:
    """Raise a ValueError if the samples differ from those that the run recorded."""
    pairs = zip_longest(sample_names(step.batch.plan, step.indices), anomaly["samples"])
    for place, (found, wanted) in enumerate(pairs):
        if found != wanted:
            raise ValueError(
                f"step {anomaly['step']}: sample {place} of the batch was {wanted}, with this "
                f"configuration it is {found}; give the run's own config.yaml"
            )


def _title(anomaly: dict[str, Any]) -> str:
    loss, norm = anomaly["loss"], anomaly["grad_norm"]
    return (
        f"Step {anomaly['step']} of metrics.jsonl: {anomaly['kind']}, loss {loss}, gradient norm "
        f"{norm} (null: not finite), {anomaly['action']}"
    )


def show_samples(
    uri: str, endpoint: str | None, source: str, keys: Sequence[str], first: int
) -> str:
    """Return the HTML page of some samples of a source.

    Args:
        uri: root of the source.
        endpoint: endpoint of the object store; None uses the environment's.
        source: name of the source.
        keys: keys of the samples; if empty, the `first` samples are shown.

    Raises:
        ValueError: no such source or sample.
        IndexMismatch: the bytes of a sample do not match the index.
    """
    store, (name,) = open_sources(uri, endpoint, [source])
    index = read_index(store, name)
    numbers = [find_sample(index, key) for key in keys]
    numbers = numbers or list(range(min(first, index.num_samples)))
    documents = read_samples(store, index, numbers)
    samples = [
        StoredSample(number, document, _files(store, index, number))
        for number, document in zip(numbers, documents, strict=True)
    ]
    return samples_page(index, samples, f"Samples of {name}")


def _files(store: Store, index: SourceIndex, number: int) -> dict[int, bytes]:
    """Return {file number: bytes} of a sample's media."""
    lines = [
        line
        for line in range(int(index.item_ptr[number]), int(index.item_ptr[number + 1]))
        if index.item_chunk[line] == 0
    ]
    bodies = read_checked(store, [medium_of(index, line) for line in lines])
    return {int(index.item_media[line]): body for line, body in zip(lines, bodies, strict=True)}
