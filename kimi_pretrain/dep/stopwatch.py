"""Seconds spent on this and that, as the device spends them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up seconds by name: the host's clock on a CPU, events of the current stream on CUDA.

    On CUDA the host runs ahead of the device: the seconds are known at the end, not before.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Add the seconds of what is inside."""
        if self._cuda:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            yield
            events[1].record()
            self._events.append((name, *events))
            return
        begin = time.perf_counter()
        yield
        self.add(name, time.perf_counter() - begin)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that are known."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def seconds(self) -> dict[str, float]:
        """Return all sums; on CUDA waits for the last event."""
        for name, begin, end in self._events:
            end.synchronize()
            self.add(name, begin.elapsed_time(end) / 1000)
        self._events = []
        return dict(self._seconds)
