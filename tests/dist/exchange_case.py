"""One of four processes that test the exchange and the gradient sum, without model and engine."""

import os
from contextlib import nullcontext
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from kimi_pretrain.dep import sharded
from kimi_pretrain.dep.encoder import DecoupledEncoder
from kimi_pretrain.dep.exchange import Exchange, scope_group
from kimi_pretrain.dep.reduce import GradientSum
from kimi_pretrain.dep.vision_plan import VisionPlan, runs, shares_of
from kimi_pretrain.parallel.rendezvous import meeting_store
from moonvit3d.config import MoonViTConfig
from tests.unit.kimi_pretrain.dep.test_vision_plan import made_plan

HIDDEN = 12


def values(item: np.ndarray, token: np.ndarray) -> torch.Tensor:
    """Return a number for every item, token and column, [tokens, HIDDEN]."""
    columns = np.arange(HIDDEN)
    return torch.from_numpy(item[:, None] * 1.7 + np.sin(token[:, None] * 13.0 + columns))


def encoded(plan: VisionPlan, rank: int) -> torch.Tensor:
    shares = plan.encoded_by(rank)
    tokens = [np.arange(b, e) for b, e in zip(shares.begin, shares.end, strict=True)]
    item = np.repeat(shares.item, shares.end - shares.begin)
    return values(item, np.concatenate([np.zeros(0, int), *tokens]))


def arrived(plan: VisionPlan, rank: int) -> torch.Tensor:
    spans = plan.received_by(rank)
    tokens = [np.arange(b, b + n) for b, n in zip(spans.begin, spans.count, strict=True)]
    item = np.repeat(spans.item, spans.count)
    return values(item, np.concatenate([np.zeros(0, int), *tokens]))


class Metered(Exchange):
    """Checks that each round stays within the budget or has a single column."""

    rounds = 0

    def _round(self, rows: torch.Tensor, to: list[int], of: list[int]) -> torch.Tensor:
        itemsize = (self.dtype or rows.dtype).itemsize
        moved = max(sum(to), sum(of)) * rows.shape[1] * itemsize
        assert moved <= self.budget_bytes or rows.shape[1] == 1, (moved, self.budget_bytes)
        self.rounds += 1
        return super()._round(rows, to, of)


def exchange_brings_every_token_there_and_back(rank: int) -> None:
    for cp, items in [(1, 40), (2, 40), (1, 0), (1, 1)]:
        plan, *_ = made_plan(cp, 1, 2 // cp, items, seed=items + cp, split=items > 1)
        sent, wanted = encoded(plan, rank), arrived(plan, rank)
        for budget, rounds in ((1 << 30, 1), (2000, None), (1, HIDDEN if items else 1)):
            exchange = Metered(None, range(4), budget)
            got = exchange.hand_over(sent, plan, rank)
            assert torch.equal(got, wanted), (cp, items, budget)
            assert torch.equal(exchange.hand_back(got, plan, rank), sent), (cp, items, budget)
            assert rounds is None or exchange.rounds == 2 * rounds, (cp, items, budget)
        narrow = Metered(None, range(4), 500, torch.bfloat16)
        got = narrow.hand_over(sent.float(), plan, rank)
        assert got.dtype == torch.float32
        assert torch.equal(got, wanted.float().bfloat16().float())
        spans = plan.sent_by(rank)
        abroad = sum(n for n, d in zip(spans.count, spans.dest, strict=True) if d != rank)
        assert narrow.bytes_sent(plan, rank, HIDDEN, 4)["over"] == abroad * HIDDEN * 2


def exchange_stays_inside_its_scope(rank: int) -> None:
    """Two independent replicas run the same exchange in two groups at once."""
    scopes = [[0, 2], [1, 3]]
    group = scope_group(scopes, 60.0)
    mine = scopes[rank % 2]
    exchange = Exchange(group, mine, 700)
    plan, *_ = made_plan(1, 1, 2, 0, seed=1, split=False)
    item = np.arange(6)
    where_from = np.array([0, 1, 2, 3, 2, 1])
    columns = {
        "item": item, "begin": 0 * item, "count": item + 1, "source": where_from,
        "dest": where_from % 2, "microbatch": 0 * item, "position": 0 * item,
    }  # fmt: skip
    plan = VisionPlan(
        rank=where_from, parts=item * 0 + 1, home=where_from % 2, tokens=item + 1,
        patches=4 * (item + 1), costs=item + 1.0, split_efficiency=1.0,
        order=np.array([0, 2, 1, 3]), spans=type(plan.spans)(**columns),
    )  # fmt: skip
    got = exchange.hand_over(encoded(plan, rank), plan, rank)
    assert torch.equal(got, arrived(plan, rank))
    assert torch.equal(exchange.hand_back(got, plan, rank), encoded(plan, rank))


def made_layers(rank: int) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(5)))


def summed(
    rank: int, chunks: int, *, overlap: bool, bucket: int, held: bool = False
) -> torch.Tensor:
    layers = made_layers(rank)
    sums = GradientSum(dict(layers.named_parameters()), torch.float32, torch.device("cpu"), bucket)
    if held:
        sums.hold()
    for chunk in range(chunks):
        x = torch.linspace(rank, chunk + 2.0, 18).view(3, 6)
        with sums.last() if overlap and chunk == chunks - 1 else nullcontext():
            layers(x).square().sum().backward()
        assert all(p.grad is None for p in layers.parameters())
    if held:
        assert not sums._work
        sums.release()
    assert len(sums._work) == (len(sums._parts) if overlap and chunks else 0)
    sums.finish()
    return sums.buffer


