"""Actions of worker.py on the optimizer in the real engine.

Weights are compared in fp64, where gradients differ between layouts by 1e-15. The Newton-Schulz
products are fp32 even then, with a rounding error of at most 1e-7.
"""

import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

STEPS, SAVE_AT = 5, 3


def _checkpoints(run) -> Path:
    """Return a checkpoint folder per layout, in a place shared by all jobs of a test."""
    axes = run.config.layout
    kind = "sharded" if run.config.optim.shard_state else "twin"
    return Path(sys.argv[1]).parent / f"{kind}_pp{axes.pp}_dp{axes.dp}_{run.config.train.dtype}"


def _weights(run) -> dict[str, Tensor]:
    from tests.dist.basic_case import _gather

    return _gather(run, run.model.tensors())


def _train(run, stop: int) -> int:
    """Train until `stop` steps are done; return how often a head was clipped."""
    clipped = 0
    while run.step < stop:
        report = run.train_step.run(next(run.loader))
        run.step += 1
        clipped += report.update.clipped_heads
    return clipped


def trained(run) -> dict[str, Any]:
    """Return the weights after all steps, saving half-way, and each rank's early sums."""
    clipped = _train(run, SAVE_AT)
    run.save(_checkpoints(run))
    clipped += _train(run, STEPS)
    early = run.mesh.all_gather_object(run.backbone.reduction.early_buckets)
    return {"weights": _weights(run), "clipped": clipped, "early": early}


def plainly_trained(run) -> dict[str, Any]:
    """Train in one process with the plain optimizer and all surrounding operations written out."""
    from kimi_pretrain.optim.groups import ModelShape
    from kimi_pretrain.optim.muon import PlainMuon
    from kimi_pretrain.optim.qk_clip import factors
    from kimi_pretrain.optim.schedule import learning_rate
    from kimi_pretrain.update import UpdateReport
    from tests.unit.kimi_pretrain.optim.oracles import clip_by_hand

    optim, shape = run.config.optim, ModelShape.of(run.config.model)
    plain = PlainMuon(run.update.named, optim, shape)
    weights = {tensor.name: tensor.data for tensor in run.update.named}

    def update(loss_tokens: int, loss: float) -> UpdateReport:
        squares = sum(float(tensor.grad().square().sum()) for tensor in run.update.named)
        norm = math.sqrt(squares) / loss_tokens
        lr = learning_rate(plain.steps, optim, run.config.tokens_per_step())
        plain.step(lr, min(1.0, optim.max_grad_norm / norm) / loss_tokens)
        clipped = 0
        for layer, max_N in run.backbone.take_max_logits().items():
            gamma = factors(max_N, optim.qk_clip_threshold)
            clipped += int((gamma < 1).sum())
            attention = f"language_model.model.layers.{layer}.self_attn."
            pair = weights[attention + "q_b_proj.weight"], weights[attention + "kv_b_proj.weight"]
            clip_by_hand(*pair, gamma, shape)
        return UpdateReport(lr, norm, applied=True, clipped_heads=clipped)

    run.update.run = update
    start = {name: weight.clone() for name, weight in weights.items()}
    clipped = _train(run, STEPS)
    moved = [float((weights[n] - old).norm() / weights[n].norm()) for n, old in start.items()]
    return {"clipped": clipped, "weights": _weights(run), "moved": moved}


def continued(run) -> dict[str, Any]:
    """Resume from every existing checkpoint, and train to the end."""
    found = {}
    for folder in sorted(Path(sys.argv[1]).parent.glob(f"*_{run.config.train.dtype}/step_*")):
        other = type(run)(run.config, run.mesh, resume=folder)
        _train(other, STEPS)
        found[folder.parent.name] = _weights(other)
        other.close()
    return found


def stopped(run) -> dict[str, bool]:
    """Return whether a stopped and resumed run is bit-identical in weights and state."""
    from kimi_pretrain.checkpoint.hashes import hash_tensors

    _train(run, 2)
    folder = run.save(_checkpoints(run))
    _train(run, 4)
    straight = hash_tensors(run.tensors(), run.mesh)
    other = type(run)(run.config, run.mesh, resume=folder)
    _train(other, 4)
    resumed = hash_tensors(other.tensors(), run.mesh)
    other.close()
    masters = any(name.startswith("optim.master.") for name in straight)
    return {"equal": resumed == straight, "masters": masters}


