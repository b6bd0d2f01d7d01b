"""An item that 2 or 4 gloo processes encode together, against the same item in one process.

Compares forward, recompute and the gradients of every parameter, once also with transformers. The
processes run once for all tests.
"""

import pytest
import torch

from benchmarks.bench_split import split_bytes
from kimi_pretrain.dep import sharded
from moonvit3d.config import MoonViTConfig
from moonvit3d.layouts import to_transformers
from tests.dist import sharded_case
from tests.dist.jobs import run_ranks
from tests.dist.sharded_case import CASES, GRIDS, SLOW, SMALL, WORLD

pytestmark = [pytest.mark.dist]

PARTS = ("forward", "recompute", "backward")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 4e-2}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """Results of each process."""
    folder = tmp_path_factory.mktemp("sharded")
    return run_ranks(sharded_case.__file__, WORLD, folder)


@pytest.fixture(scope="module")
def slow_ranks(tmp_path_factory) -> list[dict]:
    """Results of the slow cases."""
    return run_ranks(sharded_case.__file__, WORLD, tmp_path_factory.mktemp("slow"))


@pytest.fixture
def ranks_of(case, request) -> list[dict]:
    return request.getfixturevalue("slow_ranks" if case in SLOW else "ranks")


every_case = pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in (*CASES, *SLOW)],
    ids=lambda case: case.name,
)


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ||found - expected|| / ||expected||."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    return float((found - expected).double().norm() / expected.double().norm())


@pytest.fixture(scope="module")
def whole():
    """A function from case to tokens and gradients of the unsplit item."""
    known = {}

    def encode(case):
        if (case.grid, case.dtype) not in known:
            module = sharded_case.encoder_of(case.dtype)
            out = module(sharded_case.pixels_of(case.grid), [case.grid])
            out.backward(sharded_case.gradient_of(case.grid, case.dtype))
            grads = {name: parameter.grad for name, parameter in module.named_parameters()}
            known[case.grid, case.dtype] = out.detach(), grads
        return known[case.grid, case.dtype]

    return encode


@every_case
def test_tokens_and_gradients_are_those_of_the_unsplit_item(ranks_of, whole, case):
    tokens, grads = whole(case)
    for block in range(0, WORLD, case.parts):
        members = [ranks_of[rank][case.name] for rank in range(block, block + case.parts)]
        found = torch.cat([member["kept"] for member in members])
        assert apart(found, tokens) <= TOLERANCE[case.dtype]
        for member in members:
            assert member["grads"].keys() == grads.keys()
            far = {
                name: distance
                for name, grad in grads.items()
                if not (distance := apart(member["grads"][name], grad)) <= TOLERANCE[case.dtype]
            }
            assert not far


@every_case
def test_the_recompute_has_the_bits_of_the_forward(ranks_of, case):
    for rank in ranks_of:
        assert torch.equal(rank[case.name]["kept"], rank[case.name]["again"])


