"""Saves checkpoints while training goes on; see `CheckpointSaver`.

From its start on, rank 0's writer also removes what killed runs have left. The steps of a save:

1. begin      every rank stages (copies) its share; a thread stages what changes in the update
              alone, while the next step runs, and `wait_staged` waits before the update
2. write      its writer process hashes and writes the files, in the background
3. advance    the ranks exchange their progress, in the one all-gather of a training step
4. commit     when all have written, rank 0's writer writes manifest.json: the save is complete
5. retire     what need not be kept is removed; nothing waits for it

What fails on one rank fails the save as a whole, on all ranks alike, and training goes on.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from kimi_pretrain.checkpoint import sharding
from kimi_pretrain.checkpoint.errors import CheckpointError, CheckpointUnavailable, error_class
from kimi_pretrain.checkpoint.manifest import (
    INDEX,
    Fingerprint,
    RunState,
    installed_versions,
    manifest_of,
)
from kimi_pretrain.checkpoint.staging import BackgroundCopy, StagingBuffers
from kimi_pretrain.checkpoint.storage_read import Place
from kimi_pretrain.checkpoint.writer_client import WriterClient
from kimi_pretrain.config import MIB

if TYPE_CHECKING:
    from kimi_pretrain.checkpoint.ownership import Owner
    from kimi_pretrain.config import Config
    from kimi_pretrain.engine.mesh import Mesh

log = logging.getLogger("kimi_pretrain.checkpoint")

_POLL_S = 0.2
_SOON_S = 5.0
# How long a save waits for pending deletions before replacing the writer.
_REMOVAL_S = 30.0
_LAST_REMOVAL_S = 300.0  # at close no new writer follows


@dataclass(frozen=True)
class SaveProgress:
    """How far one rank's writer is with the save that is under way; small, and picklable.

    Attributes:
        phase: "writing"; "written"; "committed", of rank 0 alone; or "failed".
        bytes_done: written so far.
        files: what was written; reported once, and empty later.
        error: why it failed, in one line.
        transient: whether a retry may succeed: the place does not answer, or the process died.
        warnings: of the writer.
    """

    phase: Literal["writing", "written", "committed", "failed"]
    bytes_done: int = 0
    files: Mapping[str, Fingerprint] = field(default_factory=dict)
    error: str | None = None
    transient: bool = False
    warnings: tuple[str, ...] = ()


class CheckpointSaver:
    """Writes a run's checkpoints from all ranks, in the background.

        saver.begin(tensors, state, unchanged)     # stages a copy
        ...
        saver.wait_staged()                        # before what is `unchanged` changes
        ...
        everyone = mesh.all_gather_object(saver.progress())   # part of the step's own all-gather
        done = saver.advance(everyone)             # the URI of what is complete now, or None
        ...
        saver.finish()                             # wait for the last one
        saver.close()

    `begin` and `finish` must be called by all ranks together, with the same state. A synchronous
    save is `begin` and `finish`.

    Args:
        place: a folder that all ranks see, or an object store.
        config: of the run.
        mesh: of the job; only its rank, world size, device and `all_gather_object` are used.
        alive: called whenever a rank that waits has seen bytes being written, so that a watchdog
            can tell a slow save from one that hangs.
        owner: who must own the place when a checkpoint is committed; None: anybody.

    Attributes:
        seconds: {"stall", "background"} of the last save, on this rank.
        uri: of the last complete checkpoint that this object has written; None: none yet.
        under_way: the step whose save has begun and is not complete; None: none. The same on all
            ranks.

    Raises:
        ValueError: a place that other processes do not see.
    """

    def __init__(
        self,
        place: Place,
        config: "Config",
        mesh: "Mesh",
        alive: Callable[[], None] = lambda: None,
        owner: "Owner | None" = None,
    ):
        if place.uri.startswith("memory://"):
            raise ValueError(f"checkpoint.place={place.uri}: use a folder or s3://bucket/prefix")
        self.place, self.config, self.mesh, self._alive = place, config, mesh, alive
        self._owner = owner
        self.seconds: dict[str, float] = {}
        self.uri: str | None = None
        self.under_way: int | None = None
        self._staging: StagingBuffers | None = None
        self._background_copy: BackgroundCopy | None = None
        self._writer: WriterClient | None = None
        self._state: RunState | None = None
        self._saved: RunState | None = None  # of `uri`
        self._phase: Literal["writing", "committing"] = "writing"
        self._files: dict[str, Fingerprint] = {}  # of all ranks, so far; used by rank 0 alone
        self._files_reported = False  # whether this rank's files have gone through an all-gather
        self._began = 0.0
        self._seen_bytes = 0
        self._failures = 0
        self._failure: CheckpointError | None = None

    def prepare(self, tensors: Mapping[str, Tensor], step: int | None = None) -> None:
        """Agree on who writes what, and allocate staging memory. Collective; `begin` does it too.

        Called before the first step, it fails early where memory does not suffice, and the first
        save stalls no longer than later ones. `step` is saved next, if that is known.

        Raises:
            CheckpointError: not enough memory; the same on all ranks.
        """
        everyone: list[Any] = self.mesh.all_gather_object(sharding.compressed(_sizes(tensors)))
        sizes = sharding.decompressed(everyone)
        weights = sharding.weight_map(sizes, self.config.checkpoint.file_mib * MIB)
        texts: dict[str, bytes] = {}
        if self.mesh.rank == 0:
            total = sum({name: size for held in sizes for name, size in held.items()}.values())
            texts[INDEX] = sharding.index_text(weights, total).encode()
        self._release(0.0)
        problem: str | None = None
        kind: type[CheckpointError] = CheckpointError
        try:
            files = sharding.files_of_rank(weights, self.mesh.rank)
            self._staging = StagingBuffers(files, tensors, texts, self.mesh.device)
            self._writer = self._start(step)
        except (CheckpointError, OSError) as error:
            problem, kind = str(error), error_class(error)
        outcomes: list[Any] = self.mesh.all_gather_object((problem, kind))
        if problems := _by_rank([problem for problem, _ in outcomes]):
            self._release(0.0)
            raise next(kind for problem, kind in outcomes if problem)(problems)

    def begin(
        self,
        tensors: Mapping[str, Tensor],
        state: RunState,
        unchanged: Callable[[str], bool] | None = None,
    ) -> None:
        """Stage a copy of the tensors and start writing it. Collective.

        Waits for an earlier save first. A state that this object has saved before is not saved
        again.

        Args:
            tensors: what this rank holds, by name; equal names hold equal values on all ranks.
            state: the same on all ranks.
            unchanged: whether the tensor of a name stays as it is until `wait_staged` has returned;
                the others may change as soon as this returns. None: all may.

        Raises:
            CheckpointError: too many saves in a row have failed, or there is no memory for the
                first one; the same on all ranks.
        """
        start = time.monotonic()
        self._await_save()
        self._await_removals(state.step)
        ready = self._staging is not None and self._staging.holds(tensors)
        everyone: list[Any] = self.mesh.all_gather_object((ready, state == self._saved))
        if all(same for _, same in everyone):
            return
        if not all(ready for ready, _ in everyone):
            self.prepare(tensors, state.step)
        assert self._staging is not None  # `prepare` has raised otherwise
        self._state, self._phase, self._files, self._files_reported = state, "writing", {}, False
        self.under_way, self._failure, self._seen_bytes = state.step, None, 0
        if unchanged is None:
            self._staging.copy(tensors)
            self._send_write()
        else:
            self._staging.copy(tensors, lambda name: not unchanged(name))
            self._background_copy = BackgroundCopy(
                self._staging, tensors, unchanged, self.mesh.device
            )
        self._began = time.monotonic()
        self.seconds = {"stall": self._began - start}

    @property
    def is_staging(self) -> bool:
        """Whether `wait_staged` has something to wait for, or to do."""
        return self._background_copy is not None

    def wait_staged(self) -> None:
        """Wait until everything is staged, and let the writer begin.

        Called before anything changes that was `unchanged` when the save began.
        """
        if self._background_copy is None:
            return
        start = time.monotonic()
        self._background_copy.wait()
        self._background_copy = None
        self._send_write()
        self.seconds["stall"] += time.monotonic() - start

    def progress(self, wait: float = 0.0) -> SaveProgress | None:
        """Return how far this rank is, after `wait` seconds at most; None: nothing is under way."""
        if self.under_way is None or self._writer is None:
            return None
        self.wait_staged()
        writer = self._writer
        writer.poll(wait)
        warnings, writer.warnings = tuple(writer.warnings), []
        if writer.failed is not None:
            return SaveProgress(
                "failed", writer.bytes_done, {}, writer.failed, writer.transient, warnings
            )
        if writer.done is None:
            return SaveProgress("writing", writer.bytes_done, warnings=warnings)
        if self._phase == "committing" and self.mesh.rank == 0:
            return SaveProgress("committed", writer.bytes_done, warnings=warnings)
        # There may be thousands of ranks: each rank's files are gathered once.
        written = {} if self._files_reported else writer.done["value"]
        files = {name: Fingerprint(**found) for name, found in written.items()}
        return SaveProgress("written", writer.bytes_done, files, warnings=warnings)

    def advance(self, everyone: Sequence[SaveProgress | None]) -> str | None:
        """Handle the `progress` of all ranks; commit when all have written. The same on all ranks.

        Returns:
            the URI of the checkpoint that has just become complete.

        Raises:
            CheckpointError: `config.checkpoint.failures` saves in a row have failed
                (CheckpointUnavailable: a retry may succeed).
        """
        if self.under_way is None:
            return None
        reports = [progress for progress in everyone if progress is not None]
        assert len(reports) == self.mesh.world_size, "ranks do not agree on what is under way"
        if self.mesh.rank == 0:
            for rank, progress in enumerate(reports):
                _log_warnings(rank, progress.warnings)
        self._collect_files(reports)
        if self._phase == "committing":
            if reports[0].phase == "committed":
                return self._complete()
            if reports[0].phase == "failed":
                self._fail(reports[:1])
        elif all(progress.phase in ("written", "failed") for progress in reports):
            # Files of a rank that fails early stay while others still write theirs.
            if any(progress.error for progress in reports):
                self._fail(reports)
            else:
                self._commit()
        return None

    def finish(self) -> str | None:
        """Wait until what was begun is complete. Collective.

        Returns:
            the URI of the last complete checkpoint; None: there is none.

        Raises:
            CheckpointError: the save that was under way has failed (CheckpointUnavailable: a
                retry may succeed); the same on all ranks.
        """
        waiting = self.under_way
        self._await_save()
        if waiting is not None and self._failure is not None:
            raise self._failure
        return self.uri

    def close(self, hurry: bool = False) -> None:
        """End the writer; a save that is not complete is abandoned.

        In a hurry it takes seconds, and leaves pending deletions to the next run.
        """
        self.under_way = None
        self._release(None if hurry else self._at_most(_LAST_REMOVAL_S))

    def _await_save(self) -> None:
        """Wait for the save that is under way, as the training loop does between its steps."""
        while self.under_way is not None:
            everyone: list[Any] = self.mesh.all_gather_object(self.progress(_POLL_S))
            done = sum(progress.bytes_done for progress in everyone if progress is not None)
            if done != self._seen_bytes:
                self._seen_bytes = done
                self._alive()
            self.advance(everyone)

    def _await_removals(self, step: int) -> None:
        """Wait for the writer's pending deletions, before any rank begins to write.

        The same step may be saved again: its new files must not be removed with the old ones.
        """
        if self._writer is None:
            return
        until = time.monotonic() + self._at_most(_REMOVAL_S)
        self._await_job(until)
        if self._writer.tidying:
            self._writer.send("protect", step=step)
            self._await_job(until)

    def _await_job(self, until: float) -> None:
        assert self._writer is not None
        self._writer.poll()
        while self._writer.busy:
            if time.monotonic() > until:
                self._writer.close(0.0)  # another writer is started
                return
            self._writer.poll(_POLL_S)
            self._alive()

    def _at_most(self, seconds: float) -> float:
        """Bound what rank 0 does alone: to the watchdogs of the others it makes no progress."""
        return min(seconds, self.config.train.timeout_seconds / 2)

    def _start(self, step: int | None) -> WriterClient:
        """Start a writer; rank 0's also removes what killed runs, this one's too, have left."""
        assert self._staging is not None
        writer = WriterClient(self.place, tuple(self._staging.fds.values()))
        if self.mesh.rank == 0:
            if step is not None:  # other ranks may begin to write it at any moment
                writer.send("protect", step=step)
            writer.send("tidy", owner=self._owner)
        return writer

    def _send_write(self) -> None:
        """Let the writer begin; a new one is started if it has ended."""
        assert self._staging is not None
        if self._writer is None or not self._writer.alive:
            if self._writer is not None:
                self._writer.close(0.0)
                _log_warnings(self.mesh.rank, self._writer.warnings)
            self._writer = self._start(self.under_way)
        files = [
            {"name": name, "fd": self._staging.fds[name], "bytes": size}
            for name, size in self._staging.sizes.items()
        ]
        self._writer.send("write", step=self.under_way, files=files)

    def _commit(self) -> None:
        """Step 4 of a save: rank 0 completes the checkpoint."""
        self._phase = "committing"
        if self.mesh.rank != 0:
            return
        assert self._state is not None
        assert self._writer is not None
        manifest = manifest_of(self.config, self._state, self._files, installed_versions()).text()
        step, files = self.under_way, sorted(self._files)
        self._writer.send("commit", step=step, manifest=manifest, files=files, owner=self._owner)

    def _complete(self) -> str:
        assert self.under_way is not None
        step, keep = self.under_way, self.config.checkpoint
        self.uri = self.place.checkpoint(step).uri
        self.seconds["background"] = time.monotonic() - self._began
        self._saved, self.under_way, self._failures = self._state, None, 0
        if self.mesh.rank == 0:
            assert self._writer is not None
            log.info("checkpoint %s is complete", self.uri)
            # Nothing waits for it; its warnings come with the replies to the next job.
            keeping = {"keep_last": keep.keep_last, "keep_every": keep.keep_every}
            self._writer.send("retire", step=step, **keeping)
        return self.uri

    def _fail(self, reports: Sequence[SaveProgress]) -> None:
        step, limit = self.under_way, self.config.checkpoint.failures
        transient = any(progress.transient for progress in reports)
        kind = CheckpointUnavailable if transient else CheckpointError
        reason = _by_rank([progress.error for progress in reports])
        self.under_way = None
        self._failures += 1
        self._failure = kind(f"the checkpoint of step {step} could not be written: {reason}")
        if self.mesh.rank == 0 and self._writer is not None and self._writer.alive:
            self._writer.send("remove_torn", step=step)
            self._writer.poll(_SOON_S)  # usually enough; otherwise the next save waits
        if self._failures >= limit:
            raise kind(
                f"{self._failure}. That was save {self._failures} in a row to fail "
                f"(checkpoint.failures={limit}), so the run stops"
            )
        if self.mesh.rank == 0:
            text = "%s; training goes on, failed saves in a row: %d, allowed: %d"
            log.warning(text, self._failure, self._failures, limit - 1)

    def _collect_files(self, reports: Sequence[SaveProgress]) -> None:
        """Collect the files that ranks report; a report that is not handled here is repeated."""
        if reports[self.mesh.rank].phase == "written":
            self._files_reported = True
        if self.mesh.rank == 0:
            for progress in reports:
                self._files.update(progress.files)

    def _release(self, patience: float | None) -> None:
        if self._background_copy is not None:
            self._background_copy.wait()
            self._background_copy = None
        if self._writer is not None:
            self._writer.close(patience, self._alive)
            _log_warnings(self.mesh.rank, self._writer.warnings)
        if self._staging is not None:
            self._staging.close()
        self._writer = self._staging = None


def _sizes(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}


def _log_warnings(rank: int, warnings: Iterable[str]) -> None:
    for warning in warnings:
        log.warning("rank %d: %s", rank, warning)


def _by_rank(errors: Sequence[Any]) -> str:
    """Join the errors of ranks; "" if there is none."""
    return "; ".join(f"rank {rank}: {error}" for rank, error in enumerate(errors) if error)
