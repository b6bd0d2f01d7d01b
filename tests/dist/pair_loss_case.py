"""One of four processes that compute the pair loss with uneven numbers of pairs per rank.

Each checks its part in fp64 against one process with all pairs. The towers are linear maps, so
gradients of replicated parameters are checked too, as sums over ranks.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F

from kimi_pretrain.siglip.heads import BIAS, SCALE
from kimi_pretrain.siglip.pair_loss import pair_loss
from tests.dist.jobs import join_ranks

COUNTS = ([3, 5, 0, 4], [1, 11, 0, 0], [3, 3, 3, 3], [0, 0, 0, 2], [0, 0, 0, 0])
NAMES = ("image", "text", "scale", "bias")


def parameters() -> list[torch.Tensor]:
    """Return two towers of one matrix each, scale and bias."""
    draw = torch.Generator().manual_seed(5)
    towers = [torch.randn(16, 9, generator=draw, dtype=torch.float64) for _ in range(2)]
    numbers = [torch.tensor([value], dtype=torch.float64) for value in (SCALE, BIAS)]
    return [one.requires_grad_() for one in (*towers, *numbers)]


def pairs(total: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(total)
    both = torch.randn(2, total, 9, generator=draw, dtype=torch.float64)
    return both[0], both[1]


def loss_of(held: list[torch.Tensor], first: int, counts: list[int], rank: int) -> torch.Tensor:
    images, texts = (one[first : first + counts[rank]] for one in pairs(sum(counts)))
    image, text, scale, bias = held
    embedded = F.normalize(images @ image.T, dim=-1), F.normalize(texts @ text.T, dim=-1)
    return pair_loss(*embedded, scale, bias, counts)


def plain(held: list[torch.Tensor], total: int) -> torch.Tensor:
    """Compute the formula of the paper directly, without the code under test."""
    images, texts = pairs(total)
    x = (images @ held[0].T) / (images @ held[0].T).norm(dim=1)[:, None]
    y = (texts @ held[1].T) / (texts @ held[1].T).norm(dim=1)[:, None]
    found = 0 * (x.sum() + y.sum() + held[2].sum() + held[3].sum())  # without pairs all are 0
    for i in range(total):
        for j in range(total):
            z = (1 if i == j else -1) * (held[2].exp() * (x[i] @ y[j]) + held[3])
            found = found - torch.log(1 / (1 + torch.exp(-z))).sum()
    return found


def main(rank: int, world: int, folder: Path) -> None:
    join_ranks(rank, world, folder)
    found = {}
    for counts in COUNTS:
        held, alone = parameters(), parameters()
        loss = loss_of(held, sum(counts[:rank]), counts, rank)
        loss.backward()
        sums = [loss.detach().clone(), *(one.grad for one in held)]
        for one in sums:
            dist.all_reduce(one)
        whole = plain(alone, sum(counts))
        whole.backward()
        wanted = [whole.detach(), *(one.grad for one in alone)]
        found[str(counts)] = {
            name: float((a - b).norm() / b.norm().clamp(min=1e-300))
            for name, a, b in zip(("loss", *NAMES), sums, wanted, strict=True)
        }
        if counts == [3, 3, 3, 3]:
            found["equal counts"] = dict(zip(("loss", *NAMES), sums, strict=True))
    torch.save(found, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
