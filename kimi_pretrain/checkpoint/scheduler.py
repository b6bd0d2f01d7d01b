"""When a run is saved, and to what place: the loop's side of `kimi_pretrain.checkpoint`.

A save begins after the step that it is due at and goes on in the background while the next steps
are trained; every step's gather carries how far each rank is. At a stop, and at the end, it is
waited for.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from kimi_pretrain.checkpoint.errors import CheckpointError, told_of
from kimi_pretrain.checkpoint.saver import Checkpoints, Progress
from kimi_pretrain.checkpoint.storage_read import Place
from kimi_pretrain.checkpoint.storage_write import open_sink, set_aside_later

if TYPE_CHECKING:
    import torch

    from kimi_pretrain.checkpoint.manifest import RunState
    from kimi_pretrain.checkpoint.ownership import Owner
    from kimi_pretrain.config import Config
    from kimi_pretrain.engine.mesh import Mesh

log = logging.getLogger("kimi_pretrain.checkpoint.scheduler")


class Saved(Protocol):
    """What is saved: a run, as far as a checkpoint is concerned."""

    config: "Config"
    mesh: "Mesh"
    step: int

    def tensors(self) -> "dict[str, torch.Tensor]":
        """Return everything a checkpoint holds, by name."""
        ...

    def run_state(self) -> "RunState":
        """Return what a checkpoint holds besides tensors."""
        ...

    def changes_late(self, name: str) -> bool:
        """Whether a tensor changes in the update alone."""
        ...


class Saves:
    """Saves a run when it is due. Everything here but `progress` and `seconds` is collective.

    Args:
        place: of the checkpoints.
        owner: of the place: this start of the run.
        run: whose tensors and state are saved.
        watch: told of every progress of a save that is waited for.
        uri: of the checkpoint that the run goes on from.
        before: the last step of the checkpoints in the place that it has behind it; those of later
            steps are of another course.

    Attributes:
        uri: of the last complete checkpoint.
    """

    def __init__(
        self,
        place: Place,
        owner: "Owner",
        run: Saved,
        watch: Callable[[str], object],
        uri: str | None = None,
        before: int = 0,
    ):
        self.place, self.run, self.uri, self._before = place, run, uri, before
        self.config, self._watch = run.config, watch
        self._checkpoints: Checkpoints | None = None
        self._owner = owner
        self._seconds: dict[str, float] = {}
        # Steps of the last save that began, and of the last that is complete: as the run begins,
        # nothing is to be saved.
        self._begun = self._saved = run.step
        if self.config.checkpoint.every is not None:
            self._open()

    def progress(self) -> Progress | None:
        """Return how far this rank is with a save, for the step's gather."""
        return self._checkpoints.progress() if self._checkpoints else None

    def seconds(self) -> dict[str, float]:
        """Return what saving took since the last call; see `RankMetrics.save`."""
        found, self._seconds = self._seconds, {}
        return found

    def before_update(self) -> None:
        """Wait until a save that has begun needs the tensors no longer; not collective."""
        if self._checkpoints is not None and self._checkpoints.copying:
            start = time.monotonic()
            self._checkpoints.copied()
            self._add("stall", time.monotonic() - start)

    def after_step(self, everyone: Sequence[Progress | None]) -> bool:
        """Go on with the save under way, and begin one if it is due.

        Args:
            everyone: the progress of all ranks.

        Returns:
            whether a checkpoint has become complete.

        Raises:
            CheckpointError: too many saves in a row have failed.
        """
        before = self._saved
        if self._checkpoints is not None:
            self._note(self._checkpoints.advance(everyone))
        every, step = self.config.checkpoint.every, self.run.step
        if every and step % every == 0 and step < self.config.train.steps:  # the last: `now`
            self._begin()
            if not self.config.checkpoint.asynchronous:
                self._wait()
        return self._saved != before

    def now(self) -> None:
        """Save the run as it is, unless this step is saved already, and wait until it is complete.

        Raises:
            CheckpointError: it could not be saved, after as many attempts as are allowed.
        """
        for left in reversed(range(self.config.checkpoint.failures)):
            if self._saved == self.run.step:
                return
            try:
                if self._begun != self.run.step or not self._under_way():
                    self._begin()
                self._wait()
            except CheckpointError as error:
                if not left:
                    raise
                log.warning("step %d could not be saved: %s; trying again", self.run.step, error)

    def finish(self) -> None:
        """Wait for what is under way, if anything is.

        Raises:
            CheckpointError: it failed.
        """
        if self._under_way():
            self._wait()

    def close(self, *, hurry: bool = False) -> None:
        """End the writer; what it still removes is waited for, unless there is no time."""
        if self._checkpoints is not None:
            self._checkpoints.close(hurry=hurry)

    def _under_way(self) -> bool:
        return self._checkpoints is not None and self._checkpoints.under_way is not None

    def _open(self) -> Checkpoints:
        self.run.mesh.from_first(self._set_aside)
        self._checkpoints = Checkpoints(
            self.place, self.config, self.run.mesh, self._saving, owner=self._owner
        )
        self._checkpoints.prepare(self.run.tensors())
        return self._checkpoints

    def _set_aside(self) -> None:
        """Set aside what is of another course than the one that the run goes on with.

        Not only at the first save: a run that is killed before it must not come back to these.
        """
        with told_of(self.place.uri):
            for told in set_aside_later(self.place, open_sink(self.place), self._before):
                log.warning("%s", told)

    def _begin(self) -> None:
        self._saving()
        start = time.monotonic()
        checkpoints = self._checkpoints or self._open()
        checkpoints.begin(self.run.tensors(), self.run.run_state(), self.run.changes_late)
        self._note(checkpoints.uri)  # of the save before, which it waited for
        self._begun = self.run.step
        self._add("stall", time.monotonic() - start)

    def _wait(self) -> None:
        assert self._checkpoints is not None
        self._saving()
        start = time.monotonic()
        self._note(self._checkpoints.finish())
        self._add("stall", time.monotonic() - start)

    def _note(self, uri: str | None) -> None:
        """Note that the save that began last is complete, if it is."""
        if uri is not None and uri != self.uri:
            assert self._checkpoints is not None
            self.uri, self._saved = uri, self._begun
            self._seconds["background"] = self._checkpoints.seconds.get("background", 0.0)
            log.info("saved %s: %s", uri, self._checkpoints.seconds)

    def _saving(self) -> None:
        self._watch("8 save")

    def _add(self, what: str, seconds: float) -> None:
        self._seconds[what] = self._seconds.get(what, 0.0) + seconds
