"""The encoder as a whole: packing, determinism, names and counts, precision, initialisation."""

import numpy as np
import pytest
import torch

import moonvit3d
from moonvit3d.config import MoonViTConfig
from moonvit3d.merge import sd2_tpool
from moonvit3d.model import VisionEncoder, initialise, normalise


def split(patches, grids):
    return patches.split([t * h * w for t, h, w in grids])


GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


def test_float_patches_equal_bytes(encoder, items, make_patches):
    patches = make_patches(items)
    with torch.no_grad():
        assert torch.equal(encoder(normalise(patches), items), encoder(patches, items))


def test_one_pack_equals_item_by_item(encoder, items, make_patches):
    """The reference runs every item separately and accumulates the gradients."""
    encoder = encoder.double()
    patches = make_patches(items)

    def one_by_one(patches, grids):
        return torch.cat([encoder(p, [grid]) for p, grid in zip(split(patches, grids), grids)])

    results = []
    for forward in (encoder, one_by_one):
        encoder.zero_grad()
        out = forward(patches, items)
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad.clone() for p in encoder.parameters())])
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-3), (torch.bfloat16, 3e-2)])
def test_gpu_equals_cpu(items, make_patches, dtype, most):
    """Outputs and gradients agree; the GPU runs float32 item by item, bfloat16 with the kernel."""
    config = MoonViTConfig(width=144, depth=2, heads=2, mlp_width=288, pos_grid=6, out_width=64)
    encoder = VisionEncoder(config)
    initialise(encoder, 0)
    patches = make_patches(items)
    results = []
    for device, kind in (("cpu", torch.float64), ("cuda", dtype)):
        encoder.to(device=device, dtype=kind).zero_grad()
        out = encoder(patches.to(device), items)
        out.backward(torch.linspace(-1, 1, out.numel()).to(out).view_as(out))
        grads = [p.grad.double().cpu() for p in encoder.parameters()]
        results.append([out.detach().double().cpu(), *grads])
    for want, got in zip(*results):
        assert (got - want).norm() < most * want.norm().clamp_min(1e-2)


def test_an_item_sees_only_itself(encoder, make_patches):
    grids = [(1, 4, 4), (3, 2, 4), (1, 2, 2)]
    patches = normalise(make_patches(grids)).requires_grad_()
    out = encoder.mm_projector(encoder.vision_tower(patches, grids))
    out[4:6].sum().backward()  # the tokens of the middle item
    touched = [bool(part.any()) for part in split(patches.grad, grids)]
    assert touched == [False, True, False]
    assert patches.grad[16:40].flatten(1).any(1).all()  # all patches of all its frames


# Hooks, compilation and adapters -----------------------------------------------------------------


def gradients(call, encoder, patches, grids):
    out = call(patches, grids)
    return [out, *torch.autograd.grad(out.sin().sum(), list(encoder.parameters()))]


@pytest.mark.parametrize("part", ["a block", pytest.param("all", marks=pytest.mark.slow)])
def test_compiled_gradients_are_right(part, encoder, make_patches):
    """AOTAutograd, which all compiling backends use, loses gradients of overwritten tensors.

    All overwritten tensors are inside a block, and tracing the whole encoder takes 15 s.
    """
    encoder, grids = encoder.double(), [(1, 4, 4), (2, 2, 6)]
    patches = make_patches(grids)
    want = gradients(encoder, encoder, patches, grids)
    traced = encoder if part == "all" else encoder.vision_tower.encoder.blocks[0]
    traced.compile(backend="aot_eager")
    got = gradients(encoder, encoder, patches, grids)
    for one, other in zip(got, want):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_autocast_trains(encoder, items, make_patches):
    patches = make_patches(items)
    want = gradients(encoder, encoder, patches, items)
    with torch.autocast("cpu", torch.bfloat16):
        out = encoder(patches, items)
    got = [out, *torch.autograd.grad(out.float().sin().sum(), list(encoder.parameters()))]
    assert got[0].dtype == torch.bfloat16
    far = [
        float((a.detach().float() - b.detach()).norm() / b.detach().norm().clamp_min(1))
        for a, b in zip(got, want)
    ]
    assert max(far) < 0.25  # bfloat16 products


def test_hooks_and_adapters_on_the_second_linear_work(encoder, items, make_patches):
    patches, seen = make_patches(items), []
    plain = encoder(patches, items)
    block = encoder.vision_tower.encoder.blocks[0].mlp
    handle = block.fc1.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(encoder(patches, items), plain, rtol=0, atol=1e-5)
    assert seen
    handle.remove()

    class Doubled(torch.nn.Module):
        def __init__(self, inside):
            super().__init__()
            self.inside, self.weight, self.bias = inside, inside.weight, inside.bias

        def forward(self, x):
            return 2 * self.inside(x)

    block.fc1 = Doubled(block.fc1)
    assert (encoder(patches, items) - plain).norm() > 0.05 * plain.norm()


