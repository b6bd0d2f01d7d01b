"""Trains a model under DistributedDataParallel with the public optimizer, sharded and unsharded.

`python ddp_worker.py RANK WORLD FOLDER` joins a gloo job and writes FOLDER/rank{RANK}.pt. The
parent test process trains the same model on the whole batch.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kimi_pretrain.optim import AttentionHeads, MuonClip, Split
from tests.dist.jobs import join_ranks

WIDTH, HEADS, BATCH, STEPS, SAVE_AT, CLIP_AT = 8, 2, 6, 6, 3, 2
RULES = {"embed.weight": "adamw", "head.weight": "adamw", "*qkv.weight": Split(rows=(WIDTH,) * 3),
         "*experts": Split(stacked=True), "*": "muon"}  # fmt: skip
HEAD_ROWS = AttentionHeads(("qkv.weight", 0, WIDTH), ("qkv.weight", WIDTH, 2 * WIDTH))
# Largest logits by rank; their maximum clips only head 0.
MAXIMA = torch.tensor([[[50.0, 90.0]], [[400.0, 10.0]]])


class Toy(nn.Module):
    """An embedding, fused attention, a stack of experts, a norm, a head."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(11, WIDTH, dtype=dtype)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, dtype=dtype)
        self.experts = nn.Parameter(torch.randn(3, WIDTH, WIDTH, dtype=dtype) / WIDTH)
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, 11, bias=False, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + (q @ k.mT / WIDTH).softmax(-1) @ v
        x = x + torch.einsum("btd,edo->bto", x, self.experts).tanh()
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def tokens(step: int) -> Tensor:
    return torch.randint(11, (BATCH, 5), generator=torch.Generator().manual_seed(step))


class Training:
    """One rank's model and optimizer; `group` shards state, `parallel` averages gradients."""

    def __init__(self, dtype: torch.dtype, group: Any = None, parallel: bool = False):
        self.toy, self.group, self.parallel, self.steps = Toy(dtype), group, parallel, 0
        self.model = DistributedDataParallel(self.toy) if parallel else self.toy
        self.optimizer = MuonClip(
            self.toy.named_parameters(), 1e-2, RULES, attention=[HEAD_ROWS], process_group=group,
            ns_dtype="float32", bucket_elements=100,
        )  # fmt: skip
        self.clipped = 0
        if parallel:  # DDP rebuilds buckets after the first backward and sums in a new order
            self.model(tokens(0)).backward()
            self.optimizer.zero_grad()

    def train(self, until: int) -> "Training":
        for step in range(self.steps, until):
            batch = tokens(step)
            if self.parallel:
                batch = batch.chunk(dist.get_world_size())[dist.get_rank()]
            self.optimizer.zero_grad()
            self.model(batch).backward()
            self.optimizer.step()
            if step == CLIP_AT:
                maxima = MAXIMA.amax(0) if self.group is None else MAXIMA[dist.get_rank()]
                self.clipped = self.optimizer.qk_clip(maxima)
        self.steps = until
        return self

    def weights(self) -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in self.toy.named_parameters()}

    def resumed(self, optimizer: dict, group: Any) -> dict[str, Tensor]:
        """Continue from here with this optimizer state; return the final weights."""
        fresh = Training(self.toy.head.weight.dtype, group, self.parallel)
        fresh.toy.load_state_dict(self.weights())
        fresh.optimizer.load_state_dict(optimizer)
        fresh.steps = self.steps
        return fresh.train(STEPS).weights()


def scenarios(dtype: torch.dtype) -> dict[str, Any]:
    """Return all results of one rank."""
    group = dist.group.WORLD
    sharded = Training(dtype, group, parallel=True).train(SAVE_AT)
    own, full = sharded.optimizer.state_dict(), sharded.optimizer.full_state_dict(to=1)
    result: dict[str, Any] = {"owned": sorted(own["state"]), "full": full}
    everyone = [full]
    dist.broadcast_object_list(everyone, src=1)
    result["from own"] = sharded.resumed(own, group)
    result["from full"] = sharded.resumed(everyone[0], group)
    result["from full, unsharded"] = sharded.resumed(everyone[0], None)
    result["sharded"] = sharded.train(STEPS).weights()
    result["clipped"] = sharded.clipped
    result["unsharded"] = Training(dtype, None, parallel=True).train(STEPS).weights()
    return result


def main(rank: int, world: int, folder: Path) -> None:
    join_ranks(rank, world, folder)
    dtypes = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
    results = {name: scenarios(dtype) for name, dtype in dtypes.items()}
    torch.save(results, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
