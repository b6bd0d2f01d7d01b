"""Which rank of a real job says that it owns which tensor; an action of worker.py."""


def owners(run) -> dict[str, int]:
    """Return name -> rank in the whole job, and fail where two ranks own the same."""
    optimizer = run.update.optimizer
    mine = [tensor.name for tensor in run.update.named if optimizer.owns(tensor.name)]
    found: dict[str, int] = {}
    for rank, names in enumerate(run.mesh.all_gather_object(mine)):
        for name in names:
            assert name not in found, f"{name} is owned by ranks {found[name]} and {rank}"
            found[name] = rank
    return found


ACTIONS = {"owners": owners}
