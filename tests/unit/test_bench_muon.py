"""Tests of the Muon benchmark: its layers, and the error bound of bf16."""

import pytest

from benchmarks.muon import accuracy, report
from benchmarks.muon.layers import k2, moonlight
from kimi_pretrain.optim.newton_schulz import segments


def test_the_layers_are_the_published_ones():
    """The parameter counts match hand counts without norms (sizes from kimi_facts)."""
    attention = 2048 * (16 * 192 + 512 + 64 + 16 * 128) + 512 * 16 * 256
    assert moonlight(3).parameters == attention + 2048 * (64 + 3 * 1408 * (3 + 2))
    attention = 7168 * (1536 + 512 + 64 + 64 * 128) + 1536 * 64 * 192 + 512 * 64 * 256
    assert k2(8).parameters == attention + 7168 * (384 + 3 * 2048 * (8 + 1))
    pieces = k2(8).pieces()
    assert len(pieces) == 9 * 3 + 1 + 1 + 1 + 2 + 2 + 2
    assert pieces.count((2048, 7168)) == pieces.count((7168, 2048)) / 0.5 == 18
    assert {(8192, 1536), (4096, 1536), (512, 7168), (64, 7168), (8192, 512)} <= set(pieces)


@pytest.mark.parametrize("shape", [(160, 180), pytest.param((160, 400), marks=pytest.mark.slow)])
def test_errors_are_bounded_for_every_kind_of_matrix(shape):
    """Errors stay near torch.optim.Muon (direct form) in bf16 and near our direct form in fp32."""
    assert segments(*shape, 5) == ((1,) * 5 if shape == (160, 180) else (3, 2))
    errors = accuracy.study(*shape)["errors"]
    for kind, found in errors.items():
        assert found["ours, bf16"][0] <= report.WORSE * found["torch, bf16"][0] + report.FLOOR, kind
        assert found["ours, fp32"][0] <= 2 * found["direct, fp32"][0] + 1e-5, kind
