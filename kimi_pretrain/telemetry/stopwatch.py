"""Seconds of sections of code, as the device spends them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class Stopwatch:
    """Sums the time of code sections; on CUDA by events of the current stream, without waiting.

    On CUDA the host runs ahead of the device: the seconds are known at the end, not before.
    """

    device: torch.device
    _seconds: float = 0.0
    _events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Add the time of the section."""
        if self.device.type == "cuda":
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            yield
            events[1].record()
            self._events.append(events)
        else:
            start = time.perf_counter()
            yield
            self.add(time.perf_counter() - start)

    def add(self, seconds: float) -> None:
        """Add seconds that are known."""
        self._seconds += seconds

    def seconds(self) -> float:
        """Return the sum; synchronises the device."""
        if self._events:
            torch.cuda.synchronize(self.device)
        return self._seconds + sum(a.elapsed_time(b) for a, b in self._events) / 1000
