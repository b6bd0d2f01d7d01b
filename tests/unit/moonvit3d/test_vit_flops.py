"""The cost formula against torch's own FLOP counter."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moonvit3d.config import MoonViTConfig
from moonvit3d.flops import flops
from moonvit3d.model import VisionEncoder

GRIDS = [(1, 64, 64), (1, 16, 24), (4, 32, 40), (2, 8, 128), (1, 128, 128)]
CONFIGS = [
    MoonViTConfig(depth=3),  # Kimi's widths; every block costs the same
    MoonViTConfig(width=256, depth=4, heads=8, mlp_width=512, pos_grid=16, out_width=384),
]


@pytest.mark.parametrize("config", CONFIGS, ids=["kimi", "small"])
def test_formula_equals_the_counter(config):
    with torch.device("meta"):
        encoder = VisionEncoder(config)
    linear, quadratic = flops(GRIDS, config)
    for i, (t, h, w) in enumerate(GRIDS):
        patches = torch.empty(t * h * w, 3, 14, 14, device="meta")
        with FlopCounterMode(display=False) as counter:
            encoder(patches, [(t, h, w)])
        assert linear[i] + quadratic[i] == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_shapes_and_growth():
    config = CONFIGS[1]
    linear, quadratic = flops(np.array([[1, 8, 8], [2, 8, 8]]), config)
    assert linear.dtype == quadratic.dtype == np.int64
    assert quadratic[1] == 4 * quadratic[0]
    # A second frame doubles the tower's linear part and leaves the projector's part unchanged.
    projector = 2 * 16 * config.projector_width * (4 * config.width + config.out_width)
    assert linear[1] - projector == 2 * (linear[0] - projector)
    assert [part.shape for part in flops([], config)] == [(0,), (0,)]
