"""Reads the output of a training run, and compares two runs exactly, in a fixed order.

metrics.jsonl          one line per step
heldout.jsonl          one line per validation, compared with the numbers of its step
state_hashes.json      SHA-256 of every tensor at the end
watched.jsonl          one line per step with the hash of its plan       } only of a run
resumed.json           hashes of the whole state when the run resumed    } under observation
the last checkpoint    the rest of the state at the end, and the tensors themselves
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from kimi_pretrain.checkpoint.storage_read import Checkpoint
from kimi_pretrain.weights.compare import compare_numbers

WATCHED = "watched.jsonl"
RESUMED = "resumed.json"
OBSTACLE = "obstacle.txt"  # the reason why a fault was not planted, in the folder of its run
UNINTERRUPTED = "{}-uninterrupted"  # folder of a fault's own reference
# Entries of a line that never repeat: times, memory, requests, and values derived from them.
MEASURED = (
    "exposed_encoder_share", "exposed_encoder_parts", "imbalance.measured", "peak_gib",
    "peak_gib_step", "mfu", "model_tflops_per_gpu", "peak_tflops_per_gpu", "peak_source", "store",
    "checkpoint", "bubble_cost_ratio",
)  # fmt: skip
# Entries that describe the data of a step, in any layout. If they differ, all later entries differ.
READ = (
    "samples", "tokens", "loss_tokens", "text_tokens", "vision_tokens", "items", "skipped_samples",
)  # fmt: skip
HELDOUT = "heldout"  # key in a step's line for the validation after the step
_FIRST = (*READ, "loss", "grad_norm", "lr", "applied", "skipped_steps")
ReadBoth = Callable[[str], tuple[Tensor, Tensor]]  # name -> the tensor in both runs
# Tensors are sorted in data-flow order: the first pattern found in a name decides.
_PLACES = (
    r"vision_tower\.patch_embed", r"vision_tower\.", r"mm_projector\.", r"embed_tokens",
    r"model\.layers\.", r"model\.norm", r"lm_head",
)  # fmt: skip
_OPTIMIZER = re.compile(r"optim\.(\w+)\.(.+)")


@dataclass(frozen=True)
class Moment:
    """State of a run between two steps."""

    tensors: Mapping[str, str] = field(default_factory=dict[str, str])  # name -> SHA-256
    state: Mapping[str, Any] = field(default_factory=dict[str, Any])  # other state: loader, counts


@dataclass(frozen=True)
class Trace:
    """Output of a run; `samples`, `began` and `resumed` exist only under observation."""

    lines: Mapping[int, Mapping[str, Any]]  # step -> its line of metrics, with `HELDOUT`
    samples: Mapping[int, str] = field(default_factory=dict[int, str])  # step -> hash of its plan
    began: int | None = None  # step from which its last processes resumed
    resumed: Moment | None = None  # before the first step after the stop
    end: Moment = field(default_factory=Moment)  # after the last step


@dataclass(frozen=True)
class ValueDifference:
    """Difference in a number of a step or a value of the state; None if missing."""

    step: int
    name: str
    found: Any
    wanted: Any


@dataclass(frozen=True)
class TensorDifference:
    """Difference between two tensors."""

    name: str
    elements: int  # 0 if shapes or dtypes differ, so that no elements can be compared
    differing: int  # elements that are not bitwise equal
    largest: float | None  # absolute difference; None if one is not finite


def read_trace(run_dir: Path, last: Checkpoint | None = None) -> Trace:
    """Return the trace of a finished run.

    Args:
        run_dir: folder of the run.
        last: the run's checkpoint of its last step; without it, the state at the end apart from
            tensors is known only as a hash.

    Raises:
        FileNotFoundError: the run did not finish.
    """
    hashes = json.loads((run_dir / "state_hashes.json").read_text())
    resumed, watched = _lines(run_dir / RESUMED), _lines(run_dir / WATCHED)
    state = {name: hashes[name] for name in ("step", "loader")}
    validated = {line["step"]: {HELDOUT: line} for line in _lines(run_dir / "heldout.jsonl")}
    steps = _lines(run_dir / "metrics.jsonl")
    return Trace(
        lines={line["step"]: line | validated.get(line["step"], {}) for line in steps},
        samples={line["step"]: line["samples"] for line in watched},
        began=watched[-1]["began"] if watched else None,
        resumed=Moment(**resumed[0]) if resumed else None,
        end=Moment(hashes["per_tensor"], vars(last.manifest().state) if last else state),
    )


def reader(found: Checkpoint, wanted: Checkpoint) -> ReadBoth:
    """Return a function that reads a tensor from both runs' last checkpoints."""
    return lambda name: (found.tensor(name), wanted.tensor(name))


