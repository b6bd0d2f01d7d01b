"""The sum of the encoder's gradients over all ranks, begun while the last chunk goes backward.

The encoder is replicated, so its gradient is the sum over all ranks, of whatever each encoded, or
of nothing: ranks without media take part with zeros. One flat buffer holds it, cut into buckets
from the last parameter to the first, the order in which a backward pass finishes them. All ranks
send the buckets in this order, whenever theirs are ready.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

BUCKET_ELEMENTS = 1 << 23


class GradientSum:
    """Collects parameter gradients over chunks, wider than bfloat16, and sums them over ranks.

    Args:
        params: trained parameters by name; their `.grad` is taken away as soon as it is complete.
        dtype: of the parameters; the buffer is fp32, or fp64 for fp64.
        bucket_elements: about how many numbers travel at a time.

    Attributes:
        buffer: all gradients, flat.
        views: name -> gradient, of the parameter's shape.
    """

    def __init__(
        self,
        params: Mapping[str, torch.nn.Parameter],
        dtype: torch.dtype,
        device: torch.device,
        bucket_elements: int = BUCKET_ELEMENTS,
    ):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        sizes = [param.numel() for param in params.values()]
        self.buffer = torch.zeros(sum(sizes), dtype=wide, device=device)
        self.views: dict[str, Tensor] = {}
        bucket_of = _buckets(sizes, bucket_elements)
        self._sizes = [0] * (1 + max(bucket_of, default=-1))
        for size, bucket in zip(sizes, bucket_of, strict=True):
            self._sizes[bucket] += size
        self._members = [bucket_of.count(bucket) for bucket in range(len(self._sizes))]
        self._overlapping = False
        self._waiting: list[int] = []
        self._work: list[Work] = []
        slices = self.buffer.split(sizes)
        for (name, param), view, bucket in zip(params.items(), slices, bucket_of, strict=True):
            self.views[name] = view.view_as(param)
            param.register_post_accumulate_grad_hook(self._collector(self.views[name], bucket))

    def zero(self) -> None:
        """Forget the gradients of the last step."""
        self.buffer.zero_()

    def overlap(self) -> None:
        """Say that the next backward pass is this rank's last: finished buckets may leave."""
        self._overlapping = True
        self._waiting = list(self._members)

    def finish(self) -> None:
        """Send what is left, and wait until every bucket is the sum over all ranks."""
        self._overlapping = False
        while len(self._work) < len(self._sizes):
            self._send()
        for work in self._work:
            work.wait()
        self._work = []

    def _send(self) -> None:
        bucket = len(self._work)  # always in this order, or ranks would add up different buckets
        end = len(self.buffer) - sum(self._sizes[:bucket])
        part = self.buffer[end - self._sizes[bucket] : end]
        work = dist.all_reduce(part, async_op=True)
        assert work is not None
        self._work.append(work)

    def _collector(self, view: Tensor, bucket: int):
        def collect(param: Tensor) -> None:
            assert param.grad is not None
            view.add_(param.grad)
            param.grad = None
            if self._overlapping:
                self._waiting[bucket] -= 1
                while len(self._work) < len(self._sizes) and not self._waiting[len(self._work)]:
                    self._send()

        return collect


def _buckets(sizes: list[int], limit: int) -> list[int]:
    """Return the bucket of each parameter: filled up from the last one, bucket 0 first."""
    found, bucket, filled = [0] * len(sizes), 0, 0
    for number in reversed(range(len(sizes))):
        if filled and filled + sizes[number] > limit:
            bucket, filled = bucket + 1, 0
        found[number] = bucket
        filled += sizes[number]
    return found
