"""open_clip's SigLIP loss on four ranks with equal numbers of pairs, for `open_clip_loss.json`.

open_clip is not installed here. Its loss.py needs only torch and is given as a file; its results
for the towers and pairs of `pair_loss_case` are stored next to this file.

    pip download --no-deps open_clip_torch==3.3.0, and unzip it
    python -m tests.dist.open_clip_case open_clip/loss.py
"""

import importlib.util
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.dist.jobs import join_ranks, run_ranks
from tests.dist.pair_loss_case import NAMES, pairs, parameters

FOUND = Path(__file__).with_name("open_clip_loss.json")
VERSION, RANKS, EACH = "3.3.0", 4, 3


def main(rank: int, world: int, folder: Path) -> None:
    join_ranks(rank, world, folder)
    spec = importlib.util.spec_from_file_location("open_clip_loss", folder / "loss.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    held = parameters()
    image, text, scale, bias = held
    images, texts = (one[rank * EACH : (rank + 1) * EACH] for one in pairs(world * EACH))
    embedded = F.normalize(images @ image.T, dim=-1), F.normalize(texts @ text.T, dim=-1)
    loss = module.SigLipLoss(rank=rank, world_size=world)(*embedded, scale.exp(), bias)
    loss = loss * EACH  # open_clip divides by the pairs of a rank
    loss.sum().backward()
    sums = [loss.detach().clone(), *(one.grad for one in held)]
    for one in sums:
        dist.all_reduce(one)
    torch.save(dict(zip(("loss", *NAMES), sums, strict=True)), folder / f"rank{rank}.pt")
    dist.destroy_process_group()


def write(loss_py: Path) -> None:
    """Run open_clip's loss and store the results."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(loss_py, folder)
        first = run_ranks(__file__, RANKS, Path(folder))[0]
    values = {name: value.tolist() for name, value in first.items()}
    FOUND.write_text(json.dumps({"open_clip_torch": VERSION, **values}) + "\n")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        write(Path(sys.argv[1]))
    else:
        main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
