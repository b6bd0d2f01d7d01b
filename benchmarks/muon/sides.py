"""Sides of the benchmark: our Muon step, torch.optim.Muon and AdamW over the same matrices.

All start from zero weights and use the same gradients, so the weights after one step are the update
itself and can be compared. `step` of a side returns seconds; `newton_schulz` in the result is the
part that orthogonalises (None for AdamW). torch.optim.Muon gets the pieces that our code cuts from
fused matrices as separate parameters.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.optim._muon as torch_muon
from torch import Tensor

from benchmarks.muon.layers import Layer
from kimi_pretrain.optim.config import OptimConfig
from kimi_pretrain.optim.muon import muon_update
from kimi_pretrain.telemetry.stopwatch import Stopwatch

LR = 2e-4
CONFIG = OptimConfig(lr=LR, min_lr=0.0, warmup_steps=0, stable_steps=1, decay_steps=0)


@dataclass(frozen=True)
class Seconds:
    """Seconds of one optimizer step, and of Newton-Schulz inside it."""

    step: float
    newton_schulz: float | None


def gradients(layer: Layer, device: torch.device) -> dict[str, Tensor]:
    """Return random fp32 gradients, the same in every run on a device."""
    draw = torch.Generator(device).manual_seed(0)
    return {
        name: torch.randn(shape, generator=draw, device=device) * 1e-3
        for name, shape in layer.shapes.items()
    }


class Ours:
    """`muon_update` over the whole layer in one call, which batches equal shapes."""

    def __init__(self, layer: Layer, grads: Mapping[str, Tensor]):
        self.layer = layer
        self.rules = list(layer.rules().values())
        self.grads = list(grads.values())
        self.weights = [_touched(grad) for grad in self.grads]
        self.momenta = [_touched(grad) for grad in self.grads]

    def step(self) -> Seconds:
        device = self.grads[0].device
        whole, inside = Stopwatch(device), Stopwatch(device)
        with whole.running():
            muon_update(
                self.weights, self.grads, self.momenta, self.rules, LR, CONFIG, inside.running()
            )
        return Seconds(whole.seconds(), inside.seconds())

    def pieces(self) -> Iterator[Tensor]:
        """Yield the weight of each piece [blocks, rows of a block, columns]."""
        for weight, rule in zip(self.weights, self.rules, strict=True):
            for piece in rule.pieces:
                yield piece.rows(weight)


class Torch:
    """The installed torch.optim.Muon, with one parameter for each piece."""

    def __init__(self, layer: Layer, grads: Mapping[str, Tensor]):
        self.parameters = []
        for grad, rule in zip(grads.values(), layer.rules().values(), strict=True):
            for piece in rule.pieces:
                # A view if the piece is the whole matrix, otherwise a copy.
                part = piece.rows(grad).reshape(piece.shape(grad.shape))
                parameter = torch.nn.Parameter(_touched(part))
                parameter.grad = part
                self.parameters.append(parameter)
        self.optimizer = torch.optim.Muon(
            self.parameters,
            lr=LR,
            weight_decay=CONFIG.weight_decay,
            momentum=CONFIG.momentum,
            nesterov=CONFIG.nesterov,
            ns_steps=CONFIG.ns_steps,
            adjust_lr_fn="match_rms_adamw",
        )

    def step(self) -> Seconds:
        device = self.parameters[0].device
        whole, inside = Stopwatch(device), Stopwatch(device)
        with _timed_newton_schulz(inside), whole.running():
            self.optimizer.step()
        return Seconds(whole.seconds(), inside.seconds())


class AdamW:
    """torch.optim.AdamW, fused, over the whole matrices."""

    def __init__(self, grads: Mapping[str, Tensor]):
        self.parameters = []
        for grad in grads.values():
            parameter = torch.nn.Parameter(_touched(grad))
            parameter.grad = grad
            self.parameters.append(parameter)
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=LR, betas=CONFIG.adam_betas, weight_decay=0.1, fused=True
        )

    def step(self) -> Seconds:
        watch = Stopwatch(self.parameters[0].device)
        with watch.running():
            self.optimizer.step()
        return Seconds(watch.seconds(), None)


def apart(ours: Ours, theirs: Torch) -> float:
    """Return the largest relative difference (Frobenius) of a piece's weights between the two."""
    return max(
        float((own.reshape(other.shape) - other).norm() / other.norm())
        for own, other in zip(ours.pieces(), (p.detach() for p in theirs.parameters), strict=True)
    )


def _touched(like: Tensor) -> Tensor:
    """Return zeros in memory that is already mapped, so that no step pays for the first touch."""
    return torch.empty_like(like).fill_(0.0)


@contextmanager
def _timed_newton_schulz(watch: Stopwatch) -> Iterator[None]:
    """Time torch.optim.Muon's orthogonalisation with a watch."""
    plain = torch_muon._zeropower_via_newtonschulz

    def timed(*args: object) -> Tensor:
        with watch.running():
            return plain(*args)  # pyright: ignore[reportArgumentType]

    torch_muon._zeropower_via_newtonschulz = timed
    try:
        yield
    finally:
        torch_muon._zeropower_via_newtonschulz = plain
