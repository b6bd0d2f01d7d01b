"""Tests against mutants of the two passes that train with wrong gradients or do extra work.

A fake all-reduce doubles its input. Elements that are in a bucket when it leaves count twice, and
later additions are lost, as with real ranks.
"""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from kimi_pretrain.config import load_config
from kimi_pretrain.dep import encoder as encoder_module
from kimi_pretrain.dep import sharded
from kimi_pretrain.dep.encoder import DecoupledEncoder, EncoderPass
from kimi_pretrain.dep.memory_limit import kept_chunks, vision_bytes
from kimi_pretrain.dep.planner import VisionPlanner
from kimi_pretrain.dep.reduce import GradientSum
from kimi_pretrain.dep.vision_plan import Destinations, Shares, shares_of, spans_of
from moonvit3d.config import MoonViTConfig
from moonvit3d.memory import activation_bytes
from moonvit3d.model import VisionEncoder, initialise
from moonvit3d.packing import chunks
from tests.unit.kimi_pretrain.dep.test_vision_plan import made_plan

CONFIG = MoonViTConfig(width=32, depth=2, heads=4, mlp_width=48, pos_grid=8, out_width=24)
GRIDS = np.array([[1, 12, 4], [3, 4, 2], [1, 2, 2], [1, 8, 8], [1, 6, 6]])
TOKENS = GRIDS[:, 1] * GRIDS[:, 2] // 4
BUDGET = 70
ROOM = 1 << 30


@pytest.fixture(autouse=True)
def _alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def sent(monkeypatch):
    """Return the buffer parts that left for a sum over two ranks with equal contents."""
    left: list[torch.Tensor] = []

    def all_reduce(part, async_op):
        assert async_op
        left.append(part)
        total = 2 * part
        return SimpleNamespace(wait=lambda: part.copy_(total))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(encoder_module, "GradientSum", partial(GradientSum, bucket_elements=3000))
    return left


def made_encoder(dtype=torch.float32, **how) -> DecoupledEncoder:
    return DecoupledEncoder(CONFIG, BUDGET, 3, dtype, torch.device("cpu"), **how)


def begun(encoder: DecoupledEncoder, num_shared: int = 0, room: int = 0) -> EncoderPass:
    """Begin a pass in which a block of this process alone shares the first items."""
    items, draw = np.arange(len(GRIDS)), np.random.Generator(np.random.Philox(key=4))
    parts = np.where(items < num_shared, 2, 1)
    shares = Shares(items, 0 * items, parts, 0 * items, 0 * items, TOKENS)
    pixels = [draw.integers(0, 256, (n, 3, 14, 14), dtype=np.uint8) for n in GRIDS.prod(1)]
    encoder.sums.zero()
    return encoder.begin(shares, GRIDS, dict(enumerate(pixels)), room)


def gradient_of(out: torch.Tensor) -> torch.Tensor:
    return torch.sin(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape).to(out)


def go_back(work: EncoderPass, out: torch.Tensor) -> None:
    work.backward(gradient_of(out))


def test_every_bucket_leaves_once_a_step_when_it_is_complete(sent):
    encoder, plain = made_encoder(), VisionEncoder(CONFIG)
    initialise(plain, 3)
    for _ in range(2):  # the second step starts from zero
        sent.clear()
        work = begun(encoder)
        go_back(work, work.forward())
        early = len(sent)
        encoder.sums.finish()
        assert len(work.chunks) > 2
        assert len(sent) > 3
        assert early > 0  # during the backward pass of the last chunk
        assert sum(part.numel() for part in sent) == encoder.sums.buffer.numel()
        plain.zero_grad()
        out = plain(torch.from_numpy(np.concatenate(list(work.pixels.values()))), GRIDS)
        out.backward(gradient_of(out))
        for name, parameter in plain.named_parameters():
            wanted = 2 * parameter.grad
            assert (encoder.sums.views[name] - wanted).norm() <= 1e-5 * wanted.norm(), name


