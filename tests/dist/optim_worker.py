"""A toy model for the distributed optimizer, and the process that trains it.

`python optim_worker.py RANK WORLD FOLDER` joins a gloo job through a file in FOLDER, runs every
scenario and leaves FOLDER/rank{RANK}.pt. The parent test process uses the same functions alone.
"""

import dataclasses
import hashlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from kimi_pretrain.optim.config import OptimConfig
from kimi_pretrain.optim.distributed import DistributedMuonClip
from kimi_pretrain.optim.groups import ModelShape, NamedTensor
from kimi_pretrain.optim.qk_clip import factors
from tests.dist.jobs import join_ranks

SHAPE = ModelShape(
    num_heads=4, qk_nope_dim=4, qk_rope_dim=2, v_dim=4, kv_lora_rank=8, vision_heads=2
)
CONFIG = OptimConfig(
    lr=5e-3,
    min_lr=0,
    warmup_steps=0,
    stable_steps=1,
    decay_steps=0,
    ns_dtype="float32",
    bucket_elements=400,  # a few tensors: many rounds even here
)
STEPS, SAVE_AT, CLIP_AT, CLIP_LAYER = 20, 8, 5, 1
NUM_EXPERTS = 4


def draw(shape: tuple[int, ...], key: str) -> Tensor:
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dense_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "language_model.model.embed_tokens.weight": (30, 12),
        "language_model.model.norm.weight": (12,),
        "language_model.lm_head.weight": (30, 12),
        "vision_tower.patch_embed.proj.weight": (8, 3, 2, 2),
        "vision_tower.patch_embed.proj.bias": (8,),
        "vision_tower.patch_embed.pos_emb.weight": (4, 4, 8),
        "vision_tower.encoder.blocks.0.wqkv.weight": (24, 8),
        "vision_tower.encoder.blocks.0.mlp.fc0.weight": (20, 8),
        "mm_projector.proj.0.weight": (32, 32),
    }
    for layer in range(2):
        prefix = f"language_model.model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (12,),
            prefix + "self_attn.q_a_proj.weight": (10, 12),
            prefix + "self_attn.q_b_proj.weight": (24, 10),
            prefix + "self_attn.kv_a_proj_with_mqa.weight": (10, 12),
            prefix + "self_attn.kv_b_proj.weight": (32, 8),
            prefix + "self_attn.o_proj.weight": (12, 16),
        }
    return shapes