def line_differences(step: int, found: Trace, wanted: Trace) -> tuple[ValueDifference, ...]:
    """Return the numbers of a step that differ, in the order in which they are computed."""
    if step not in found.lines or step not in wanted.lines:
        return (ValueDifference(step, "line", step in found.lines, step in wanted.lines),)
    mine, others = numbers_of(found.lines[step]), numbers_of(wanted.lines[step])
    if found.samples and wanted.samples:  # both runs were observed
        mine["samples"], others["samples"] = found.samples.get(step), wanted.samples.get(step)
    order = {name: place for place, name in enumerate(_FIRST)}
    differing = value_differences(step, mine, others)
    # The sort is stable: names outside the table keep the order of the line.
    return tuple(sorted(differing, key=lambda one: order.get(one.name, len(order))))


def numbers_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a line that must repeat: "name", "name.inner", "name.3" -> value.

    Measured values are excluded: seconds, memory, requests, and values derived from them.
    """
    return {name: value for name, value in _leaves(line) if not _measured(name)}


def value_differences(
    step: int, found: Mapping[str, Any], wanted: Mapping[str, Any]
) -> tuple[ValueDifference, ...]:
    """Return the values of a line or of the state ("loader.step") that differ."""
    mine, other = dict(_leaves(found)), dict(_leaves(wanted))
    names = [name for name in {**other, **mine} if not _same(mine, other, name)]
    return tuple(ValueDifference(step, name, mine.get(name), other.get(name)) for name in names)


def unequal(found: Mapping[str, str], wanted: Mapping[str, str]) -> tuple[str, ...]:
    """Return the tensors that differ or exist in only one run, in model order."""
    return tuple(
        in_model_order(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
    )


def tensor_difference(name: str, found: Tensor, wanted: Tensor) -> TensorDifference:
    """Return the difference of two tensors, compared bitwise so that equal NaNs are equal."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return TensorDifference(name, 0, 0, None)
    apart = compare_numbers(name, found, wanted)
    if apart is None:
        return TensorDifference(name, found.numel(), 0, 0.0)
    largest = apart.largest if apart.largest < math.inf else None
    return TensorDifference(name, apart.total, apart.count, largest)


def in_model_order(names: Iterable[str]) -> list[str]:
    """Return checkpoint names in data-flow order, from images to the loss.

    The optimizer's state ("optim.momentum.NAME") follows all weights, in the same order; its step
    count is last. Numbers in a name sort as numbers.
    """
    return sorted(names, key=_key)


def _key(name: str) -> tuple[bool, int, list[tuple[bool, int, str]], str]:
    kept = _OPTIMIZER.fullmatch(name)
    tensor = kept[2] if kept else name
    place = next((at for at, one in enumerate(_PLACES) if re.search(one, tensor)), len(_PLACES))
    parts = [
        (part.isdigit(), int(part) if part.isdigit() else 0, part) for part in tensor.split(".")
    ]
    return name.startswith("optim."), place, parts, name


def _lines(file: Path) -> list[dict[str, Any]]:
    """Return the parsed lines of a JSONL file; empty if the file does not exist."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def _leaves(values: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("outer.inner", value) pairs; list items are named by their index."""
    if isinstance(values, Mapping):
        pairs: Iterable[tuple[Any, Any]] = values.items()
    elif isinstance(values, list | tuple):
        pairs = enumerate(values)
    else:
        yield name, values
        return
    for key, value in pairs:
        yield from _leaves(value, f"{name}.{key}" if name else str(key))


def _measured(name: str) -> bool:
    return "seconds" in name or any(name == one or name.startswith(f"{one}.") for one in MEASURED)


def _same(found: Mapping[str, Any], wanted: Mapping[str, Any], name: str) -> bool:
    if name not in found or name not in wanted:
        return False
    mine, other = found[name], wanted[name]
    return mine == other or (mine != mine and other != other)  # NaN equals NaN
