"""Faults that `verify resume` must find, planted in a run that was just resumed.

Each is something that a checkpoint can fail to hold, or a loader to restore; the run goes on
silently, and most of them move its loss by less than a step of training does.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kimi_pretrain.verify.fault import Fault, Replaced

if TYPE_CHECKING:  # listing the faults' names does not load the engine
    from kimi_pretrain.engine.backbone import BackboneResult
    from kimi_pretrain.engine.microbatch import Microbatch
    from kimi_pretrain.run import Run

_MOMENTUM = ("optim.momentum.", "optim.exp_avg.")  # Muon's and AdamW's
_DROPPED = 0.1


def _unsaved_rng(replaced: Replaced, run: "Run") -> None:
    """Leave tokens out of the loss at random, by a generator that nobody saves."""
    train_step = run.backbone.train_step
    generator = torch.Generator().manual_seed(0)  # made with the run, as a layer would make it

    def dropping(microbatches: "list[Microbatch]", aux_scale: float) -> "BackboneResult":
        return train_step([thinned(one) for one in microbatches], aux_scale)

    def thinned(microbatch: "Microbatch") -> "Microbatch":
        mask = microbatch.loss_mask
        if mask is None:
            return microbatch
        kept = torch.rand(mask.shape, generator=generator) >= _DROPPED
        return replace(microbatch, loss_mask=mask & kept.to(mask.device))

    replaced.put(run.backbone, "train_step", dropping)


def _loader_off_by_one(replaced: Replaced, run: "Run") -> None:
    step = run.loader.state_dict()["step"]
    next(run.loader)
    # A wrong count of steps would be seen by whoever reads the next checkpoint's manifest.
    run.loader.load_state_dict(run.loader.state_dict() | {"step": step})


def _lost_momentum(replaced: Replaced, run: "Run") -> None:
    _zero(run.update.optimizer.state_dict(), _smallest(run, _momentum))


def _lost_expert_bias(replaced: Replaced, run: "Run") -> None:
    _zero(run.model.tensors(), _smallest(run, _biases))


def _lost_master(replaced: Replaced, run: "Run") -> None:
    run.update.optimizer.sync_masters()


def _lost_step_count(replaced: Replaced, run: "Run") -> None:
    run.update.optimizer.steps = 0


def _swapped_states(replaced: Replaced, run: "Run") -> None:
    """Swap what the optimizer keeps of two tensors of one shape, as a wrong file name would."""
    pairs: list[Any] = run.mesh.gather(_pair(run))
    rank = next(rank for rank, pair in enumerate(pairs) if pair is not None)
    if run.mesh.rank == rank:
        held = run.update.optimizer.state_dict()
        one, other = (held[name] for name in pairs[rank])
        before = one.clone()
        one.copy_(other)
        other.copy_(before)


def _zero(tensors: Mapping[str, Tensor], name: str | None) -> None:
    if name is not None and name in tensors:
        tensors[name].zero_()


def _momentum(run: "Run") -> dict[str, Tensor]:
    """Return the buffers of momentum of this rank; not those that are zero and lose nothing.

    Muon's; AdamW's where no rank has any of Muon's.
    """
    state = run.update.optimizer.state_dict()
    held = [{n: t for n, t in state.items() if n.startswith(one) and t.any()} for one in _MOMENTUM]
    everyone: list[Any] = run.mesh.gather(bool(held[0]))
    return held[0] if any(everyone) else held[1]


def _biases(run: "Run") -> dict[str, Tensor]:
    tensors = run.model.tensors()
    return {n: t for n, t in tensors.items() if n.endswith("e_score_correction_bias") and t.any()}


def _smallest(run: "Run", held: "Callable[[Run], dict[str, Tensor]]") -> str | None:
    """Return the smallest of the tensors of all ranks, the hardest to miss; None without any."""
    mine = [(tensor.numel(), name) for name, tensor in held(run).items()]
    everyone: list[Any] = run.mesh.gather(min(mine, default=None))
    return min((one for one in everyone if one is not None), default=(0, None))[1]


def _pair(run: "Run") -> tuple[str, str] | None:
    """Return two buffers of momentum of this rank that have one shape."""
    seen: dict[Any, str] = {}
    for name, tensor in sorted(_momentum(run).items()):
        kind = name.split(".")[1], tensor.shape
        if kind in seen:
            return seen[kind], name
        seen[kind] = name
    return None


def _no_momentum(run: "Run") -> str | None:
    if _smallest(run, _momentum) is None:
        return "no momentum is kept, or all of it is zero"
    return None


def _no_bias(run: "Run") -> str | None:
    if _smallest(run, _biases) is None:
        return "there are no routing biases, or all of them are zero"
    return None


def _no_master(run: "Run") -> str | None:
    held = any(name.startswith("optim.master.") for name in run.update.optimizer.state_dict())
    if not any(run.mesh.gather(held)):
        return f"there are no fp32 masters with train.dtype={run.config.train.dtype}"
    return None


def _no_update(run: "Run") -> str | None:
    return None if run.update.optimizer.steps else "no update was done before the stop"


def _no_pair(run: "Run") -> str | None:
    if not any(run.mesh.gather(_pair(run))):
        return "no process keeps momentum of two tensors of one shape"
    return None


RESUME_FAULTS: "dict[str, Fault[Run]]" = {
    "unsaved-rng": Fault(
        "tokens are left out of the loss by random numbers whose generator no checkpoint holds",
        lambda run: None, _unsaved_rng,
        # It is in the uninterrupted run too: the stop loses only the generator's position.
        own_reference=True,
    ),
    "loader-off-by-one": Fault(
        "the loader goes on one step too far", lambda run: None, _loader_off_by_one
    ),
    "lost-momentum": Fault(
        "the momentum of the smallest tensor begins at zero again", _no_momentum, _lost_momentum
    ),
    "lost-expert-bias": Fault(
        "the routing biases of one layer begin at zero again", _no_bias, _lost_expert_bias
    ),
    "lost-master": Fault(
        "the fp32 masters are made from the rounded weights", _no_master, _lost_master
    ),
    "lost-step-count": Fault(
        "the count of updates begins at zero again", _no_update, _lost_step_count
    ),
    "swapped-states": Fault(
        "the momentum of two tensors of one shape is loaded into each other's place",
        _no_pair, _swapped_states,
    ),
}  # fmt: skip