def sum_is_the_same_with_and_without_overlap(rank: int) -> None:
    """Ranks with different numbers of chunks, including none, get the same sum without deadlock."""
    chunks = [3, 1, 0, 2][rank]
    for bucket in (1, 50, 1 << 20):
        plain = summed(rank, chunks, overlap=False, bucket=bucket)
        early = summed(rank, chunks, overlap=True, bucket=bucket)
        assert torch.equal(plain, early), bucket
        assert torch.equal(plain, summed(rank, chunks, overlap=True, bucket=bucket, held=True))
    expected = torch.zeros_like(plain)
    for other, count in enumerate([3, 1, 0, 2]):
        layers = made_layers(other)
        for chunk in range(count):
            x = torch.linspace(other, chunk + 2.0, 18).view(3, 6)
            layers(x).square().sum().backward()
        if count:
            expected += torch.cat([p.grad.flatten() for p in layers.parameters()])
    assert torch.allclose(plain, expected, rtol=1e-5)


def sum_goes_to_owners_alone(rank: int) -> None:
    """Owners get the full sum for half the bytes; the sum can switch back to all ranks."""
    chunks = [3, 1, 0, 2][rank]
    plain = summed(rank, chunks, overlap=False, bucket=50)
    for bucket in (1, 50, 1 << 20):
        layers = made_layers(rank)
        names = dict(layers.named_parameters())
        wanted = dict(zip(names, plain.split([param.numel() for param in names.values()])))
        owners = {name: (3 * number) % 4 for number, name in enumerate(names)}
        sums = GradientSum(names, torch.float32, torch.device("cpu"), bucket)
        moved = []
        for told in (owners, None):
            sums.to_owners(told)
            for chunk in range(chunks):
                x = torch.linspace(rank, chunk + 2.0, 18).view(3, 6)
                with sums.last() if chunk == chunks - 1 else nullcontext():
                    layers(x).square().sum().backward()
            sums.finish()
            for name, gradient in sums.views.items():
                if told is None or told[name] == rank:
                    assert torch.allclose(gradient.flatten(), wanted[name], rtol=1e-6), name
            total = torch.tensor([sums.bytes_moved])
            dist.all_reduce(total)
            moved.append(int(total))
        assert moved == [3 * plain.nbytes, 6 * plain.nbytes]


VISION = MoonViTConfig(width=32, depth=2, heads=4, mlp_width=48, pos_grid=8, out_width=24)
GRIDS = np.array([[1, 8, 8], [2, 4, 6], [1, 12, 4], [1, 2, 2], [4, 4, 4], [1, 6, 6]])
FIRST = np.array([0, 2, 0, 3, 1, 1])  # rank of each item, or first rank of those that share it
PARTS = np.array([4, 2, 2, 1, 1, 1])


def encoder_sums(rank: int, blocks: dict, room: int, **how) -> tuple[torch.Tensor, ...]:
    """Return outputs, gradients summed over ranks, and kept patches, of shared and whole items."""
    tokens, draw = GRIDS[:, 1] * GRIDS[:, 2] // 4, np.random.Generator(np.random.Philox(key=4))
    pixels = [draw.integers(0, 256, (n, 3, 14, 14), dtype=np.uint8) for n in GRIDS.prod(1)]
    encoder = DecoupledEncoder(
        VISION, 70, 3, torch.float64, torch.device("cpu"), blocks=blocks, **how
    )
    shares = shares_of(FIRST, PARTS, tokens, np.arange(4))
    mine = shares[shares.rank == rank]
    mine = mine[np.lexsort((mine.item, -mine.parts))]
    fetched = {item: pixels[item] for item in np.flatnonzero(rank == FIRST).tolist()}
    work = encoder.begin(mine, GRIDS, fetched, room)
    out, kept = work.forward(), torch.tensor(work.kept_patches)
    starts = (np.cumsum(tokens) - tokens)[mine.item]
    places = torch.from_numpy(runs(starts + mine.begin, mine.end - mine.begin))
    places = places[:, None] * 24 + torch.arange(24)  # a gradient for every token and column
    work.backward(torch.sin(places.double()))
    encoder.sums.finish()
    return out, encoder.sums.buffer, kept


def ranks_with_other_room_share_items(rank: int) -> None:
    """Each rank decides separately what it keeps: its block does not know its free memory."""
    blocks = sharded.blocks([range(4)], 4, 15.0)
    room = [0, 1 << 30, 0, 1 << 25][rank]
    for frozen in ([], ["vision_tower"]):
        plain_out, plain, _ = encoder_sums(rank, blocks, 0, frozen=frozen)
        out, sums, kept = encoder_sums(rank, blocks, room, frozen=frozen)
        assert torch.equal(out, plain_out)
        assert torch.equal(sums, plain)
        assert (kept > 0) == (rank in (1, 3)), kept


if __name__ == "__main__":
    torch.set_num_threads(1)
    soon = timedelta(seconds=60)
    store = meeting_store(4, soon)
    dist.init_process_group(
        "gloo", store=store, rank=int(os.environ["RANK"]), world_size=4, timeout=soon
    )
    for case in (
        exchange_brings_every_token_there_and_back,
        exchange_stays_inside_its_scope,
        sum_is_the_same_with_and_without_overlap,
        sum_goes_to_owners_alone,
        ranks_with_other_room_share_items,
    ):
        case(dist.get_rank())
        dist.barrier()
        if dist.get_rank() == 0:
            print("passed", case.__name__, flush=True)
    dist.destroy_process_group()
