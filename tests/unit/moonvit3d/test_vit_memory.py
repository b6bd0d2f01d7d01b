"""Predicted peak memory against the allocator's measured peak."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from moonvit3d.config import MoonViTConfig
from moonvit3d.geometry import num_tokens
from moonvit3d.memory import activation_bytes, frozen_tower_bytes
from moonvit3d.model import VisionEncoder, initialise

CONFIGS = [
    dict(width=144, depth=3, heads=2, mlp_width=538, pos_grid=16, out_width=200),
    dict(width=48, depth=8, heads=4, mlp_width=80, pos_grid=6, out_width=40),
    dict(width=288, depth=2, heads=4, mlp_width=1076, pos_grid=64, out_width=900),
]
BATCHES = [[(1, 32, 32), (4, 16, 16)], [(4, 10, 12)] * 4, [(1, 8, 8)] * 30]


def filled(config, dtype, device):
    encoder = VisionEncoder(config)
    initialise(encoder, 0)
    encoder.to(device=device, dtype=dtype)
    for parameter in encoder.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return encoder


def step(encoder, patches, grids):
    out = encoder(patches, grids)
    out.backward(torch.ones_like(out))


def frozen_step(encoder, patches, grids):
    """Run the tower without a graph, as DEP runs a frozen one."""
    with torch.no_grad():
        features = encoder.vision_tower(patches, grids)
    out = encoder.mm_projector(features, [num_tokens(*grid) for grid in grids])
    out.backward(torch.ones_like(out))


def measured_on_cpu(run, *args):
    """Return the peak of all allocations minus frees over one forward and backward pass."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run(*args)
    found = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = top = 0
    for event in sorted(found, key=lambda e: e.start_ns()):
        live += event.nbytes()
        top = max(top, live)
    return top


# Each config and each type once; slow tests cover the other pairs.
PAIRS = list(zip(CONFIGS, (torch.float32, torch.bfloat16, torch.float64)))
PAIRS += [
    pytest.param(sizes, dtype, marks=pytest.mark.slow)
    for sizes, one in PAIRS
    for dtype in (torch.float32, torch.bfloat16, torch.float64)
    if dtype != one
]


@pytest.mark.parametrize(("sizes", "dtype"), PAIRS)
def test_peak_is_predicted_within_15_percent(sizes, dtype, make_patches):
    config = MoonViTConfig(**sizes)
    encoder = filled(config, dtype, "cpu")
    for grids in BATCHES:
        for run, formula in ((step, activation_bytes), (frozen_step, frozen_tower_bytes)):
            peak = measured_on_cpu(run, encoder, make_patches(grids), grids)
            predicted = formula(grids, config, dtype.itemsize)
            assert predicted.sum() == pytest.approx(peak, rel=0.15), (grids, formula)
            assert predicted.shape == (len(grids),)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("sizes", [CONFIGS[0], {"depth": 4}], ids=["small", "full width"])
def test_peak_is_predicted_on_a_gpu(sizes, make_patches):
    config = MoonViTConfig(**sizes)
    encoder = filled(config, torch.bfloat16, "cuda")
    grids = [(1, 64, 64), (4, 32, 32), *[(1, 16, 16)] * 40]
    patches = make_patches(grids).cuda()
    step(encoder, patches, grids)  # library workspaces do not belong to the encoder
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(encoder, patches, grids)
    peak = torch.cuda.max_memory_allocated() - before
    assert activation_bytes(grids, config).sum() == pytest.approx(peak, rel=0.15)


def test_shares_add_up_and_grow_with_the_item():
    config = MoonViTConfig()
    items = [(1, 64, 64), (4, 64, 64), (1, 2, 2)]
    together = activation_bytes(items, config)
    assert together.tolist() == [int(activation_bytes([item], config)[0]) for item in items]
    assert together[0] == 1024 * together[2]
    assert 3.9 < together[1] / together[0] <= 4  # frames cost patches; they share only the tokens
    assert activation_bytes([], config).tolist() == []
