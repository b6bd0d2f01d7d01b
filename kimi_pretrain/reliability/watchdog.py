"""Watchdog: ends a hanging run within a bounded time and names the rank that caused the hang.

A thread of each rank follows the main thread's step and phase (the phases of `kimi_pretrain.step`,
and building, waiting for data, measuring, saving). `train.timeout_seconds` without a new phase is a
hang. So no single phase may take longer: on a GPU the first backbone phase, which compiles kernels,
sets the bound. In order of time:

    4/5 of it   the rank writes its phase and stack to logs/stalled_rank_N.json, for the others, and
                the stacks of all its threads to logs/stacks_rank_N.txt
    all of it   it writes an exit report that names the rank at fault, judged by what all ranks
                wrote, and exits with 75

Of a large job only some ranks, spread over it, read what the others wrote: thousands of ranks that
open thousands of files would take too long. Their exit ends the job; if all of them are gone, the
other ranks exit a little later (`GRACE_S`) with their own state.

After a request to stop, the rank finishes its step and saves. If it cannot, because it waits for
data and the store does not answer, it exits with 75: soon after INT or TERM, which a person sends
(`STORE_S`), later after USR1, which a scheduler sends minutes ahead so that no step is lost
(`SCHEDULERS_S`). Saves have the whole patience of the store.

A rank that wrote nothing is stopped or dead, or works while others wait for it. Of those that
wrote, one that does not wait for other ranks (`kimi_pretrain.reliability.stack_inspection`) is at
fault; else those that stopped in the earliest phase. Only time in which this process runs counts: a
job that a scheduler suspends continues afterwards, if the pause was shorter than the next limits.

Two slower clocks stand behind this one. Collectives have a timeout of their own (`backstop`). And C
code that holds Python's lock stops all Python threads, this one included: so at every tick it
re-arms faulthandler, a C thread, which writes all stacks and exits with 1 if it is not re-armed for
long (`held_after`). Under torchrun it writes to logs/held_rank_N.txt, which
`exit_report.first_exit_report` reads; else to stderr.
"""

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from data_pipeline.store.retry import longest_silence
from kimi_pretrain.reliability.exit_report import (
    NO_PROGRESS,
    ExitReport,
    held_file,
    open_held,
    write_exit_report,
)
from kimi_pretrain.reliability.stack_inspection import stack_of, waits, where
from kimi_pretrain.reliability.start_identity import holds, report_base
from kimi_pretrain.reliability.status import mark_failed

EARLY = 0.8  # of the time, after which a rank says where it stands
WRITING_S = 10.0  # that writing may take before the process ends anyway: the disk may hang, too
READING_RANKS = 16  # ranks that read what all wrote; the others leave GRACE_S later
GRACE_S = 10.0
STORE_S = 4.0  # that a store may be silent for a rank that is told to stop
SCHEDULERS_S = 60.0  # the same where a scheduler says so, and steps may be lost
WORKERS_S = 30.0  # at least, for a step that the loader's processes fetch: their store is not seen
WAIT_FOR_DATA = "1 wait for data"
_READERS = 32  # files at a time: on a shared file system each takes about a millisecond
NAMED = 8  # ranks that a message lists


def backstop(seconds: float) -> float:
    """Return the timeout of collectives for a watchdog's of `seconds`."""
    return seconds * 1.25 + GRACE_S + 15


def held_after(seconds: float) -> float:
    """Return after how long without a tick of the watching thread the process ends.

    Longer than that thread waits for a disk, and than the watchdogs of ranks that can still speak.
    """
    return seconds + GRACE_S + WRITING_S / 2


