"""What a run leaves behind: resolved config, versions, git state, metrics, logs, a trace.

Rank 0 writes everything but the logs, of which each rank has its own. No credential is ever
written: the config holds none, and the environment is not recorded.
"""

import json
import logging
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from kimi_pretrain.config import Config, dump_config
from kimi_pretrain.dep.memory import GIB
from kimi_pretrain.guard import finite
from kimi_pretrain.step_lines import forget_after
from kimi_pretrain.telemetry.exposed import exposed
from kimi_pretrain.telemetry.line import RankRecord
from kimi_pretrain.telemetry.phases import Span, phase_of

PACKAGES = (
    "kimi-pretrain", "torch", "megatron-core", "numpy", "pillow", "av", "boto3", "tiktoken",
    "transformer-engine",
)  # fmt: skip

NOT_DRAWN = ("step", "rank", "mean")
# Lists with a number for each layer; other lists (of ranks) are not drawn.
BY_LAYER = ("max_logits",)


def log_to(folder: Path, rank: int) -> logging.Logger:
    """Send this process's log to `logs/rank_<rank>.log`; warnings also to the terminal."""
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(logs / f"rank_{rank}.log")
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


def describe_environment(folder: Path, config: Config) -> None:
    """Write config.yaml, versions.json, and git.json with diff.patch where there is a checkout."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_config(config))
    versions = {name: _version(name) for name in PACKAGES}
    versions |= {"python": platform.python_version(), "cuda": torch.version.cuda}
    (folder / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")
    checkout = Path(__file__).parent.parent
    if (checkout / ".git").exists():
        commit = _git(checkout, "rev-parse", "HEAD").strip()
        difference = _git(checkout, "diff", "HEAD")
        state = {"commit": commit, "clean": not difference}
        (folder / "git.json").write_text(json.dumps(state, indent=1) + "\n")
        (folder / "diff.patch").write_text(difference)


class MetricsWriter:
    """Appends one line a step to metrics.jsonl, the same numbers to TensorBoard, and a bar.

    Every line is flushed when it is written: a killed run keeps all steps it finished. Steps that
    an earlier run of the same folder did after the checkpoint are done again: their lines go.
    """

    def __init__(self, folder: Path, first_step: int, steps: int, *, show_bar: bool = True):
        for name in ("metrics.jsonl", "quarantine.jsonl", "anomalies.jsonl"):
            forget_after(folder / name, first_step)
        self._lines = (folder / "metrics.jsonl").open("a", buffering=1)
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TimeRemainingColumn(),
            disable=not show_bar,
        )
        self._task = self._bar.add_task("training", total=steps, completed=first_step, loss=0.0)
        self._bar.start()

    def write(self, line: dict[str, Any]) -> None:
        """Record one step; `line` holds at least "step" and "loss".

        A number that is not finite becomes null, which every reader of JSON understands.
        """
        self._bar.update(self._task, completed=line["step"], loss=line["loss"])
        line = finite(line)
        self._lines.write(json.dumps(line, allow_nan=False) + "\n")
        for tag, value in scalars(line).items():
            self._board.add_scalar(tag, value, line["step"])

    def close(self) -> None:
        """Flush and close everything."""
        self._bar.stop()
        self._lines.close()
        self._board.close()


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Return what TensorBoard draws of a line: tag -> number.

    What is inside goes under "outside/inside". Of the ranks' numbers only the largest is drawn,
    under the plain name; whose it is, the mean, the loads of all ranks and what was not measured
    are in metrics.jsonl alone. A list by layer becomes one curve a layer.
    """
    found: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            for inner, number in scalars(value).items():
                found[name if inner == "max" else f"{name}/{inner}"] = number
        elif name in BY_LAYER:
            layers = {f"{name}/layer_{layer:02d}": number for layer, number in enumerate(value)}
            found |= {tag: number for tag, number in layers.items() if number is not None}
        elif isinstance(value, int | float) and name not in NOT_DRAWN:
            found[name] = value
    return found


def write_trace(
    file: Path, everyone: Sequence[RankRecord], scopes: Iterable[NDArray[np.int64]] = ()
) -> None:
    """Write one step's phases of all ranks as a Chrome trace (chrome://tracing, Perfetto).

    Every rank is a process; "exposed encoder" is one more, with the stretches of the step that are
    the encoder's alone. The peak memory of a phase is among its arguments.

    Args:
        everyone: the records of all ranks, in their order.
        scopes: the ranks that share their media, as for `exposed`.
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
    file.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def _phase_events(rank: int, record: RankRecord) -> list[dict[str, Any]]:
    events = []
    for name, span in record.spans.items():
        phase = phase_of(name)
        event = _event(rank, phase, span, "phase")
        if (peak := record.peak_bytes.get(phase)) is not None:
            event["args"] = {"peak GiB": peak / GIB, "first stage": record.first_stage}
        events.append(event)
    return events


def _event(row: int, name: str, span: Span, category: str) -> dict[str, Any]:
    start, end = span
    times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
    return {"name": name, "cat": category, "ph": "X", "pid": row, "tid": 0, **times}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(checkout: Path, *arguments: str) -> str:
    command = ["git", "-C", str(checkout), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:  # no git here: the run does not need it
        return f"unknown: {error}"
    return done.stdout
