"""What one optimizer step tells: the size of Muon's updates and the time of their making."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class StepReport:
    """What one step did on this rank, over the Muon tensors it owns; two sums and a time.

    update_square_sum (0-d fp64) and update_elements count updates before the learning rate; summed
    over all ranks they give the figure of the whole model.
    """

    update_square_sum: Tensor
    update_elements: int = 0
    _seconds: float = 0.0
    _events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    @property
    def update_rms(self) -> float:
        """Root mean square of the updates before lr, about 0.17; 0 if this rank owns none."""
        return (float(self.update_square_sum) / max(1, self.update_elements)) ** 0.5

    @property
    def newton_schulz_seconds(self) -> float:
        """Time in orthogonalisation. Waits for the device: read it when logging, not each step."""
        if self._events:
            torch.cuda.synchronize(self.update_square_sum.device)
        return self._seconds + sum(a.elapsed_time(b) for a, b in self._events) / 1000

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Add the time spent inside; on CUDA the device's own, taken without waiting for it."""
        if self.update_square_sum.is_cuda:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            yield
            events[1].record()
            self._events.append(events)
        else:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start

    def count(self, updates: Sequence[Tensor]) -> None:
        """Add updates to the two sums."""
        for update in updates:
            self.update_square_sum += torch.linalg.vector_norm(update).double().square()
            self.update_elements += update.numel()
