"""The replicated vision encoder of one rank: forward without graph, recompute with backward.

Both run the same items in the same chunks through the same kernels, so the recomputed outputs are
those that the backbone saw. Peak memory is one chunk's activations (K2.5 report, section 4.5.1:
only the final outputs are kept).
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moonvit3d.config import MoonViTConfig
from moonvit3d.model import VisionEncoder, initialise
from moonvit3d.packing import chunks

Grid = tuple[int, int, int]


class DecoupledEncoder:
    """The encoder, its gradient buffer, and the two passes of a step.

    Gradients collect over chunks in one flat buffer, fp32 (fp64 for fp64 parameters), as sums over
    tokens: nobody divides here.

    Forward and recompute use the same chunks, so their bits agree on every device; on CPU an item
    has the same bits in every chunk.
    """

    def __init__(
        self,
        config: MoonViTConfig,
        budget: int,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.config, self.budget = config, budget
        self.module = VisionEncoder(config)
        initialise(self.module, seed)
        self.module.to(device=device, dtype=dtype)
        params = dict(self.module.named_parameters())
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        size = sum(param.numel() for param in params.values())
        self.grad_buffer = torch.zeros(size, dtype=wide, device=device)
        views = self.grad_buffer.split([param.numel() for param in params.values()])
        self.grads = {
            name: view.view_as(param)
            for (name, param), view in zip(params.items(), views, strict=True)
        }
        for name, param in params.items():
            param.register_post_accumulate_grad_hook(_collect_into(self.grads[name]))

    def forward(self, patches: list[np.ndarray], grids: list[Grid]) -> Tensor:
        """Encode this rank's items, keeping only the outputs (phase 2).

        Args:
            patches: uint8 [patches of the item, 3, 14, 14] each.
            grids: patch grid (frames, height, width) of each.

        Returns:
            [tokens, hidden]: the items' embeddings, one after the other.
        """
        with torch.no_grad():
            outputs = [self._encode(patches, grids, run) for run in self._runs(grids)]
        return torch.cat([self._nothing(), *outputs])

    def backward(self, patches: list[np.ndarray], grids: list[Grid], gradients: Tensor) -> None:
        """Recompute each chunk with a graph and push its gradients through (phase 6).

        Args:
            patches, grids: exactly those of `forward`.
            gradients: [tokens, hidden], of the loss with respect to the forward's output.
        """
        start = 0
        for run in self._runs(grids):
            outputs = self._encode(patches, grids, run)
            torch.autograd.backward(outputs, gradients[start : start + len(outputs)])
            start += len(outputs)
        assert start == len(gradients), (start, gradients.shape)

    def zero_grads(self) -> None:
        """Forget the gradients of the last step."""
        self.grad_buffer.zero_()

    def reduce_grads(self) -> None:
        """Sum the gradients over all ranks; ranks that had no items take part with zeros."""
        dist.all_reduce(self.grad_buffer)

    def _runs(self, grids: list[Grid]) -> list[slice]:
        return chunks((t * h * w for t, h, w in grids), self.budget)

    def _encode(self, patches: list[np.ndarray], grids: list[Grid], run: slice) -> Tensor:
        pixels = torch.from_numpy(np.concatenate(patches[run])).to(self.grad_buffer.device)
        return self.module(pixels, grids[run])

    def _nothing(self) -> Tensor:
        dtype = next(self.module.parameters()).dtype
        return torch.empty(0, self.config.out_width, dtype=dtype, device=self.grad_buffer.device)


def _collect_into(buffer: Tensor):
    def collect(param: Tensor) -> None:
        assert param.grad is not None
        buffer.add_(param.grad)
        param.grad = None

    return collect
