"""Compares heads and loss with transformers' SiglipModel and Siglip2's masked pooling head."""

import math

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.memory.live import PeakBytes
from kimi_pretrain.checkpoint.errors import CheckpointError
from kimi_pretrain.siglip.config import SiglipConfig
from kimi_pretrain.siglip.counts import pair_flops, pooling_bytes, text_bytes
from kimi_pretrain.siglip.heads import HeadSizes, PoolingHead, SiglipHeads, initialise_heads
from kimi_pretrain.siglip.pair_loss import pair_loss
from kimi_pretrain.weights.siglip_heads import open_heads
from kimi_pretrain.weights.siglip_shapes import siglip_shapes
from tests.later import Later

siglip = Later("transformers.models.siglip.modeling_siglip")
siglip2 = Later("transformers.models.siglip2.modeling_siglip2")

WIDTH = 32
CONFIG = SiglipConfig(
    tokenizer="tokenizer.json", depth=2, heads=4, mlp_width=48, positions=8, vocabulary=50
)
SIZES = HeadSizes.of(CONFIG, WIDTH)
TEXT = dict(
    vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=8,
)  # fmt: skip
VISION = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
    image_size=28, patch_size=14,
)  # fmt: skip


def drawn(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Draw weights of which none is zero or one, so that a missing bias shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    found, wanted = found.detach(), wanted.detach()
    return float((found - wanted).norm() / wanted.norm())


@pytest.fixture
def oracle():
    config = siglip.SiglipConfig(text_config=TEXT, vision_config=VISION)
    return drawn(siglip.SiglipModel(config)).double()


@pytest.fixture
def heads(oracle) -> SiglipHeads:
    heads = SiglipHeads(SIZES).double()
    heads.load_state_dict({n: v for n, v in oracle.state_dict().items() if n in heads.state_dict()})
    return heads


def test_pooling_of_packed_items_is_that_of_padded_items_with_a_mask():
    config = siglip2.Siglip2VisionConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=1
    )
    config._attn_implementation = "sdpa"  # otherwise the head builds no attention mask
    for dtype, limit in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        oracle = drawn(siglip2.Siglip2MultiheadAttentionPoolingHead(config)).to(dtype)
        head = PoolingHead(SIZES).to(dtype)
        head.load_state_dict(oracle.state_dict())
        lengths = [3, 17, 1, 9]
        x = torch.randn(sum(lengths), 32, generator=torch.Generator().manual_seed(1)).to(dtype)
        packed, padded = (x.clone().requires_grad_() for _ in range(2))
        items = torch.nn.utils.rnn.pad_sequence(padded.split(lengths), batch_first=True)
        mask = torch.arange(17)[None] < torch.tensor(lengths)[:, None]
        found, wanted = head(packed, lengths), oracle(items, mask)
        assert relative(found, wanted) <= limit
        for out in (found, wanted):
            (out * torch.sin(torch.arange(32).to(dtype))).sum().backward()
        assert relative(packed.grad, padded.grad) <= 3 * limit
        parameters = dict(oracle.named_parameters())
        for name, parameter in head.named_parameters():
            assert relative(parameter.grad, parameters[name].grad) <= 10 * limit, name


def test_no_items_pool_to_none_and_wrong_lengths_are_refused():
    head = drawn(PoolingHead(SIZES))
    none = head(torch.zeros(0, 32), [])
    assert none.shape == (0, 32)
    none.sum().backward()
    assert all(not p.grad.any() for p in head.parameters())
    for lengths in ([2], [2, 0, 1], [3, 3]):
        with pytest.raises(ValueError, match="patches"):
            head(torch.zeros(3, 32), lengths)


def test_text_tower_is_transformers(oracle, heads):
    ids = torch.randint(0, 50, (5, 8), generator=torch.Generator().manual_seed(2))
    assert relative(heads.text_model(ids), oracle.text_model(ids).pooler_output) <= 1e-14
    single = relative(heads.float().text_model(ids), oracle.float().text_model(ids).pooler_output)
    assert single <= 1e-6
    assert heads.text_model(ids[:0]).shape == (0, 32)
    with pytest.raises(ValueError, match=r"want \[texts, 8\]"):
        heads.texts(ids[:, :7])


def test_loss_and_gradients_are_those_of_siglip_model(oracle, heads):
    draw = torch.Generator().manual_seed(3)
    ids, pixels = torch.randint(0, 50, (6, 8), generator=draw), torch.rand(6, 3, 28, 28).double()
    out = oracle(input_ids=ids, pixel_values=pixels, return_loss=True)
    out.loss.backward()
    patches = out.vision_model_output.last_hidden_state.detach()
    images = heads.images(patches.flatten(0, 1), [4] * 6)
    loss = pair_loss(images, heads.texts(ids), heads.logit_scale, heads.logit_bias, [6])
    (loss / 6).backward()
    assert relative(loss / 6, out.loss) <= 1e-13
    parameters = dict(oracle.named_parameters())
    most = max(float(parameters[name].grad.norm()) for name, _ in heads.named_parameters())
    for name, parameter in heads.named_parameters():  # for key biases only rounding is left
        distance = (parameter.grad - parameters[name].grad).norm()
        assert float(distance) <= 1e-11 * float(parameters[name].grad.norm()) + 1e-16 * most, name