def test_second_derivatives_are_refused(encoder, items, make_patches):
    out = encoder(make_patches(items), items)
    weight = encoder.mm_projector.proj[0].weight
    (grad,) = torch.autograd.grad(out.sin().sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("form", [np.array, torch.tensor, lambda g: [list(x) for x in g]])
def test_grids_come_in_any_form(encoder, items, make_patches, form):
    patches = make_patches(items)
    with torch.no_grad():
        assert torch.equal(encoder(patches, form(items), 160), encoder(patches, items))
    with pytest.raises(ValueError, match="want \\(t, h, w\\)"):
        encoder(patches, form([(4, 4)]))


# Determinism ------------------------------------------------------------------------------------


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_twice_gives_equal_bits(items, make_patches, device, dtype):
    """Forward and backward, while torch refuses each operation known as nondeterministic."""
    config = MoonViTConfig(
        width=144, depth=2, heads=2, mlp_width=80, pos_grid=6, pos_init_std=0.5, out_width=40
    )
    encoder = VisionEncoder(config)
    initialise(encoder, 7)
    encoder.to(device=device, dtype=dtype)
    patches = make_patches(items).to(device)
    runs = []
    for _ in range(2):
        encoder.zero_grad()
        out = encoder(patches, items, 160)
        out.square().sum().backward()
        runs.append([out.detach(), *(p.grad.clone() for p in encoder.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*runs))
    assert all(bool(g.any()) for g in runs[0])  # every parameter has a gradient


def test_nothing_in_nothing_out(encoder, small):
    for empty in (torch.zeros(0, 3, 14, 14, dtype=torch.uint8), torch.zeros(0, 3, 14, 14)):
        out = encoder(empty, [])
        assert out.shape == (0, small.out_width)
    out.sum().backward()  # still part of a graph
    assert not encoder.mm_projector.pre_norm.weight.grad.any()


def test_float64_is_float64_throughout(encoder, items, make_patches):
    """A central difference with a step of 1e-5 would expose any float32 operation."""
    encoder = encoder.double()
    patches = make_patches(items)
    parameters = list(encoder.parameters())
    torch.manual_seed(0)
    ways = [torch.randn_like(p) for p in parameters]
    out = encoder(patches, items)
    push = torch.randn_like(out)
    grads = torch.autograd.grad((out * push).sum(), parameters)
    slope = sum((g * w).sum() for g, w in zip(grads, ways))
    values = []
    for step in (1e-5, -2e-5):
        with torch.no_grad():
            for parameter, way in zip(parameters, ways):
                parameter += step * way
            values.append((encoder(patches, items) * push).sum())
    assert abs((values[0] - values[1]) / 2e-5 - slope) < 1e-6 * abs(slope)


def test_low_precision_follows_float32(encoder, items, make_patches):
    patches = make_patches(items)
    with torch.no_grad():
        exact = encoder(patches, items)
        rounded = encoder.bfloat16()(patches, items).float()
    error = (rounded - exact).norm() / exact.norm()
    assert 1e-4 < error < 3e-2


def test_pooling_by_hand():
    grids = [(2, 2, 4), (1, 4, 2)]
    x = torch.arange(24, dtype=torch.float64)[:, None].repeat(1, 3)
    got = sd2_tpool(x, grids)[..., 0].tolist()
    # Frames 0-7 and 8-15 average to 4-11; a token is a 2x2 square, in row order.
    assert got == [[4, 5, 8, 9], [6, 7, 10, 11], [16, 17, 18, 19], [20, 21, 22, 23]]


def test_full_size_counts_and_names():
    with torch.device("meta"):
        encoder = VisionEncoder(MoonViTConfig())
    tower = dict(encoder.vision_tower.named_parameters())
    assert len(tower) == 329
    assert sum(p.numel() for p in tower.values()) == 416_866_032
    projector = dict(encoder.mm_projector.named_parameters())
    assert sum(p.numel() for p in projector.values()) == 54_277_888
    shapes = {name: tuple(p.shape) for name, p in encoder.state_dict().items()}
    assert len(shapes) == 335  # no buffer is saved
    block = "vision_tower.encoder.blocks.26."
    for name, shape in {
        "vision_tower.patch_embed.proj.weight": (1152, 3, 14, 14),
        "vision_tower.patch_embed.proj.bias": (1152,),
        "vision_tower.patch_embed.pos_emb.weight": (64, 64, 1152),
        block + "norm0.weight": (1152,),
        block + "norm1.bias": (1152,),
        block + "wqkv.weight": (3456, 1152),
        block + "wqkv.bias": (3456,),
        block + "wo.weight": (1152, 1152),
        block + "mlp.fc0.weight": (4304, 1152),
        block + "mlp.fc1.weight": (1152, 4304),
        "vision_tower.encoder.final_layernorm.weight": (1152,),
        "mm_projector.pre_norm.bias": (1152,),
        "mm_projector.proj.0.weight": (4608, 4608),
        "mm_projector.proj.2.weight": (7168, 4608),
    }.items():
        assert shapes[name] == shape
    out = encoder(torch.empty(64, 3, 14, 14, device="meta"), [(4, 2, 4), (1, 8, 4)])
    assert out.shape == (10, 7168)


# Initialisation ---------------------------------------------------------------------------------


def test_initialisation_depends_on_seed_and_name_only(small):
    torch.manual_seed(1)
    one = VisionEncoder(small)
    initialise(one, seed=3)
    torch.manual_seed(2)
    other = VisionEncoder(small).double()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(float("nan"))  # unwritten values stay visible
    torch.rand(5)
    initialise(other, seed=3)
    for (name, a), b in zip(one.named_parameters(), other.parameters()):
        assert torch.equal(a.double(), b), name
    initialise(other, seed=4)
    changed = [n for n, p in other.named_parameters() if not torch.equal(p, one.get_parameter(n))]
    assert all(p.ndim > 1 for n, p in one.named_parameters() if n in changed)
    assert len(changed) == sum(p.ndim > 1 for p in one.parameters())


FROZEN = [0.0032, -0.0297, 0.0504]


def test_initialisation_is_frozen(small):
    """Runs of different versions of this code must draw the same numbers."""
    model = VisionEncoder(small)
    initialise(model, seed=0)
    weight = model.get_parameter("vision_tower.encoder.blocks.1.mlp.fc0.weight")
    assert [round(v, 4) for v in weight[0, :3].tolist()] == FROZEN


def test_initial_scales(small):
    model = VisionEncoder(MoonViTConfig(width=128, depth=2, heads=4, mlp_width=256, pos_grid=32,
                                        pos_init_std=0.02, out_width=200))  # fmt: skip
    initialise(model, seed=0)
    block = "vision_tower.encoder.blocks.0."
    truncation = 0.8796  # std of a normal distribution truncated at two deviations
    for name, std in {
        "vision_tower.patch_embed.pos_emb.weight": 0.02,
        "vision_tower.patch_embed.proj.weight": truncation * 588**-0.5,
        block + "wqkv.weight": truncation * 128**-0.5,
        block + "wo.weight": truncation * 128**-0.5,
        block + "mlp.fc1.weight": truncation * (2 / 384) ** 0.5,
        "mm_projector.proj.2.weight": truncation * (2 / 712) ** 0.5,
    }.items():
        assert float(model.get_parameter(name).detach().std()) == pytest.approx(std, rel=0.03)
    assert not model.get_parameter(block + "wqkv.bias").any()
    assert (model.get_parameter(block + "norm0.weight") == 1).all()
    assert not model.get_parameter(block + "norm0.bias").any()


# Refusals ---------------------------------------------------------------------------------------


def with_a_bad_pixel(value):
    patches = torch.zeros(12, 3, 14, 14)
    patches[7, 1, 3, 5] = value
    return patches


@pytest.mark.parametrize(
    ("patches", "grids", "message"),
    [
        (torch.zeros(4, 3, 14, 14), [(1, 2, 4)], "add up to 8 patches, but 4"),
        (torch.zeros(4, 3, 14, 14), [], "add up to 0 patches, but 4"),
        (torch.zeros(4, 588), [(1, 2, 2)], "want \\[L, 3, 14, 14\\]"),
        (torch.zeros(20, 3, 14, 14), [(5, 2, 2)], "1 to 4 frames"),
        (torch.zeros(6, 3, 14, 14), [(1, 2, 3)], "must be even"),
        (torch.zeros(0, 3, 14, 14), [(1, 0, 2)], "must be even"),
        (torch.zeros(1028, 3, 14, 14), [(1, 2, 514)], "2 to 512"),
        (torch.zeros(4, 1, 14, 14), [(1, 2, 2)], "want \\[L, 3, 14, 14\\]"),
        (torch.zeros(4, 3, 14, 14, dtype=torch.int64), [(1, 2, 2)], "int64: want uint8"),
        (with_a_bad_pixel(float("nan")), [(1, 2, 2), (1, 2, 4)], "item 1 with grid .* NaN"),
        (with_a_bad_pixel(float("inf")), [(1, 2, 4), (1, 2, 2)], "item 0 with grid .* NaN or inf"),
    ],
)
def test_unsound_packs_are_refused(encoder, patches, grids, message):
    with pytest.raises(ValueError, match=message):
        encoder(patches, grids)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_eps": float("nan")}, "norm_eps\n.* finite number"),
        ({"width": 50}, "multiple of 16"),
        ({"heads": 0}, "heads\n.* greater than 0"),
        ({"depth": -1}, "depth"),
    ],
)
def test_impossible_configs_are_refused(change, message):
    sizes = dict(width=48, depth=2, heads=4, mlp_width=80)
    with pytest.raises(ValueError, match=message):
        MoonViTConfig(**{**sizes, **change})


def test_config_defaults_and_strictness():
    assert MoonViTConfig().projector_width == 4608
    assert MoonViTConfig().head_dim == 72
    assert MoonViTConfig(width=64, heads=4).projector_width == 256
    with pytest.raises(ValueError, match="widht"):
        MoonViTConfig(**{"widht": 64})


# The package ------------------------------------------------------------------------------------


def test_every_public_name_is_there():
    for name in moonvit3d.__all__:
        assert getattr(moonvit3d, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = moonvit3d.nothing
