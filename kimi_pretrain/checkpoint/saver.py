"""Saves checkpoints while training goes on; see `Checkpoints`.

What killed runs have left is removed by rank 0's writer from its start on, beside all else. A save
in numbered steps:

1. begin      every rank copies what it is to write aside (`aside`); of what changes in the update
              alone a thread does, while the next step runs, and `copied` waits before the update
2. write      its writer process (`writer`) hashes and writes the files, in the background
3. advance    the ranks tell each other how far they are, in the one gather of a training step
4. commit     when all have written, rank 0's writer puts manifest.json: it is complete
5. retire     what need not be kept is removed, and nobody waits for it

What fails on one rank fails the save as a whole, on all ranks alike, and training goes on.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from kimi_pretrain.checkpoint import sharding
from kimi_pretrain.checkpoint.errors import CheckpointError, CheckpointUnavailable, kind_of
from kimi_pretrain.checkpoint.manifest import INDEX, Fingerprint, RunState, manifest_of
from kimi_pretrain.checkpoint.progress import Progress
from kimi_pretrain.checkpoint.staging import Aside, Copying
from kimi_pretrain.checkpoint.storage_read import Place
from kimi_pretrain.checkpoint.versions import versions
from kimi_pretrain.checkpoint.writer_client import Hand

if TYPE_CHECKING:
    from kimi_pretrain.checkpoint.ownership import Owner
    from kimi_pretrain.config import Config
    from kimi_pretrain.engine.mesh import Mesh

log = logging.getLogger("kimi_pretrain.checkpoint")

_MIB = 1 << 20
_POLL_S = 0.2
_SOON_S = 5.0
# So long a save waits for what is still being removed: a new writer's tidying takes it up again.
_REMOVAL_S = 30.0
_LAST_REMOVAL_S = 300.0  # at the end there is none


class Checkpoints:
    """Writes a run's checkpoints from all ranks, in the background.

        checkpoints.begin(tensors, state, still)         # copies aside
        ...
        checkpoints.copied()                             # before what is `still` changes
        ...
        everyone = mesh.gather(checkpoints.progress())   # part of the step's own gather
        done = checkpoints.advance(everyone)             # the URI of what is complete now, or None
        ...
        checkpoints.finish()                             # wait for the last one
        checkpoints.close()

    `begin` and `finish` must be called by all ranks together, with the same state. A synchronous
    save is `begin` and `finish`.

    Args:
        place: a folder that all ranks see, or an object store.
        config: of the run.
        mesh: of the job; only its rank, world size, device and `gather` are used.
        alive: called whenever a rank that waits has seen bytes being written; so a slow save can
            be told from one that hangs.
        owner: who must own the place when a checkpoint is committed; None: whoever does.

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
        self._aside: Aside | None = None
        self._copying: Copying | None = None
        self._hand: Hand | None = None
        self._state: RunState | None = None
        self._saved: RunState | None = None  # of `uri`
        self._phase: Literal["writing", "committing"] = "writing"
        self._files: dict[str, Fingerprint] = {}  # of all ranks, so far; rank 0 alone needs them
        self._said = False  # whether all ranks know of this one's files
        self._began = 0.0
        self._seen_bytes = 0
        self._failures = 0
        self._failure: CheckpointError | None = None

    def prepare(self, tensors: Mapping[str, Tensor], step: int | None = None) -> None:
        """Agree on who writes what, and take the memory for it. Collective; `begin` does it too.

        Called before the first step, it tells early when memory does not suffice, and the first
        save stalls no longer than others.

        Args:
            tensors: as for `begin`.
            step: that is saved next, if that is known.

        Raises:
            CheckpointError: not enough memory; the same on all ranks.
        """
        everyone: list[Any] = self.mesh.gather(sharding.packed(_sizes(tensors)))
        sizes = sharding.unpacked(everyone)
        weights = sharding.weight_map(sizes, self.config.checkpoint.file_mib * _MIB)
        texts: dict[str, bytes] = {}
        if self.mesh.rank == 0:
            total = sum({name: size for held in sizes for name, size in held.items()}.values())
            texts[INDEX] = sharding.index_text(weights, total).encode()
        self._let_go(0.0)
        problem: str | None = None
        kind: type[CheckpointError] = CheckpointError
        try:
            files = sharding.files_of(weights, self.mesh.rank)
            self._aside = Aside(files, tensors, texts, self.mesh.device)
            self._hand = self._start(step)
        except (CheckpointError, OSError) as error:
            problem, kind = str(error), kind_of(error)
        told: list[Any] = self.mesh.gather((problem, kind))
        if problems := _of_ranks([problem for problem, _ in told]):
            self._let_go(0.0)
            raise next(kind for problem, kind in told if problem)(problems)

    def begin(
        self,
        tensors: Mapping[str, Tensor],
        state: RunState,
        still: Callable[[str], bool] | None = None,
    ) -> None:
        """Copy the tensors aside and start writing them. Collective.

        Waits for an earlier save first. A state that was saved before by this object is not saved
        again.

        Args:
            tensors: what this rank holds, by name; equal names hold equal values on all ranks.
            state: the same on all ranks.
            still: tells of a name whether its tensor stays as it is until `copied` has returned;
                all others, None: all, may change as soon as this returns.

        Raises:
            CheckpointError: too many saves in a row have failed, or there is no memory for the
                first one; the same on all ranks.
        """
        start = time.monotonic()
        self._settle()
        self._make_way(state.step)
        ready = self._aside is not None and self._aside.holds(tensors)
        everyone: list[Any] = self.mesh.gather((ready, state == self._saved))
        if all(same for _, same in everyone):
            return
        if not all(ready for ready, _ in everyone):
            self.prepare(tensors, state.step)
        assert self._aside is not None  # `prepare` has raised otherwise
        self._state, self._phase, self._files, self._said = state, "writing", {}, False
        self.under_way, self._failure, self._seen_bytes = state.step, None, 0
        if still is None:
            self._aside.copy(tensors)
            self._give_write()
        else:
            self._aside.copy(tensors, lambda name: not still(name))
            self._copying = Copying(self._aside, tensors, still, self.mesh.device)
        self._began = time.monotonic()
        self.seconds = {"stall": self._began - start}

    @property
    def copying(self) -> bool:
        """Whether `copied` has something to wait for, or to do."""
        return self._copying is not None

    def copied(self) -> None:
        """Wait until everything is copied aside, and let the writer begin.

        Called before anything changes that was `still` when the save began.
        """
        if self._copying is None:
            return
        start = time.monotonic()
        self._copying.wait()
        self._copying = None
        self._give_write()
        self.seconds["stall"] += time.monotonic() - start

    def progress(self, wait: float = 0.0) -> Progress | None:
        """Return how far this rank is; None: nothing is under way.

        Args:
            wait: seconds to wait for the writer, if it has something to do.
        """
        if self.under_way is None or self._hand is None:
            return None
        self.copied()
        hand = self._hand
        hand.poll(wait)
        told, hand.told = tuple(hand.told), []
        if hand.failed is not None:
            return Progress("failed", hand.bytes_done, {}, hand.failed, hand.passing, told)
        if hand.done is None:
            return Progress("writing", hand.bytes_done, told=told)
        if self._phase == "committing" and self.mesh.rank == 0:
            return Progress("committed", hand.bytes_done, told=told)
        # Thousands of ranks: what one of them has written goes through the gather once.
        written = {} if self._said else hand.done["value"]
        files = {name: Fingerprint(**found) for name, found in written.items()}
        return Progress("written", hand.bytes_done, files, told=told)

    def advance(self, everyone: Sequence[Progress | None]) -> str | None:
        """Take in what all ranks said; commit when all have written. The same on all ranks.

        Args:
            everyone: `progress` of all ranks, in their order.

        Returns:
            the URI of the checkpoint that has just become complete.

        Raises:
            CheckpointError: `config.checkpoint.failures` saves in a row have failed
                (CheckpointUnavailable: the last for what a later run may not meet).
        """
        if self.under_way is None:
            return None
        said = [progress for progress in everyone if progress is not None]
        assert len(said) == self.mesh.world_size, "ranks do not agree on what is under way"
        self._tell(said)
        self._remember(said)
        if self._phase == "committing":
            if said[0].phase == "committed":
                return self._complete()
            if said[0].phase == "failed":
                self._fail(said[:1])
        elif all(progress.phase in ("written", "failed") for progress in said):
            # One that fails early must not have its files removed under those that still write.
            if any(progress.error for progress in said):
                self._fail(said)
            else:
                self._commit()
        return None

    def finish(self) -> str | None:
        """Wait until what was begun is complete. Collective.

        Returns:
            the URI of the last complete checkpoint; None: there is none.

        Raises:
            CheckpointError: the save that was under way has failed (CheckpointUnavailable: for
                what a later run may not meet); the same on all ranks.
        """
        waiting = self.under_way
        self._settle()
        if waiting is not None and self._failure is not None:
            raise self._failure
        return self.uri

    def close(self, hurry: bool = False) -> None:
        """End the writer; a save that is not complete is abandoned.

        Args:
            hurry: end in seconds, and leave what is still being removed to the next run.
        """
        self.under_way = None
        self._let_go(None if hurry else self._at_most(_LAST_REMOVAL_S))

    def _settle(self) -> None:
        """Wait for the save that is under way, as the loop would, but without steps between."""
        while self.under_way is not None:
            everyone: list[Any] = self.mesh.gather(self.progress(_POLL_S))
            done = sum(progress.bytes_done for progress in everyone if progress is not None)
            if done != self._seen_bytes:
                self._seen_bytes = done
                self._alive()
            self.advance(everyone)

    def _make_way(self, step: int) -> None:
        """Let the writer end what it is removing, before any rank begins to write.

        The same step may be saved again: its new files must not go with the old ones.
        """
        if self._hand is None:
            return
        until = time.monotonic() + self._at_most(_REMOVAL_S)
        self._await_job(until)
        if self._hand.tidying:
            self._hand.send("spare", step=step)
            self._await_job(until)

    def _await_job(self, until: float) -> None:
        assert self._hand is not None
        self._hand.poll()
        while self._hand.busy:
            if time.monotonic() > until:
                self._hand.close(0.0)  # another writer is started
                return
            self._hand.poll(_POLL_S)
            self._alive()

    def _at_most(self, seconds: float) -> float:
        """Bound what rank 0 does alone: for the watchdogs of the others it stands still."""
        return min(seconds, self.config.train.timeout_seconds / 2)

    def _start(self, step: int | None) -> Hand:
        """Start a writer; rank 0's tidies up, also what a killed one of this run has left."""
        assert self._aside is not None
        hand = Hand(self.place, tuple(self._aside.fds.values()))
        if self.mesh.rank == 0:
            if step is not None:  # other ranks may begin with it at any moment
                hand.send("spare", step=step)
            hand.send("tidy", owner=self._owner)
        return hand

    def _give_write(self) -> None:
        """Let the writer begin; it is started anew if it has ended."""
        assert self._aside is not None
        if self._hand is None or not self._hand.alive:
            if self._hand is not None:
                self._hand.close(0.0)
                self._log(self._hand.told)
            self._hand = self._start(self.under_way)
        files = [
            {"name": name, "fd": self._aside.fds[name], "bytes": size}
            for name, size in self._aside.sizes.items()
        ]
        self._hand.send("write", step=self.under_way, files=files)

    def _commit(self) -> None:
        """Phase 4: rank 0 completes the checkpoint."""
        self._phase = "committing"
        if self.mesh.rank != 0:
            return
        assert self._state is not None
        assert self._hand is not None
        manifest = manifest_of(self.config, self._state, self._files, versions()).text()
        step, files = self.under_way, sorted(self._files)
        self._hand.send("commit", step=step, manifest=manifest, files=files, owner=self._owner)

    def _complete(self) -> str:
        assert self.under_way is not None
        step, keep = self.under_way, self.config.checkpoint
        self.uri = self.place.checkpoint(step).uri
        self.seconds["background"] = time.monotonic() - self._began
        self._saved, self.under_way, self._failures = self._state, None, 0
        if self.mesh.rank == 0:
            assert self._hand is not None
            log.info("checkpoint %s is complete", self.uri)
            # Nobody waits for it; what is told of it is heard with the next job's answers.
            keeping = {"keep_last": keep.keep_last, "keep_every": keep.keep_every}
            self._hand.send("retire", step=step, **keeping)
        return self.uri

    def _fail(self, said: Sequence[Progress]) -> None:
        step, limit = self.under_way, self.config.checkpoint.failures
        passing = any(progress.passing for progress in said)
        kind = CheckpointUnavailable if passing else CheckpointError
        reason = _of_ranks([progress.error for progress in said])
        self.under_way = None
        self._failures += 1
        self._failure = kind(f"the checkpoint of step {step} could not be written: {reason}")
        if self.mesh.rank == 0:
            if self._hand is not None and self._hand.alive:
                self._hand.send("remove_torn", step=step)
                self._hand.poll(_SOON_S)  # as a rule; else the next save waits for it
            log.warning(
                "%s; training goes on, failed saves in a row: %d, allowed: %d",
                self._failure, self._failures, limit - 1,
            )  # fmt: skip
        if self._failures >= limit:
            raise kind(
                f"{self._failure}. That was save {self._failures} in a row to fail "
                f"(checkpoint.failures={limit}), so the run stops"
            )

    def _remember(self, said: Sequence[Progress]) -> None:
        """Note the files that ranks tell of; a report that is not taken in here is repeated."""
        if said[self.mesh.rank].phase == "written":
            self._said = True
        if self.mesh.rank == 0:
            for progress in said:
                self._files.update(progress.files)

    def _tell(self, said: Sequence[Progress]) -> None:
        if self.mesh.rank == 0:
            for rank, progress in enumerate(said):
                for warning in progress.told:
                    log.warning("rank %d: %s", rank, warning)

    def _log(self, told: Sequence[str]) -> None:
        for warning in told:
            log.warning("rank %d: %s", self.mesh.rank, warning)

    def _let_go(self, patience: float | None) -> None:
        if self._copying is not None:
            self._copying.wait()
            self._copying = None
        if self._hand is not None:
            self._hand.close(patience, self._alive)
            self._log(self._hand.told)
        if self._aside is not None:
            self._aside.close()
        self._hand = self._aside = None


def _sizes(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}


def _of_ranks(errors: Sequence[Any]) -> str:
    """Join what went wrong on some ranks; "" if nothing did."""
    return "; ".join(f"rank {rank}: {told}" for rank, told in enumerate(errors) if told)
