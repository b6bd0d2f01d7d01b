"""Tests the fit of the cost model, the limits on timing runs, and a real calibration."""

import json
import math

import numpy as np
import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from kimi_pretrain.config import load_config
from kimi_pretrain.dep.cost import CostModel
from kimi_pretrain.dep.cost_fit import Pack, Timing, fit, flops_shape, non_negative
from kimi_pretrain.dep.measure import EncoderRun, measure, packs_of
from kimi_pretrain.tools import calibrate
from moonvit3d.config import MoonViTConfig

KIMI = MoonViTConfig()
TINY = MoonViTConfig(
    width=32, depth=2, heads=2, mlp_width=64, pos_grid=8, pos_init_std=0.02, out_width=48
)
PACKS = packs_of(image=16384, frame=4096, side=512, budget=65536)
# Seconds per patch, per squared patch, per item and per chunk, as on a fast GPU.
TRUTH = (3e-6, 2e-10, 4e-5, 6e-3)


def seconds(pack: Pack, truth: tuple[float, ...], filled: int = 0) -> float:
    sizes = [t * h * w for t, h, w in pack.grids]
    squares = sum(size * size for size in sizes)
    return truth[0] * (sum(sizes) + filled) + truth[1] * squares + truth[2] * len(sizes) + truth[3]


def timings_of(truth, noise: float, seed: int, filled: int = 0) -> list[Timing]:
    draw = np.random.default_rng(seed)
    found = []
    for pack in PACKS:
        total = seconds(pack, truth, filled) * math.exp(draw.normal(0, noise))
        found.append(Timing(pack, total / 4, total, filled))
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("filled", [0, 128])
def test_planted_coefficients_come_back_from_noisy_timings(seed, filled):
    found = fit(timings_of(TRUTH, 0.02, seed, filled))
    got = (found.cost.per_patch, found.cost.per_patch_squared, found.cost.per_item)
    assert (*got, found.per_chunk) == pytest.approx(TRUTH, rel=0.06)
    assert found.median_error < 0.03
    assert found.median_error < found.worst_error < 0.1


def test_without_noise_the_fit_is_exact_to_its_digits():
    found = fit(timings_of(TRUTH, 0.0, 0))
    assert found.worst_error < 1e-3
    errors = [found.predicted[i] / seconds(pack, TRUTH) - 1 for i, pack in enumerate(PACKS)]
    assert found.errors == pytest.approx(errors, abs=1e-12)


@pytest.mark.parametrize("absent", range(4))
@pytest.mark.parametrize("seed", range(4))
def test_what_costs_nothing_never_becomes_negative(absent, seed):
    truth = tuple(0.0 if i == absent else value for i, value in enumerate(TRUTH))
    found = fit(timings_of(truth, 0.03, seed))
    got = (found.cost.per_patch, found.cost.per_patch_squared, found.cost.per_item, found.per_chunk)
    assert min(got) >= 0
    assert got[absent] < 0.2 * TRUTH[absent]
    assert found.worst_error < 0.15


def test_small_items_weigh_as_much_as_large_ones():
    """An outlier of one size must not distort the small items, because errors are relative."""
    timings = timings_of(TRUTH, 0.0, 0)
    largest = max(timings, key=lambda timing: timing.total)
    timings[timings.index(largest)] = Timing(largest.pack, 1.0, largest.total * 1.3)
    found = fit(timings)
    icon = PACKS.index(Pack(((1, 2, 2),)))
    assert abs(found.errors[icon]) < 0.02


@pytest.mark.parametrize("seed", range(30))
def test_non_negative_least_squares_meets_its_conditions_for_an_optimum(seed):
    """Checks the Karush-Kuhn-Tucker conditions, which suffice because the problem is convex."""
    draw = np.random.default_rng(seed)
    matrix = draw.normal(size=(12, 4)) * 10.0 ** draw.uniform(-6, 6, 4)
    target = draw.normal(size=12)
    x = non_negative(matrix, target)
    slope = matrix.T @ (matrix @ x - target) / np.linalg.norm(matrix, axis=0)
    assert (x >= 0).all()
    assert slope[x > 0] == pytest.approx(0, abs=1e-9)
    assert (slope[x == 0] >= -1e-9).all()


