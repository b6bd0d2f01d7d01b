"""Saves checkpoints while training goes on; see `Checkpoints`.

A save in numbered steps:

1. begin      every rank copies what it is to write aside (`aside`); of what changes in the update
              alone a thread does, while the next step runs, and `copied` waits before the update
2. write      its writer process (`writer`) hashes and writes the files, in the background
3. advance    the ranks tell each other how far they are, in the one gather of a training step
4. commit     when all have written, rank 0's writer puts manifest.json: it is complete
5. retire     what need not be kept is removed, and nobody waits for it

What fails on one rank fails the save as a whole, on all ranks alike, and training goes on.
"""

import logging
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from kimi_pretrain.checkpoint import writers
from kimi_pretrain.checkpoint.aside import Aside, Copying
from kimi_pretrain.checkpoint.errors import CheckpointError, CheckpointUnavailable
from kimi_pretrain.checkpoint.hand import Hand
from kimi_pretrain.checkpoint.manifest import INDEX, Fingerprint, RunState, manifest_of
from kimi_pretrain.checkpoint.place import Place

if TYPE_CHECKING:
    from kimi_pretrain.config import Config
    from kimi_pretrain.engine.mesh import Mesh

log = logging.getLogger("kimi_pretrain.checkpoint")

PACKAGES = ("kimi-pretrain", "torch", "megatron-core", "numpy")
_MIB = 1 << 20
_POLL_S = 0.2
_SOON_S = 5.0
_REMOVAL_S = 300.0  # longer only where the place does not answer


