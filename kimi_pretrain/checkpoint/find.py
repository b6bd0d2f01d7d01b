"""Finds the checkpoint that a run resumes from, by manifests alone, and verifies its files.

All ranks come to the same answer: rank 0 lists the checkpoints and reads their manifests, because a
shared file system may show other ranks an older state, and thousands of ranks that read one file
keep it busy. Every file is hashed by one rank.
"""

import logging
import os
from functools import partial
from typing import TYPE_CHECKING

from kimi_pretrain.checkpoint.collective_read import broadcast_from_rank0, on_all_ranks
from kimi_pretrain.checkpoint.errors import CheckpointError, CheckpointUnavailable, storage_errors
from kimi_pretrain.checkpoint.file_access import CheckpointUnreadable, OnBytes
from kimi_pretrain.checkpoint.manifest import MANIFEST, check_fits, check_resumes, share_of_files
from kimi_pretrain.checkpoint.storage_read import Checkpoint, Place, open_checkpoint

if TYPE_CHECKING:
    from kimi_pretrain.config import Config
    from kimi_pretrain.engine.mesh import Mesh

log = logging.getLogger("kimi_pretrain.checkpoint")


def find(
    resume: str | os.PathLike[str],
    place: Place,
    config: "Config",
    mesh: "Mesh | None",
    progress: OnBytes | None = None,
    own: bool = False,
) -> Checkpoint | None:
    """Return the verified checkpoint to go on from; None: there is none yet. Collective.

    Args:
        resume: "latest" for the newest complete one of `place`, or one checkpoint's folder or URI.
        place: of the run's checkpoints.
        config: of the run: the checkpoint must be of this model and precision.
        mesh: None: this process alone.
        progress: called with the bytes that this rank has just hashed.
        own: whether `place` belongs to this run, claimed: what a killed run has left in the middle
            of a rename is put right then, and the checkpoint must be of this stage
            (`check_resumes`). A place that is only read is left as it is.

    Raises:
        CheckpointError: the checkpoint is damaged (names file, what was found and expected), is not
            complete, is of another model or may not be read. Of "latest" a damaged one is passed
            over with a warning where `config.resume.fallback` allows it. The same on all ranks.
        CheckpointUnavailable: a store or shared folder does not answer. That is no damage: no other
            checkpoint is taken.
    """
    if os.fspath(resume) != "latest":
        found = verified(open_checkpoint(resume), config, mesh, progress)
        if own:
            check_resumes(found.manifest(), config, found.uri)
        return found
    steps = broadcast_from_rank0(partial(_steps_of, place, own), mesh)
    for step in reversed(steps):
        found = place.checkpoint(step)
        problems = _problems(found, config, mesh, progress, listed=True)
        if not problems:
            if own:
                check_resumes(found.manifest(), config, found.uri)
            return found
        damage = "; ".join(problems)
        if not config.resume.fallback:
            raise CheckpointError(
                f"the newest checkpoint is damaged: {damage}. To go on from the one before it, set "
                "resume.fallback=true"
            )
        if mesh is None or mesh.rank == 0:
            log.warning("passing over a damaged checkpoint: %s", damage)
    if steps:
        raise CheckpointError(f"{place.uri}: all {len(steps)} checkpoints are damaged; see the log")
    return None


def verified(
    found: Checkpoint,
    config: "Config",
    mesh: "Mesh | None" = None,
    progress: OnBytes | None = None,
) -> Checkpoint:
    """Return a checkpoint after every file of it was hashed. Collective; see `find`.

    Raises:
        CheckpointError: it is damaged, not complete, or of another model.
    """
    if problems := _problems(found, config, mesh, progress):
        raise CheckpointError("; ".join(problems))
    return found


def _problems(
    found: Checkpoint,
    config: "Config",
    mesh: "Mesh | None",
    progress: OnBytes | None,
    listed: bool = False,
) -> list[str]:
    """What is damaged, the same on all ranks; errors that are no sign of damage are raised.

    Args:
        listed: whether it was complete a moment ago.
    """
    texts, problem = broadcast_from_rank0(partial(_texts, found, listed), mesh)
    if problem is not None:
        return [problem]
    found.know(texts)
    everyone = on_all_ranks(partial(_damaged, found, config, mesh, progress), mesh)
    problems = [problem for part in everyone for problem in part]
    return list(dict.fromkeys(problems))  # a bad manifest is seen by all


def _damaged(
    found: Checkpoint, config: "Config", mesh: "Mesh | None", progress: OnBytes | None
) -> list[str]:
    """What is damaged of the manifest, or of this rank's share of the files."""
    rank, world_size = (0, 1) if mesh is None else (mesh.rank, mesh.world_size)
    try:
        manifest = found.manifest()
    except CheckpointError as error:
        return [str(error)]
    if rank == 0:
        found.warn_if_unhashed()
    check_fits(manifest, config, found.uri)
    with storage_errors(found.uri):
        return found.verify(share_of_files(manifest.files, rank, world_size), progress)


def _texts(found: Checkpoint, listed: bool) -> tuple[dict[str, bytes], str | None]:
    """Return manifest and index, or what is damaged of them."""
    with storage_errors(found.uri):
        try:
            return found.texts(), None
        except (CheckpointUnavailable, CheckpointUnreadable):
            raise
        except CheckpointError as error:
            if listed and not found.is_complete():
                raise CheckpointUnavailable(
                    f"{found.uri}: its {MANIFEST} was there a moment ago and is gone: something "
                    "else removes checkpoints of this place, or its file system lags behind"
                ) from None
            return {}, str(error)


def _steps_of(place: Place, own: bool) -> list[int]:
    with storage_errors(place.uri):
        if own:
            place.recover()
        return place.steps()
