"""Times optimizer steps and single matrices, both sides in turns."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
import torch.optim._muon as torch_muon
from torch import Tensor

from benchmarks.muon.layers import Layer
from benchmarks.muon.sides import AdamW, Ours, Seconds, Torch, apart, gradients
from kimi_pretrain.optim.newton_schulz import COEFFICIENTS, EPSILON, flops, orthogonalise, segments
from kimi_pretrain.telemetry.stopwatch import Stopwatch

STEPS = 5


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the minimum and the maximum."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def direct_flops(rows: int, columns: int) -> int:
    """Return the operations of the direct form with full products, as in torch.optim.Muon."""
    short, long = sorted((rows, columns))
    return STEPS * (4 * short * short * long + 2 * short**3)


def steps(layer: Layer, rounds: int, device: torch.device, adamw: bool) -> dict[str, Any]:
    """Time optimizer steps of both sides in turns.

    Args:
        layer: matrices to update.
        rounds: steps of each side; the side that goes first alternates.
        device: device of the tensors.
        adamw: also time torch.optim.AdamW, afterwards (memory may not suffice for all three).

    Returns:
        spreads of seconds, spreads of torch's seconds over ours within a round, and operation
        counts.
    """
    grads = gradients(layer, device)
    ours, theirs = Ours(layer, grads), Torch(layer, grads)
    taken: dict[str, list[Seconds]] = {"ours": [], "torch": []}
    sides = {"ours": ours, "torch": theirs}
    agreement = 0.0
    for number in range(rounds):
        for name in sorted(sides, reverse=number % 2 == 1):
            taken[name].append(sides[name].step())
        if number == 0:
            agreement = apart(ours, theirs)
    found = _summary(layer, taken) | {"apart_after_one_step": agreement}
    if adamw:
        del ours, theirs, sides
        other = AdamW(grads)
        found["adamw"] = {"step": spread([other.step().step for _ in range(rounds)])}
    return found


def _summary(layer: Layer, taken: Mapping[str, Sequence[Seconds]]) -> dict[str, Any]:
    pieces = layer.pieces()
    found: dict[str, Any] = {
        "title": layer.title,
        "parameters": layer.parameters,
        "matrices": len(pieces),
        "flops": {
            "ours": sum(flops(*piece, STEPS) for piece in pieces),
            "torch": sum(direct_flops(*piece) for piece in pieces),
        },
        "ratio": {},
    }
    for name, seconds in taken.items():
        found[name] = {
            "step": spread([one.step for one in seconds]),
            "newton_schulz": spread([one.newton_schulz or 0.0 for one in seconds]),
        }
    for part in ("step", "newton_schulz"):
        found["ratio"][part] = spread(
            [
                getattr(theirs, part) / getattr(own, part)
                for own, theirs in zip(taken["ours"], taken["torch"], strict=True)
            ]
        )
    return found


def shapes(sizes: Sequence[tuple[int, int]], rounds: int, device: torch.device) -> list[Any]:
    """Time Newton-Schulz of single fp32 matrices, ours and torch's in turns."""
    found = []
    for rows, columns in sizes:
        draw = torch.Generator(device).manual_seed(0)
        x = torch.randn((rows, columns), generator=draw, device=device)
        taken: dict[str, list[float]] = {"ours": [], "torch": []}
        for number in range(rounds + 1):
            for name in sorted(taken, reverse=number % 2 == 1):
                watch = Stopwatch(device)
                with watch.running():
                    _orthogonalise(name, x)
                if number:  # the first round is a warm-up
                    taken[name].append(watch.seconds())
        found.append(
            {
                "shape": (rows, columns),
                "segments": segments(rows, columns, STEPS),
                "flops": {
                    "ours": flops(rows, columns, STEPS),
                    "torch": direct_flops(rows, columns),
                },
                "seconds": {name: spread(seconds) for name, seconds in taken.items()},
                "ratio": spread([b / a for a, b in zip(taken["ours"], taken["torch"])]),
            }
        )
    return found


def _orthogonalise(name: str, x: Tensor) -> Tensor:
    if name == "ours":
        return orthogonalise(x, STEPS, torch.bfloat16)
    return torch_muon._zeropower_via_newtonschulz(x, COEFFICIENTS, STEPS, EPSILON)


def matmul_peak(size: int, repeats: int, device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of the fastest of several square products."""
    draw = torch.Generator(device).manual_seed(0)
    x = torch.randn((size, size), generator=draw, device=device).to(dtype)
    best = 0.0
    for _ in range(repeats):
        watch = Stopwatch(device)
        with watch.running():
            x @ x
        best = max(best, 2 * size**3 / watch.seconds())
    return best
