"""Objects of very different sizes, gathered by all ranks; run by `tests/dist/worker.py`."""

from typing import Any

import numpy as np


def objects(rank: int, world_size: int) -> list[Any]:
    """Return the objects that a rank sends, in order."""
    return [
        rank,
        None if rank else "x" * 300_000,  # far longer than the others
        b"" if rank < world_size - 1 else b"\0" * 100_000,
        [],
        {"array": np.arange(rank * 100), "name": f"rank {rank}"},
        bytes(range(256)) * rank,
    ]


def gathered(run) -> list[list[Any]]:
    """Gather each of `objects` and return the results, which must be the same on all ranks."""
    mesh = run.mesh
    found = [mesh.all_gather_object(value) for value in objects(mesh.rank, mesh.world_size)]
    everywhere = mesh.all_gather_object(found)
    assert all(repr(there) == repr(found) for there in everywhere)
    return found


ACTIONS = {"gathered": gathered}
