"""When a run is saved, and to what place: the loop's side of `kimi_pretrain.checkpoint`.

A save begins after the step that it is due at and goes on in the background while the next steps
are trained; every step's all-gather carries how far each rank is. At a stop, and at the end, it is
waited for.
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
    """What saving needs of a run."""

    config: "Config"
    mesh: "Mesh"
    step: int

    def tensors(self) -> "dict[str, torch.Tensor]":
        """Return everything a checkpoint holds, by name."""
        ...

    def run_state(self) -> "RunState":
        """Return what a checkpoint holds besides tensors."""
        ...

    def changes_only_in_update(self, name: str) -> bool:
        """Whether a tensor changes in the update alone."""
        ...


class CheckpointScheduler:
    """Saves a run when it is due. All methods but `progress` and `seconds` are collective.

    Args:
        owner: of the place: this start of the run.
        watch: called on every progress of a save that is waited for.
        uri: of the checkpoint that the run goes on from.
        last_own: the last step of the checkpoints in the place that it has behind it; those of
            later steps are of another course (docs/RELIABILITY.md).

    Attributes:
        uri: of the last complete checkpoint.
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
        # Steps of the last save that began, and of the last that is complete: as the run begins,
        # nothing is to be saved.
        self._begun_step = self._saved_step = run.step
        if self.config.checkpoint.every is not None:
            self._open()

    def progress(self) -> SaveProgress | None:
        """Return how far this rank is with a save, for the step's all-gather."""
        return self._saver.progress() if self._saver else None

    def seconds(self) -> dict[str, float]:
        """Return what saving took since the last call; see `RankMetrics.save`."""
        found, self._seconds = self._seconds, {}
        return found

    def before_update(self) -> None:
        """Wait until a save that has begun needs the tensors no longer; not collective."""
        if self._saver is not None and self._saver.is_staging:
            start = time.monotonic()
            self._saver.wait_staged()
            self._add("stall", time.monotonic() - start)

    def after_step(self, everyone: Sequence[SaveProgress | None]) -> bool:
        """Continue the save under way, and begin one if it is due.

        Returns:
            whether a checkpoint has become complete.

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
        """Save the run as it is, unless this step is saved already, and wait until it is complete.

        Raises:
            CheckpointError: it could not be saved, after as many attempts as are allowed.
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
        """Save the run before an error of this kind ends it; all ranks must have raised it."""
        try:
            yield
        except kind as error:
            log.warning("step %d: %s; saving a checkpoint", self.run.step, error)
            self.now()
            raise

    def finish(self) -> None:
        """Wait for what is under way, if anything is; CheckpointError: it failed."""
        if self._under_way():
            self._wait()

    def close(self, *, hurry: bool = False) -> None:
        """End the writer; waits for pending deletions unless `hurry`."""
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
        """Mark checkpoints as abandoned that are not on the course that the run continues.

        Before the first save: a run that is killed before it must not come back to them.
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
        self._note(saver.uri)  # of the save before, which it waited for
        self._begun_step = self.run.step
        self._add("stall", time.monotonic() - start)

    def _wait(self) -> None:
        assert self._saver is not None
        self._report_saving()
        start = time.monotonic()
        self._note(self._saver.finish())
        self._add("stall", time.monotonic() - start)

    def _note(self, uri: str | None) -> None:
        """Record that the save that began last is complete, if it is."""
        if uri is not None and uri != self.uri:
            assert self._saver is not None
            self.uri, self._saved_step = uri, self._begun_step
            self._seconds["background"] = self._saver.seconds.get("background", 0.0)
            log.info("saved %s: %s", uri, self._saver.seconds)

    def _report_saving(self) -> None:
        self._watch("8 save")

    def _add(self, what: str, seconds: float) -> None:
        self._seconds[what] = self._seconds.get(what, 0.0) + seconds
