"""Tower and projector against transformers 5.23.0's Kimi_K25VisionModel and projection class."""

from types import SimpleNamespace

import pytest
import torch

from moonvit3d.config import MoonViTConfig
from moonvit3d.model import VisionEncoder, normalise

kimi = pytest.importorskip("transformers.models.kimi_k25.modeling_kimi_k25")

CONFIGS = [
    dict(width=48, depth=2, heads=4, mlp_width=80, pos_grid=6, out_width=40),
    dict(width=144, depth=1, heads=2, mlp_width=52, pos_grid=9, out_width=16),  # head_dim 72
    dict(width=32, depth=3, heads=1, mlp_width=64, pos_grid=4, out_width=24),
    dict(width=64, depth=1, heads=2, mlp_width=96, pos_grid=64, out_width=8, rope_theta=500.0),
]
TOLERANCE = 2e-5


def half_split(weight, heads):
    """Rows of a q or k matrix (or bias) from adjacent rotary pairs to transformers' two halves."""
    rows = weight.unflatten(0, (heads, -1, 2))
    return rows.transpose(1, 2).flatten(0, 2)


def tower_weights(config, state):
    """Our tower's tensors under transformers' names."""
    out = {}
    renamed = {
        "norm0": "norm1", "norm1": "norm2", "wo": "attn.proj", "mlp.fc0": "mlp.fc1",
        "mlp.fc1": "mlp.fc2",
    }  # fmt: skip
    for name, value in state.items():
        if name == "patch_embed.pos_emb.weight":
            out["patch_embed.pos_emb.position_embeddings"] = value
        elif not name.startswith("encoder.blocks."):
            out[name.removeprefix("encoder.")] = value
        else:
            index, rest = name.removeprefix("encoder.blocks.").split(".", 1)
            layer, kind = rest.rsplit(".", 1)
            if layer == "wqkv":
                q, k, v = value.chunk(3)
                out[f"layers.{index}.attn.q_proj.{kind}"] = half_split(q, config.heads)
                out[f"layers.{index}.attn.k_proj.{kind}"] = half_split(k, config.heads)
                out[f"layers.{index}.attn.v_proj.{kind}"] = v
            else:
                out[f"layers.{index}.{renamed[layer]}.{kind}"] = value
    return out


def oracle(config, encoder):
    """transformers' tower and projection with our weights, every tensor matched by name."""
    vision = kimi.Kimi_K25VisionConfig(
        pos_emb_height=config.pos_grid, pos_emb_width=config.pos_grid,
        num_attention_heads=config.heads, num_hidden_layers=config.depth,
        hidden_size=config.width, intermediate_size=config.mlp_width,
        rope_parameters={"rope_type": "axial", "rope_theta": config.rope_theta},
    )  # fmt: skip
    vision._attn_implementation = "eager"
    tower = kimi.Kimi_K25VisionModel(vision).eval()
    tower.load_state_dict(tower_weights(config, encoder.vision_tower.state_dict()), strict=True)
    projection = kimi.Kimi_K25MultimodalProjection(
        SimpleNamespace(
            vision_config=vision, projection_hidden_size=config.width,
            projection_layer_norm_eps=config.norm_eps,
            text_config=SimpleNamespace(hidden_size=config.out_width),
        )
    )  # fmt: skip
    names = {"pre_norm": "pre_norm", "proj.0": "in_proj", "proj.2": "out_proj"}
    weights = {
        f"{names[layer]}.{kind}": value
        for (layer, kind), value in (
            (name.rsplit(".", 1), value)
            for name, value in encoder.mm_projector.state_dict().items()
        )
    }
    projection.load_state_dict(weights, strict=True)
    return tower, projection


def filled_encoder(config):
    """Every tensor random, biases and norms too, at a scale where no activation saturates."""
    encoder = VisionEncoder(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in encoder.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            flat = parameter.ndim == 1
            parameter.copy_(1 + 0.2 * noise if flat else noise / parameter[0].numel() ** 0.5)
    return encoder


@pytest.mark.parametrize("sizes", CONFIGS, ids=lambda s: f"width{s['width']}")
def test_equals_transformers(sizes, items, make_patches):
    """Mixed frame counts in one call of ours; the oracle takes one item at a time."""
    config = MoonViTConfig(**sizes)
    side = config.pos_grid
    grids = [*items, (2, 4, 4)]
    if side % 2 == 0:
        grids.append((1, side, side))  # the native grid
    encoder = filled_encoder(config)
    tower, projection = oracle(config, encoder)
    patches = make_patches(grids)
    with torch.no_grad():
        merged = encoder.vision_tower(patches, grids)  # one pack of everything
        final = encoder(patches, grids)
        want_merged, want_final, start = [], [], 0
        for t, h, w in grids:
            pixels = normalise(patches[start : start + t * h * w])
            out = tower(pixels, torch.tensor([[t, h, w]])).pooler_output
            want_merged.append(out)
            want_final.append(projection(out).flatten(0, 1))
            start += t * h * w
    torch.testing.assert_close(merged, torch.cat(want_merged), rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(final, torch.cat(want_final), rtol=0, atol=TOLERANCE)
    assert final.std() > 0.1  # the comparison is of signals, not of zeros


def test_gradients_equal_transformers(make_patches):
    config = MoonViTConfig(**CONFIGS[0])
    grids = [(2, 4, 6), (2, 2, 8)]  # the oracle takes several items of one frame count
    encoder = filled_encoder(config)
    tower, projection = oracle(config, encoder)
    patches = make_patches(grids)
    out = encoder(patches, grids)
    push = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (out * push).sum().backward()
    merged = tower(normalise(patches), torch.tensor(grids)).pooler_output
    (projection(merged).flatten(0, 1) * push).sum().backward()
    grads = {name: p.grad for name, p in encoder.vision_tower.named_parameters()}
    got = tower_weights(config, grads)
    wanted = {name: p.grad for name, p in tower.named_parameters()}
    assert got.keys() == wanted.keys()
    for name, want in wanted.items():
        error = (got[name] - want).norm() / want.norm().clamp_min(1e-4)
        assert error < 2e-5 or name.endswith("k_proj.bias"), (name, float(error))
        # A bias on the keys shifts all logits of a query alike; without rotation its gradient
        # would vanish, so it is compared against the size of its weight's gradient instead.
        if name.endswith("k_proj.bias"):
            scale = wanted[name.replace("bias", "weight")].norm()
            assert (got[name] - want).norm() < 2e-5 * scale