def refused(run) -> dict[str, str]:
    """Return the errors for checkpoint optimizer state that does not fit."""
    from kimi_pretrain.checkpoint.errors import CheckpointError
    from kimi_pretrain.checkpoint.load import load
    from kimi_pretrain.checkpoint.storage_read import open_checkpoint

    (folder,) = _checkpoints(run).parent.glob("sharded_pp2_dp2_float64/step_*")
    told = {}
    own = run.tensors()
    momentum = next(name for name in own if name.startswith("optim.momentum."))
    for name, tensors in {
        "other rules": {**own, momentum.replace("momentum", "exp_avg"): own[momentum]},
        "other pieces": {**own, momentum: own[momentum][:-1].clone()},
    }.items():
        try:
            load(open_checkpoint(folder), tensors)
        except CheckpointError as error:
            told[name] = str(error)
    return told | {"momentum": momentum}


def poisoned(run) -> dict[str, Any]:
    """Take steps around one with a NaN gradient on one rank; return what changed."""
    from kimi_pretrain.checkpoint.hashes import hash_tensors

    def hashes() -> dict[str, str]:
        return hash_tensors(run.tensors(), run.mesh)

    _train(run, 1)
    before = hashes()
    param = next(iter(run.backbone.chunks[0].decoder.layers[0].self_attention.parameters()))
    handle = param.register_hook(
        lambda gradient: gradient * math.nan if run.mesh.rank == run.mesh.world_size - 1 else None
    )
    report = run.train_step.run(next(run.loader))
    handle.remove()
    after = hashes()
    good = run.train_step.run(next(run.loader))
    return {
        "changed": before != after,
        "applied": [report.update.applied, good.update.applied],
        "skipped": [report.update.skipped_steps, good.update.skipped_steps],
        "finite": math.isfinite(good.loss) and math.isfinite(good.update.grad_norm),
    }


def differing(run) -> dict[str, list[str]]:
    """Return what `verify dep` reports for copies that differ."""
    from kimi_pretrain.verify.dep import differing_copies

    run.train_step.run(next(run.loader))
    told = {"none": differing_copies(run)}
    tensor = next(t for t in run.update.named if t.replicas == "dense")
    copies = {"weight": tensor.data, "gradient": tensor.grad()}
    for name, copy in copies.items():
        if run.mesh.rank == 1:
            copy.mul_(1.001)
        told[name] = differing_copies(run)
        if run.mesh.rank == 1:
            copy.div_(1.001)
    return told | {"name": [tensor.name]}


class Wire(TorchDispatchMode):
    """Counts the bytes of every collective in torch's process groups, by operation.

    It counts the bytes that must cross the network over the whole group of two: the tensor's bytes
    once for reduce, broadcast, reduce-scatter or all-gather, twice for all-reduce.
    """

    def __init__(self):
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = [a if isinstance(a, list | tuple) else [a] for a in args]
            sizes = [sum(t.nbytes for t in flat if isinstance(t, Tensor)) for flat in tensors]
            name = func.overloadpacket.__name__
            self.bytes[name] += max(sizes) * (2 if "allreduce" in name else 1)
        return func(*args, **(kwargs or {}))


def traffic(run) -> dict[str, Any]:
    """Return the bytes of a step's collectives and of Megatron-Core's ZeRO-1, equal parameters.

    Its DistributedOptimizer reduce-scatters the gradients before AdamW and all-gathers the
    parameters after it. Its DDP does both, and is what runs here.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    assert run.mesh.world_size == 2
    batch = next(run.loader)
    with Wire() as ours:
        run.train_step.run(batch)
    counters = run.backbone.reduction, run.encoder.sums, run.update.optimizer
    told = [sum(run.mesh.all_gather_object(counter.bytes_moved)) for counter in counters]
    elements = sum(tensor.data.numel() for tensor in run.update.named)
    buffers = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=True
    )
    with Wire() as zero1:
        for module in (*run.backbone.chunks, run.encoder.module):
            model = DistributedDataParallel(run.backbone.engine, buffers, module)
            model.finish_grad_sync()
            model.start_param_sync(force_sync=True)
    return {
        "ours": dict(ours.bytes),
        "zero1": dict(zero1.bytes),
        "told": dict(zip(("backbone", "encoder", "weights"), told)),
        "elements": elements,
    }


ACTIONS = {
    f"muonclip_{action.__name__}": action
    for action in (
        trained, plainly_trained, continued, stopped, refused, poisoned, differing, traffic
    )
}  # fmt: skip
