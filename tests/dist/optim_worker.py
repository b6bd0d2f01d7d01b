"""A toy model for the distributed optimizer, and the process that trains it.

`python optim_worker.py RANK WORLD FOLDER` joins a gloo job of four through a file in FOLDER, runs
every scenario in the layouts of FOLDER/layouts.json and writes FOLDER/rank{RANK}.pt. The first two
ranks run the layouts of two processes. The parent test process calls the same functions without
groups.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kimi_pretrain.optim.config import OptimConfig
from kimi_pretrain.optim.groups import ModelShape, NamedTensor
from kimi_pretrain.optim.muonclip import DistributedMuonClip
from kimi_pretrain.optim.qk_clip import factors
from tests.dist.jobs import join_ranks

SHAPE = ModelShape(num_heads=4, qk_nope_dim=4, qk_rope_dim=2, v_dim=4, kv_lora_rank=8)
CONFIG = OptimConfig(
    lr=5e-3,
    min_lr=0,
    warmup_steps=0,
    stable_steps=1,
    decay_steps=0,
    ns_dtype="float32",
    bucket_elements=1200,  # a few tensors, which gives many rounds even here
)
TWIN = CONFIG.replace(shard_state=False)
STEPS, SAVE_AT, GO_ON_TO, CLIP_AT, CLIP_LAYER = 20, 4, 8, 5, 1
NUM_EXPERTS = 4
# Only the first member of a group produces its gradient; the others' backward never reaches it.
SILENT = "language_model.model.layers.1.self_attn.o_proj.weight"


def draw(shape: tuple[int, ...], key: str) -> Tensor:
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer_shapes(layer: int) -> dict[str, tuple[int, ...]]:
    prefix = f"language_model.model.layers.{layer}."
    return {
        prefix + "input_layernorm.weight": (12,),
        prefix + "self_attn.q_a_proj.weight": (10, 12),
        prefix + "self_attn.q_b_proj.weight": (24, 10),
        prefix + "self_attn.kv_a_proj_with_mqa.weight": (10, 12),
        prefix + "self_attn.kv_b_proj.weight": (32, 8),
        prefix + "self_attn.o_proj.weight": (12, 16),
    }


# By pipeline stage; both stages have the encoder.
STAGES: list[dict[str, tuple[int, ...]]] = [
    {"language_model.model.embed_tokens.weight": (30, 12), **layer_shapes(0)},
    {
        **layer_shapes(1),
        "language_model.model.norm.weight": (12,),
        "language_model.lm_head.weight": (30, 12),
    },
]
ENCODER: dict[str, tuple[int, ...]] = {
    "vision_tower.patch_embed.proj.weight": (8, 3, 2, 2),
    "vision_tower.patch_embed.proj.bias": (8,),
    "vision_tower.patch_embed.pos_emb.weight": (4, 4, 8),
    "vision_tower.encoder.blocks.0.wqkv.weight": (24, 8),
    "vision_tower.encoder.blocks.0.mlp.fc0.weight": (20, 8),
    "mm_projector.proj.0.weight": (32, 32),
}


@dataclass(frozen=True)
class Share:
    """The groups, experts and pipeline stages of a rank."""

    groups: dict[str, Any]
    experts: range
    stages: tuple[int, ...] = (0, 1)

    def part(self, replicas: str, name: str) -> float:
        """Return this rank's fraction of a tensor's gradient; all members sum to 1."""
        group = self.groups[replicas]
        if group is None:
            return 1.0
        members, index = dist.get_world_size(group), dist.get_rank(group)
        if name == SILENT:
            return float(index == 0)
        return 0.5 ** min(index + 1, members - 1)  # a half, a quarter, ..., the last twice


class Toy:
    """Parameters and gradients as an engine holds them.

    It has a fused gate|up and experts in one 3-D weight. Gradients are in one buffer, in the order
    of a backward pass; tensors of one parameter stay in order.
    """

    def __init__(self, share: Share, dtype: torch.dtype):
        self.share = share
        self.weights: dict[str, Tensor] = {}
        shapes = {name: s for stage in share.stages for name, s in STAGES[stage].items()}
        for name, shape in (ENCODER | shapes).items():
            self.weights[name] = torch.empty(shape, dtype=dtype)
        self.fused = []
        if 0 in share.stages:
            dense = torch.empty(36, 12, dtype=dtype)
            prefix = "language_model.model.layers.0.mlp."
            self._fuse(
                {prefix + "gate_proj.weight": dense[:18], prefix + "up_proj.weight": dense[18:]}
            )
        if 1 in share.stages:
            stacked = torch.empty(len(share.experts), 14, 12, dtype=dtype)
            prefix = "language_model.model.layers.1.mlp.experts."
            experts: dict[str, Tensor] = {}
            for place, expert in enumerate(share.experts):
                experts[f"{prefix}{expert}.gate_proj.weight"] = stacked[place, :7]
                # Not contiguous, as in an engine that stores experts transposed.
                experts[f"{prefix}{expert}.down_proj.weight"] = stacked[place, 7:].T
            self._fuse(experts)
        for name, weight in self.weights.items():
            weight.copy_(draw(tuple(weight.shape), name))
        wide = torch.promote_types(dtype, torch.float32)
        sizes = [self.weights[name].numel() for name in self.order()]
        buffer = torch.empty(sum(sizes), dtype=wide)
        self.grads = {
            name: part.view(self.weights[name].shape)
            for name, part in zip(self.order(), buffer.split(sizes), strict=True)
        }

    def _fuse(self, weights: dict[str, Tensor]) -> None:
        self.weights |= weights
        self.fused.append(list(weights))

    def order(self) -> list[str]:
        """Return the names in the order of a backward pass."""
        plain = [[name] for name in self.weights if not any(name in f for f in self.fused)]
        return [name for names in reversed(plain + self.fused) for name in names]

    def backward(self, step: int, ready: Callable[[str], None] = lambda name: None) -> None:
        """Produce this rank's part of weight-dependent gradients, so that errors propagate."""
        groups = {tensor.name: tensor.replicas for tensor in self.named()}
        for name in self.order():
            weight, part = self.weights[name], self.share.part(groups[name], name)
            noise = draw(tuple(weight.shape), f"{name} {step}")
            self.grads[name].copy_(part * 3 * (noise + 0.3 * weight.to(self.grads[name].dtype)))
            if part:
                ready(name)

    def named(self) -> list[NamedTensor]:
        def group_of(name: str) -> str:
            if ".experts." in name:
                return "expert"
            return "dense" if name.startswith("language_model.") else "encoder"

        return [
            NamedTensor(name, weight, lambda name=name: self.grads[name], group_of(name))
            for name, weight in self.weights.items()
        ]


