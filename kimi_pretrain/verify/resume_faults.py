"""Faults that `verify resume` must find, planted in a run that was just resumed.

Each fault is state that a checkpoint may miss or that a loader may not restore. The run continues
silently, and most faults move its loss by less than one training step does.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kimi_pretrain.verify.fault import Fault, Replaced, register

if TYPE_CHECKING:  # listing the names of the faults must not load the engine
    from kimi_pretrain.engine.backbone import BackboneResult
    from kimi_pretrain.engine.microbatch import Microbatch
    from kimi_pretrain.run import Run

_MOMENTUM = ("optim.momentum.", "optim.exp_avg.")  # of Muon and AdamW
_DROPPED = 0.1
RESUME_FAULTS: "dict[str, Fault[Run]]" = {}


def _zero(tensors: Mapping[str, Tensor], name: str | None) -> None:
    if name is not None and name in tensors:
        tensors[name].zero_()


def _momentum(run: "Run") -> dict[str, Tensor]:
    """Return this rank's nonzero momentum buffers.

    They are Muon's, or AdamW's if no rank has momentum of Muon.
    """
    state = run.update.optimizer.state_dict()
    held = [{n: t for n, t in state.items() if n.startswith(one) and t.any()} for one in _MOMENTUM]
    everyone: list[Any] = run.mesh.all_gather_object(bool(held[0]))
    return held[0] if any(everyone) else held[1]


def _biases(run: "Run") -> dict[str, Tensor]:
    tensors = run.model.tensors()
    return {n: t for n, t in tensors.items() if n.endswith("e_score_correction_bias") and t.any()}


def _smallest(run: "Run", held: "Callable[[Run], dict[str, Tensor]]") -> str | None:
    """Return the smallest tensor over all ranks, the hardest to detect; None if there is none."""
    mine = [(tensor.numel(), name) for name, tensor in held(run).items()]
    everyone: list[Any] = run.mesh.all_gather_object(min(mine, default=None))
    return min((one for one in everyone if one is not None), default=(0, None))[1]


def _pair(run: "Run") -> tuple[str, str] | None:
    """Return two momentum buffers of this rank with the same shape."""
    seen: dict[Any, str] = {}
    for name, tensor in sorted(_momentum(run).items()):
        kind = name.split(".")[1], tensor.shape
        if kind in seen:
            return seen[kind], name
        seen[kind] = name
    return None


def _masters(run: "Run") -> bool:
    held = any(name.startswith("optim.master.") for name in run.update.optimizer.state_dict())
    return any(run.mesh.all_gather_object(held))


def _fault(
    what: str, needs: "Callable[[Run], object]", otherwise: str = "", *, own_reference: bool = False
) -> Callable[..., None]:
    """Register a fault for runs that meet `needs`; `otherwise` is the obstacle of other runs."""

    def obstacle(run: "Run") -> str | None:
        return None if needs(run) else otherwise.format(run.config.train)

    return register(RESUME_FAULTS, what, obstacle, own_reference=own_reference)


@_fault(
    "tokens are left out of the loss by random numbers whose generator no checkpoint holds",
    lambda run: True,
    # The uninterrupted run has the fault, too: the stop loses only the state of the generator.
    own_reference=True,
)
def _unsaved_rng(replaced: Replaced, run: "Run") -> None:
    """Drop tokens from the loss at random, with a generator that no checkpoint saves."""
    train_step = run.backbone.train_step
    generator = torch.Generator().manual_seed(0)  # created with the run, as a layer would do

    def dropping(microbatches: "list[Microbatch]", aux_scale: float) -> "BackboneResult":
        for one in microbatches:  # in place: with `dep.bubbles` they receive their media later
            if (mask := one.loss_mask) is not None:
                kept = torch.rand(mask.shape, generator=generator) >= _DROPPED
                one.loss_mask = mask & kept.to(mask.device)
        return train_step(microbatches, aux_scale)

    replaced.put(run.backbone, "train_step", dropping)


@_fault("the loader goes on one step too far", lambda run: True)
def _loader_off_by_one(replaced: Replaced, run: "Run") -> None:
    step = run.loader.state_dict()["step"]
    next(run.loader)
    # A wrong step count would already show in the manifest of the next checkpoint.
    run.loader.load_state_dict(run.loader.state_dict() | {"step": step})


@_fault(
    "the momentum of the smallest tensor begins at zero again",
    lambda run: _smallest(run, _momentum),
    "no momentum is kept, or all of it is zero",
)
def _lost_momentum(replaced: Replaced, run: "Run") -> None:
    _zero(run.update.optimizer.state_dict(), _smallest(run, _momentum))


@_fault(
    "the routing biases of one layer begin at zero again",
    lambda run: _smallest(run, _biases),
    "there are no routing biases, or all of them are zero",
)
def _lost_expert_bias(replaced: Replaced, run: "Run") -> None:
    _zero(run.model.tensors(), _smallest(run, _biases))


@_fault(
    "the fp32 masters are made from the rounded weights",
    _masters,
    "there are no fp32 masters with train.dtype={0.dtype}",
)
def _lost_master(replaced: Replaced, run: "Run") -> None:
    run.update.optimizer.sync_masters()


@_fault(
    "the count of updates begins at zero again",
    lambda run: run.update.optimizer.steps,
    "no update was done before the stop",
)
def _lost_step_count(replaced: Replaced, run: "Run") -> None:
    run.update.optimizer.steps = 0


@_fault(
    "the momentum of two tensors of one shape is loaded into each other's place",
    lambda run: any(run.mesh.all_gather_object(_pair(run))),
    "no process keeps momentum of two tensors of one shape",
)
def _swapped_states(replaced: Replaced, run: "Run") -> None:
    """Swap the optimizer state of two tensors of one shape, as a wrong file name would."""
    pairs: list[Any] = run.mesh.all_gather_object(_pair(run))
    rank = next(rank for rank, pair in enumerate(pairs) if pair is not None)
    if run.mesh.rank == rank:
        held = run.update.optimizer.state_dict()
        one, other = (held[name] for name in pairs[rank])
        before = one.clone()
        one.copy_(other)
        other.copy_(before)