def reads_reports(rank: int, world_size: int) -> bool:
    """Whether a rank reads the others' files: all ranks of a small job do, some of a large one."""
    return rank % -(-world_size // READING_RANKS) == 0


@dataclass(frozen=True)
class Stall:
    """Where a rank hangs.

    Attributes:
        step: that it is doing, counted from 1; 0 before the first.
        seconds: without progress.
        where: the line that its main thread is at, and the line of this project that led there.
        waits: whether it is waiting for other ranks, or for its device.
    """

    rank: int
    step: int
    phase: str
    seconds: float
    where: str
    waits: bool


class Watchdog:
    """Watches this rank: `start`, `enter` at every phase, `stop` at the end.

    Args:
        seconds: without progress that are too many.
        leave: ends the process with an exit code.
        stop: returns why this rank was asked to stop, with the signal's name, or None.
        workers: whether processes of the loader fetch the data.
    """

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        world_size: int,
        seconds: float,
        leave: Callable[[int], object] = os._exit,
        stop: Callable[[], str | None] = lambda: None,
        workers: bool = False,
    ):
        self.run_dir, self.rank, self.world_size, self.seconds = run_dir, rank, world_size, seconds
        self._leave, self._reads, self._stop = leave, reads_reports(rank, world_size), stop
        self._workers = workers
        self._step, self._place = 0, (0, 0, "start")  # moves so far, step, phase
        self._main = threading.main_thread().ident
        self._tick = min(1.0, seconds / 20)
        self._end = threading.Event()
        self._stacks = 2  # file descriptor for the stacks of a process that is held
        self._base: Path | None = None  # folder below which that file is
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> "Watchdog":
        """Start watching."""
        self._open_stacks()
        self._wind()
        self._thread.start()
        return self

    def joined(self) -> None:
        """Note that this rank has joined its start, which holds the run folder by now."""
        self._open_stacks()

    def _open_stacks(self) -> None:
        """Have stacks of a held process go where this start may write now."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:  # nobody reads the file
            return
        with suppress(OSError):
            base = report_base(self.run_dir)
            if base is not None and base != self._base:
                # The clock may still write into the former file: it stays open.
                self._stacks, former = open_held(base, self.rank), self._base
                self._base = base
                if former is not None:
                    self._wind()
                    held_file(former, self.rank).unlink(missing_ok=True)

    def stop(self) -> None:
        """Stop watching."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._base is not None:
            os.close(self._stacks)
            self._stacks = 2
            with suppress(OSError):
                held_file(self._base, self.rank).unlink(missing_ok=True)

    def begin_step(self, step: int) -> None:
        """Record the start of a step, counted from 1."""
        self._step = step

    def enter(self, phase: str) -> None:
        """Record that a phase starts or resumes: this is progress."""
        # One assignment: the watching thread sees all of it or nothing.
        self._place = (self._place[0] + 1, self._step, phase)

    def progress(self, phase: str) -> Callable[[object], None]:
        """Return a callback that records progress within a phase."""
        return lambda _: self.enter(phase)

    def _watch(self) -> None:
        try:
            self._look()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _wind(self) -> None:
        seconds = held_after(self.seconds)
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._stacks)

    def _look(self) -> None:
        seen, still, told, last = self._place, 0.0, False, time.monotonic()
        asked = 0.0  # seconds since this rank was told to stop
        while not self._end.wait(self._tick):
            self._wind()
            now, place = time.monotonic(), self._place
            # A longer tick is time in which this process was stopped, or starved.
            passed, last = min(now - last, 2 * self._tick), now
            asked = asked + passed if self._stop() else 0.0
            still = still + passed if place == seen else 0.0
            if place != seen and told:
                told = False
                with suppress(OSError):
                    if holds(self.run_dir):
                        stall_file(self.run_dir, self.rank).unlink(missing_ok=True)
            seen = place
            if asked and (why := self._unanswered(place, asked, still)):
                _in_time(partial(self._say, why))
                self._leave(NO_PROGRESS)
                return
            if still >= self.seconds + (0 if self._reads else GRACE_S):
                _in_time(partial(self._say_why, seen, still))
                self._leave(NO_PROGRESS)
                return
            elif still >= EARLY * self.seconds and not told:
                told = True
                _in_time(partial(self._tell, seen, still))

    def _tell(self, place: tuple[int, int, str], seconds: float) -> None:
        """Write this rank's position for the other ranks, and its stacks for people."""
        base = report_base(self.run_dir)
        if base is None:
            return
        file = stall_file(base, self.rank)
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".partial")
        unfinished.write_text(json.dumps(asdict(self._stall(place, seconds))) + "\n")
        unfinished.replace(file)
        with (file.parent / f"stacks_rank_{self.rank}.txt").open("w") as stacks:
            print(f"rank {self.rank}, step {place[1]}, phase {place[2]!r}", file=stacks, flush=True)
            faulthandler.dump_traceback(stacks, all_threads=True)

    def _unanswered(self, place: tuple[int, int, str], asked: float, still: float) -> str | None:
        """Say why this rank, told to stop so many seconds ago, cannot come to the end of its step.

        Only where the main thread depends on the store: before the first step, or without data for
        so long since it was told, in this very wait (`still`).
        """
        _, step, phase = place
        if step and phase != WAIT_FOR_DATA:
            return None
        why = self._stop() or ""
        patience = SCHEDULERS_S if step and signal.SIGUSR1.name in why else STORE_S
        waited = min(asked, still) if step else asked
        what, seconds = longest_silence()
        if min(waited, seconds) >= patience:
            silent = f"{what}: no answer for {seconds:.0f} s"
        elif step and self._workers and waited >= max(patience, WORKERS_S):
            silent = f"the data does not come for {waited:.0f} s"
        else:
            return None
        return (
            f"stopped ({why}) in {_at(step, phase)} without saving, because it cannot be "
            f"finished: {silent}; --resume latest goes on from the last checkpoint, if there is one"
        )

    def _say(self, message: str) -> None:
        write_exit_report(self.run_dir, self.rank, ExitReport(message, NO_PROGRESS))
        print(f"error: {message}", file=sys.stderr, flush=True)
        if self.rank == 0 and holds(self.run_dir):
            mark_failed(self.run_dir, message)

    def _say_why(self, place: tuple[int, int, str], seconds: float) -> None:
        mine = self._stall(place, seconds)
        message = stall_message(mine)
        write_exit_report(self.run_dir, self.rank, ExitReport(message, NO_PROGRESS))
        base = report_base(self.run_dir)
        if self._reads and base is not None:  # which the file system may not let it do in time
            stalls = read_stalls(base, self.world_size)
            message = describe(mine, stalls, self.world_size)
            write_exit_report(self.run_dir, self.rank, ExitReport(message, NO_PROGRESS))
        print(f"error: {message}", file=sys.stderr, flush=True)

    def _stall(self, place: tuple[int, int, str], seconds: float) -> Stall:
        # The frame of a running thread may go on while it is read; this is for people.
        lines = stack_of(sys._current_frames().get(self._main or 0))
        waiting = waits(lines, on_device=_on_device())
        return Stall(self.rank, place[1], place[2], seconds, where(lines), waiting)