class Job:
    """A toy and its optimizer on this rank."""

    def __init__(self, share: Share, dtype=torch.float32, config=CONFIG):
        self.toy = Toy(share, dtype)
        self.optimizer = DistributedMuonClip(self.toy.named(), share.groups, config, SHAPE)
        self.reduction = self.optimizer.gradient_reduction(self.toy.order(), share.groups)

    def backward(self, step: int) -> None:
        self.toy.backward(step, self.reduction.ready)
        self.reduction.finish()

    def train(self, start: int, stop: int) -> "Job":
        for step in range(start, stop):
            self.backward(step)
            self.optimizer.step(CONFIG.lr * (1 + step % 3), scale=0.5)
            if step == CLIP_AT:
                prefix = f"language_model.model.layers.{CLIP_LAYER}.self_attn."
                names = f"{prefix}q_b_proj.weight", f"{prefix}kv_b_proj.weight"
                maxima = torch.tensor([150.0, -4.0, 99.0, 300.0])
                self.optimizer.apply_qk_clip(*names, factors(maxima, 100.0), SHAPE)
        return self

    def __next__(self) -> dict[str, dict[str, Tensor]]:
        step = self.optimizer.steps
        return self.train(step, step + 1).save()

    def save(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of weights and optimizer state."""
        weights = {name: weight.clone() for name, weight in self.toy.weights.items()}
        state = {name: tensor.clone() for name, tensor in self.optimizer.state_dict().items()}
        return {"weights": weights, "state": state}

    def load(self, saved: dict[str, dict[str, Tensor]]) -> "Job":
        for name, weight in self.toy.weights.items():
            weight.copy_(saved["weights"][name])
        self.optimizer.load_state_dict(saved["state"])
        return self

    state_dict, load_state_dict = save, load


ALONE = Share({"dense": None, "expert": None, "encoder": None}, range(NUM_EXPERTS))


def join_groups(world: int, rank: int) -> dict[str, Share]:
    """Return this rank's share in every layout; all ranks create all groups in the same order."""
    everyone, halves = list(range(world)), ([0, 1], [2, 3])
    mine = None
    for pair in halves:
        group = dist.new_group(pair)
        mine = group if rank in pair else mine
    columns = [dist.new_group([column, column + 2]) for column in range(2)]
    singles = [dist.new_group([one]) for one in everyone]
    column, single = columns[rank % 2], singles[rank]
    half = range(2 * (rank % 2), 2 * (rank % 2) + 2)  # of the experts
    return {
        "DP2": Share({"dense": mine, "expert": mine, "encoder": mine}, range(NUM_EXPERTS)),
        "EP2": Share({"dense": mine, "expert": single, "encoder": mine}, half),
        "DP4 with EP2": Share(
            {"dense": dist.group.WORLD, "expert": column, "encoder": dist.group.WORLD}, half
        ),
        "PP2 x EP2": Share(
            {"dense": mine, "expert": single, "encoder": dist.group.WORLD}, half, (rank // 2,)
        ),
    }


LAYOUTS, PAIRS = ("DP4 with EP2", "PP2 x EP2"), ("DP2", "EP2")


def scenarios(share: Share, folder: Path) -> dict[str, Any]:
    """Return all results of a rank in one layout, by scenario name."""
    results: dict[str, Any] = {}
    for scenario, config in (("fp32", CONFIG), ("twin", TWIN)):
        job = Job(share, config=config).train(0, SAVE_AT)
        results[scenario + " saved"] = job.save()
        results[scenario + " half"] = job.train(SAVE_AT, GO_ON_TO).save()
        results[scenario] = job.train(GO_ON_TO, STEPS).save()
        results[scenario + " owners"] = job.optimizer.owners
    alone = torch.load(folder / "alone.pt")
    for scenario, saved, config in (
        ("resumed", results["fp32 saved"], CONFIG),
        ("from twin", results["twin saved"], CONFIG),
        ("from alone", alone, CONFIG),
        ("twin from alone", alone, TWIN),
    ):
        job = Job(share, config=config).load(saved)
        results[scenario] = job.train(SAVE_AT, GO_ON_TO).save()
    for scenario, elements in (("one bucket", 10**6), ("one tensor a bucket", 1)):
        config = CONFIG.replace(bucket_elements=elements)
        results[scenario] = Job(share, config=config).train(0, SAVE_AT).save()
    return results | half_precision(share) | sums(share)


def half_precision(share: Share) -> dict[str, Any]:
    """Train bf16 weights with fp32 masters half-way and a few steps on, with and without a stop."""
    job = Job(share, torch.bfloat16).train(0, SAVE_AT)
    saved = job.save()
    ended = job.train(SAVE_AT, GO_ON_TO).save()
    again = Job(share, torch.bfloat16).load(saved).train(SAVE_AT, GO_ON_TO).save()
    return {"bf16": saved, "bf16 ended": ended, "bf16 resumed": again}


def sums(share: Share) -> dict[str, Any]:
    """Return the job's sum of squares, also with a NaN on one rank; early buckets; bytes."""
    results: dict[str, Any] = {}
    for name, config in (("", CONFIG), ("twin ", TWIN)):
        job = Job(share, config=config)
        with counted() as told:
            job.backward(0)
            job.optimizer.step(0.0)
        results[name + "bytes told"] = told
        moved = job.reduction.bytes_moved, job.optimizer.bytes_moved
        results[name + "bytes"] = dict(zip(("gradients", "weights"), moved))
        results[name + "early"] = job.reduction.early_buckets
        for poison in (False, True):
            job.toy.backward(1)
            if poison and dist.get_rank(share.groups["encoder"]) == 1:
                job.toy.grads["mm_projector.proj.0.weight"][3, 4] = float("nan")
            job.reduction.finish()
            total = job.optimizer.grad_square_sum()
            dist.all_reduce(total, group=share.groups["encoder"])
            results[name + ("poisoned" if poison else "square sum")] = float(total)
    return results


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count the bytes that torch.distributed is asked to move, by operation.

    A call on n ranks counts the bytes that must cross the network: n - 1 times the tensor's for
    reduce or broadcast, twice that for all-reduce. The first rank of the group counts.
    """
    told = {"reduce": 0, "broadcast": 0, "all_reduce": 0}
    real = {name: getattr(dist, name) for name in told}

    def counting(name: str) -> Callable[..., Any]:
        def call(tensor: Tensor, *args: Any, **options: Any) -> Any:
            group = options.get("group")
            times = (dist.get_world_size(group) - 1) * (2 if name == "all_reduce" else 1)
            told[name] += times * tensor.nbytes if dist.get_rank(group) == 0 else 0
            return real[name](tensor, *args, **options)

        return call

    for name in told:
        setattr(dist, name, counting(name))
    try:
        yield told
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


def disagreement(share: Share, rank: int) -> str:
    """Return a rank's error when one rank passes a tensor too few."""
    named = Toy(share, torch.float32).named()
    try:
        DistributedMuonClip(named[1:] if rank == 1 else named, share.groups, CONFIG, SHAPE)
    except ValueError as error:
        return str(error)
    return "nothing"


def main(rank: int, world: int, folder: Path) -> None:
    join_ranks(rank, world, folder)
    shares = join_groups(world, rank)
    results: dict[str, Any] = {"disagreement": disagreement(shares["DP4 with EP2"], rank)}
    for name in json.loads((folder / "layouts.json").read_text()):
        if name in PAIRS and rank > 1:
            continue  # the others need not wait for the first two
        results[name] = scenarios(shares[name], folder)
    torch.save(results, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
