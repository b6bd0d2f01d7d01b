"""Tests that an encoder pass split between blocks, forward and backward, gives the same bits."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from kimi_pretrain.dep.encoder import DecoupledEncoder
from kimi_pretrain.dep.unit_pass import UnitPass
from moonvit3d.config import MoonViTConfig

CONFIG = MoonViTConfig(width=32, depth=5, heads=2, mlp_width=48, pos_grid=8, out_width=24)
GRIDS, TOKENS = [(2, 6, 4), (1, 2, 6)], 9


@pytest.fixture(autouse=True)
def _alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made_encoder(dtype=torch.float32, frozen=()) -> DecoupledEncoder:
    device = torch.device("cpu")
    return DecoupledEncoder(CONFIG, 80, 3, dtype, device, frozen=frozen, check_recompute=True)


def pixels():
    draw = np.random.Generator(np.random.Philox(key=4))
    return [draw.integers(0, 256, (size, 3, 14, 14), dtype=np.uint8) for size in (48, 12)]


GRADIENT = torch.sin(torch.arange(TOKENS * 24, dtype=torch.float64)).view(TOKENS, 24)


def step(encoder, pieces, kept=0):
    """Return the output and the gradients of two items, computed in pieces."""
    encoder.sums.zero()
    run = UnitPass(encoder, pixels(), GRIDS, pieces, kept=kept)
    outputs = [run.forward(piece) for piece in range(pieces)]
    assert all(output is None for output in outputs[:-1])
    assert not outputs[-1].requires_grad
    for piece in range(pieces if encoder.trainable else 0):
        run.again(piece)
        run.backward(None if piece else GRADIENT.to(encoder.dtype))
    return outputs[-1], {name: grad.clone() for name, grad in encoder.sums.views.items()}


def in_one(encoder):
    """Return the output and the gradients of one forward and one backward pass by torch alone."""
    encoder.sums.zero()
    output = encoder.module(torch.from_numpy(np.concatenate(pixels())), GRIDS)
    if encoder.trainable:
        output.backward(GRADIENT.to(encoder.dtype))
    return output.detach(), {name: grad.clone() for name, grad in encoder.sums.views.items()}


FROZEN = [(), ("vision_tower",), ("projector",), ("vision_tower", "projector")]


@pytest.mark.parametrize("frozen", FROZEN, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_pieces_come_to_the_bits_of_one_pass(dtype, frozen):
    encoder = made_encoder(dtype, frozen)
    output, grads = in_one(encoder)
    assert len(grads) == len(encoder.trained())
    for pieces in (1, 2, 3, 5, 7):  # of five blocks, so pieces may be empty
        for kept in {0, pieces // 2, pieces - 1, pieces}:
            found, found_grads = step(encoder, pieces, kept)
            assert torch.equal(found, output)
            assert found_grads.keys() == grads.keys()
            for name, grad in grads.items():
                assert torch.equal(found_grads[name], grad), (name, pieces, kept)


def test_units_in_turns_come_to_the_bits_of_one_after_the_other():
    """Units keep their order within each piece; a bubble too short for one unit runs the next."""
    encoder, pieces = made_encoder(), 3
    some, grids = [*pixels(), pixels()[0][:8]], [*GRIDS, (1, 2, 4)]
    rows = [*GRADIENT.float().split((6, 3)), GRADIENT.float()[4:6]]

    def gradients(*order):
        encoder.sums.zero()
        units = [  # each keeps one more piece than the unit before
            UnitPass(encoder, [one], [grid], pieces, kept=number)
            for number, (one, grid) in enumerate(zip(some, grids))
        ]
        for unit, piece in order:
            units[unit].forward(piece)
        for unit, piece in order:
            units[unit].again(piece)
            units[unit].backward(None if piece else rows[unit])
        return {name: grad.clone() for name, grad in encoder.sums.views.items()}

    def same(one, other):
        return [torch.equal(grad, other[name]) for name, grad in one.items()]

    each = gradients(*((unit, piece) for unit in range(3) for piece in range(pieces)))
    turns = (0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2), (1, 2), (2, 1), (2, 2)
    assert all(same(each, gradients(*turns)))
    ahead = (0, 0), (2, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2), (2, 1), (2, 2)
    assert not all(same(each, gradients(*ahead)))


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_nothing_is_left_of_a_unit_that_is_done(kept):
    encoder = made_encoder()
    run = UnitPass(encoder, pixels(), GRIDS, 3, kept=kept)
    for piece in range(3):
        run.forward(piece)
    assert len(run._graph) == kept
    assert len(run._inputs) == 3 - kept
    assert run._x is None
    for piece in range(3):
        run.again(piece)
        assert len(run._graph) == max(1, kept - piece)  # only the graphs of kept pieces
        run.backward(None if piece else GRADIENT.float())
    left = (run._graph, run._inputs, run._hashes, run._x, run._pack, run._pixels, run._features)
    assert left == ([], [], [], None, None, None, None)
    assert run._gradient is None


def test_weights_that_change_in_between_are_seen():
    encoder = made_encoder()
    run = UnitPass(encoder, pixels(), GRIDS, 2, kept=0)
    for piece in range(2):
        run.forward(piece)
    run.again(0)
    run.backward(GRADIENT.float())
    with torch.no_grad():
        next(encoder.module.parameters()).add_(1.0)
    with pytest.raises(RuntimeError, match="differ from those of the forward pass"):
        run.again(1)
