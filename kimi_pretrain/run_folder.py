"""What a run leaves behind: resolved config, versions, git state, metrics, logs, a trace.

Rank 0 writes everything but the logs, of which each rank has its own. No credential is ever
written: the config holds none, and the environment is not recorded.
"""

import json
import logging
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from kimi_pretrain.config import Config, dump_config

PACKAGES = (
    "kimi-pretrain", "torch", "megatron-core", "numpy", "pillow", "av", "boto3", "tiktoken",
    "transformer-engine",
)  # fmt: skip


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
        for name in ("metrics.jsonl", "quarantine.jsonl"):
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
        """Record one step; `line` holds at least "step" and "loss"."""
        self._lines.write(json.dumps(line) + "\n")
        for name, value in line.items():
            if isinstance(value, int | float) and name != "step":
                self._board.add_scalar(name, value, line["step"])
        for name, seconds in line.get("phase_seconds", {}).items():
            self._board.add_scalar(f"phase_seconds/{name}", seconds["max"], line["step"])
        self._bar.update(self._task, completed=line["step"], loss=line["loss"])

    def close(self) -> None:
        """Flush and close everything."""
        self._bar.stop()
        self._lines.close()
        self._board.close()


def forget_after(file: Path, step: int) -> None:
    """Drop the lines of a JSON-lines file that belong to later steps, and a torn last line."""
    if not file.is_file():
        return
    kept = []
    for line in file.read_text().splitlines(keepends=True):
        if line.endswith("\n") and json.loads(line)["step"] <= step:
            kept.append(line)
    file.write_text("".join(kept))


def write_trace(file: Path, spans_of_rank: list[dict[str, tuple[float, float]]]) -> None:
    """Write one step's phases of all ranks as a Chrome trace (chrome://tracing, Perfetto).

    Args:
        spans_of_rank: for each rank, phase -> (start, end) in seconds of the wall clock.
    """
    begin = min(start for spans in spans_of_rank for start, _ in spans.values())
    events = [
        {
            "name": name,
            "ph": "X",
            "pid": rank,
            "tid": 0,
            "ts": (start - begin) * 1e6,
            "dur": (end - start) * 1e6,
        }
        for rank, spans in enumerate(spans_of_rank)
        for name, (start, end) in spans.items()
    ]
    file.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


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
