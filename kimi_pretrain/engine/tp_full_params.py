"""Full copies of the tensors that tensor-parallel ranks hold in slices.

The optimizer orthogonalises full matrices and checkpoints store them, so under tensor parallelism
the full tensors are initialised, updated, saved and loaded. Every rank keeps a copy of the full
dense tensors (experts are not sliced), copies its own slices into the model before a step, and
all-gathers the gradients after it. All ranks of a stage therefore hold the same full tensors and
divide the optimizer's work on them.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from kimi_pretrain.engine.param_names import View


class FullParams:
    """The full tensors of views that are slices.

    Args:
        views: views of this rank; views that are not slices are ignored.
        group: the tensor-parallel ranks, in the order of their slices.
    """

    def __init__(self, views: Iterable[View], group: dist.ProcessGroup):
        self.group = group
        self._slices = {view.name: view for view in views if view.tp_slice is not None}
        self.data = {
            name: torch.zeros(view.whole_shape, dtype=view.data.dtype, device=view.data.device)
            for name, view in self._slices.items()
        }
        self.grads: dict[str, Tensor] = {}

    def of(self, view: View) -> View:
        """Return the view of the full tensor if a view is a slice, else the view itself."""
        return View(view.name, self.data[view.name]) if view.name in self.data else view

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Copy this rank's slices into the model, and drop the gradients of the last step."""
        self.grads.clear()
        for name, view in self._slices.items():
            view.data.copy_(view.slice_of(self.data[name]))

    def gather_grads(self) -> None:
        """All-gather the slices' gradients after a step's backward; collective in the group."""
        for name, view in self._slices.items():
            assert view.tp_slice is not None
            mine = view.of(view.param.main_grad).contiguous()  # type: ignore[attr-defined]
            whole = mine.new_empty(view.tp_slice.count * mine.shape[0], *mine.shape[1:])
            dist.all_gather_into_tensor(whole, mine, group=self.group)
            if view.tp_slice.dim > 0:  # the all-gather has concatenated slices along dimension 0
                whole = torch.cat(whole.chunk(view.tp_slice.count), dim=view.tp_slice.dim)
            self.grads[name] = whole
