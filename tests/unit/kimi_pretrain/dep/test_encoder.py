"""Tests that the encoder's two passes give the same bits however items are cut, kept or frozen."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from kimi_pretrain.dep.encoder import DecoupledEncoder, hash_of
from kimi_pretrain.dep.memory_limit import check_memory, kept_chunks
from kimi_pretrain.dep.vision_plan import shares_of
from moonvit3d.config import MoonViTConfig
from moonvit3d.memory import activation_bytes

CONFIG = MoonViTConfig(width=32, depth=2, heads=2, mlp_width=48, pos_grid=8, out_width=24)
GRIDS = np.array([[1, 8, 8], [3, 4, 2], [1, 2, 2], [1, 12, 4], [4, 4, 4], [1, 6, 6]])
PATCHES = GRIDS.prod(1)
TOKENS = GRIDS[:, 1] * GRIDS[:, 2] // 4


@pytest.fixture(autouse=True)
def _alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made_pixels():
    draw = np.random.Generator(np.random.Philox(key=4))
    return {
        item: draw.integers(0, 256, (size, 3, 14, 14), dtype=np.uint8)
        for item, size in enumerate(PATCHES.tolist())
    }


def made_encoder(dtype=torch.float32, budget=80, **how) -> DecoupledEncoder:
    return DecoupledEncoder(CONFIG, budget, 3, dtype, torch.device("cpu"), **how)


def one_step(encoder: DecoupledEncoder, room: int = 0):
    """Return the pass, embeddings and gradients of all items, for a position-dependent gradient."""
    items = np.arange(len(GRIDS))
    shares = shares_of(0 * items, np.ones_like(items), TOKENS, np.zeros(1, np.int64))
    encoder.sums.zero()
    work = encoder.begin(shares, GRIDS, made_pixels(), room)
    out = work.forward()
    places = torch.arange(out.numel(), dtype=torch.float64).view(out.shape)
    if encoder.trainable:
        work.backward(torch.sin(places).to(out))
        encoder.sums.finish()
    return work, out, {name: grad.clone() for name, grad in encoder.sums.views.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_encoder_in_the_graph(dtype):
    encoder = made_encoder(dtype)
    work, out, grads = one_step(encoder)
    assert len(work.chunks) > 2
    pixels = made_pixels()
    whole = torch.from_numpy(np.concatenate([pixels[item] for item in range(len(GRIDS))]))
    plain = made_encoder(dtype).module  # none of our hooks has seen its gradients
    for hook_free in plain.parameters():
        hook_free._post_accumulate_grad_hooks.clear()
    expected = plain(whole, GRIDS)
    places = torch.arange(out.numel(), dtype=torch.float64).view(out.shape)
    expected.backward(torch.sin(places).to(out))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    assert torch.equal(out, expected.detach())
    assert grads.keys() == dict(plain.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        error = (grads[name] - parameter.grad).norm() / parameter.grad.norm()
        assert error <= tolerance, (name, float(error))


def test_kept_activations_change_no_bit():
    sizes = activation_bytes(GRIDS, CONFIG, 4)
    _, plain, plain_grads = one_step(made_encoder(check_recompute=True))
    kept = []
    for room in (0, int(sizes.sum() * 0.7), int(sizes.sum()) + 1):
        work, out, grads = one_step(made_encoder(check_recompute=True), room)
        kept.append(work.kept_patches)
        assert torch.equal(out, plain)
        assert all(torch.equal(grads[name], plain_grads[name]) for name in grads)
    assert kept[0] == 0
    assert 0 < kept[1] < kept[2] == PATCHES.sum()


@pytest.mark.parametrize(
    "frozen", [["vision_tower"], ["projector"], ["vision_tower", "projector"]], ids=str
)
def test_frozen_parts_get_no_gradient_and_the_others_the_same(frozen, monkeypatch):
    _, whole, whole_grads = one_step(made_encoder())
    encoder = made_encoder(frozen=frozen, check_recompute=True)
    towers = []
    encoder.module.vision_tower.register_forward_hook(lambda *args: towers.append(1))
    work, out, grads = one_step(encoder)
    assert torch.equal(out, whole)
    prefix = {"vision_tower": "vision_tower.", "projector": "mm_projector."}
    left = {n for n in whole_grads if not any(n.startswith(prefix[part]) for part in frozen)}
    assert grads.keys() == left
    assert all(torch.equal(grads[name], whole_grads[name]) for name in left)
    # A frozen tower runs once per chunk; its outputs are kept for the projector's backward pass.
    again = 1 if "vision_tower" in frozen else 2
    assert len(towers) == again * len(work.chunks)


def test_a_recompute_that_differs_is_told():
    encoder = made_encoder(check_recompute=True)
    items = np.arange(len(GRIDS))
    shares = shares_of(0 * items, np.ones_like(items), TOKENS, np.zeros(1, np.int64))
    work = encoder.begin(shares, GRIDS, made_pixels())
    out = work.forward()
    with torch.no_grad():
        encoder.module.mm_projector.proj[2].bias[5] += 1e-3
    with pytest.raises(RuntimeError, match=r"recomputed embeddings of items \[0\] differ"):
        work.backward(torch.zeros_like(out))


def test_the_hash_sees_every_bit_and_its_place():
    x = torch.linspace(-1, 1, 60).view(6, 10)
    moved = x.clone()
    moved[[1, 2]] = moved[[2, 1]]
    flipped = x.clone().view(torch.int32)
    flipped[3, 3] ^= 1
    assert len({hash_of(y) for y in (x, moved, flipped.view(torch.float32), x.double())}) == 4
    assert hash_of(x) == hash_of(x.clone()) == hash_of(x.T.contiguous().T)
    assert hash_of(x[:0]) == 0  # a rank may have no token of a shared item


@pytest.mark.parametrize("seed", range(5))
def test_kept_chunks_leave_room_for_the_largest_other(seed):
    draw = np.random.Generator(np.random.Philox(key=seed))
    sizes = draw.integers(1, 100, 12).tolist()
    for room in (0, 50, 99, 150, 400, 2000):
        kept = kept_chunks(sizes, room)
        held = sum(size for size, keep in zip(sizes, kept, strict=True) if keep)
        others = [size for size, keep in zip(sizes, kept, strict=True) if not keep]
        assert not any(kept) or held + max(others, default=0) <= room
        for number, size in enumerate(sizes):  # no other chunk would have fitted
            rest = [s for n, s in enumerate(sizes) if not kept[n] and n != number]
            assert kept[number] or held + size + max(rest, default=0) > room


def test_too_much_memory_is_refused_by_rank_and_size():
    with pytest.raises(ValueError, match=r"^the media of rank 1 would take 3\.00 GiB, over .*=2;"):
        check_memory(np.array([1, 3, 2]) << 30, 2 << 30)
    check_memory(np.array([1, 2]) << 30, 2 << 30)
