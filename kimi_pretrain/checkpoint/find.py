"""Which checkpoint a run goes on from: found by manifests alone, and verified before anything else.

All ranks come to the same answer: rank 0 looks which checkpoints there are and reads what they say
of themselves, because a shared file system may show the others something older, and thousands of
ranks that read one file keep it busy. Every file is hashed by one rank.
"""

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from kimi_pretrain.checkpoint.errors import CheckpointError, CheckpointUnavailable
from kimi_pretrain.checkpoint.files import Progress
from kimi_pretrain.checkpoint.manifest import Manifest, check_fits
from kimi_pretrain.checkpoint.place import Checkpoint, Place, open_checkpoint

if TYPE_CHECKING:
    from kimi_pretrain.config import Config
    from kimi_pretrain.engine.mesh import Mesh

log = logging.getLogger("kimi_pretrain.checkpoint")
T = TypeVar("T")


def find(
    resume: str | os.PathLike[str],
    place: Place,
    config: "Config",
    mesh: "Mesh | None",
    progress: Progress | None = None,
) -> Checkpoint | None:
    """Return the verified checkpoint to go on from; None: there is none yet. Collective.

    Args:
        resume: "latest" for the newest complete one of `place`, or one checkpoint's folder or URI.
        place: of the run's checkpoints.
        config: of the run: the checkpoint must be of this model and precision.
        mesh: None: this process alone.
        progress: called with the bytes that this rank has just hashed.

    Raises:
        CheckpointError: the checkpoint is damaged (names file, what was found and expected), is not
            complete or is of another model. Of "latest" a damaged one is passed over with a warning
            where `config.resume.fallback` allows it. The same on all ranks.
    """
    if os.fspath(resume) != "latest":
        return verified(open_checkpoint(resume), config, mesh, progress)
    steps = _steps_of(place, mesh)
    for step in reversed(steps):
        found = place.checkpoint(step)
        problems = _problems(found, config, mesh, progress)
        if not problems:
            return found
        told = "; ".join(problems)
        if not config.resume.fallback:
            raise CheckpointError(
                f"the newest checkpoint is damaged: {told}. To go on from the one before it, set "
                "resume.fallback=true"
            )
        if _is_first(mesh):
            log.warning("passing over a damaged checkpoint: %s", told)
    if steps:
        raise CheckpointError(f"{place.uri}: all {len(steps)} checkpoints are damaged; see the log")
    return None


def verified(
    found: Checkpoint,
    config: "Config",
    mesh: "Mesh | None" = None,
    progress: Progress | None = None,
) -> Checkpoint:
    """Return a checkpoint after every file of it was hashed. Collective; see `find`.

    Raises:
        CheckpointError: it is damaged, not complete, or of another model.
    """
    if problems := _problems(found, config, mesh, progress):
        raise CheckpointError("; ".join(problems))
    return found


def _problems(
    found: Checkpoint, config: "Config", mesh: "Mesh | None", progress: Progress | None
) -> list[str]:
    """What is damaged, the same on all ranks; raises where the checkpoint is not for this run."""
    rank, world_size = (0, 1) if mesh is None else (mesh.rank, mesh.world_size)
    mine: list[str] = []
    misfit: str | None = None
    error_of: type[CheckpointError] = CheckpointError
    try:
        texts, told = _from_first(mesh, partial(_texts, found))
        if told is not None:
            raise CheckpointError(told)
        found.know(texts)
        manifest = found.manifest()
        misfit = _misfit(manifest, config, found.uri)
        if misfit is None:
            # Sorted by size, so that the ranks' shares are about equal.
            order = sorted(manifest.files, key=lambda name: (-manifest.files[name].bytes, name))
            mine = found.verify(order[rank::world_size], progress)
    except CheckpointError as error:
        mine = [str(error)]
    except Exception as error:  # of the store; raised on all ranks below, or the others would wait
        misfit, error_of = f"{found.uri}: {error}", CheckpointUnavailable
    said = mine, misfit, error_of
    everyone: list[Any] = [said] if mesh is None else mesh.gather(said)
    if misfits := [(kind, told) for _, told, kind in everyone if told is not None]:
        kind, told = misfits[0]
        raise kind(told)
    problems = [problem for part, _, _ in everyone for problem in part]
    return list(dict.fromkeys(problems))  # a bad manifest is seen by all


def _texts(found: Checkpoint) -> tuple[dict[str, bytes], str | None]:
    """Return manifest and index, or why they cannot be had; not an error where others may do."""
    try:
        return found.texts(), None
    except CheckpointError as error:
        return {}, str(error)


def _misfit(manifest: Manifest, config: "Config", where: str) -> str | None:
    try:
        check_fits(manifest, config, where)
    except CheckpointError as error:
        return str(error)
    return None


def _is_first(mesh: "Mesh | None") -> bool:
    return mesh is None or mesh.rank == 0


def _from_first(mesh: "Mesh | None", make: Callable[[], T]) -> T:
    return make() if mesh is None else mesh.from_first(make)


def _steps_of(place: Place, mesh: "Mesh | None") -> list[int]:
    """Return the complete checkpoints as rank 0 sees them; an error is raised on all ranks."""

    def look() -> list[int]:
        try:
            place.recover()
            return place.steps()
        except Exception as error:  # of the store, or of a disk
            raise CheckpointUnavailable(f"{place.uri}: {error}") from error

    return _from_first(mesh, look)
