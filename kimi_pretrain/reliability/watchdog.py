"""Watchdog: ends a hanging run within a bounded time and names the rank that caused the hang.

A thread of each rank follows the step and phase of the main thread (the phases of
`kimi_pretrain.step`, and building, waiting for data, measuring, saving). `train.timeout_seconds`
without a new phase is a hang, so no phase may take longer than that. On a GPU the first backbone
phase compiles kernels and sets the lower bound of the timeout. In order of time:

    4/5 of it   the rank writes its phase and stack to logs/stalled_rank_N.json, which other ranks
                read, and the stacks of all its threads to logs/stacks_rank_N.txt
    all of it   the rank reads what all ranks wrote, writes an exit report that names the rank at
                fault, and exits with 75

In a large job only some ranks, spread over the job, read the files of all ranks; thousands of
ranks that open thousands of files would take too long. Their exit ends the job. If all of these
ranks are gone, the other ranks exit `GRACE_S` later and report only their own state.

After a request to stop, the rank finishes its step and saves. If it waits for data and the store
does not answer, it cannot finish and exits with 75. It does so soon (`STORE_S`) after INT or TERM,
which a person sends, and later (`SCHEDULERS_S`) after USR1, which a scheduler sends minutes ahead
so that no step is lost. Saves may use all the patience of the store.

A rank that wrote nothing is stopped or dead, or works while others wait for it. Among the ranks
that wrote, a rank that does not wait for other ranks is at fault
(`kimi_pretrain.reliability.stack_inspection`). If all wait, the ranks in the earliest phase are.
Only time in which this process runs counts: a job that a scheduler suspends continues afterwards,
unless the pause exceeds one of the two limits below.

Two slower timeouts back this one up. Collectives have their own timeout (`backstop`). C code that
holds the GIL stops all Python threads, including this one. Therefore every tick re-arms
faulthandler, a C thread, which writes all stacks and exits with 1 if it is not re-armed within
`held_after`. Under torchrun it writes to logs/held_rank_N.txt, which
`exit_report.first_exit_report` reads; otherwise it writes to stderr.
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

EARLY = 0.8  # fraction of the timeout after which a rank writes its position
WRITING_S = 10.0  # limit for writing before the process exits anyway: the disk may hang, too
READING_RANKS = 16  # ranks that read all ranks' files; the others exit GRACE_S later
GRACE_S = 10.0
STORE_S = 4.0  # allowed silence of a store once a rank is asked to stop
SCHEDULERS_S = 60.0  # the same if a scheduler asks and steps may be lost
WORKERS_S = 30.0  # minimum if loader processes fetch the step: their store traffic is not visible
WAIT_FOR_DATA = "1 wait for data"
_READERS = 32  # concurrent reads: each takes about a millisecond on a shared file system
NAMED = 8  # most ranks that a message lists


def backstop(seconds: float) -> float:
    """Return the collective timeout that goes with a watchdog timeout of `seconds`."""
    return seconds * 1.25 + GRACE_S + 15


def held_after(seconds: float) -> float:
    """Return the number of seconds without a watchdog tick after which the process ends.

    It exceeds the time the watchdog thread waits for a disk, and the timeouts of the other ranks'
    watchdogs.
    """
    return seconds + GRACE_S + WRITING_S / 2


def reads_reports(rank: int, world_size: int) -> bool:
    """Return True if a rank reads the other ranks' files: all ranks of a small job, or a subset."""
    return rank % -(-world_size // READING_RANKS) == 0


@dataclass(frozen=True)
class Stall:
    """Position at which a rank hangs.

    Attributes:
        step: the current step, counted from 1; 0 before the first step.
        seconds: time without progress.
        where: the main thread's line, and the line of this project that led there.
        waits: True if the rank is waiting for other ranks or for its device.
    """

    rank: int
    step: int
    phase: str
    seconds: float
    where: str
    waits: bool


class Watchdog:
    """Watches this rank: call `start`, then `enter` at every phase, and `stop` at the end.

    Args:
        seconds: time without progress that counts as a hang.
        leave: ends the process with an exit code.
        stop: returns the reason of a stop request, including the signal's name, or None.
        workers: True if loader processes fetch the data.
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
        self._step, self._place = 0, (0, 0, "start")  # number of phase changes, step, phase
        self._main = threading.main_thread().ident
        self._tick = min(1.0, seconds / 20)
        self._end = threading.Event()
        self._stacks = 2  # file descriptor for the stacks of a held process
        self._base: Path | None = None  # folder that contains that file
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> "Watchdog":
        """Start watching."""
        self._open_stacks()
        self._wind()
        self._thread.start()
        return self

    def joined(self) -> None:
        """Note that this rank has joined its start, which now holds the run folder."""
        self._open_stacks()

    def _open_stacks(self) -> None:
        """Redirect the stacks of a held process to the folder that this start may write to now."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:  # no supervisor reads the file
            return
        with suppress(OSError):
            base = report_base(self.run_dir)
            if base is not None and base != self._base:
                # faulthandler may still write to the former file, so it stays open.
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
        """Record that a phase starts or resumes, which counts as progress."""
        # A single assignment is atomic for the watching thread.
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
        asked = 0.0  # seconds since this rank was asked to stop
        while not self._end.wait(self._tick):
            self._wind()
            now, place = time.monotonic(), self._place
            # A longer tick means that this process was suspended or starved.
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
        """Write this rank's position for the other ranks, and its stacks for the user."""
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
        """Return the reason why this rank cannot finish its step after a stop request, or None.

        This applies only while the main thread depends on the store: before the first step, or in a
        wait for data that has lasted long enough since the request (`still`).
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
        if self._reads and base is not None:  # the file system may be too slow to finish this
            stalls = read_stalls(base, self.world_size)
            message = describe(mine, stalls, self.world_size)
            write_exit_report(self.run_dir, self.rank, ExitReport(message, NO_PROGRESS))
        print(f"error: {message}", file=sys.stderr, flush=True)

    def _stall(self, place: tuple[int, int, str], seconds: float) -> Stall:
        # The thread may run on while its frame is read; the result is only for people.
        lines = stack_of(sys._current_frames().get(self._main or 0))
        waiting = waits(lines, on_device=_on_device())
        return Stall(self.rank, place[1], place[2], seconds, where(lines), waiting)


def stall_file(run_dir: Path, rank: int) -> Path:
    """Return the path of the file in which a hanging rank reports its position."""
    return run_dir / "logs" / f"stalled_rank_{rank}.json"


def read_stalls(run_dir: Path, world_size: int) -> dict[int, Stall]:
    """Return the reports of all hanging ranks, keyed by rank."""

    def read(rank: int) -> Stall | None:
        try:
            return Stall(**json.loads(stall_file(run_dir, rank).read_text()))
        except FileNotFoundError:
            return None

    with ThreadPoolExecutor(_READERS) as pool:
        stalls = pool.map(read, range(world_size))
        return {stall.rank: stall for stall in stalls if stall is not None}


def stall_message(mine: Stall) -> str:
    """Return one line that says where this rank hangs."""
    return (
        f"no progress for {mine.seconds:.0f} s (train.timeout_seconds): rank {mine.rank} is in "
        f"{_at(mine.step, mine.phase)}, at {mine.where}"
    )


def _at(step: int, phase: str) -> str:
    return f"step {step}, phase {phase!r}" if step else f"phase {phase!r}"


def describe(mine: Stall, stalls: Mapping[int, Stall], world_size: int) -> str:
    """Return the line that ends a run: where this rank waits, and which ranks it waits for.

    `stalls` holds the reports of all ranks that wrote one; this rank may be missing.
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
    """Return the ranks that hold up the others, given the reports of all ranks.

    The list is empty if all ranks wait in the same phase.
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
    """Return True if this process uses a CUDA device; does not import torch."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)  # torch may still be importing
    begun = getattr(cuda, "is_initialized", None)
    return begun is not None and begun()


def named(ranks: Sequence[int]) -> str:
    """Format ranks for a message; long lists are shortened."""
    listed = ", ".join(str(rank) for rank in ranks[:NAMED])
    more = f" and {len(ranks) - NAMED} others" if len(ranks) > NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}"


def _in_time(work: Callable[[], None]) -> None:
    """Call `work`, but wait at most WRITING_S: a hanging disk must not delay the exit."""

    def try_it() -> None:
        with suppress(OSError):
            work()

    thread = threading.Thread(target=try_it, daemon=True)
    thread.start()
    thread.join(WRITING_S)
