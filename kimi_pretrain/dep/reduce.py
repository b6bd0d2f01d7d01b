"""Sums the encoder's gradients over all ranks, overlapping with the last backward work.

The encoder is replicated, so its gradient is the sum over all ranks; ranks without media contribute
zeros. One flat buffer holds the gradients, cut into buckets from the last parameter to the first,
the order in which a backward pass completes them. All ranks send the buckets in this order, each as
soon as it is complete.

If a single rank updates each parameter (`to_owners`), only this rank receives the sum. A bucket
then holds parameters of one owner, adjacent in the buffer, and the traffic is halved.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

BUCKET_ELEMENTS = 1 << 23


class GradientSum:
    """Collects parameter gradients over chunks, wider than bfloat16, and sums them over ranks.

    Args:
        params: trained parameters by name; their `.grad` is freed as soon as it is complete.
        dtype: dtype of the parameters; the buffer is fp32, or fp64 for fp64.
        bucket_elements: approximate number of elements per bucket.

    Attributes:
        buffer: all gradients, flat.
        views: name -> gradient, with the parameter's shape. After `finish` it is the sum on every
            rank, or only on the parameter's owner.
        bytes_moved: this rank's share of the traffic of the last step's sums; the sum over ranks is
            the traffic of the job. For owned buckets, the owner counts (n - 1) times their size.
    """

    def __init__(
        self,
        params: Mapping[str, torch.nn.Parameter],
        dtype: torch.dtype,
        device: torch.device,
        bucket_elements: int = BUCKET_ELEMENTS,
    ):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self._params, self._limit = dict(params), bucket_elements
        elements = sum(param.numel() for param in params.values())
        self.buffer = torch.zeros(elements, dtype=wide, device=device)
        self.views: dict[str, Tensor] = {}
        self._counting = self._held = False
        self._work: list[Work] = []
        self.to_owners(None)
        for name, param in params.items():
            param.register_post_accumulate_grad_hook(self._collector(name))

    def to_owners(self, owners: Mapping[str, int] | None) -> None:
        """Reduce each gradient to one rank from the next step on; call it between steps.

        Args:
            owners: parameter name -> global rank, the same on all ranks. None: every rank gets the
                sums, which is the initial setting. Empty: nothing is sent, because the update sums
                the gradients over ranks.
        """
        self._lay_out([owners[name] if owners else None for name in self._params])
        if owners == {}:
            self._parts = []
        self.zero()

    def zero(self) -> None:
        """Reset the gradients of the last step."""
        self.buffer.zero_()
        self.bytes_moved = 0
        self._waiting = list(self._members)

    @contextmanager
    def last(self) -> Iterator[None]:
        """Mark each gradient that arrives in this context as this rank's last of its parameter.

        Buckets are sent as they complete, in the order of all ranks.
        """
        self._counting = True
        try:
            yield
        finally:
            self._counting = False

    def hold(self) -> None:
        """Hold complete buckets back until `release`."""
        self._held = True

    def release(self) -> None:
        """Send the complete buckets, and later ones as soon as they complete."""
        self._held = False
        self._send_finished()

    def send_all(self) -> None:
        """Send all remaining buckets without waiting; no gradients may be added after this."""
        while len(self._work) < len(self._parts):
            self._send()

    def finish(self) -> None:
        """Send the remaining buckets, and wait until all sums have arrived."""
        self.send_all()
        for work in self._work:
            work.wait()
        self._work = []

    def _lay_out(self, owners: Sequence[int | None]) -> None:
        """Assign every parameter to a bucket, and the parameters of a bucket to adjacent positions.

        The buffer holds buckets from the last to the first, and parameters in their own order.
        """
        sizes = [param.numel() for param in self._params.values()]
        # Runs of parameters are cut first and then divided among owners, so that a bucket does not
        # wait for a parameter of the same owner that completes much later in the backward pass.
        runs = [
            (run, -1 if owner is None else owner)
            for run, owner in zip(_buckets(sizes, self._limit), owners, strict=True)
        ]
        keys = sorted(set(runs))
        self._bucket_of = dict(zip(self._params, map(keys.index, runs), strict=True))
        self._owner_of = [None if owner < 0 else owner for _, owner in keys]
        self._members = [runs.count(key) for key in keys]
        self._parts: list[Tensor] = [self.buffer[:0]] * len(keys)
        start = 0
        for bucket in reversed(range(len(keys))):
            first = start
            for name, param in self._params.items():
                if self._bucket_of[name] == bucket:
                    self.views[name] = self.buffer[start : start + param.numel()].view_as(param)
                    start += param.numel()
            self._parts[bucket] = self.buffer[first:start]

    def _send_finished(self) -> None:
        while len(self._work) < len(self._parts) and not self._waiting[len(self._work)]:
            self._send()

    def _send(self) -> None:
        bucket = len(self._work)  # always in this order, or ranks would add up different buckets
        part, owner = self._parts[bucket], self._owner_of[bucket]
        ranks = dist.get_world_size()
        if owner is None:
            work = dist.all_reduce(part, async_op=True)
            self.bytes_moved += 2 * (ranks - 1) * part.nbytes // ranks
        else:
            work = dist.reduce(part, owner, async_op=True)
            self.bytes_moved += (ranks - 1) * part.nbytes if owner == dist.get_rank() else 0
        assert work is not None
        self._work.append(work)

    def _collector(self, name: str):
        def collect(param: Tensor) -> None:
            assert param.grad is not None
            self.views[name].add_(param.grad)
            param.grad = None
            if self._counting:
                self._waiting[self._bucket_of[name]] -= 1
                if not self._held:
                    self._send_finished()

        return collect


def _buckets(sizes: list[int], limit: int) -> list[int]:
    """Return the bucket of each parameter; bucket 0 is filled first, from the last parameter."""
    found, bucket, filled = [0] * len(sizes), 0, 0
    for number in reversed(range(len(sizes))):
        if filled and filled + sizes[number] > limit:
            bucket, filled = bucket + 1, 0
        found[number] = bucket
        filled += sizes[number]
    return found