@pytest.mark.parametrize(
    "chosen",
    [
        [],
        [pack for pack in PACKS if len(pack.grids) == 1],
        [pack for pack in PACKS if len(pack.grids) > 1],
        [pack for pack in PACKS if pack.sizes[0] in (4, 16)],
    ],
    ids=["nothing", "no packs", "packs only", "two sizes"],
)
def test_too_few_timings_are_refused(chosen):
    timings = [Timing(pack, 1.0, 4.0) for pack in chosen]
    with pytest.raises(ValueError, match=rf"{len(chosen)} timings.*--max-seconds"):
        fit(timings)


def test_the_best_rate_of_flops_is_the_best():
    """Even where the shape does not fit, a scan finds no better rate."""
    timings = timings_of(TRUTH, 0.0, 0)
    rate, predicted = flops_shape(timings, KIMI)
    share = predicted / [timing.total for timing in timings]
    squares = [((share * factor - 1) ** 2).sum() for factor in np.linspace(0.5, 2, 1501)]
    assert np.linspace(0.5, 2, 1501)[np.argmin(squares)] == pytest.approx(1, abs=2e-3)
    work = float(CostModel.from_flops(KIMI, 1.0).seconds(timings[0].pack.sizes).sum())
    assert predicted[0] == pytest.approx(work / rate)


def test_loads_reach_from_one_token_to_the_limits():
    singles = [pack for pack in PACKS if len(pack.grids) == 1]
    images = [pack.patches for pack in singles if pack.grids[0][0] == 1]
    chunks = [pack.patches for pack in singles if pack.grids[0][0] == 4]
    assert (min(images), max(images)) == (4, 16384)
    assert (min(chunks), max(chunks)) == (16, 4 * 4096)
    assert len(set(PACKS)) == len(PACKS)
    for pack in packs_of(image=1000, frame=300, side=20, budget=512):
        assert pack.patches <= 512
        assert all(h % 2 == w % 2 == 0 and 2 <= h <= 20 and 2 <= w <= 20 for _, h, w in pack.grids)
        assert all(h * w <= (1000 if t == 1 else 300) for t, h, w in pack.grids)
    assert [pack.grids for pack in packs_of(image=1, frame=1, side=2, budget=4)] == [((1, 2, 2),)]


class Machine:
    """Simulated machine: a pack takes time by its FLOPs, and every fifth run is disturbed."""

    def __init__(self, memory: int = 1 << 40):
        self.model, self.memory, self.runs = CostModel.from_flops(KIMI, 2e14), memory, 0

    def truth(self, pack: Pack) -> float:
        return float(self.model.seconds(pack.sizes).sum())

    def __call__(self, pack: Pack) -> tuple[float, float]:
        if pack.patches > self.memory:
            raise torch.OutOfMemoryError
        self.runs += 1
        total = self.truth(pack) * (3.0 if self.runs % 5 == 0 else 1.0)
        return total / 4, total


def test_medians_do_not_see_a_disturbance_now_and_then():
    machine, told = Machine(), []
    found = measure(PACKS[:13], machine, KIMI, 1e6, progress=lambda share, _: told.append(share))
    assert not found.left_out
    assert found.repeats == 5
    assert machine.runs == 13 * 6 + 1  # a warm-up each, and one before all of them
    for timing in found.timings:
        assert timing.total == pytest.approx(machine.truth(timing.pack))
        assert timing.forward == pytest.approx(timing.total / 4)
    assert told == sorted(told)
    assert told[-1] == 1.0


@pytest.mark.parametrize("max_seconds", [0.05, 0.5, 2.0])
def test_time_is_bounded_and_what_did_not_fit_is_named(max_seconds):
    machine = Machine()
    found = measure(PACKS, machine, KIMI, max_seconds)
    assert 0 < found.seconds < 1.5 * max_seconds  # disturbances are not planned for
    assert found.repeats >= 1
    timed = [timing.pack for timing in found.timings]
    left = [pack for pack, _ in found.left_out]
    assert sorted(timed + left, key=PACKS.index) == PACKS
    assert left
    assert max(map(machine.truth, timed)) <= min(map(machine.truth, left))
    assert all("would take about" in reason for _, reason in found.left_out)


