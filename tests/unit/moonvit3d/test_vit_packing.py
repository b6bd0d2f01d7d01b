"""Packs of bounded size; the bits of an item's output do not depend on its pack."""

import random
from pathlib import Path

import pytest
import torch

from moonvit3d import rows
from moonvit3d.config import MoonViTConfig
from moonvit3d.model import VisionEncoder, initialise
from moonvit3d.packing import chunks
from tests import fork_server


def random_encoder(case, dtype):
    draw = random.Random(case)
    heads = draw.choice([1, 2, 3, 4])
    config = MoonViTConfig(
        width=heads * draw.choice([8, 12, 24, 36, 72]), heads=heads, depth=2,
        mlp_width=draw.choice([20, 52, 80, 96]), pos_grid=draw.choice([4, 6, 9, 64]),
        pos_init_std=0.5, out_width=draw.choice([16, 40, 70]),
    )  # fmt: skip
    encoder = VisionEncoder(config)
    initialise(encoder, case)
    return encoder.to(dtype)


def random_grids(case, count=10):
    draw = random.Random(case)
    sides = [2 * draw.randint(1, 9) for _ in range(2 * count)]
    return [(draw.randint(1, 4), h, w) for h, w in zip(sides[::2], sides[1::2])]


def split(patches, grids):
    return patches.split([t * h * w for t, h, w in grids])


def differing_items(case, dtype, make_patches):
    """Return the items whose output bits change in a pack, in another order or in small chunks."""
    encoder, grids = random_encoder(case, dtype), random_grids(case)
    parts = split(make_patches(grids), grids)
    order = random.Random(case + 1).sample(range(len(grids)), len(grids))
    largest = max(t * h * w for t, h, w in grids)
    ends = [h * w // 4 for _, h, w in grids]
    with torch.no_grad():
        alone = [encoder(part, [grid]) for part, grid in zip(parts, grids)]
        ways = [encoder(torch.cat(parts), grids, budget) for budget in (None, largest, 2 * largest)]
        shuffled = encoder(torch.cat([parts[i] for i in order]), [grids[i] for i in order])
    pieces = shuffled.split([ends[i] for i in order])
    ways.append(torch.cat([pieces[order.index(i)] for i in range(len(grids))]))
    # a training step keeps a graph and runs other code, with the same bits
    with torch.enable_grad():
        ways.append(encoder(torch.cat(parts), grids).detach())
    return [
        i
        for way in ways
        for i, piece in enumerate(way.split(ends))
        if not torch.equal(piece, alone[i])
    ]


def repeats(case, make_patches):
    """Return whether two runs have bit-equal outputs and gradients."""
    encoder, grids = random_encoder(case, torch.float32), random_grids(case)
    patches = make_patches(grids)
    runs = []
    for _ in range(2):
        out = encoder(patches, grids)
        runs.append([out, *torch.autograd.grad(out.sin().sum(), list(encoder.parameters()))])
    return all(torch.equal(a, b) for a, b in zip(*runs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", range(8))
def test_company_changes_no_bit(case, dtype, make_patches):
    assert differing_items(case, dtype, make_patches) == []


@pytest.mark.parametrize("threads", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_company_changes_no_bit_on_several_threads(threads):
    """A second run also gives the same bits, gradients included.

    The test runs in a separate process because the thread count is a process-wide setting.
    """
    here = Path(__file__).parent
    code = (
        f"import sys, torch; sys.path.insert(0, {str(here)!r}); "
        "import test_vit_packing as t\n"
        f"torch.set_num_threads({threads})\n"
        "def make(grids):\n"
        "    generator = torch.Generator().manual_seed(0)\n"
        "    shape = (sum(t * h * w for t, h, w in grids), 3, 14, 14)\n"
        "    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)\n"
        "bad = [(case, t.differing_items(case, dtype, make)) for case in range(20, 23)\n"
        "       for dtype in (torch.float32, torch.float64)]\n"
        "bad = [b for b in bad if b[1]] + [c for c in range(20, 22) if not t.repeats(c, make)]\n"
        "sys.exit(str(bad) if bad else 0)\n"
    )
    done = fork_server.run(["-c", code], 100)
    assert done.returncode == 0, done.stderr[-500:]


def test_item_by_item_equals_whole(monkeypatch, make_patches):
    """The code for more than two threads runs with and without a graph, with empty items, too."""
    encoder, grids = random_encoder(5, torch.float64), random_grids(5)
    patches = make_patches(grids)
    results = []
    for itemwise in (False, True):
        if itemwise:
            monkeypatch.setattr(rows, "spans", lambda x, lengths: [*lengths, 0])
        with torch.no_grad():
            quiet = encoder(patches, grids)
        out = encoder(patches, grids)
        grads = torch.autograd.grad(out.sin().sum(), list(encoder.parameters()))
        results.append([quiet, out, *grads])
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_without_whole_blocks_company_would_show(monkeypatch, make_patches):
    """Padding makes the tests above pass: without it they fail."""
    monkeypatch.setattr(rows, "padding", lambda *_: 0)
    assert any(differing_items(case, torch.float64, make_patches) for case in range(4))


@pytest.mark.parametrize("kind", ["tanh", "none"])
@pytest.mark.parametrize("frozen", [False, True])
def test_gelu_and_linear_equal_torch(kind, frozen):
    torch.manual_seed(0)
    linear = torch.nn.Linear(36, 12, dtype=torch.float64).requires_grad_(not frozen)
    x = torch.randn(20, 36, dtype=torch.float64, requires_grad=True)
    leaves = [x] if frozen else [x, *linear.parameters()]
    want = linear(torch.nn.functional.gelu(x, approximate=kind))
    got = rows.gelu_linear(x, linear, [3, 0, 17], kind)
    wanted = torch.autograd.grad(want.sin().sum(), leaves)
    grads = torch.autograd.grad(got.sin().sum(), leaves)
    for one, other in zip([got, *grads], [want, *wanted]):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    with torch.no_grad():
        assert torch.equal(rows.gelu_linear(x.clone(), linear, [3, 0, 17], kind), got)


def test_chunks_keep_order_and_budget():
    def runs(sizes, budget):
        return [list(range(len(sizes)))[run] for run in chunks(sizes, budget)]

    assert runs([4, 6, 8, 1, 1, 10, 3], 10) == [[0, 1], [2, 3, 4], [5], [6]]
    assert runs([10], 10) == [[0]]
    assert runs([], 10) == []
    with pytest.raises(ValueError, match="item 1 has 11 patches, over max_patches_per_chunk=10"):
        chunks([4, 11], 10)


def test_an_item_over_the_budget_is_refused(encoder, make_patches):
    grids = [(1, 2, 2), (2, 4, 4)]
    with pytest.raises(ValueError, match="item 1 has 32 patches"):
        encoder(make_patches(grids), grids, 31)
    assert encoder(make_patches([])[:0], [], 31).shape == (0, 40)
