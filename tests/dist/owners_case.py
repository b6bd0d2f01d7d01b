"""Action of worker.py that maps each tensor to its owner in a real job."""


def owners(run) -> dict[str, int]:
    """Return name -> global rank; fail if two ranks own the same tensor."""
    optimizer = run.update.optimizer
    mine = [tensor.name for tensor in run.update.named if optimizer.owns(tensor.name)]
    found: dict[str, int] = {}
    for rank, names in enumerate(run.mesh.all_gather_object(mine)):
        for name in names:
            assert name not in found, f"{name} is owned by ranks {found[name]} and {rank}"
            found[name] = rank
    return found


ACTIONS = {"owners": owners}