def test_nothing_leaves_while_ranks_that_share_an_item_talk(sent):
    """A rank that waits for the sum would make the others of its block wait for it."""
    encoder = made_encoder(blocks={2: dist.group.WORLD})
    work = begun(encoder, num_shared=len(GRIDS))
    go_back(work, work.forward())
    assert not sent
    encoder.sums.finish()
    assert sum(part.numel() for part in sent) == encoder.sums.buffer.numel()


@pytest.mark.parametrize("frozen", [[], ["vision_tower"]], ids=str)
def test_shared_items_are_scattered_once_and_never_kept(frozen, monkeypatch):
    """Each rank chooses recompute independently, so shared items are always recomputed."""
    scattered, scatter, encoded, encode = [], sharded.scatter_patches, [], sharded.encode
    monkeypatch.setattr(
        sharded, "scatter_patches", lambda *args: scattered.append(1) or scatter(*args)
    )
    monkeypatch.setattr(sharded, "encode", lambda *args: encoded.append(1) or encode(*args))
    encoder = made_encoder(blocks={2: dist.group.WORLD}, frozen=frozen, check_recompute=True)
    work = begun(encoder, num_shared=2, room=ROOM)
    assert [run.keep for run in work.chunks][:2] == [False, False]
    assert work.kept_patches == GRIDS[2:].prod(1).sum()
    go_back(work, work.forward())
    assert len(scattered) == 2
    assert len(encoded) == 4
    # The largest recomputed chunk needs room next to the kept ones.
    assert kept_chunks([50, 10, 10, 10], 70, 1) == [False, True, True, False]


@pytest.mark.parametrize(("room", "passes"), [(0, 2), (ROOM, 1)])
def test_a_graph_is_made_once_and_only_where_it_is_used(room, passes):
    encoder, graphs = made_encoder(), []
    encoder.module.vision_tower.register_forward_hook(
        lambda *args: graphs.append(torch.is_grad_enabled())
    )
    work = begun(encoder, room=room)
    out = work.forward()
    assert not out.requires_grad
    go_back(work, out)
    assert graphs == [False] * len(work.chunks) * (passes - 1) + [True] * len(work.chunks)


@pytest.mark.parametrize("room", [0, ROOM])
@pytest.mark.parametrize("frozen", [[], ["vision_tower"], ["vision_tower", "projector"]], ids=str)
def test_nothing_is_held_that_nobody_will_read(room, frozen):
    encoder = made_encoder(frozen=frozen, blocks={2: dist.group.WORLD})
    work = begun(encoder, num_shared=1, room=room)
    out = work.forward()
    for run in work.chunks:
        assert (run.output is not None) == run.keep
        assert (run.features is not None) == (frozen == ["vision_tower"] and run.parts == 1)
    if encoder.trainable:
        go_back(work, out)
        assert all(run.output is run.features is run.pixels is None for run in work.chunks)


def test_gradients_of_bfloat16_add_up_in_float32():
    encoder = made_encoder(torch.bfloat16)
    work = begun(encoder)
    go_back(work, work.forward())
    encoder.sums.finish()
    assert encoder.sums.buffer.dtype == torch.float32
    assert not torch.equal(encoder.sums.buffer, encoder.sums.buffer.bfloat16().float())
    assert made_encoder(torch.float64).sums.buffer.dtype == torch.float64


def test_an_item_may_end_where_its_row_ends():
    holder, granule = np.array([0, 1, 1, 0]), 8
    where = Destinations(
        microbatch=np.zeros(2, np.int64), position=np.array([20, 4]), ranks=np.array([[0, 1]] * 2),
        holder=holder, offset=np.array([0, 0, 8, 8]), granule=granule,
    )  # fmt: skip
    tokens, ones = np.array([12, 12]), np.ones(2, np.int64)
    spans = spans_of(shares_of(0 * ones, ones, tokens, np.arange(2)), where)
    assert spans.item.tolist() == [0, 0, 1, 1]
    assert spans.count.tolist() == [4, 8, 4, 8]
    assert spans.dest.tolist() == [1, 0, 0, 1]
    assert spans.position.tolist() == [12, 8, 4, 0]