def test_operations_are_those_that_torch_counts():
    """Counts are exact except for the one query that all items of a chunk share."""
    heads, ids = drawn(SiglipHeads(SIZES)), torch.zeros(2, 8, dtype=torch.int64)
    patches = torch.rand(12, WIDTH, requires_grad=True)
    for forwards in (1, 3):
        # Torch counts no FLOPs for fused attention on a CPU.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            images, texts = heads.images(patches, [9, 3]), heads.texts(ids)
            loss = pair_loss(images, texts, heads.logit_scale, heads.logit_bias, [2])
            if forwards > 1:
                loss.backward()
        query = 2 * WIDTH**2 * forwards
        assert counter.get_total_flops() - query == forwards * pair_flops(CONFIG, WIDTH, 2, 12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "mlp_width", "depth"), [(64, 240, 3), (96, 96, 8)])
def test_memory_is_predicted_within_15_percent(width, mlp_width, depth, dtype):
    sizes = {"mlp_width": mlp_width, "depth": depth, "positions": 16, "texts_per_chunk": 24}
    config = CONFIG.replace(**sizes)
    heads = SiglipHeads(HeadSizes.of(config, width)).to(dtype)
    for parameter in heads.parameters():
        parameter.grad = torch.zeros_like(parameter)
    lengths = [130, 70, 300]
    patches = torch.rand(sum(lengths), width, dtype=dtype).requires_grad_()
    ids = torch.zeros(24, 16, dtype=torch.int64)
    for predicted, run in (
        (text_bytes(config, width, dtype.itemsize), lambda: heads.texts(ids)),
        (
            pooling_bytes(sum(lengths), width, dtype.itemsize),
            lambda: heads.images(torch.cat([patches]), lengths),
        ),
    ):
        with PeakBytes() as live:
            run().sum().backward()
        patches.grad = None
        assert predicted == pytest.approx(live.peak, rel=0.15)


def test_scale_and_bias_begin_as_in_the_paper():
    heads = SiglipHeads(SIZES)
    assert heads.logit_scale.exp().item() == pytest.approx(10.0)
    assert heads.logit_bias.item() == -10.0
    one = F.normalize(torch.ones(1, 4), dim=-1)
    loss = pair_loss(one, one, heads.logit_scale, heads.logit_bias, [1])
    assert loss.item() == pytest.approx(math.log(2), rel=1e-5)  # z = 10 - 10 = 0
    with pytest.raises(ValueError, match="the plan says 2 pairs"):
        pair_loss(one, one, heads.logit_scale, heads.logit_bias, [2])


def load_heads(heads: SiglipHeads, uri: str, config: SiglipConfig = CONFIG) -> None:
    """Read all tensors before changing the heads."""
    weights = open_heads(uri, config, WIDTH)
    heads.load_state_dict(
        {n: weights.read(f"siglip.{n}", p.dtype) for n, p in heads.named_parameters()}
    )


def test_names_and_shapes_are_those_of_the_module():
    heads = SiglipHeads(SIZES)
    held = {f"siglip.{name}": tuple(one.shape) for name, one in heads.named_parameters()}
    assert siglip_shapes(CONFIG, WIDTH) == held
    assert siglip_shapes(None, WIDTH) == {}


def test_first_weights_follow_from_seed_and_name():
    one, same, other = (SiglipHeads(SIZES) for _ in range(3))
    for heads, seed in ((one, 1), (same, 1), (other, 2)):
        initialise_heads(heads, seed)
    for name, value in one.named_parameters():
        assert torch.equal(value, same.get_parameter(name))
        drawn = value.ndim > 1
        assert torch.equal(value, other.get_parameter(name)) != drawn, name
    assert 0.05 < one.text_model.head.weight.std().item() < 0.3
    assert (one.logit_scale.item(), one.logit_bias.item()) == (pytest.approx(math.log(10)), -10)


def test_heads_are_read_from_a_siglip_checkpoint(oracle, tmp_path):
    oracle.float().save_pretrained(tmp_path / "whole")
    heads = SiglipHeads(SIZES)
    load_heads(heads, str(tmp_path / "whole"))
    stored = oracle.state_dict()
    assert all(torch.equal(value, stored[name]) for name, value in heads.state_dict().items())
    oracle.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    again = SiglipHeads(SIZES)
    load_heads(again, str(tmp_path / "sharded"))
    assert all(torch.equal(value, stored[name]) for name, value in again.state_dict().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(depth=1), "unexpected tensor text_model.encoder.layers.1"),
        (dict(depth=3), r"no tensor text_model.encoder.layers.2.* 3 blocks"),
        (dict(mlp_width=40), r"has shape \[48, 32\]: want \[40, 32\]"),
        # All tensors fit, but the function differs.
        (dict(heads=8), r"config.json: text_config.num_attention_heads is 4, want 8"),
    ],
)
def test_a_model_of_other_sizes_is_refused(oracle, tmp_path, change, message):
    oracle.float().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        open_heads(str(tmp_path), CONFIG.replace(**change), WIDTH)


def test_a_number_that_is_not_finite_is_refused(oracle, tmp_path):
    with torch.no_grad():
        oracle.logit_bias.fill_(math.nan)
    oracle.float().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"logit_bias\[0\] is nan"):
        load_heads(SiglipHeads(SIZES), str(tmp_path))


def test_pairs_of_a_group_that_is_not_there_are_refused():
    """One count would give a loss over this rank's own pairs; two counts need a second rank."""
    one = torch.eye(2)
    with pytest.raises(ValueError, match="pairs of 2 ranks, in a group of 1"):
        pair_loss(one, one, torch.zeros(1), torch.zeros(1), [2, 2])


def test_autocast_leaves_the_cosines_wide():
    draw = torch.Generator().manual_seed(0)
    images, texts = (F.normalize(torch.randn(6, 32, generator=draw), dim=-1) for _ in range(2))
    scale, bias = torch.tensor([math.log(10)]), torch.tensor([-10.0])
    plain = pair_loss(images, texts, scale, bias, [6])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(pair_loss(images, texts, scale, bias, [6]), plain)
