"""Seconds of sections of code, and when they ran, as the device spends them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

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
        began = _now(self.device)
        yield
        self._ends(began)

    def start(self) -> None:
        """Begin a section that `stop` ends."""
        self._began = _now(self.device)

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


Section = tuple[str, float, float]
"""A name, and (start, end) in seconds of the wall clock."""


class Sections:
    """When named sections of code ran; on CUDA by events of the current stream, without waiting.

    Made where the stream has nothing left to do: its events are put on the wall clock from here.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._begin, self._wall = _now(device), time.time()
        self._found: list[tuple[str, Any, Any]] = []

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Record a section."""
        start = _now(self._device)
        yield
        self._found.append((name, start, _now(self._device)))

    def all(self) -> list[Section]:
        """Return the sections in the order in which they ended; synchronises the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return [(name, self._at(start), self._at(end)) for name, start, end in self._found]

    def _at(self, mark: Any) -> float:
        if self._device.type != "cuda":
            return self._wall + mark - self._begin
        return self._wall + self._begin.elapsed_time(mark) / 1000


def _now(device: torch.device) -> Any:
    """Return the time, or on CUDA an event of the current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
