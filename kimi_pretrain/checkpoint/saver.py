"""Saves checkpoints during training; see `CheckpointSaver`.

When rank 0's writer starts, it also begins to remove the leftovers of killed runs. A save has these
steps:

1. begin      every rank stages (copies) its share; a thread stages the tensors that only the update
              changes, while the next step runs, and `wait_staged` waits before the update
2. write      the rank's writer process hashes and writes the files in the background
3. advance    the ranks exchange their progress, in the all-gather of a training step
4. commit     when all ranks have written, rank 0's writer writes manifest.json, which completes the
              save
5. retire     rank 0's writer removes checkpoints that need not be kept; nothing waits for it

A failure on one rank fails the whole save on all ranks, and training continues.
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
# Maximum seconds that a save waits for pending deletions before it replaces the writer.
_REMOVAL_S = 30.0
_LAST_REMOVAL_S = 300.0  # the same at close, where no new writer follows


@dataclass(frozen=True)
class SaveProgress:
    """Progress of one rank's writer with the current save; small and picklable.

    Attributes:
        phase: "writing"; "written"; "committed", only on rank 0; or "failed".
        bytes_done: bytes written so far.
        files: the files written; reported once, and empty later.
        error: reason of the failure, in one line.
        transient: True if a retry may succeed: the location does not respond, or the process died.
        warnings: warnings of the writer.
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
        saver.wait_staged()                        # before `unchanged` tensors change
        ...
        everyone = mesh.all_gather_object(saver.progress())   # in the all-gather of the step
        done = saver.advance(everyone)             # URI of a newly complete checkpoint, or None
        ...
        saver.finish()                             # wait for the last save
        saver.close()

    All ranks must call `begin` and `finish` together, with the same state. A synchronous save is
    `begin` followed by `finish`.

    Args:
        place: a folder that all ranks see, or an object store.
        config: configuration of the run.
        mesh: mesh of the job; only rank, world size, device and `all_gather_object` are used.
        alive: called whenever a waiting rank sees that bytes were written, so that a watchdog can
            distinguish a slow save from a hang.
        owner: required owner of the location at each commit; None for any owner.

    Attributes:
        seconds: {"stall", "background"} of the last save, on this rank.
        uri: URI of the last complete checkpoint that this object has written, or None.
        under_way: step of the save that has begun and is not complete, or None. The same on all
            ranks.

    Raises:
        ValueError: other processes cannot see the location.
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
        self._saved: RunState | None = None  # state in the checkpoint `uri`
        self._phase: Literal["writing", "committing"] = "writing"
        self._files: dict[str, Fingerprint] = {}  # files of all ranks so far; only on rank 0
        self._files_reported = False  # True once an all-gather has contained this rank's files
        self._began = 0.0
        self._seen_bytes = 0
        self._failures = 0
        self._failure: CheckpointError | None = None

    def prepare(self, tensors: Mapping[str, Tensor], step: int | None = None) -> None:
        """Assign tensors to ranks and allocate staging memory; a collective call.

        `begin` calls this if needed. If it is called before the first step, missing memory shows
        early, and the first save stalls no longer than later saves. `step` is the next step to
        save, if known.

        Raises:
            CheckpointError: there is not enough memory; all ranks raise the same error.
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
        """Stage a copy of the tensors and start writing it; a collective call.

        It first waits for an earlier save. It does nothing if this object has already saved this
        state.

        Args:
            tensors: tensors of this rank by name; a name has equal values on all ranks.
            state: the state of the run, equal on all ranks.
            unchanged: returns whether the tensor of a name does not change until `wait_staged` has
                returned. All other tensors may change as soon as this returns; with None, all
                tensors may.

        Raises:
            CheckpointError: too many saves in a row have failed, or there is no memory for the
                first save; all ranks raise the same error.
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
        """True if a background copy has not been completed by `wait_staged`."""
        return self._background_copy is not None

    def wait_staged(self) -> None:
        """Wait until all tensors are staged, and start the writer.

        Call it before any tensor changes that was `unchanged` in `begin`.
        """
        if self._background_copy is None:
            return
        start = time.monotonic()
        self._background_copy.wait()
        self._background_copy = None
        self._send_write()
        self.seconds["stall"] += time.monotonic() - start

    def progress(self, wait: float = 0.0) -> SaveProgress | None:
        """Return this rank's progress after at most `wait` seconds, or None without a save."""
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
        # There may be thousands of ranks, so each rank's files are only gathered once.
        written = {} if self._files_reported else writer.done["value"]
        files = {name: Fingerprint(**found) for name, found in written.items()}
        return SaveProgress("written", writer.bytes_done, files, warnings=warnings)

    def advance(self, everyone: Sequence[SaveProgress | None]) -> str | None:
        """Handle the `progress` of all ranks, and commit when all of them have written.

        Returns:
            the URI of the checkpoint that has just become complete, or None; equal on all ranks.

        Raises:
            CheckpointError: `config.checkpoint.failures` saves in a row have failed
                (CheckpointUnavailable if a retry may succeed).
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
            # If a rank fails early, its files stay until all other ranks have finished writing.
            if any(progress.error for progress in reports):
                self._fail(reports)
            else:
                self._commit()
        return None

    def finish(self) -> str | None:
        """Wait until the current save is complete; a collective call.

        Returns:
            the URI of the last complete checkpoint, or None.

        Raises:
            CheckpointError: the current save has failed (CheckpointUnavailable if a retry may
                succeed); all ranks raise the same error.
        """
        waiting = self.under_way
        self._await_save()
        if waiting is not None and self._failure is not None:
            raise self._failure
        return self.uri

    def close(self, hurry: bool = False) -> None:
        """End the writer and abandon an incomplete save.

        With `hurry` this takes seconds and leaves pending deletions to the next run.
        """
        self.under_way = None
        self._release(None if hurry else self._at_most(_LAST_REMOVAL_S))

    def _await_save(self) -> None:
        """Wait for the current save by exchanging progress, as the training loop does per step."""
        while self.under_way is not None:
            everyone: list[Any] = self.mesh.all_gather_object(self.progress(_POLL_S))
            done = sum(progress.bytes_done for progress in everyone if progress is not None)
            if done != self._seen_bytes:
                self._seen_bytes = done
                self._alive()
            self.advance(everyone)

    def _await_removals(self, step: int) -> None:
        """Wait for the writer's pending deletions before any rank begins to write.

        If the same step is saved again, its new files must not be removed with the old files.
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
                self._writer.close(0.0)  # a new writer is started later
                return
            self._writer.poll(_POLL_S)
            self._alive()

    def _at_most(self, seconds: float) -> float:
        """Limit a wait of only rank 0, because the watchdogs of other ranks see no progress."""
        return min(seconds, self.config.train.timeout_seconds / 2)

    def _start(self, step: int | None) -> WriterClient:
        """Start a writer; on rank 0 it also removes leftovers of killed runs and writers."""
        assert self._staging is not None
        writer = WriterClient(self.place, tuple(self._staging.fds.values()))
        if self.mesh.rank == 0:
            if step is not None:  # other ranks may begin to write this step at any moment
                writer.send("protect", step=step)
            writer.send("tidy", owner=self._owner)
        return writer

    def _send_write(self) -> None:
        """Send the write job to the writer; if it has ended, start a new one first."""
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
        """Run step 4 of a save, in which rank 0 completes the checkpoint."""
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
            # Nothing waits for this job; its warnings arrive with the replies to the next job.
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
            self._writer.poll(_SOON_S)  # usually sufficient; otherwise the next save waits
        if self._failures >= limit:
            raise kind(
                f"{self._failure}. That was save {self._failures} in a row to fail "
                f"(checkpoint.failures={limit}), so the run stops"
            )
        if self.mesh.rank == 0:
            text = "%s; training goes on, failed saves in a row: %d, allowed: %d"
            log.warning(text, self._failure, self._failures, limit - 1)

    def _collect_files(self, reports: Sequence[SaveProgress]) -> None:
        """Collect the reported files; a rank repeats its report until this has handled it."""
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
    """Return the errors of all ranks as one line, "" if there are none."""
    return "; ".join(f"rank {rank}: {error}" for rank, error in enumerate(errors) if error)