class Toy:
    """Parameters as an engine holds them: a fused gate|up, experts in one 3-D weight."""

    def __init__(self, experts: range, dtype: torch.dtype):
        self.weights: dict[str, Tensor] = {}
        for name, shape in dense_shapes().items():
            self.weights[name] = draw(shape, name).to(dtype)
        dense = torch.empty(36, 12, dtype=dtype)
        stacked = torch.empty(len(experts), 14, 12, dtype=dtype)
        prefix = "language_model.model.layers.0.mlp."
        self.weights |= {f"{prefix}gate_proj.weight": dense[:18]}
        self.weights |= {f"{prefix}up_proj.weight": dense[18:]}
        prefix = "language_model.model.layers.1.mlp.experts."
        for place, expert in enumerate(experts):
            self.weights[f"{prefix}{expert}.gate_proj.weight"] = stacked[place, :7]
            # Not contiguous, as in an engine that stores experts transposed.
            self.weights[f"{prefix}{expert}.down_proj.weight"] = stacked[place, 7:].T
        for name, weight in self.weights.items():
            weight.copy_(draw(tuple(weight.shape), name))
        self.grads: dict[str, Tensor] = {}

    def backward(self, step: int) -> None:
        """Gradients that depend on the weights, so that an error made once shows later on."""
        for name, weight in self.weights.items():
            noise = draw(tuple(weight.shape), f"{name} {step}")
            self.grads[name] = 3 * (noise + 0.3 * weight.float())

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

    def __init__(self, groups: dict, experts: range, dtype=torch.float32, config=CONFIG):
        self.toy = Toy(experts, dtype)
        self.optimizer = DistributedMuonClip(self.toy.named(), groups, config, SHAPE)

    def train(self, start: int, stop: int) -> "Job":
        for step in range(start, stop):
            self.toy.backward(step)
            self.optimizer.step(CONFIG.lr * (1 + step % 3), scale=0.5)
            if step == CLIP_AT:
                prefix = f"language_model.model.layers.{CLIP_LAYER}.self_attn."
                names = f"{prefix}q_b_proj.weight", f"{prefix}kv_b_proj.weight"
                maxima = torch.tensor([150.0, -4.0, 99.0, 300.0])
                self.optimizer.apply_qk_clip(*names, factors(maxima, 100.0))
        return self

    def __next__(self) -> dict[str, dict[str, Tensor]]:
        step = self.optimizer.steps
        return self.train(step, step + 1).save()

    def save(self) -> dict[str, dict[str, Tensor]]:
        """Copies of weights and optimizer state."""
        weights = {name: weight.clone() for name, weight in self.toy.weights.items()}
        state = {name: tensor.clone() for name, tensor in self.optimizer.state_dict().items()}
        return {"weights": weights, "state": state}

    def load(self, saved: dict[str, dict[str, Tensor]]) -> "Job":
        for name, weight in self.toy.weights.items():
            weight.copy_(saved["weights"][name])
        self.optimizer.load_state_dict(saved["state"])
        return self

    state_dict, load_state_dict = save, load


ALONE = {"dense": None, "expert": None, "encoder": None}
ALL_EXPERTS = range(NUM_EXPERTS)


def join_groups(world: int, rank: int) -> tuple[dict, range]:
    """Two expert-parallel halves: even ranks hold experts 0 and 1, odd ranks 2 and 3."""
    everyone = dist.new_group(list(range(world)))
    halves = [dist.new_group(list(range(half, world, 2))) for half in range(2)]
    half = rank % 2
    groups = {"dense": everyone, "encoder": dist.group.WORLD, "expert": halves[half]}
    return groups, range(2 * half, 2 * half + 2)


def scenarios(groups: dict, experts: range, rank: int, folder: Path) -> dict:
    """Everything a rank has to show, by name of the scenario."""
    results: dict = {}
    job = Job(groups, experts).train(0, SAVE_AT)
    results["saved"] = job.save()
    total = job.optimizer.grad_square_sum()
    dist.all_reduce(total)
    results["grad_square_sum"] = total
    results["fp32"] = job.train(SAVE_AT, STEPS).save()
    results["owners"] = job.optimizer.owners
    results["resumed"] = Job(groups, experts).load(results["saved"]).train(SAVE_AT, STEPS).save()
    alone = torch.load(folder / "alone.pt")
    results["from_alone"] = Job(groups, experts).load(alone).train(SAVE_AT, STEPS).save()
    results["bf16"] = Job(groups, experts, torch.bfloat16).train(0, SAVE_AT).save()
    for scenario, elements in (("one_bucket", 10**6), ("one_tensor_a_bucket", 1)):
        config = dataclasses.replace(CONFIG, bucket_elements=elements)
        results[scenario] = Job(groups, experts, config=config).train(0, SAVE_AT).save()
    results["disagreement"] = disagreement(groups, experts, rank)
    return results


def disagreement(groups: dict, experts: range, rank: int) -> str:
    """What a rank is told when one rank brings a tensor too few."""
    named = Toy(experts, torch.float32).named()
    try:
        DistributedMuonClip(named[1:] if rank == 1 else named, groups, CONFIG, SHAPE)
    except ValueError as error:
        return str(error)
    return "nothing"


def main(rank: int, world: int, folder: Path) -> None:
    join_ranks(rank, world, folder)
    groups, experts = join_groups(world, rank)
    torch.save(scenarios(groups, experts, rank, folder), folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
