"""Progress on stdout: a bar on a terminal, plain lines in a file or a pipe."""

import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class StepLines:
    """Formats every n-th step as one plain line, and the first step of this start and the last.

    Args:
        first_step: number of steps done before this start.
        steps: number of steps of the run.
        every: n.
        about: `steps` is an estimate.
    """

    def __init__(self, first_step: int, steps: int, every: int, *, about: bool = False):
        self._first, self._steps, self._every = first_step, steps, every
        self._about = "about " if about else ""
        self._done, self._tokens, self._seconds = 0, 0, 0.0

    def line(self, step: int, loss: float, tokens: int, seconds: float) -> str | None:
        """Count a step (from 1), `seconds` after the last; return the line to print, or None."""
        self._done, self._tokens = self._done + 1, self._tokens + tokens
        self._seconds += seconds
        if step % self._every and step not in (self._first + 1, self._steps):
            return None
        speed = self._tokens / max(self._seconds, 1e-9)
        to_do = max(self._steps - step, 0)  # an estimate may be too low
        left = timedelta(seconds=round(to_do * self._seconds / self._done))
        self._done, self._tokens, self._seconds = 0, 0, 0.0
        steps = f"{self._about}{self._steps}"
        return (
            f"step {step}/{steps}  loss {loss:.4f}  {speed:,.0f} tokens/s  ETA {self._about}{left}"
        )


class StepDisplay:
    """Shows each step on stdout: a bar on a terminal, otherwise the lines of `StepLines`."""

    def __init__(self, first_step: int, steps: int, every: int, *, about: bool = False):
        console = Console()
        lines = StepLines(first_step, steps, every, about=about)
        self._lines = None if console.is_terminal else lines
        self._shown = time.monotonic()
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TimeRemainingColumn(),
            console=console,
            disable=self._lines is not None,
        )
        self._task = self._bar.add_task("training", total=steps, completed=first_step, loss=0.0)
        self._bar.start()

    def step(self, line: Mapping[str, Any]) -> None:
        """Show a step by its line of metrics.jsonl: "step", "loss" and "tokens"."""
        if self._lines is None:
            self._bar.update(self._task, completed=line["step"], loss=line["loss"])
            return
        now = time.monotonic()
        seconds, self._shown = now - self._shown, now
        text = self._lines.line(line["step"], line["loss"], line["tokens"], seconds)
        if text is not None:
            # Flushed, because a pipe is buffered; a full disk is no reason to stop training.
            with suppress(OSError):
                print(text, flush=True)

    def heldout(self, line: Mapping[str, Any]) -> None:
        """Show a validation by its line of heldout.jsonl."""
        means = [f"{n} {m:.4f}" for n, m in line["loss_by_source"].items() if m is not None]
        loss = "none counted" if line["loss"] is None else f"{line['loss']:.4f}"
        text = f"held out at step {line['step']}: loss {loss} ({', '.join(means)})"
        self._shown += line["seconds"]  # a validation is not part of a step
        with suppress(OSError):
            if self._lines is None:
                self._bar.console.print(text)
            else:
                print(text, flush=True)

    def close(self) -> None:
        """Stop the progress bar."""
        self._bar.stop()
