"""Megatron-Core's gradient buffers; the sums over replicas are the caller's.

Its DDP lays all gradients of a kind into one fp32 buffer and accumulates each microbatch's; that is
used as it is. Its all-reduce would bring every gradient to every rank, where only one updates the
tensor, and its reduce-scatter cuts the buffer at arbitrary bytes (`docs/decisions/002`). So this
class reports each gradient as it becomes complete, and when the last one must be.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn


class Reduction(Protocol):
    """Sums gradients over replicas; `kimi_pretrain.optim.reduce` has the one that is used."""

    def ready(self, name: str) -> None:
        """Called when a tensor's gradient is complete on this rank; may start its sum."""

    def launch_rest(self) -> None:
        """Called once all gradients are complete; starts the remaining sums."""

    def finish(self) -> None:
        """Wait until the sums are on the tensors' owners."""


class GradientBuffers(DistributedDataParallel):
    """A model chunk whose gradients accumulate in buffers, without sums over replicas.

    Megatron-Core's schedules run all but a chunk's last microbatch inside `config.no_sync_func`:
    without pipelining a plain `with`, under 1F1B entered before the first and left before the last
    backward pass, and with virtual stages left for the one backward pass of each chunk that is its
    last (all chunks' contexts at once, but only this chunk goes backward then).

    Args:
        config: of the chunk.
        module: the chunk.
        fp32: gradients collect in fp32 whatever the parameters are; else in their own dtype.
        complete: called with each parameter in the last microbatch's backward pass, once its
            gradient is in the buffer.
        rest: called when the schedule is over, before Megatron-Core's own collectives on gradients
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
        """Zero the buffers. Until a schedule leaves `no_sync`, no microbatch is the last."""
        super().zero_grad_buffer()
        self._is_last_microbatch = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Mark the microbatches before the last.

        Not with `finally`: a forward-only schedule drops the context without leaving it, and the
        garbage collector may close it inside a later step.
        """
        self._is_last_microbatch = False
        yield
        self._is_last_microbatch = True

    def start_grad_sync(self, *unused) -> None:
        """Do nothing: the sums are the caller's."""

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Report that all gradients are complete; called by `finalize_model_grads`."""
        self._rest()

    def _make_backward_post_hook(self, param: nn.Parameter) -> Callable[..., None]:
        # A hook of our own would run before 0.19.2's has added the gradient to the buffer, or
        # after, depending on the kind of hook: so this one runs right behind it.
        collect = super()._make_backward_post_hook(param)

        def hook(*unused) -> None:
            collect(*unused)
            if self._is_last_microbatch:
                self._complete(param)

        return hook
