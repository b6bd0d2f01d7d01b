"""Writes the run folder: resolved config, versions, git state, metrics, logs and a trace.

Rank 0 writes everything except the logs; each rank has its own log. No credential is ever written:
the config holds none, and the environment is not recorded.
"""

import hashlib
import io
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from tensorboard.compat.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.compat.proto.summary_pb2 import (
    Summary,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.summary.writer.record_writer import RecordWriter

from data_pipeline.index.manifest import (
    RUN_BEGAN_AT,
    RUN_MIXTURES,
    RUN_SOURCES,
    RUN_TOMBSTONES,
)
from kimi_pretrain.checkpoint.manifest import PACKAGES as MANIFEST_PACKAGES
from kimi_pretrain.checkpoint.manifest import installed_versions
from kimi_pretrain.config import GIB, Config, dump_config
from kimi_pretrain.reliability.anomaly_guard import finite
from kimi_pretrain.reliability.run_files import Appended, read_patiently, write_whole
from kimi_pretrain.reliability.run_history import BEGAN, METRICS
from kimi_pretrain.telemetry.console import StepDisplay
from kimi_pretrain.telemetry.diff_secrets import mask_diff
from kimi_pretrain.telemetry.exposed import exposed
from kimi_pretrain.telemetry.jsonl import abandoned, cut_after, first_step
from kimi_pretrain.telemetry.metrics import RankMetrics
from kimi_pretrain.telemetry.phases import BACKBONE, Span, phase_of

PACKAGES = (*MANIFEST_PACKAGES, "pillow", "av", "boto3", "tiktoken", "transformer-engine")

log = logging.getLogger("kimi_pretrain.telemetry.run_dir")

# Maximum size of the stored git diff.
DIFF_BYTES = 1 << 20
NOT_DRAWN = ("step", "rank", "mean")
# Values keyed by source names, which may be any word, even "max".
BY_SOURCE = ("loss_by_source", "loss_tokens_by_source", "loss_by_source_and_position")
History = Literal["own", "other", "none"]
# Lists with a number per layer; other lists (per rank) are not drawn.
BY_LAYER = ("max_logits",)


def log_to(folder: Path, rank: int) -> logging.Logger:
    """Send this process's log to `logs/rank_<rank>.log`; rank 0 also prints its warnings."""
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(logs / f"rank_{rank}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    logging.getLogger("megatron").setLevel(logging.WARNING)
    if rank == 0:
        terminal = logging.StreamHandler()
        terminal.setLevel(logging.WARNING)
        root.addHandler(terminal)
    return logging.getLogger("kimi_pretrain")


def describe_environment(
    folder: Path,
    config: Config,
    began_from: Mapping[str, Any] | None = None,
    sources: Sequence[Mapping[str, Any]] | None = None,
    mixtures: Mapping[str, Any] | None = None,
) -> None:
    """Write config.yaml and versions.json; in a git checkout also git.json and diff.patch.

    Args:
        folder: of the run.
        config: of the run.
        began_from: written to began_from.json if the run starts from weights of other runs'
            checkpoints; a resume leaves the file unchanged.
        sources: written to sources.json; from `data_pipeline.access.run_sources`.
        mixtures: written to mixtures.json, the mixture of all steps; from
            `data_pipeline.plan.report.mixtures`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "config.yaml", dump_config(config))
    if began_from:
        write_whole(folder / BEGAN, json.dumps(began_from, indent=1) + "\n")
    if sources is not None:
        write_whole(folder / RUN_SOURCES, json.dumps(sources, indent=1) + "\n")
    if mixtures is not None:
        write_whole(folder / RUN_MIXTURES, json.dumps(mixtures, indent=1) + "\n")
    versions = {**installed_versions(PACKAGES), "cuda": torch.version.cuda}
    write_whole(folder / "versions.json", json.dumps(versions, indent=1) + "\n")
    checkout = Path(__file__).parent.parent.parent
    if (checkout / ".git").exists():
        state, difference = git_state(checkout, keep_diff=config.train.keep_diff)
        write_whole(folder / "git.json", json.dumps(state, indent=1) + "\n")
        write_whole(folder / "diff.patch", difference)


def tell_sources(folder: Path, sources: Sequence[Mapping[str, Any]]) -> None:
    """Add the sources that a start is going to read to sources.json, before it reads them.

    Entries of an earlier start stay, because its steps were drawn with them. Once the run is built,
    `describe_environment` rewrites the file.

    Args:
        sources: from `data_pipeline.access.sources_ahead`.

    Raises:
        ValueError: the existing file is invalid, or the data of a held-out source have changed
            since this folder's validations.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known = _noted_sources(folder)
    if (folder / METRICS).is_file():
        _check_heldout(folder, known, sources)
    new = [one for one in sources if _use(one) not in {_use(other) for other in known}]
    if new:
        write_whole(folder / RUN_SOURCES, json.dumps([*known, *new], indent=1) + "\n")


def with_earlier_heldout(
    folder: Path, sources: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the sources of a resumed run, with the held-out sources of earlier starts."""
    here = {_use(one) for one in sources}
    known = [one for one in _noted_sources(folder) if one["use"] == "heldout"]
    return [*sources, *(one for one in known if _use(one) not in here)]


def note_beginning(folder: Path, state: Mapping[str, Any], history: History) -> None:
    """Store the loader state before the first step of a folder, unless its steps begin at step 1.

    With it, the steps can be planned again even if the checkpoint of that state is gone.

    Args:
        folder: of the run.
        state: of the loader, before this start's first step.
        history: as in `MetricsWriter`; call this before creating the writer.
    """
    file, first = folder / RUN_BEGAN_AT, first_step(folder / METRICS)
    if history != "none" and first is not None and first <= state["step"]:
        return  # steps before this start stay, so the stored state is still the first
    if state["step"]:
        write_whole(file, json.dumps(state) + "\n")
    else:
        file.unlink(missing_ok=True)


def _noted_sources(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of sources.json; empty if there is no file."""
    file = folder / RUN_SOURCES
    try:
        known: list[dict[str, Any]] = json.loads(read_patiently(file) or b"[]")
        for one in known:
            _use(one)
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file}: expected what a run writes of its sources; remove it") from None
    return known


def _use(source: Mapping[str, Any]) -> tuple[str, str]:
    return source["name"], source["use"]


def _check_heldout(
    folder: Path, known: Sequence[Mapping[str, Any]], sources: Sequence[Mapping[str, Any]]
) -> None:
    """Raise if a held-out source now has other data: validations would not be comparable."""
    before = {_use(one): one.get("made_as", one["content_hash"]) for one in known}
    for one in sources:
        was = before.get(_use(one), one["made_as"])
        if one["use"] == "heldout" and was != one["made_as"]:
            raise ValueError(
                f"data.heldout: source {one['name']!r} is {one['made_as'][:12]}, the run of "
                f"{folder} was validated with {was[:12]} under this name ({RUN_SOURCES}); give "
                "other data another name"
            )


def note_tombstones(folder: Path, record: Mapping[str, Any]) -> None:
    """Write tombstones.json: the samples removed from the run, and the steps of their removal.

    Call it after `MetricsWriter` has cut the lines of repeated steps, and before the first step.
    Then the file always matches the steps in metrics.jsonl.

    Args:
        folder: of the run.
        record: from `data_pipeline.plan.tombstones.Tombstones.record`.

    Raises:
        OSError: it cannot be written, so no step may be trained.
    """
    write_whole(folder / RUN_TOMBSTONES, json.dumps(record) + "\n")


def git_state(checkout: Path, *, keep_diff: bool = True) -> tuple[dict[str, Any], bytes]:
    """Return the state of the code that runs, and the diff of tracked files against the commit.

    At most DIFF_BYTES of the diff are kept, with likely secrets masked. The state has the SHA-256
    and the size of the whole diff, the number of masked lines, and the number of bytes left out.

    The state is "clean" if there is neither a diff nor an untracked module, which the diff does not
    cover. If git fails, for example in a checkout of another owner, "unknown" gives the reason, and
    "commit" and "clean" are null.
    """
    try:
        commit = _git(checkout, "rev-parse", "HEAD").decode().strip()
        difference, size, sha256 = _difference(checkout)
        untracked = _git(
            checkout, "ls-files", "-z", "--others", "--exclude-standard", "--", "*.py", "*.so"
        )
    except (OSError, subprocess.CalledProcessError) as error:  # the run does not need git
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        why = " ".join(os.fsdecode(said).split())
        log.warning("git does not say which code runs: %s", why)
        return {"commit": None, "clean": None, "unknown": why}, b""
    modules = sorted(name.decode(errors="replace") for name in untracked.split(b"\0") if name)
    state = {"commit": commit, "clean": not size and not modules, "untracked": modules}
    if not size:
        return state, b""
    kept, masked = mask_diff(difference) if keep_diff else (b"", 0)
    left_out = size - len(difference) if keep_diff else size
    about = {"sha256": sha256, "bytes": size, "masked_lines": masked, "left_out_bytes": left_out}
    return {**state, "diff": about}, kept


class MetricsWriter:
    """Appends one line per step to metrics.jsonl, and the same numbers to TensorBoard.

    Every line is written immediately, so a killed run keeps all finished steps. A full disk is
    logged and does not end the run (`Appended`). Steps that an earlier start did after the
    checkpoint are repeated: their lines move to metrics.abandoned.jsonl, and those of the other
    files likewise.

    Args:
        folder: of the run.
        first_step: number of steps done before.
        display: shows each step on stdout; None shows nothing.
        history: origin of the existing lines. "own": the run resumes from its own checkpoint, and
            lines up to `first_step` stay; "other": it starts from a checkpoint from elsewhere,
            so an existing validation at `first_step` used other weights; "none": it starts without
            a checkpoint, and all existing lines are from a start that saved nothing.
    """

    def __init__(
        self,
        folder: Path,
        first_step: int,
        display: StepDisplay | None = None,
        history: History = "own",
    ):
        for name in ("metrics.jsonl", "heldout.jsonl", "quarantine.jsonl", "anomalies.jsonl"):
            after = -1 if history == "none" else first_step
            if history == "other" and name == "heldout.jsonl":
                after = first_step - 1
            last = cut_after(folder / name, after)
            if last is not None:
                kept = abandoned(folder / name).name
                log.warning(
                    "%s goes on after step %d; lines of another start, up to step %d, are in %s",
                    name, first_step, last, kept,
                )  # fmt: skip
        self._lines = Appended(folder / "metrics.jsonl")
        self._heldout = Appended(folder / "heldout.jsonl")
        self._board = _Board(folder / "tensorboard", first_step + 1)
        self._display = display

    def write(self, line: dict[str, Any]) -> None:
        """Record one step; `line` holds at least "step", "loss" and "tokens".

        A non-finite number becomes null, which every JSON reader understands.
        """
        if self._display is not None:
            self._display.step(line)
        line = finite(line)
        self._lines.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._board.write(line["step"], scalars(line))

    def write_heldout(self, line: dict[str, Any]) -> None:
        """Record a validation in heldout.jsonl and under heldout/ in TensorBoard."""
        if self._display is not None:
            self._display.heldout(line)
        line = finite(line)
        self._heldout.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        drawn = scalars({name: value for name, value in line.items() if name != "kind"})
        self._board.write(line["step"], {f"heldout/{tag}": number for tag, number in drawn.items()})

    def close(self) -> None:
        """Flush and close everything."""
        if self._display is not None:
            self._display.close()
        self._lines.close()
        self._heldout.close()
        self._board.close()


class _Board:
    """Writes the curves of TensorBoard, whose own writer thread would end at the first error.

    TensorBoard discards an earlier run's curves from step `first` on.
    """

    def __init__(self, folder: Path, first: int):
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard's naming scheme: it reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._events = Appended(folder / name)
        self._add(Event(step=first, file_version="brain.Event:2"))
        self._add(Event(step=first, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add a point to each curve."""
        values = [Summary.Value(tag=tag, simple_value=number) for tag, number in numbers.items()]
        self._add(Event(step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Close the file."""
        self._events.close()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._events.write(record.getvalue())


class _LogFile(logging.FileHandler):
    """A log file; a full disk is reported once, not with a traceback for every line."""

    def __init__(self, file: Path):
        super().__init__(file)
        self._told = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Report an error in writing `record`."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._told:
            self._told = True
            print(f"{self.baseFilename}: {error.strerror}; some lines are lost", file=sys.stderr)


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the curves of a line for TensorBoard: tag -> number.

    Nested values get tags "outer/inner". For values per rank only the largest is drawn, under the
    plain name; its rank, the mean, the loads of all ranks and nulls are only in metrics.jsonl. A
    list by layer becomes one curve per layer.
    """
    found: dict[str, float] = {}
    for name, value in line.items():
        if name in BY_SOURCE and isinstance(value, Mapping):
            for source, inside in value.items():
                bins = inside if isinstance(inside, Mapping) else {None: inside}
                tags = {"/".join(filter(None, (name, source, at))): n for at, n in bins.items()}
                found |= {tag: number for tag, number in tags.items() if number is not None}
        elif isinstance(value, Mapping):
            for inner, number in scalars(value).items():
                found[name if inner == "max" else f"{name}/{inner}"] = number
        elif name in BY_LAYER:
            layers = {f"{name}/layer_{layer:02d}": number for layer, number in enumerate(value)}
            found |= {tag: number for tag, number in layers.items() if number is not None}
        elif isinstance(value, int | float) and name not in NOT_DRAWN:
            found[name] = value
    return found


def write_trace(
    file: Path, everyone: Sequence[RankMetrics], scopes: Iterable[NDArray[np.int64]] = ()
) -> None:
    """Write one step's phases of all ranks as a Chrome trace (chrome://tracing, Perfetto).

    Every rank is a process; one more process, "exposed encoder", shows the intervals of `exposed`.
    The args of a phase hold its peak memory. Vision work in bubbles and waits are drawn inside the
    backbone, and its args hold their seconds.

    Args:
        file: to write.
        everyone: metrics of all ranks.
        scopes: as in `exposed`.
    """
    found = exposed([record.spans for record in everyone], scopes)
    stretches = {"forward": found.forward, "backward": found.backward}
    rows = [_phase_events(rank, record) for rank, record in enumerate(everyone)]
    rows += [
        [_event(len(everyone), f"exposed encoder, {name}", span, "exposed")]
        for name, span in stretches.items()
        if span is not None
    ]
    events = [event for row in rows for event in row]
    begin = min(event["ts"] for event in events)
    for event in events:
        event["ts"] -= begin
    names = [f"rank {rank}" for rank in range(len(everyone))] + ["exposed encoder"]
    events += [
        {"name": "process_name", "ph": "M", "pid": number, "args": {"name": name}}
        for number, name in enumerate(names)
    ]
    write_whole(file, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def _phase_events(rank: int, record: RankMetrics) -> list[dict[str, Any]]:
    events = []
    for name, span in record.spans.items():
        phase = phase_of(name)
        event = _event(rank, phase, span, "phase")
        if (peak := record.peak_bytes.get(phase)) is not None:
            event["args"] = {"peak GiB": peak / GIB, "first stage": record.first_stage}
        if phase == BACKBONE and record.bubble_seconds is not None:
            event.setdefault("args", {}).update(record.bubble_seconds)
        events.append(event)
    sections = record.bubble_sections
    return events + [_event(rank, name, (a, b), "bubble") for name, a, b in sections]


def _event(row: int, name: str, span: Span, category: str) -> dict[str, Any]:
    start, end = span
    times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
    return {"name": name, "cat": category, "ph": "X", "pid": row, "tid": 0, **times}


def _difference(checkout: Path) -> tuple[bytes, int, str]:
    """Return the diff of tracked files, cut after DIFF_BYTES; the size and SHA-256 of all of it."""
    command = ["git", "-C", str(checkout), "diff", "--no-ext-diff", "--no-textconv", "HEAD"]
    kept, size, digest = bytearray(), 0, hashlib.sha256()
    with (
        TemporaryFile() as told,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=told) as process,
    ):
        assert process.stdout is not None
        while piece := process.stdout.read(1 << 16):
            digest.update(piece)
            size += len(piece)
            kept += piece[: DIFF_BYTES - len(kept)]
        code = process.wait()
        told.seek(0)
        if code:
            raise subprocess.CalledProcessError(code, command, stderr=told.read())
    whole = len(kept) if len(kept) == size else kept.rfind(b"\n") + 1
    return bytes(kept[:whole]), size, digest.hexdigest()


def _git(checkout: Path, *arguments: str) -> bytes:
    command = ["git", "-C", str(checkout), *arguments]
    return subprocess.run(command, capture_output=True, check=True).stdout
