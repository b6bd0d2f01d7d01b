"""Fills a run's tensors from a checkpoint of any layout.

Because a name means the same whole matrix in every layout, each rank reads what it needs, straight
into the tensors' own memory; of replicated tensors, each holder a part (`collective_read`).
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
    """Fill tensors in place, on whatever device they are; returns what the run remembers besides.

    Collective where there is a mesh. Files are not hashed here: `find` has done it.

    Args:
        tensors: what this rank holds, by checkpoint name.
        progress: called after each tensor that this rank has read.
        copies, mesh: see `tensors_to_read`.

    Raises:
        CheckpointError: a tensor is not there, or of another shape or type, or the optimizer's
            steps are not those of the manifest: nothing has been changed then. Or a file ends
            before a tensor does. The same on all ranks.
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
    """Refuse what cannot be loaded before anything is changed; headers of `mine` alone are read."""
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