def test_what_does_not_fit_into_memory_is_named():
    found = measure(PACKS, Machine(memory=16384), KIMI, 1e6)
    assert {pack for pack, _ in found.left_out} == {x for x in PACKS if x.patches > 16384}
    assert all("memory" in reason for _, reason in found.left_out)


def flops_of(run: EncoderRun, pack: Pack) -> float:
    with FlopCounterMode(display=False) as counter:
        run(pack)
    return counter.get_total_flops()


def test_a_step_s_work_is_what_a_training_step_computes():
    """Torch counts four forward passes, or one if all is frozen; a frozen tower runs only once."""
    pack, cpu = Pack(((1, 16, 16),) * 3), torch.device("cpu")
    run = EncoderRun(TINY, torch.float32, cpu)
    pixels, grids = run._images(pack.patches), list(pack.grids)
    with FlopCounterMode(display=False) as counter:
        run._forward(pixels, grids)
    forward = counter.get_total_flops()
    embed = 2 * pack.patches * 3 * 14 * 14 * TINY.width
    # A backward pass costs two forward passes, but the pixels need no gradient.
    assert flops_of(run, pack) == pytest.approx(4 * forward - embed, rel=0.01)
    both = EncoderRun(TINY, torch.float32, cpu, ["vision_tower", "projector", "language_model"])
    assert flops_of(both, pack) == forward
    assert len(set(both(pack))) == 1
    tower = EncoderRun(TINY, torch.float32, cpu, ["vision_tower"])
    projector = 2 * (pack.patches // 4) * TINY.projector_width * (4 * TINY.width + TINY.out_width)
    assert flops_of(tower, pack) == pytest.approx(forward + 3 * projector, rel=0.05)
    assert all(param.grad is None for param in run.encoder.parameters())


def tiny_config(*overrides: str):
    vision = "{width: 32, depth: 2, heads: 2, mlp_width: 64, pos_grid: 8, out_width: 128}"
    small = ["data.limits={image: 256, frame: 64}", "dep.max_patches_per_chunk=1024"]
    return load_config("tiny_cpu", [f"model.vision={vision}", *small, *overrides])


def test_a_real_calibration():
    config = tiny_config("train.threads=1")
    result = calibrate.calibrate(config, max_seconds=30.0, device=torch.device("cpu"))
    cost = result.fit.cost
    # On a busy machine a coefficient may be zero, and the forward pass may take longer than the
    # rest.
    predicted = cost.seconds(np.array([4, 64, 1024, 16384]))
    assert predicted.max() > 0
    assert (np.diff(predicted) >= 0).all()
    assert 0 < result.forward_share < 1
    every = packs_of(256, 64, 512, 1024)
    plain = json.loads(json.dumps(calibrate.as_json(result)))
    named = [row["name"] for row in plain["sizes"] + plain["left_out"]]
    assert sorted(named) == sorted(pack.name for pack in every)
    table = "\n".join(calibrate.lines(result))
    assert all(f"{pack.name} " in table for pack in every)
    for row in plain["sizes"]:
        assert 0 < row["forward"] < row["total"]
    assert plain["median_error"] <= plain["worst_error"]
    pasted = yaml.safe_load(calibrate.yaml_block(result))["dep"]["cost"]
    values = {name: float(value) for name, value in pasted.items()}
    assert values == plain["cost"]
    given = tiny_config(*(f"dep.cost.{name}={value}" for name, value in pasted.items()))
    assert given.dep.cost.model_dump() == plain["cost"]


def test_threads_are_the_training_s_only_while_it_measures():
    config, before = tiny_config("train.threads=1", "data.limits.image=64"), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        result = calibrate.calibrate(config, 30.0, device=torch.device("cpu"))
        assert result.threads == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_calibration_on_a_gpu():
    wide = "model.vision={depth: 4, out_width: 128}"
    result = calibrate.calibrate(load_config("tiny_cpu", [wide, "train.dtype=bfloat16"]), 60.0)
    assert result.threads is None
    assert result.device == torch.cuda.get_device_name()
    assert min(result.fit.cost.per_patch, result.fit.cost.per_item) > 0
    assert 0.1 < result.forward_share < 0.5