@dataclass(frozen=True)
class Progress:
    """How far one rank's writer is with the save that is under way; small, and picklable.

    Attributes:
        phase: "writing"; "written"; "committed", of rank 0 alone; or "failed".
        bytes_done: written so far.
        files: what was written, once it is.
        error: why it failed, in one line.
        unavailable: whether because the place does not answer, so that a later run may do better.
        told: warnings of the writer.
    """

    phase: Literal["writing", "written", "committed", "failed"]
    bytes_done: int = 0
    files: Mapping[str, Fingerprint] = field(default_factory=dict)
    error: str | None = None
    unavailable: bool = False
    told: tuple[str, ...] = ()


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
    ):
        if place.uri.startswith("memory://"):
            raise ValueError(f"checkpoint.place={place.uri}: use a folder or s3://bucket/prefix")
        self.place, self.config, self.mesh, self._alive = place, config, mesh, alive
        self.seconds: dict[str, float] = {}
        self.uri: str | None = None
        self.under_way: int | None = None
        self._aside: Aside | None = None
        self._copying: Copying | None = None
        self._hand: Hand | None = None
        self._state: RunState | None = None
        self._saved: RunState | None = None  # of `uri`
        self._phase: Literal["writing", "committing"] = "writing"
        self._files: dict[str, Fingerprint] = {}
        self._began = 0.0
        self._seen_bytes = 0
        self._failures = 0
        self._failure: CheckpointError | None = None
        self._tidied = False

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Agree on who writes what, and take the memory for it. Collective; `begin` does it too.

        Called before the first step, it tells early when memory does not suffice, and the first
        save stalls no longer than others.

        Raises:
            CheckpointError: not enough memory; the same on all ranks.
        """
        everyone: list[Any] = self.mesh.gather(writers.packed(_sizes(tensors)))
        sizes = writers.unpacked(everyone)
        weights = writers.weight_map(sizes, self.config.checkpoint.file_mib * _MIB)
        texts: dict[str, bytes] = {}
        if self.mesh.rank == 0:
            total = sum({name: size for held in sizes for name, size in held.items()}.values())
            texts[INDEX] = writers.index_text(weights, total).encode()
        self._let_go()
        problem: str | None = None
        try:
            files = writers.files_of(weights, self.mesh.rank)
            self._aside = Aside(files, tensors, texts, self.mesh.device)
            self._hand = self._start()
        except (CheckpointError, OSError) as error:
            problem = str(error)
        if problems := _of_ranks(self.mesh.gather(problem)):
            self._let_go()
            raise CheckpointError(problems)

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
        self._await_removals()
        ready = self._aside is not None and self._aside.holds(tensors)
        everyone: list[Any] = self.mesh.gather((ready, state == self._saved))
        if all(same for _, same in everyone):
            return
        if not all(ready for ready, _ in everyone):
            self.prepare(tensors)
        assert self._aside is not None  # `prepare` has raised otherwise
        self._state, self._phase, self._files = state, "writing", {}
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
            return Progress("failed", hand.bytes_done, {}, hand.failed, hand.unavailable, told)
        if hand.done is None:
            return Progress("writing", hand.bytes_done, told=told)
        if self._phase == "committing" and self.mesh.rank == 0:
            return Progress("committed", hand.bytes_done, told=told)
        if not self._files:
            written = hand.done["value"]
            self._files = {name: Fingerprint(**found) for name, found in written.items()}
        return Progress("written", hand.bytes_done, self._files, told=told)

    def advance(self, everyone: Sequence[Progress | None]) -> str | None:
        """Take in what all ranks said; commit when all have written. The same on all ranks.

        Args:
            everyone: `progress` of all ranks, in their order.

        Returns:
            the URI of the checkpoint that has just become complete.

        Raises:
            CheckpointError: `config.checkpoint.failures` saves in a row have failed
                (CheckpointUnavailable: the last for a place that does not answer).
        """
        if self.under_way is None:
            return None
        said = [progress for progress in everyone if progress is not None]
        assert len(said) == self.mesh.world_size, "ranks do not agree on what is under way"
        self._tell(said)
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
                self._commit(said)
        return None

    def finish(self) -> str | None:
        """Wait until what was begun is complete. Collective.

        Returns:
            the URI of the last complete checkpoint; None: there is none.

        Raises:
            CheckpointError: the save that was under way has failed (CheckpointUnavailable: for a
                place that does not answer); the same on all ranks.
        """
        waiting = self.under_way
        self._settle()
        if waiting is not None and self._failure is not None:
            raise self._failure
        return self.uri

    def close(self) -> None:
        """End the writer; a save that is not complete is abandoned."""
        self.under_way = None
        self._let_go()

    def _settle(self) -> None:
        """Wait for the save that is under way, as the loop would, but without steps between."""
        while self.under_way is not None:
            everyone: list[Any] = self.mesh.gather(self.progress(_POLL_S))
            done = sum(progress.bytes_done for progress in everyone if progress is not None)
            if done != self._seen_bytes:
                self._seen_bytes = done
                self._alive()
            self.advance(everyone)

    def _await_removals(self) -> None:
        """Let the writer end what it is removing, before any rank begins to write.

        The same step may be saved again: its new files must not go with the old ones.
        """
        until = time.monotonic() + _REMOVAL_S
        while self._hand is not None and self._hand.busy:
            if time.monotonic() > until:
                self._hand.close()  # the place does not answer; another writer is started
                return
            self._hand.poll(_POLL_S)
            self._alive()

    def _start(self) -> Hand:
        assert self._aside is not None
        self._tidied = False  # a writer that was killed may have left something
        return Hand(self.place, tuple(self._aside.fds.values()))

    def _give_write(self) -> None:
        """Let the writer begin; it is started anew if it has ended."""
        assert self._aside is not None
        if self._hand is None or not self._hand.alive:
            if self._hand is not None:
                self._hand.close()
            self._hand = self._start()
        files = [
            {"name": name, "fd": self._aside.fds[name], "bytes": size}
            for name, size in self._aside.sizes.items()
        ]
        tidy = self.mesh.rank == 0 and not self._tidied
        self._hand.send("write", step=self.under_way, files=files, tidy=tidy)
        self._tidied = True

    def _commit(self, said: Sequence[Progress]) -> None:
        """Phase 4: rank 0 completes the checkpoint."""
        self._phase = "committing"
        if self.mesh.rank != 0:
            return
        assert self._state is not None
        assert self._hand is not None
        files = {name: found for progress in said for name, found in progress.files.items()}
        manifest = manifest_of(self.config, self._state, files, versions())
        step = self.under_way
        self._hand.send("commit", step=step, manifest=manifest.text(), files=sorted(files))

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
        unavailable = any(progress.unavailable for progress in said)
        kind = CheckpointUnavailable if unavailable else CheckpointError
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

    def _tell(self, said: Sequence[Progress]) -> None:
        if self.mesh.rank == 0:
            for rank, progress in enumerate(said):
                for warning in progress.told:
                    log.warning("rank %d: %s", rank, warning)

    def _let_go(self) -> None:
        if self._copying is not None:
            self._copying.wait()
            self._copying = None
        if self._hand is not None:
            self._hand.close()
            for warning in self._hand.told:
                log.warning("%s", warning)
        if self._aside is not None:
            self._aside.close()
        self._hand = self._aside = None


def versions() -> dict[str, str | None]:
    """Return the versions that a manifest names."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _sizes(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}


def _of_ranks(errors: Sequence[Any]) -> str:
    """Join what went wrong on some ranks; "" if nothing did."""
    return "; ".join(f"rank {rank}: {told}" for rank, told in enumerate(errors) if told)