def stall_file(run_dir: Path, rank: int) -> Path:
    """Return the file in which a hanging rank reports where it is."""
    return run_dir / "logs" / f"stalled_rank_{rank}.json"


def read_stalls(run_dir: Path, world_size: int) -> dict[int, Stall]:
    """Return the reports of all hanging ranks."""

    def read(rank: int) -> Stall | None:
        try:
            return Stall(**json.loads(stall_file(run_dir, rank).read_text()))
        except FileNotFoundError:
            return None

    with ThreadPoolExecutor(_READERS) as pool:
        stalls = pool.map(read, range(world_size))
        return {stall.rank: stall for stall in stalls if stall is not None}


def stall_message(mine: Stall) -> str:
    """Return in one line where this rank hangs."""
    return (
        f"no progress for {mine.seconds:.0f} s (train.timeout_seconds): rank {mine.rank} is in "
        f"{_at(mine.step, mine.phase)}, at {mine.where}"
    )


def _at(step: int, phase: str) -> str:
    return f"step {step}, phase {phase!r}" if step else f"phase {phase!r}"


def describe(mine: Stall, stalls: Mapping[int, Stall], world_size: int) -> str:
    """Return the line that ends a run: where this rank waits, and for whom.

    `stalls` are of the ranks that said where they stand, this one perhaps among them.
    """
    told = stall_message(mine)
    everyone = {**stalls, mine.rank: mine}
    if silent := [rank for rank in range(world_size) if rank not in everyone]:
        return (
            f"{told}; no word from {named(silent)}: stopped, dead, cut off, or still working "
            "while others wait"
        )
    guilty = suspects(list(everyone.values()))
    if world_size == 1 or [stall.rank for stall in guilty] == [mine.rank]:
        return f"{told}; it waits for no other rank" if not mine.waits else told
    if not guilty:
        return f"{told}; all {world_size} ranks wait in this phase: a network or a device hangs"
    first = guilty[0]
    return (
        f"{told}; held up by {named([stall.rank for stall in guilty])}, in step {first.step}, "
        f"phase {first.phase!r}, at {first.where}"
    )


def suspects(stalls: Sequence[Stall]) -> list[Stall]:
    """Return the ranks that hold up the others, when all said where they stand; none if all are
    alike.
    """
    if busy := [stall for stall in stalls if not stall.waits]:
        return busy
    step = min(stall.step for stall in stalls)
    longest = max(
        (stall for stall in stalls if stall.step == step), key=lambda stall: stall.seconds
    )
    place = (longest.step, longest.phase)
    behind = [stall for stall in stalls if (stall.step, stall.phase) == place]
    return [] if len(behind) == len(stalls) else behind


def _on_device() -> bool:
    """Whether this process computes on a CUDA device; does not import torch."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)  # it may be loading just now
    begun = getattr(cuda, "is_initialized", None)
    return begun is not None and begun()


def named(ranks: Sequence[int]) -> str:
    """Return ranks as a message names them: not all of thousands."""
    listed = ", ".join(str(rank) for rank in ranks[:NAMED])
    more = f" and {len(ranks) - NAMED} others" if len(ranks) > NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}"


def _in_time(work: Callable[[], None]) -> None:
    """Call `work`, but wait no longer than WRITING_S: a hanging disk must not delay the exit."""

    def try_it() -> None:
        with suppress(OSError):
            work()

    thread = threading.Thread(target=try_it, daemon=True)
    thread.start()
    thread.join(WRITING_S)
