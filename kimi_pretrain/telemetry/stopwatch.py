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
    sections: int = 0  # that are over
    _seconds: float = 0.0
    _began: float | torch.cuda.Event | None = None
    _events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Add the time of the section."""
        began = self._now()
        yield
        self._ends(began)

    def start(self) -> None:
        """Begin a section that `stop` ends."""
        self._began = self._now()

    def stop(self) -> None:
        """End the section that was begun; without one nothing is added."""
        began, self._began = self._began, None
        if began is not None:
            self._ends(began)

    def add(self, seconds: float) -> None:
        """Add seconds that are known."""
        self._seconds += seconds
        self.sections += 1

    def seconds(self) -> float:
        """Return the sum; synchronises the device."""
        if self._events:
            torch.cuda.synchronize(self.device)
        return self._seconds + sum(a.elapsed_time(b) for a, b in self._events) / 1000

    def mean(self) -> float:
        """Return the seconds of a section, 0 of none; synchronises the device."""
        return self.seconds() / max(1, self.sections)

    def _ends(self, began: float | torch.cuda.Event) -> None:
        if not isinstance(began, torch.cuda.Event):
            self.add(time.perf_counter() - began)
            return
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        self._events.append((began, end))
        self.sections += 1

    def _now(self) -> float | torch.cuda.Event:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
