"""Finds the checkpoint that a run resumes from, only by manifests, and verifies its files.

All ranks return the same checkpoint. Only rank 0 lists the checkpoints and reads their manifests,
because a shared file system may show other ranks an older state and would be overloaded if
thousands of ranks read one file. One rank hashes each file.
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
    """Return the verified checkpoint to resume from, or None if there is none; a collective call.

    Args:
        resume: "latest" for the newest complete checkpoint in `place`, or the folder or URI of one
            checkpoint.
        place: location of the run's checkpoints.
        config: configuration of the run; model and precision of the checkpoint must match it.
        mesh: mesh of the job; None for a single process.
        progress: called with the number of bytes that this rank has just hashed.
        own: True if this run has claimed `place`. Then an interrupted rename of a killed run is
            repaired, and the checkpoint must be of this stage (`check_resumes`). Otherwise `place`
            is not modified.

    Raises:
        CheckpointError: the checkpoint is damaged (the message names the file, its actual and its
            expected state), incomplete, of another model, or not readable. With "latest" and
            `config.resume.fallback`, damaged checkpoints are skipped with a warning. All ranks
            raise the same error.
        CheckpointUnavailable: a store or shared folder does not respond. This is not damage, so no
            other checkpoint is used.
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
    """Verify the hash of every file of a checkpoint and return it; a collective call, see `find`.

    Raises:
        CheckpointError: it is damaged, incomplete, or of another model.
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
    """Return descriptions of all damage, the same on all ranks; raise errors that are not damage.

    Args:
        found: the checkpoint.
        config, mesh, progress: see `find`.
        listed: True if the checkpoint was listed as complete just before.
    """
    texts, problem = broadcast_from_rank0(partial(_texts, found, listed), mesh)
    if problem is not None:
        return [problem]
    found.know(texts)
    everyone = on_all_ranks(partial(_damaged, found, config, mesh, progress), mesh)
    problems = [problem for part in everyone for problem in part]
    return list(dict.fromkeys(problems))  # all ranks report a damaged manifest


def _damaged(
    found: Checkpoint, config: "Config", mesh: "Mesh | None", progress: OnBytes | None
) -> list[str]:
    """Return the damage of the manifest, or of this rank's share of the files."""
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
    """Return (texts of manifest and index, description of their damage or None)."""
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