@every_case
def test_members_hold_all_tokens_once_and_near_equally(ranks_of, case):
    members = [ranks_of[rank][case.name] for rank in range(case.parts)]
    held = [token for member in members for token in member["tokens"]]
    assert held == list(range(case.grid[1] * case.grid[2] // 4))
    counts = [len(member["tokens"]) for member in members]
    assert max(counts) - min(counts) <= 1
    assert [len(member["kept"]) for member in members] == counts
    if "fewer" in case.name and case.parts == 4:
        assert 0 in counts


@every_case
def test_all_members_issue_the_same_collectives_and_the_bytes_predicted(ranks_of, case):
    members = [ranks_of[rank][case.name] for rank in range(case.parts)]
    itemsize = case.dtype.itemsize
    patches = case.grid[0] * case.grid[1] * case.grid[2]
    predicted = split_bytes(patches, SMALL, case.parts, itemsize)
    sent = {part: [sum(size for _, size in member[part]) for member in members] for part in PARTS}
    for member in members:
        for part in PARTS:
            assert [kind for kind, _ in member[part]] == [str(case.dtype)] * 2 * SMALL.depth
    assert sent["recompute"] == sent["forward"]
    assert sum(sent["backward"]) == sum(sent["forward"])
    tokens = case.grid[1] * case.grid[2] // 4
    if tokens % case.parts == 0:
        assert sent["forward"] == sent["backward"] == [predicted] * case.parts
    elif tokens > case.parts:
        assert 0.7 < predicted / max(sent["forward"]) < 1.3


@pytest.mark.parametrize("name", ["image", "chunk of 3", "chunk of 4", "column"])
@pytest.mark.parametrize("parts", [2, 4])
def test_each_member_receives_the_pixels_of_its_tokens(ranks, name, parts):
    """Expects the item's pictures cut into tokens, each into frames and patches, pixel by pixel."""
    t, h, w = GRIDS[name]
    pictures = sharded_case.pixels_of(GRIDS[name]).reshape(t, h, w, 3, 14, 14)
    for rank in range(parts):
        member = ranks[rank][f"{name}, {parts} parts, float64"]
        held = iter(member["pixels"])
        for frame in range(t):
            for upper in (0, 1):
                for token in member["tokens"]:
                    for left in (0, 1):
                        row, column = divmod(token, w // 2)
                        patch = pictures[frame, 2 * row + upper, 2 * column + left]
                        assert torch.equal(next(held), patch)
        assert next(held, None) is None


def test_gradients_and_tokens_are_those_of_transformers(ranks):
    """An image and a chunk, fp32, with weights under transformers' names."""
    oracle = pytest.importorskip("tests.unit.moonvit3d.test_vit_oracle")
    for name in ("image", "chunk of 4"):
        grid = GRIDS[name]
        tower, projection = oracle.oracle(SMALL, sharded_case.encoder_of(torch.float32))
        pixels = sharded_case.pixels_of(grid).double() / 127.5 - 1
        merged = tower(pixels.float(), torch.tensor([grid])).pooler_output
        out = projection(merged).flatten(0, 1)
        out.backward(sharded_case.gradient_of(grid, torch.float32))
        members = [ranks[rank][f"{name}, 4 parts, float32"] for rank in range(4)]
        assert apart(torch.cat([member["kept"] for member in members]), out.detach()) <= 1e-5
        mine = to_transformers(members[0]["grads"], SMALL)
        expected = oracle.gradients(tower, oracle.TOWER)
        expected |= oracle.gradients(projection, oracle.PROJECTOR)
        assert not oracle.over(oracle.distances(mine, expected), 1e-5)


def test_a_frozen_tower_sends_nothing_backward(ranks):
    module = sharded_case.encoder_of(torch.float64)
    out = module(sharded_case.pixels_of(GRIDS["image"]), [GRIDS["image"]])
    out.backward(sharded_case.gradient_of(GRIDS["image"], torch.float64))
    expected = {f"mm_projector.{n}": p.grad for n, p in module.mm_projector.named_parameters()}
    for rank in ranks:
        assert rank["frozen"]["backward"] == []
        assert rank["frozen"]["grads"].keys() == expected.keys()
        for name, grad in expected.items():
            assert apart(rank["frozen"]["grads"][name], grad) <= 1e-10


def test_what_cannot_work_is_refused_before_anybody_waits(ranks):
    for number, rank in enumerate(ranks):
        told = rank["refusals"]
        assert "4 ranks cannot share 6 attention heads" in told["heads"]
        assert "holds" in told["patches"]
        assert "but 60 came" in told["patches"]
        assert "found nothing" in told["nothing"]
        assert "(59, 3, 14, 14)" in told["another item"]
        if number:
            assert "first rank alone" in told["not the first"]


def test_blocks_are_aligned_inside_their_scope(ranks):
    """Holds although ranks 0 and 2 are in one process group more than the others."""
    pairs = [[0, 1], [0, 1], [2, 3], [2, 3]]
    for rank, found in enumerate(ranks):
        assert found["blocks"]["everyone"] == {2: pairs[rank], 4: [0, 1, 2, 3]}
        assert found["blocks"]["a short one"] == ({2: [0, 1]} if rank < 2 else {})
        assert found["blocks"]["replicas"] == {2: [rank % 2, rank % 2 + 2]}


@pytest.mark.parametrize(
    ("scopes", "max_split", "message"),
    [
        ([[0, 1]], 3, "max_split = 3"),
        ([[0, 1]], 0, "max_split = 0"),
        ([[1, 0]], 2, "rising"),
        ([[0, 0, 1]], 2, "once"),
        ([[0, 1], [1, 2]], 2, "one scope"),
    ],
)
def test_scopes_that_cannot_be_are_refused(scopes, max_split, message):
    with pytest.raises(ValueError, match=message):
        sharded.blocks(scopes, max_split, 1.0)


def test_bytes_of_a_split_at_full_size():
    """Each of 4 ranks sends 3/4 of 4,096 patches x 4 x 1,152 bf16 numbers in each of 27 layers."""
    assert split_bytes(16384, MoonViTConfig(), 4, 2) == 4096 * 4 * 1152 * 27 * 2 * 3 // 4


def test_a_member_that_a_block_does_not_have_is_refused():
    with pytest.raises(ValueError, match="member 4 of a block of 4"):
        sharded.token_range(10, 4, 4)
