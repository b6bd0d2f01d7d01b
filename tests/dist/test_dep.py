"""DEP in a real layout: all ways to run the encoder give the same gradients (I2)."""

import pytest
import torch

from tests.dist.jobs import layout, run_job

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]


def worst(found: dict, expected: dict) -> tuple[float, str]:
    """Return the largest relative difference of any parameter's gradient, and its name."""
    assert found.keys() == expected.keys()
    errors = {
        name: float((found[name].double() - wanted.double()).norm() / wanted.double().norm())
        for name, wanted in expected.items()
        if wanted.any() or found[name].any()
    }
    name = max(errors, key=lambda name: errors[name])
    return errors[name], name


PREFIX = {
    "vision_tower": "vision_tower.", "projector": "mm_projector.",
    "language_model": "language_model.",
}  # fmt: skip
FROZEN = {
    "tower": ["vision_tower"],
    "projector": ["projector"],
    "encoder": ["vision_tower", "projector"],
    "language model": ["language_model"],
    "all but the projector": ["vision_tower", "language_model"],
}


def check_frozen(found: dict, plain: dict, unbalanced: dict) -> None:
    """Check that trained parts get their usual gradients, and frozen parts get none and no phases.

    With a frozen language model, the reference has no balance loss, because it cannot balance
    anything.
    """
    for name, parts in FROZEN.items():
        expected = unbalanced if "language_model" in parts else plain
        gone = tuple(PREFIX[part] for part in parts)
        left = {n: g for n, g in expected["gradients"].items() if not n.startswith(gone)}
        error, parameter = worst(found[name]["gradients"], left)
        assert error <= 1e-6, (name, parameter, error)
        assert found[name]["loss"] == expected["loss"]
        backward = {"5 hand-back", "6 vision backward", "6 gradient sum"}
        ran = backward & set(found[name]["phases"])
        assert ran == (set() if name == "encoder" else backward), name


def check_held_out(found: dict, plain: dict) -> None:
    """Check that a validation before the step agrees; the gradients are computed after it."""
    wanted, shared = plain["held out"]
    assert shared == 0
    assert wanted["vision_tokens"] > 100
    for name, variant in found.items():
        line, shared = variant["held out"]
        assert (shared > 0) == (name == "shared by two"), name
        for key, value in line.items():
            expected = pytest.approx(wanted[key], rel=1e-6) if key in MEANS else wanted[key]
            assert value == expected, (name, key)


HELDOUT = (
    "data.heldout={pictures_heldout: 1, words_heldout: 1}", "data.heldout_tokens=1200",
    "train.validate_every=1",
)  # fmt: skip
MEANS = ("loss", "loss_by_source", "loss_by_position")


def test_every_way_to_encode_comes_to_the_same(data_root, tmp_path):
    """Covers the baseline, kept activations, chunks, other ranks, shared items: PP2 x EP2, fp32."""
    axes = layout(pp=2, dp=2, ep=2)
    root = f"data.root={data_root}"
    few = "train.rows_per_microbatch=2", "data.rows_per_step=8"
    found = run_job("dep_variants", tmp_path, 4, root, "train.steps=1", *few, *axes, *HELDOUT)
    plain = found.pop("plain")
    assert plain["kept"] == 0
    alone = found.pop("no balance loss")
    check_frozen({name: found.pop(name) for name in FROZEN}, plain, alone)
    check_held_out(found, plain)
    for name, variant in found.items():
        error, parameter = worst(variant["gradients"], plain["gradients"])
        assert error <= 1e-5, (name, parameter, error)
        assert abs(variant["loss"] - plain["loss"]) <= 1e-6 * plain["loss"], name
    # Settings that do not change arithmetic do not change any bit.
    for name in ("kept", "offloaded", "small chunks"):
        for parameter, gradient in found[name]["gradients"].items():
            assert torch.equal(gradient, plain["gradients"][parameter]), (name, parameter)
    assert found["kept"]["kept"] == plain["patches"]
    assert found["shared by two"]["shared"] > 0
