"""Measures seconds and peak memory of the phases of a step, on one rank.

Spans never overlap. A phase that begins inside another phase interrupts it. A phase that runs twice
in a step has two spans; the second is called "name#2", and `phase_of` returns the plain name. So
the seconds of all spans add up, and a trace shows each span at its time.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

Span = tuple[float, float]
Spans = Mapping[str, Span]
AGAIN = "#"
BACKBONE = "4 backbone"


class CudaMeter:
    """Peak bytes of tensors on one CUDA device, as PyTorch's allocator counts them."""

    def __init__(self, device: torch.device):
        self._device = device

    def reset(self) -> None:
        """Reset the peak."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def read(self) -> int | None:
        """Return the most bytes allocated at once since `reset`."""
        return torch.cuda.max_memory_allocated(self._device)


class ProcessMeter:
    """Resident bytes of this process, code and background threads included (Linux).

    Writing "5" to clear_refs resets the kernel's high-water mark (VmHWM). This takes 9
    microseconds for any size of the process, and reading takes 15. It also resets `ru_maxrss` of
    getrusage, so nothing else in a training process may rely on that number. The kernel counts in
    batches per core: an error of a few hundred KiB is normal.
    """

    def __init__(self, process: Path = Path("/proc/self")):
        self._clear, self._status = process / "clear_refs", process / "status"
        self._works = True

    def reset(self) -> None:
        """Reset the peak; if this is not permitted, stop measuring for good."""
        try:
            self._clear.write_bytes(b"5")
        except OSError:  # no such file, or no permission: the step continues without the number
            self._works = False

    def read(self) -> int | None:
        """Return the most bytes resident at once since `reset`."""
        if not self._works:
            return None
        try:
            status = self._status.read_bytes()
        except OSError:
            return None
        _, found, rest = status.partition(b"VmHWM:")
        return int(rest.split(maxsplit=1)[0]) * 1024 if found else None


class PhaseClock:
    """Records the times and the peak memory of a step's phases on this rank.

    Attributes:
        spans: phase -> (start, end) in seconds of the wall clock, ordered by end; a phase that ran
            or resumed several times has several entries, see the module.
        peak_bytes: phase -> peak bytes over all its spans, missing if this machine cannot measure
            them. CUDA: tensors; CPU: resident bytes of the whole process.
        on_phase: called with the name of a phase that begins or resumes.
    """

    def __init__(self, device: torch.device, meter: CudaMeter | ProcessMeter | None = None):
        """Start a clock; the device decides the default `meter`."""
        self._device = device
        self._meter = meter or (CudaMeter(device) if device.type == "cuda" else ProcessMeter())
        self.on_phase: Callable[[str], object] = lambda phase: None
        self.restart()

    def restart(self) -> None:
        """Begin a new step with new, empty records; records returned earlier stay unchanged."""
        self.spans: dict[str, Span] = {}
        self.peak_bytes: dict[str, int] = {}
        # Durations follow the monotonic clock, even if the wall clock is adjusted.
        self._wall = time.time() - time.perf_counter()
        self._times: dict[str, int] = {}
        self._running: list[str] = []
        self._began = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the code inside the context as phase `name`; it interrupts an enclosing phase."""
        if self._running:
            self._end(self._running[-1])
        self._running.append(name)
        self._begin(name)
        yield
        # Not in a `finally`: an error ends the step, and waiting for the device could hide it.
        self._end(name)
        self._running.pop()
        if self._running:
            self._begin(self._running[-1])

    def _begin(self, name: str) -> None:
        self.on_phase(name)
        self._meter.reset()
        self._began = self._wall + time.perf_counter()

    def _end(self, name: str) -> None:
        if self._device.type == "cuda":
            # Synchronises this stream only, so collectives can overlap with the next phase.
            torch.cuda.current_stream(self._device).synchronize()
        end = self._wall + time.perf_counter()
        self._times[name] = times = self._times.get(name, 0) + 1
        self.spans[f"{name}{AGAIN}{times}" if times > 1 else name] = (self._began, end)
        if (peak := self._meter.read()) is not None:
            self.peak_bytes[name] = max(peak, self.peak_bytes.get(name, 0))


def phase_of(span: str) -> str:
    """Return the phase that a span belongs to: "4 backbone#2" -> "4 backbone"."""
    return span.partition(AGAIN)[0]


def seconds_of_phases(spans: Spans) -> dict[str, float]:
    """Return the seconds of each phase, summed over its spans."""
    seconds: dict[str, float] = {}
    for span, (start, end) in spans.items():
        phase = phase_of(span)
        seconds[phase] = seconds.get(phase, 0.0) + (end - start)
    return seconds


def first_start(spans: Spans, phase: str) -> float | None:
    """Return the time at which a phase first began; None if it did not run."""
    return min(
        (start for name, (start, _) in spans.items() if phase_of(name) == phase), default=None
    )


def last_end(spans: Spans, phase: str) -> float | None:
    """Return the time at which a phase last ended; None if it did not run."""
    return max((end for name, (_, end) in spans.items() if phase_of(name) == phase), default=None)
