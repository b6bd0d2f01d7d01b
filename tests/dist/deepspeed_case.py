"""Actions of worker.py for an encoder trained by DeepSpeed or our own optimizer."""

import numpy as np
import torch

from kimi_pretrain.checkpoint.storage_read import open_place


def trained(run) -> dict:
    """Return losses and norms of all steps, and the final weights and optimizer state.

    With `checkpoint.place`, the run saves there half-way; if a checkpoint exists, it resumes from
    it.
    """
    place, steps = run.config.checkpoint.place, run.config.train.steps
    there = place is not None and bool(open_place(place).steps())
    run.mesh.barrier()
    if there:
        run = type(run)(run.config, run.mesh, f"{place}/step_{steps // 2:08d}")
    lines = []
    while run.step < steps:
        report = run.train_step.run(next(run.loader))
        run.step += 1
        items = np.bincount(report.vision.rank, minlength=run.mesh.world_size)
        lines.append((report.loss, report.update.grad_norm, items.tolist()))
        figures = report.update.own
        if place is not None and not there and run.step == steps // 2:
            run.save(place)
    own = {name: tensor.clone() for name, tensor in run.update.optimizer.state_dict().items()}
    everyone = run.mesh.all_gather_object((own, figures))
    state = {name: tensor for part, _ in everyone for name, tensor in part.items()}
    weights = {name: p.detach().clone() for name, p in run.encoder.module.named_parameters()}
    if there:
        run.close()
    return {
        "lines": lines,
        "weights": weights,
        "state": state,
        "rms": [one for _, one in everyone],
        "skipped": run.update.skipped_steps,
        "equal": all_equal(run, weights),
        "bytes": bytes_of(run.update.optimizer),
    }


def bytes_of(optimizer) -> int:
    """Return DeepSpeed's bytes of weights and state between steps, counting shared memory once."""
    if not hasattr(optimizer, "_engine"):
        return 0
    shards = optimizer._engine.optimizer.optimizer.state
    held = [*optimizer._copies.values(), *shards]
    held += [moment for state in shards.values() for moment in state.values()]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in held}
    return sum(storages.values())


def all_equal(run, weights: dict[str, torch.Tensor]) -> bool:
    """Return whether all ranks hold the same bits."""
    flat = torch.cat([one.flatten().view(torch.uint8) for one in weights.values()])
    return len({one.numpy().tobytes() for one in run.mesh.all_gather_object(flat)}) == 1


def infinity(run) -> dict:
    """Take two steps, the first with a non-finite gradient.

    With DeepSpeed the value is on one rank before the sum, otherwise in the sum.
    """
    before = {name: p.detach().clone() for name, p in run.encoder.module.named_parameters()}
    finish, last = run.encoder.sums.finish, run.mesh.world_size - 1

    def planted() -> None:
        finish()
        if run.mesh.rank == last or run.config.optim.deepspeed is None:
            run.encoder.sums.buffer[-1] = float("inf")

    run.encoder.sums.finish = planted
    first = run.train_step.run(next(run.loader)).update
    same = all(torch.equal(p, before[n]) for n, p in run.encoder.module.named_parameters())
    run.encoder.sums.finish = finish
    second = run.train_step.run(next(run.loader)).update
    return {
        "applied": (first.applied, second.applied),
        "same": same,
        "updates": run.update.optimizer.steps,
        "weights": {name: p.detach().clone() for name, p in run.encoder.module.named_parameters()},
    }


ACTIONS = {"zero_trained": trained, "zero_infinity": infinity}
