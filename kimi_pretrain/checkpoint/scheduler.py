"""Schedules the saves of a run; the interface between the training loop and the checkpoints.

A save begins after the step at which it is due and continues in the background during the next
steps; the all-gather of every step carries the progress of each rank. When the run stops or ends,
it waits for the save.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from kimi_pretrain.checkpoint.errors import CheckpointError, storage_errors
from kimi_pretrain.checkpoint.saver import CheckpointSaver, SaveProgress
from kimi_pretrain.checkpoint.storage_read import Place
from kimi_pretrain.checkpoint.storage_write import abandon_later_checkpoints, open_storage_writer

if TYPE_CHECKING:
    import torch

    from kimi_pretrain.checkpoint.manifest import RunState
    from kimi_pretrain.checkpoint.ownership import Owner
    from kimi_pretrain.config import Config
    from kimi_pretrain.engine.mesh import Mesh

log = logging.getLogger("kimi_pretrain.checkpoint.scheduler")


class SavedRun(Protocol):
    """Interface of a run that can be saved."""

    config: "Config"
    mesh: "Mesh"
    step: int

    def tensors(self) -> "dict[str, torch.Tensor]":
        """Return all tensors of a checkpoint by name."""
        ...

    def run_state(self) -> "RunState":
        """Return the state of a checkpoint other than tensors."""
        ...

    def changes_only_in_update(self, name: str) -> bool:
        """Return whether only the update changes a tensor."""
        ...


class CheckpointScheduler:
    """Scheduler that saves a run when a save is due.

    All methods except `progress`, `seconds` and `before_update` are collective.

    Args:
        place: location of the checkpoints.
        owner: owner of the location, for this start of the run.
        run: the run to save.
        watch: called with "8 save" when a wait for a save begins and whenever the save progresses.
        uri: URI of the checkpoint that the run resumed from.
        last_own: the newest checkpoint step in the location on this run's lineage; checkpoints of
            later steps belong to an abandoned lineage (docs/RELIABILITY.md).

    Attributes:
        uri: URI of the last complete checkpoint.
    """

    def __init__(
        self,
        place: Place,
        owner: "Owner",
        run: SavedRun,
        watch: Callable[[str], object],
        uri: str | None = None,
        last_own: int = 0,
    ):
        self.place, self.run, self.uri, self._last_own = place, run, uri, last_own
        self.config, self._watch = run.config, watch
        self._saver: CheckpointSaver | None = None
        self._owner = owner
        self._seconds: dict[str, float] = {}
        # Steps of the last save that began and of the last that is complete. The initial state
        # counts as saved.
        self._begun_step = self._saved_step = run.step
        if self.config.checkpoint.every is not None:
            self._open()

    def progress(self) -> SaveProgress | None:
        """Return this rank's progress with a save, for the all-gather of the step."""
        return self._saver.progress() if self._saver else None

    def seconds(self) -> dict[str, float]:
        """Return the seconds spent on saves since the last call; see `RankMetrics.save`."""
        found, self._seconds = self._seconds, {}
        return found

    def before_update(self) -> None:
        """Wait until a save no longer needs the tensors; not collective."""
        if self._saver is not None and self._saver.is_staging:
            start = time.monotonic()
            self._saver.wait_staged()
            self._add("stall", time.monotonic() - start)

    def after_step(self, everyone: Sequence[SaveProgress | None]) -> bool:
        """Continue the current save, and begin a new save if it is due.

        Returns:
            True if a checkpoint has become complete.

        Raises:
            CheckpointError: too many saves in a row have failed.
        """
        before = self._saved_step
        if self._saver is not None:
            self._note(self._saver.advance(everyone))
        every, step = self.config.checkpoint.every, self.run.step
        if every and step % every == 0 and step < self.config.train.steps:  # the last: `now`
            self._begin()
            if not self.config.checkpoint.asynchronous:
                self._wait()
        return self._saved_step != before

    def now(self) -> None:
        """Save the run in its current state, if not yet saved, and wait until this is complete.

        Raises:
            CheckpointError: all allowed attempts have failed.
        """
        for left in reversed(range(self.config.checkpoint.failures)):
            if self._saved_step == self.run.step:
                return
            try:
                if self._begun_step != self.run.step or not self._under_way():
                    self._begin()
                self._wait()
            except CheckpointError as error:
                if not left:
                    raise
                log.warning("step %d could not be saved: %s; trying again", self.run.step, error)

    @contextmanager
    def saving_before(self, kind: type[Exception]) -> Iterator[None]:
        """Save the run before an error of this kind ends it; all ranks must raise the error."""
        try:
            yield
        except kind as error:
            log.warning("step %d: %s; saving a checkpoint", self.run.step, error)
            self.now()
            raise

    def finish(self) -> None:
        """Wait for the current save, if any; raise `CheckpointError` if it failed."""
        if self._under_way():
            self._wait()

    def close(self, *, hurry: bool = False) -> None:
        """End the writer, after waiting for pending deletions unless `hurry` is set."""
        if self._saver is not None:
            self._saver.close(hurry=hurry)

    def _under_way(self) -> bool:
        return self._saver is not None and self._saver.under_way is not None

    def _open(self) -> CheckpointSaver:
        self.run.mesh.broadcast_from_rank0(self._abandon_later)
        self._saver = CheckpointSaver(
            self.place, self.config, self.run.mesh, self._report_saving, owner=self._owner
        )
        self._saver.prepare(self.run.tensors())
        return self._saver

    def _abandon_later(self) -> None:
        """Mark checkpoints as abandoned that are not on this run's lineage.

        This happens before the first save, so that a run that is killed earlier does not resume
        from them.
        """
        with storage_errors(self.place.uri):
            for warning in abandon_later_checkpoints(
                self.place, open_storage_writer(self.place), self._last_own
            ):
                log.warning("%s", warning)

    def _begin(self) -> None:
        self._report_saving()
        start = time.monotonic()
        saver = self._saver or self._open()
        saver.begin(self.run.tensors(), self.run.run_state(), self.run.changes_only_in_update)
        self._note(saver.uri)  # of the previous save, for which `begin` waited
        self._begun_step = self.run.step
        self._add("stall", time.monotonic() - start)

    def _wait(self) -> None:
        assert self._saver is not None
        self._report_saving()
        start = time.monotonic()
        self._note(self._saver.finish())
        self._add("stall", time.monotonic() - start)

    def _note(self, uri: str | None) -> None:
        """If `uri` is a new checkpoint, record that the most recent save is complete."""
        if uri is not None and uri != self.uri:
            assert self._saver is not None
            self.uri, self._saved_step = uri, self._begun_step
            self._seconds["background"] = self._saver.seconds.get("background", 0.0)
            log.info("saved %s: %s", uri, self._saver.seconds)

    def _report_saving(self) -> None:
        self._watch("8 save")

    def _add(self, what: str, seconds: float) -> None:
        self._seconds[what] = self._seconds.get(what, 0.0) + seconds
