"""Compares two folders of weights tensor by tensor: missing tensors and numerical differences."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kimi_pretrain.checkpoint.manifest import first_difference
from kimi_pretrain.weights.matching import OPTIMIZER
from kimi_pretrain.weights.shapes import LANGUAGE, VISION
from kimi_pretrain.weights.weight_reader import WeightReader

_PART = 1 << 24  # numbers that are widened to float64 at a time

Kind = Literal["only in A", "only in B", "shape", "dtype", "numbers"]


@dataclass(frozen=True)
class WeightDifference:
    """Difference in one tensor.

    Attributes:
        kind: for missing tensors and different shapes, no numbers are compared.
        detail: shapes or dtypes on both sides.
        count: numbers that differ, of `total`; NaNs with the same bits are equal.
        largest: largest absolute difference; infinite if only one side is not finite.
        relative: `largest` divided by the largest magnitude in A.
        first: index of the first different number, and both numbers.
    """

    name: str
    kind: Kind
    detail: str = ""
    count: int = 0
    total: int = 0
    largest: float = 0.0
    relative: float = 0.0
    first: tuple[list[int], float, float] | None = None


def canonical(reader: WeightReader, *, weights_only: bool) -> dict[str, str]:
    """Return name -> stored name, with names that are comparable across folder formats."""
    names: dict[str, str] = {}
    for name in reader.headers:
        if name.startswith(OPTIMIZER):
            if not weights_only:
                names[name] = name
        elif name.startswith((LANGUAGE, *VISION)):
            names[name] = name
        else:  # K2 and Moonlight lack the prefix
            names[LANGUAGE + name] = name
    return names


def compare(
    a: WeightReader,
    b: WeightReader,
    *,
    weights_only: bool = False,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Iterator[WeightDifference]:
    """Yield the differences in name order; one tensor of each side is in memory at a time.

    Args:
        weights_only: skip the optimizer.
        progress: called with (tensors compared, total tensors).

    Raises:
        CheckpointError: a file of a checkpoint is damaged, so its headers cannot be trusted either.
    """
    in_a, in_b = (canonical(x, weights_only=weights_only) for x in (a, b))
    names = sorted(in_a.keys() | in_b.keys())
    for done, name in enumerate(names, 1):
        for reader, held in ((a, in_a), (b, in_b)):
            if name in held:
                reader.verify(held[name])
        if name not in in_b:
            yield WeightDifference(name, "only in A")
        elif name not in in_a:
            yield WeightDifference(name, "only in B")
        else:
            found = _of_headers(name, a, in_a[name], b, in_b[name])
            if found is None or found.kind == "dtype":
                numbers = compare_numbers(name, a.read(in_a[name]), b.read(in_b[name]))
                found = numbers if found is None else _both(found, numbers)
            if found is not None:
                yield found
        progress(done, len(names))


def _of_headers(
    name: str, a: WeightReader, in_a: str, b: WeightReader, in_b: str
) -> WeightDifference | None:
    left, right = a.headers[in_a], b.headers[in_b]
    if left.shape != right.shape:
        return WeightDifference(name, "shape", f"{list(left.shape)} and {list(right.shape)}")
    if left.dtype != right.dtype:
        types = (str(dtype).removeprefix("torch.") for dtype in (left.dtype, right.dtype))
        return WeightDifference(name, "dtype", " and ".join(types))
    return None


def _both(types: WeightDifference, numbers: WeightDifference | None) -> WeightDifference:
    """Combine a dtype difference with the numerical difference."""
    if numbers is None:
        return types
    fields = {key: value for key, value in vars(numbers).items() if key not in ("kind", "detail")}
    return WeightDifference(**fields, kind="dtype", detail=types.detail)


def compare_numbers(name: str, a: Tensor, b: Tensor) -> WeightDifference | None:
    """Compare two tensors of one shape; None if equal (bitwise, or by value across dtypes)."""
    if a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b)):
        return None
    count, largest, scale, first = 0, 0.0, 0.0, None
    parts = zip(a.reshape(-1).split(_PART), b.reshape(-1).split(_PART), strict=True)
    for number, (x, y) in enumerate(parts):
        differ, gap = _gaps(x, y)
        scale = max(scale, float(x.double().abs().nan_to_num(posinf=0).max()))
        if not (found := int(differ.sum())):
            continue
        count, largest = count + found, max(largest, float(gap[differ].max()))
        if first is None:
            place = int(differ.nonzero()[0])
            index = torch.unravel_index(torch.tensor(number * _PART + place), a.shape)
            first = [int(i) for i in index], float(x[place]), float(y[place])
    if not count:
        return None
    relative = largest / scale if scale else (0.0 if largest == 0 else torch.inf)
    return WeightDifference(
        name,
        "numbers",
        count=count,
        total=a.numel(),
        largest=largest,
        relative=relative,
        first=first,
    )


def _gaps(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return where two flat tensors differ (bitwise for equal dtypes), and the gaps in float64."""
    wide_x, wide_y = x.double(), y.double()
    differ = wide_x != wide_y
    if x.dtype == y.dtype:
        differ = (_bytes(x) != _bytes(y)).view(-1, x.dtype.itemsize).any(1)
    # Infinities of equal sign have distance 0.
    gap = torch.where(wide_x == wide_y, 0.0, (wide_x - wide_y).abs())
    return differ, gap.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def state_difference(a: WeightReader, b: WeightReader) -> str | None:
    """Return the first difference between two checkpoints' states (step, loader, ...), or None."""
    if a.manifest is None or b.manifest is None:
        return None
    states: list[dict[str, Any]] = [vars(x.manifest.state) for x in (a, b) if x.manifest]
    for key in states[0]:
        if told := first_difference(states[0][key], states[1][key], f"state.{key}"):
            return told.replace("this run has", "B has")
    return None
