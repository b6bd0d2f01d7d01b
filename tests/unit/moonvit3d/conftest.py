"""Fixtures of the encoder tests, which run on one torch thread for bit-stable results."""

import pytest
import torch

from moonvit3d.config import MoonViTConfig
from moonvit3d.model import VisionEncoder, initialise

torch.set_num_threads(1)

# Mixed frame counts, a 2-patch-high strip, a square at the native grid of `small` (6), repeats.
ITEMS = [(1, 2, 10), (3, 4, 6), (1, 6, 6), (4, 2, 2), (2, 8, 4), (1, 2, 2), (4, 6, 6), (1, 2, 2)]


def num_patches(grids):
    return sum(t * h * w for t, h, w in grids)


@pytest.fixture
def items():
    return ITEMS


@pytest.fixture
def small():
    return MoonViTConfig(
        width=48, depth=2, heads=4, mlp_width=80, pos_grid=6, pos_init_std=0.5, out_width=40
    )


@pytest.fixture
def encoder(small):
    """Return a small float32 encoder whose biases and norms differ from the trivial 0 and 1."""
    model = VisionEncoder(small)
    initialise(model, seed=7)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture
def make_patches():
    def make(grids, seed=0):
        generator = torch.Generator().manual_seed(seed)
        shape = (num_patches(grids), 3, 14, 14)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    return make
