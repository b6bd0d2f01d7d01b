"""Compares FP8 tiles with a loop over tiles and bounds the error of an expert's gradients."""

import pytest
import torch
import torch.nn.functional as F

from kimi_pretrain.memory import fp8_tiles
from kimi_pretrain.memory.fp8_tiles import TILE, fp8_problem, from_fp8, to_fp8


def random(*shape, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * scale


def by_loop(x):
    """Scale each tile to 448, cast it to FP8, and convert it back."""
    out = torch.empty_like(x)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], TILE):
            tile = x[row, start : start + TILE].float()
            scale = max(float(tile.abs().max()) / 448, 1e-38) if len(tile) else 1.0
            codes = (tile / torch.tensor(scale)).to(torch.float8_e4m3fn)
            out[row, start : start + TILE] = (codes.float() * torch.tensor(scale)).to(x.dtype)
    return out


@pytest.mark.parametrize("width", [128, 256, 200, 64, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_to_a_loop_over_tiles(width, dtype):
    x = random(9, width).to(dtype)
    x[3] *= 1e-6
    x[4] = 0
    codes, scales = to_fp8(x)
    assert codes.shape == x.shape
    assert codes.dtype == torch.float8_e4m3fn
    assert scales.shape == (9, -(-width // TILE))
    assert scales.dtype == torch.float32
    found = from_fp8(codes, scales, dtype)
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert torch.equal(found, by_loop(x))


def test_errors_are_those_of_three_bits():
    x = random(64, 512, scale=1e-3)
    found = from_fp8(*to_fp8(x), torch.float32)
    tops = x.unflatten(-1, (4, TILE)).abs().amax(-1, keepdim=True).expand(64, 4, TILE).flatten(1)
    # Half a step of a three-bit mantissa; below the normal numbers, half the smallest step.
    assert ((found - x).abs() <= torch.maximum(x.abs() / 16, tops / 448 / 1024)).all()


@pytest.mark.parametrize("width", [256, 200])
@pytest.mark.parametrize("planted", [float("inf"), -float("inf"), float("nan")])
def test_a_tile_with_what_is_not_finite_comes_back_as_nan(planted, width):
    """A clamped scale would turn the rest of the tile into zeros, so the whole tile becomes NaN."""
    x = random(3, width)
    x[1, 130] = planted
    found = from_fp8(*to_fp8(x), torch.float32)
    assert found[1, TILE:].isnan().all()
    found[1, TILE:] = 0
    assert found.isfinite().all()


def test_the_smallest_numbers_have_scales():
    x = random(3, 256, scale=1e-35)
    found = from_fp8(*to_fp8(x), torch.float32).double()
    assert (found - x).norm() < 0.04 * x.double().norm()


def test_no_tokens():
    codes, scales = to_fp8(random(0, 256))
    assert from_fp8(codes, scales, torch.bfloat16).shape == (0, 256)


def plainly_cast(x):
    return x.to(torch.float8_e4m3fn).to(x.dtype)


def by_tiles(x):
    return from_fp8(*to_fp8(x), x.dtype)


def gradients(x, keep):
    """Return gradients of x, up and down weights of an expert whose inputs pass through `keep`."""
    up, down, grad = random(512, 256, seed=1) / 16, random(256, 256, seed=2) / 16, random(300, 256)
    gate_up = (x.float() @ up.T).to(x.dtype)
    kept_x, kept = (keep(t).float().requires_grad_() for t in (x, gate_up))
    gate, upper = kept.chunk(2, -1)
    inner = F.silu(gate) * upper
    (of_gate_up,) = torch.autograd.grad(inner, kept, grad @ down)
    return of_gate_up @ up, of_gate_up.T @ kept_x.detach(), grad.T @ inner.detach()


def errors(x, keep):
    pairs = zip(gradients(x, keep), gradients(x, lambda t: t), strict=True)
    return [float((one - other).norm() / other.norm()) for one, other in pairs]


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_gradients_stay_within_six_percent(scale):
    x = random(300, 256, scale=scale).bfloat16()
    assert max(errors(x, by_tiles)) <= 0.06


def test_without_scales_small_inputs_lose_their_gradients():
    """Control of the test above: a plain cast fails for small inputs."""
    assert max(errors(random(300, 256).bfloat16(), plainly_cast)) <= 0.06
    assert min(errors(random(300, 256, scale=1e-3).bfloat16(), plainly_cast)) > 0.5


@pytest.mark.parametrize("function", ["to_fp8", "from_fp8"])
def test_the_formulas_can_be_compiled_whole(function):
    """Compiles as for CUDA, but without the kernels."""
    formula = getattr(fp8_tiles, function).__wrapped__
    compiled = torch.compile(formula, backend="eager", fullgraph=True, dynamic=True)
    for rows in (4, 9):
        x = random(rows, 256).bfloat16()
        arguments = (x,) if function == "to_fp8" else (*to_fp8(x), torch.bfloat16)
        found, wanted = compiled(*arguments), formula(*arguments)
        pairs = zip(found, wanted, strict=True) if function == "to_fp8" else [(found, wanted)]
        assert all(torch.equal(one.float(), other.float()) for one, other in pairs)


@pytest.mark.parametrize(
    ("capability", "refused"), [((8, 0), True), ((8, 6), True), ((8, 9), False), ((9, 0), False)]
)
def test_a_device_for_which_triton_has_no_e4m3_is_refused(capability, refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    told = fp8_problem(torch.device("cuda", 1))
    assert (told is not None) == refused
    if told is not None:
        for part in ("8.9", f"cuda:1 has 8.{capability[1]}", "train.fp8_storage=false"):
            assert part in told


def test_casts_need_nothing_of_a_host():
    assert fp8_problem(torch.device("cpu")) is None
