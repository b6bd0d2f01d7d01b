"""Fills a run's tensors from a checkpoint of any layout.

Because a name means the same whole matrix in every layout, each rank reads what it needs, straight
into the tensors' own memory.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from kimi_pretrain.checkpoint.errors import CheckpointError
from kimi_pretrain.checkpoint.manifest import RunState
from kimi_pretrain.checkpoint.memory import DTYPES
from kimi_pretrain.checkpoint.place import Checkpoint

_THREADS = 4
_STEPS = "optim.step"


def load(
    checkpoint: Checkpoint,
    tensors: Mapping[str, Tensor],
    progress: Callable[[], object] | None = None,
) -> RunState:
    """Fill tensors in place, on whatever device they are; returns what the run remembers besides.

    Files are not hashed here: `find` has done it.

    Args:
        checkpoint: verified; see `find`.
        tensors: what this rank holds, by checkpoint name.
        progress: called after each tensor.

    Raises:
        CheckpointError: a tensor is not there, or of another shape or type, or the optimizer's
            steps are not those of the manifest: nothing has been changed then. Or a file ends
            before a tensor does.
    """
    check_tensors(checkpoint, tensors)
    state = checkpoint.manifest().state
    if _STEPS in tensors and (steps := int(checkpoint.tensor(_STEPS))) != state.optimizer_steps:
        raise CheckpointError(
            f"{checkpoint.uri}: {_STEPS} is {steps}, the manifest says optimizer_steps="
            f"{state.optimizer_steps}: tensors and manifest are not of the same step"
        )
    # Neighbours in a file one after the other; the long reads begin first where there are several.
    with ThreadPoolExecutor(_THREADS) as pool:
        weight_map = checkpoint.weight_map()
        order = sorted(tensors, key=lambda name: (weight_map[name], checkpoint.entry(name).offset))
        for _ in pool.map(lambda name: checkpoint.read_into(name, tensors[name]), order):
            if progress is not None:
                progress()
    return state


def check_tensors(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are not there, or of another shape or type, before any is changed."""
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
    for name, tensor in sorted(tensors.items()):
        entry = checkpoint.entry(name)
        found = DTYPES[entry.dtype], entry.shape
        if found != (tensor.dtype, tuple(tensor.shape)):
            raise CheckpointError(
                f"{checkpoint.uri}: {name!r} is {found[0]} {found[1]}, this run has "
                f"{tensor.dtype} {tuple(tensor.shape)}: a checkpoint of another model or of other "
                "settings"
            )
