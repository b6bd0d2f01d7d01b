"""Times sections of code as the device executes them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


class Mark:
    """A point in time of the host's clock or, on CUDA, of the current stream, without a sync."""

    def __init__(self, device: torch.device):
        self._event: torch.cuda.Event | None = None
        self._seconds = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        else:
            self._seconds = time.perf_counter()

    def until(self, later: "Mark") -> float:
        """Return the seconds from this mark to a later one; the device must have passed both."""
        if self._event is None or later._event is None:
            return later._seconds - self._seconds
        return self._event.elapsed_time(later._event) / 1000


@dataclass
class Stopwatch:
    """Sum of the times of code sections; on CUDA from events of the current stream, without a sync.

    On CUDA the host runs ahead of the device, so the seconds are only known at the end.
    """

    device: torch.device
    sections: int = 0  # finished
    _seconds: float = 0.0
    _began: Mark | None = None
    _spans: list[tuple[Mark, Mark]] = field(default_factory=list)  # on CUDA, not summed yet

    @contextmanager
    def running(self) -> Iterator[None]:
        """Add the time of the code inside the context."""
        began = Mark(self.device)
        yield
        self._ends(began)

    def start(self) -> None:
        """Begin a section that `stop` ends."""
        self._began = Mark(self.device)

    def stop(self) -> None:
        """End the section that `start` began; without one nothing is added."""
        began, self._began = self._began, None
        if began is not None:
            self._ends(began)

    def add(self, seconds: float) -> None:
        """Add a finished section of the given seconds."""
        self._seconds += seconds
        self.sections += 1

    def seconds(self) -> float:
        """Return the sum; synchronises the device."""
        if self._spans:
            torch.cuda.synchronize(self.device)
        return self._seconds + sum(begin.until(end) for begin, end in self._spans)

    def mean(self) -> float:
        """Return the mean seconds of a section, 0 if there is none; synchronises the device."""
        return self.seconds() / max(1, self.sections)

    def _ends(self, began: Mark) -> None:
        end = Mark(self.device)
        if self.device.type == "cuda":
            self._spans.append((began, end))
            self.sections += 1
        else:
            self.add(began.until(end))


Section = tuple[str, float, float]
"""A name, and (start, end) in seconds of the wall clock."""


class Sections:
    """Time spans of named code sections; on CUDA from events of the current stream, without a sync.

    Create it when the stream is idle, because its events are mapped to the wall clock at creation.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._begin, self._wall = Mark(device), time.time()
        self._found: list[tuple[str, Mark, Mark]] = []

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Record the code inside the context as a section."""
        start = Mark(self._device)
        yield
        self._found.append((name, start, Mark(self._device)))

    def all(self) -> list[Section]:
        """Return the sections in the order of their ends; synchronises the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return [(name, self._at(start), self._at(end)) for name, start, end in self._found]

    def _at(self, mark: Mark) -> float:
        return self._wall + self._begin.until(mark)