def test_memory_is_bounded_by_what_ranks_hold():
    """Equals a plain loop and is never less than the chunks that the ranks really run."""
    plan, *_ = made_plan(2, 1, dp=2, items=40, seed=3, split=True)
    budget, itemsize = 100, 2
    grids = np.stack([0 * plan.tokens + 1, 0 * plan.tokens + 2, 2 * plan.tokens], axis=1)
    found = vision_bytes(plan, grids, CONFIG, itemsize, budget)
    each = activation_bytes(grids, CONFIG, itemsize)
    for rank in range(plan.num_ranks):
        shares = plan.encoded_by(rank)
        part = (shares.end - shares.begin) / plan.tokens[shares.item]
        bytes_of, patches = each[shares.item] * part, plan.patches[shares.item] * part
        alone = shares.parts == 1
        runs = chunks(patches[alone].astype(int).tolist(), max(budget, int(patches.max())))
        most = max([*bytes_of[~alone], *(bytes_of[alone][run].sum() for run in runs)])
        tokens = plan.sent_by(rank).count.sum() + plan.received_by(rank).count.sum()
        embeddings = 2 * int(tokens) * CONFIG.out_width * itemsize
        dense = (bytes_of / np.maximum(1, patches)).max()
        worst = min(bytes_of.sum(), min(patches.sum(), budget) * dense)
        assert found[rank] == pytest.approx(worst + embeddings, abs=1)
        if patches.max() <= budget:
            assert found[rank] >= int(most) + embeddings


@pytest.mark.parametrize("scope", ["world", "replica", 2])
@pytest.mark.parametrize("assign", ["balanced", "round_robin", "owner"])
def test_items_are_encoded_in_the_scope_that_needs_them(scope, assign):
    layout = ["layout.pp=2", "layout.dp=4", "data.rows_per_step=16", "data.seq_len=128"]
    dep = ["dep={}", f"dep.scope={scope}", f"dep.assign={assign}", "train.rows_per_microbatch=2"]
    cost = ["dep.max_split=2", "dep.cost={per_patch: 0.0, per_patch_squared: 1.0, per_item: 0.0}"]
    planner = VisionPlanner(load_config("tiny_cpu", [*layout, *dep, *cost]))
    draw = np.random.Generator(np.random.Philox(key=8))
    row = np.sort(draw.integers(0, 16, 30))
    sides = 2 * draw.integers(1, 5, (2, 30))
    sides[:, 7::14] = 20  # two items are worth sharing
    items = SimpleNamespace(
        row=row, start=draw.integers(0, 28, 30), tokens=sides.prod(0) // 4, patches=sides.prod(0),
        frames=np.ones(30), grid_h=sides[0], grid_w=sides[1],
    )  # fmt: skip
    plan = SimpleNamespace(step=0, seq_len=128, num_rows=16, items=items)
    found = planner.plan(plan)
    assert planner.plan(plan) is found  # loader and step request the same plan
    together = {"world": [range(8)], "replica": [[0, 4], [1, 5], [2, 6], [3, 7]]}.get(
        scope, [[0, 1, 4, 5], [2, 3, 6, 7]]
    )
    group = {rank: number for number, ranks in enumerate(together) for rank in ranks}
    replica = row // 4
    assert np.array_equal(found.home, replica)
    assert np.array_equal(found.spans.dest, replica[found.spans.item])
    assert np.array_equal(found.spans.microbatch, (row % 4 // 2)[found.spans.item])
    at = (row % 2 * 128 + items.start)[found.spans.item]
    assert np.array_equal(found.spans.position, at + found.spans.begin)
    homes = found.home[found.shares.item].tolist()
    assert [group[rank] for rank in found.shares.rank.tolist()] == [group[home] for home in homes]
    if assign == "owner":
        assert np.array_equal(found.rank, found.home)
    elif assign == "round_robin":
        for ranks in together:
            mine = found.rank[np.isin(found.home, list(ranks))]
            counts = np.bincount(np.searchsorted(list(ranks), mine), minlength=len(ranks))
            assert counts.max() - counts.min() <= 1
    else:
        assert len(set(found.shares.rank.tolist())) == 8
        assert (found.parts > 1).any()
