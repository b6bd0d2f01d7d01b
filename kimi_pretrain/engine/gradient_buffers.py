"""Megatron-Core's gradient buffers without its reduction over replicas, which the caller does.

Megatron-Core's DDP accumulates all gradients of a kind in one fp32 buffer, which is used unchanged.
Its all-reduce would send every gradient to every rank, though only one rank updates the tensor, and
its reduce-scatter cuts the buffer at arbitrary bytes (`docs/decisions/002`). `GradientBuffers`
therefore calls back when a gradient is complete, and again when all of them are.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn


class Reduction(Protocol):
    """Sum of gradients over replicas; implemented in `kimi_pretrain.optim.reduce`."""

    def ready(self, name: str) -> None:
        """Mark a tensor's gradient as complete on this rank, and possibly start its sum."""

    def launch_rest(self) -> None:
        """Start the remaining sums; called once all gradients are complete."""

    def finish(self) -> None:
        """Wait until the tensors' owners have the sums."""


class GradientBuffers(DistributedDataParallel):
    """A model chunk whose gradients accumulate in buffers, without sums over replicas.

    Megatron-Core's schedules run all but a chunk's last microbatch inside `config.no_sync_func`.
    Without pipelining this is a plain `with`. Under 1F1B the context is entered before the first
    backward pass and left before the last. With virtual stages it is left for the last backward
    pass of each chunk: the schedule leaves the contexts of all chunks at once, but only this chunk
    runs backward then.

    Args:
        config: Megatron-Core's configuration of the chunk.
        module: the chunk.
        fp32: accumulate gradients in fp32 for any parameter dtype; if False, in that dtype.
        complete: called with each parameter in the last microbatch's backward pass, once its
            gradient is in the buffer.
        rest: called at the end of the schedule, before Megatron-Core's own collectives on gradients
            (of tensor-parallel ranks' norms) and routing biases.
    """

    def __init__(
        self,
        config: TransformerConfig,
        module: nn.Module,
        *,
        fp32: bool,
        complete: Callable[[nn.Parameter], None],
        rest: Callable[[], None],
    ):
        buffers = DistributedDataParallelConfig(
            grad_reduce_in_fp32=fp32, overlap_grad_reduce=False, use_distributed_optimizer=False
        )
        super().__init__(config, buffers, module)
        self._complete, self._rest = complete, rest
        self._is_last_microbatch = False

    def zero_grad_buffer(self) -> None:
        """Zero the buffers; no microbatch counts as the last until a schedule leaves `no_sync`."""
        super().zero_grad_buffer()
        self._is_last_microbatch = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Mark the microbatches before the last.

        There is no `finally`, because a forward-only schedule drops the context without leaving it,
        and the garbage collector may close it during a later step.
        """
        self._is_last_microbatch = False
        yield
        self._is_last_microbatch = True

    def start_grad_sync(self, *unused) -> None:
        """Do nothing, because the caller sums gradients."""

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Report that all gradients are complete; called by `finalize_model_grads`."""
        self._rest()

    def _make_backward_post_hook(self, param: nn.Parameter) -> Callable[..., None]:
        # Wrap the hook of 0.19.2: whether a separate hook runs after it has added the gradient to
        # the buffer depends on the kind of hook.
        collect = super()._make_backward_post_hook(param)

        def hook(*unused) -> None:
            collect(*unused)
            if self._is_last_microbatch:
                self._complete(param)

        return hook
