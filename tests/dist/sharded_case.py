"""Items encoded jointly by blocks of gloo processes, and the process that takes part.

`python sharded_case.py RANK WORLD FOLDER` joins a job through a file in FOLDER, runs every case and
writes FOLDER/rank{RANK}.pt. The parent test process builds the same encoders, items and gradients.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from kimi_pretrain.dep import sharded
from moonvit3d.config import MoonViTConfig
from moonvit3d.model import VisionEncoder, initialise
from tests.dist.jobs import join_ranks

WORLD = 4
SMALL = MoonViTConfig(
    width=48, depth=2, heads=4, mlp_width=80, pos_grid=6, pos_init_std=0.5, out_width=40
)
GRIDS = {
    "image": (1, 6, 10),  # 15 tokens
    "native grid": (1, 6, 6),  # uses the position table without interpolation; 9 tokens
    "chunk of 3": (3, 4, 6),  # 6 tokens: 1, 2, 1 and 2 of them for 4 members
    "chunk of 4": (4, 10, 6),
    "column": (2, 14, 2),
    "fewer tokens than members": (1, 2, 6),
    "one token": (4, 2, 2),
}


@dataclass(frozen=True)
class Case:
    """One item for blocks of `parts` ranks."""

    name: str
    grid: tuple[int, int, int]
    parts: int
    dtype: torch.dtype = torch.float64


FLOAT32 = [
    Case(f"{name}, {parts} parts, float32", grid, parts, torch.float32)
    for name, grid in GRIDS.items()
    for parts in (2, 4)
]
COMPARED = ("image", "chunk of 4")  # also compared with transformers, in float32
SLOW = [case for case in FLOAT32 if not case.name.startswith(COMPARED)]
CASES = [
    *(case for case in FLOAT32 if case.name.startswith(COMPARED)),
    *(
        Case(f"{name}, {parts} parts, float64", grid, parts)
        for name, grid in GRIDS.items()
        for parts in (2, 4)
    ),
    Case("alone in its block", GRIDS["chunk of 3"], 1),
    Case("strips wider than any image", (1, 48, 48), 2),
    Case("bfloat16", GRIDS["chunk of 4"], 4, torch.bfloat16),
]


def encoder_of(dtype: torch.dtype, config: MoonViTConfig = SMALL) -> VisionEncoder:
    """Return an encoder whose biases and norms are not the trivial 0 and 1."""
    module = VisionEncoder(config)
    initialise(module, seed=7)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return module.to(dtype)


def pixels_of(grid: tuple[int, int, int]) -> torch.Tensor:
    """Return random bytes, [patches, 3, 14, 14]."""
    generator = torch.Generator().manual_seed(math.prod(grid))
    shape = (math.prod(grid), 3, 14, 14)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def gradient_of(grid: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return a loss gradient with respect to an item's tokens, [tokens, out_width]."""
    generator = torch.Generator().manual_seed(1 + math.prod(grid))
    shape = (grid[1] * grid[2] // 4, SMALL.out_width)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


class Watch:
    """Records every collective and the bytes it sends to other members."""

    def __init__(self):
        self.seen: list[tuple[str, int]] = []
        self.plain = dist.all_to_all_single
        dist.all_to_all_single = self.all_to_all_single

    def all_to_all_single(self, received, sent, from_, to, group):
        row = sent[:1].nbytes if len(sent) else 0
        others = sum(count for member, count in enumerate(to) if member != group.rank())
        self.seen.append((str(sent.dtype), row * others))
        self.plain(received, sent, from_, to, group=group)

    def take(self) -> list[tuple[str, int]]:
        seen, self.seen = self.seen, []
        return seen


def run_case(case: Case, group: dist.ProcessGroup, watch: Watch) -> dict:
    """Run a step's operations on a shared item on this rank."""
    module = encoder_of(case.dtype)
    pixels = pixels_of(case.grid).numpy() if group.rank() == 0 else None
    own = sharded.scatter_patches(pixels, case.grid, group, torch.device("cpu"))
    watch.take()
    with torch.no_grad():
        kept = sharded.encode(module, own, case.grid, group)
    forward = watch.take()
    again = sharded.encode(module, own, case.grid, group)
    recompute = watch.take()
    tokens = sharded.token_range(len(gradient_of(case.grid, case.dtype)), case.parts, group.rank())
    again.backward(gradient_of(case.grid, case.dtype)[tokens.start : tokens.stop])
    backward = watch.take()
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    for grad in grads.values():  # every parameter has one, and their sum is the whole item's
        dist.all_reduce(grad, group=group)
    return {
        "pixels": own, "kept": kept, "again": again.detach(), "grads": grads, "tokens": tokens,
        "forward": forward, "recompute": recompute, "backward": backward,
    }  # fmt: skip


def run_frozen(group: dist.ProcessGroup, watch: Watch) -> dict:
    """Run with a frozen tower: the projector has gradients, and backward communicates nothing."""
    module, grid = encoder_of(torch.float64), GRIDS["image"]
    module.vision_tower.requires_grad_(False)
    pixels = pixels_of(grid).numpy() if group.rank() == 0 else None
    own = sharded.scatter_patches(pixels, grid, group, torch.device("cpu"))
    out = sharded.encode(module, own, grid, group)
    watch.take()
    tokens = sharded.token_range(15, group.size(), group.rank())
    out.backward(gradient_of(grid, torch.float64)[tokens.start : tokens.stop])
    grads = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    for grad in grads.values():
        dist.all_reduce(grad, group=group)
    return {"grads": grads, "backward": watch.take()}


def refusals(group: dist.ProcessGroup, alone: dist.ProcessGroup) -> dict[str, str]:
    """Return a rank's errors for invalid arguments, which must be raised before any communication.

    Errors that only the first rank of a block can detect are tested in a block of one.
    """
    grid, cpu = GRIDS["image"], torch.device("cpu")
    pixels = pixels_of(grid).numpy()
    six_heads = encoder_of(torch.float32, SMALL.replace(heads=6))
    calls = {
        "heads": lambda: sharded.encode(six_heads, pixels_of(grid), grid, group),
        "patches": lambda: sharded.encode(encoder_of(torch.float32), pixels_of(grid), grid, group),
        "nothing": lambda: sharded.scatter_patches(None, grid, alone, cpu),
        "another item": lambda: sharded.scatter_patches(pixels[1:], grid, alone, cpu),
    }
    if group.rank():
        calls["not the first"] = lambda: sharded.scatter_patches(pixels, grid, group, cpu)
    return {name: message_of(call) for name, call in calls.items()}


def message_of(call) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing"


SCOPES = {
    "everyone": [[0, 1, 2, 3]],
    "a short one": [[0, 1, 2], [3]],
    "replicas": [[0, 2], [1, 3]],
}


def members_of_blocks() -> dict[str, dict[int, list[int]]]:
    """Return the ranks of each block of this rank, determined by a sum over the block."""
    found = {}
    for name, scopes in SCOPES.items():
        found[name] = {}
        for size, group in sharded.blocks(scopes, 4, 30.0).items():
            total = torch.tensor([10.0 ** dist.get_rank()])
            dist.all_reduce(total, group=group)
            found[name][size] = [rank for rank in range(WORLD) if int(total) // 10**rank % 10]
    return found


def main(rank: int, world: int, folder: Path) -> None:
    join_ranks(rank, world, folder)
    dist.new_group([0, 2])  # as in a pipeline, where some ranks are in more groups than others
    alone = [dist.new_group([member]) for member in range(world)][rank]
    blocks = {1: alone, **sharded.blocks([range(world)], 4, 30.0)}
    watch = Watch()
    cases = SLOW if folder.name.startswith("slow") else CASES
    results: dict = {case.name: run_case(case, blocks[case.parts], watch) for case in cases}
    results["frozen"] = run_frozen(blocks[4], watch)
    results["refusals"] = refusals(blocks[4], alone)
    results["blocks"] = members_of_blocks()
    torch.save(results, folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
