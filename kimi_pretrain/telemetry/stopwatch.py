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


Section = tuple[str, float, float]
"""A name, and (start, end) in seconds of the wall clock."""


class Sections:
    """When named sections of code ran; on CUDA by events of the current stream, without waiting.

    Made where the stream has nothing left to do: its events are put on the wall clock from here.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._begin, self._wall = self._now(), time.time()
        self._found: list[tuple[str, Any, Any]] = []

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Record a section."""
        start = self._now()
        yield
        self._found.append((name, start, self._now()))

    def all(self) -> list[Section]:
        """Return the sections in the order in which they ended; synchronises the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return [(name, self._at(start), self._at(end)) for name, start, end in self._found]

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _at(self, mark: Any) -> float:
        if self._device.type != "cuda":
            return self._wall + mark - self._begin
        return self._wall + self._begin.elapsed_time(mark) / 1000
