"""Loads a checkpoint of any layout into a run's tensors.

A name means the same full matrix in every layout, so each rank reads the tensors it needs, directly
into their memory. The holders of replicated tensors divide the reads (`collective_read`).
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from kimi_pretrain.checkpoint.collective_read import (
    on_all_ranks,
    read_and_broadcast,
    tensors_to_read,
)
from kimi_pretrain.checkpoint.errors import CheckpointError
from kimi_pretrain.checkpoint.manifest import RunState
from kimi_pretrain.checkpoint.storage_read import Checkpoint
from moonvit3d.safetensors_io import torch_dtype

if TYPE_CHECKING:
    from kimi_pretrain.engine.mesh import Mesh

OPTIMIZER_STEPS = "optim.step"


def load(
    checkpoint: Checkpoint,
    tensors: Mapping[str, Tensor],
    progress: Callable[[], object] = lambda: None,
    *,
    mesh: "Mesh | None" = None,
    copies: Mapping[str, str] | None = None,
) -> RunState:
    """Fill tensors in place, on any device, and return the run's state other than tensors.

    This is a collective call if there is a mesh. It does not hash files, because `find` has done
    so.

    Args:
        checkpoint: the checkpoint to load.
        tensors: the tensors that this rank holds, by checkpoint name.
        progress: called after each tensor that this rank reads.
        copies, mesh: see `tensors_to_read`.

    Raises:
        CheckpointError: a tensor is missing or has another shape or dtype, or the optimizer's step
            count differs from the manifest; no tensor has changed then. Also if a file is
            truncated. All ranks raise the same error.
    """
    copies = copies or {}
    mine = {name: tensors[name] for name in tensors_to_read(tensors, copies, mesh)}
    on_all_ranks(lambda: _check(checkpoint, tensors, mine), mesh)
    weight_map = checkpoint.weight_map()

    def read(name: str) -> None:
        checkpoint.read_into(name, tensors[name])
        progress()

    def place(name: str) -> tuple[str, int]:
        return weight_map[name], checkpoint.entry(name).offset

    read_and_broadcast(tensors, copies, mesh, read, place)
    return checkpoint.manifest().state


def _check(
    checkpoint: Checkpoint, tensors: Mapping[str, Tensor], mine: Mapping[str, Tensor]
) -> None:
    """Check that all tensors can be loaded before any is changed; read only headers for `mine`."""
    _check_names(checkpoint, tensors)
    for name, tensor in sorted(mine.items()):
        entry = checkpoint.entry(name)
        found = torch_dtype(entry.dtype), entry.shape
        if found != (tensor.dtype, tuple(tensor.shape)):
            raise CheckpointError(
                f"{checkpoint.uri}: {name!r} is {found[0]} {found[1]}, this run has "
                f"{tensor.dtype} {tuple(tensor.shape)}: a checkpoint of another model or of other "
                "settings"
            )
    expected = checkpoint.manifest().state.optimizer_steps
    if OPTIMIZER_STEPS in mine and (steps := int(checkpoint.tensor(OPTIMIZER_STEPS))) != expected:
        raise CheckpointError(
            f"{checkpoint.uri}: {OPTIMIZER_STEPS} is {steps}, the manifest says optimizer_steps="
            f"{expected}: tensors and manifest are not of the same step"
        )


def _check_names(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
    held = checkpoint.weight_map()
    if missing := sorted(set(tensors) - set(held)):
        first, hint = missing[0], ""
        if checkpoint.manifest().contents == "weights":
            hint = "; it holds weights alone: begin a new run from it with train.start_from"
        elif first.startswith("optim."):
            tensor = first.split(".", 2)[-1]
            kept = sorted(n for n in held if n.startswith("optim.") and n.endswith(f".{tensor}"))
            hint = f"; of this tensor it holds {kept}: written with another optim.matrices?"
        raise CheckpointError(
            f"{checkpoint.uri}: {len(missing)} tensors are missing, first {first!r}{hint}"
        )
