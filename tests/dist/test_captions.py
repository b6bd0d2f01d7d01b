"""The captioning stage against transformers' Kimi K2.5 with a frozen language model.

Both sides go from pixels through tower, projector and language model to the loss, and back. Ours is
the engine with DEP in a separate process. Theirs loads the folder that `export` writes and runs
each document alone. With `train.siglip`, transformers' SigLIP text model and SigLIP 2's pooling
head are added, and everything is in one graph.
"""

import copy
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from torch.nn import functional as F

from data_pipeline.text import Tokenizer
from kimi_pretrain.config import load_config
from kimi_pretrain.weights import hf_export
from kimi_pretrain.weights.hf_config import SpecialIds
from moonvit3d.layouts import to_transformers
from tests.dist.jobs import SMALL, layout, run_jobs
from tests.later import Later

transformers = Later("transformers")
kimi = Later("transformers.models.kimi_k25.modeling_kimi_k25")
deepseek = Later("transformers.models.deepseek_v3.modeling_deepseek_v3")
vision_utils = Later("transformers.vision_utils")
siglip = Later("transformers.models.siglip.modeling_siglip")
siglip2 = Later("transformers.models.siglip2.modeling_siglip2")

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

EPS = 1e-5
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
MODEL = (
    *layout(),
    "model.language.yarn={factor: 4.0, original_max_position: 32, beta_fast: 4.0}",
    f"model.language.norm_eps={EPS:f}",
    "data.seed=4",  # gives a first step with videos
)


PAIRS = (
    "train.siglip={tokenizer: text_tokenizer.json, depth: 2, heads: 2, mlp_width: 48, "
    "positions: 12, vocabulary: 60, texts_per_chunk: 3}",
)


class TorchInFloat64:
    """torch with float64 in place of float32."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture(scope="module")
def found(data_root, tmp_path_factory):
    """The folder that `export` writes, and each precision's step from its weights."""
    folder = tmp_path_factory.mktemp("captions")
    common = (f"data.root={data_root}", *MODEL)
    stage = (*common, f"train.start_from={folder / 'run'}", "train.frozen=[language_model]")
    # The jobs run in this order: the first one saves the weights from which the others start.
    jobs = {"save": ("caption_start", (*common, f"checkpoint.place={folder / 'run'}"))}
    for dtype in TOLERANCE:
        jobs[dtype] = "caption_gradients", (*stage, f"train.dtype={dtype}")
        jobs[f"siglip {dtype}"] = "caption_gradients", (*stage, *PAIRS, f"train.dtype={dtype}")
    done = run_jobs(jobs, folder / "job", 1, timeout=200)
    base = Tokenizer.from_file(data_root / "tokenizer.tiktoken").num_base
    options = hf_export.ExportOptions("kimi_k25", ids=SpecialIds(base))
    hf_export.export(hf_export.plan(folder / "run", options), folder / "hf", options)
    return folder / "hf", done


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_encoder_gradients_are_those_of_kimi_k25(found, dtype, monkeypatch):
    folder, done = found
    model = theirs(folder, dtype, monkeypatch)
    documents = done[dtype]["documents"]
    frames = [grid[0] for one in documents for grid, _ in one["media"]]
    assert 1 in frames
    assert max(frames) > 1  # includes a video
    loss = captioning(model, documents)
    loss.backward()
    assert done[dtype]["loss"] == pytest.approx(loss.item(), rel=TOLERANCE[dtype])
    assert done[dtype]["siglip"] is None
    check_encoder(done[dtype]["gradients"], model, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_kimi_vl_s_objective_is_that_of_other_people_s_parts_in_one_graph(
    found, dtype, monkeypatch, data_root
):
    """L_siglip + 2 L_caption: compares the loss of all pairs and every parameter's gradient."""
    folder, done = found
    step = done[f"siglip {dtype}"]
    model, parts = theirs(folder, dtype, monkeypatch), their_heads(step["heads"], dtype)
    tokenizer = Tokenizer.from_file(data_root / "tokenizer.tiktoken")
    pairs = [
        (one["media"][0], text)
        for one in step["documents"]
        if len(one["media"]) == 1 and (text := caption_of(one["tokens"], tokenizer))
    ]
    assert len({text for _, text in pairs}) > 5
    siglip = their_siglip(model, parts, pairs, data_root)
    captions = captioning(model, step["documents"])
    assert step["loss"] == pytest.approx(captions.item(), rel=TOLERANCE[dtype])
    assert step["siglip"][:2] == (pytest.approx(siglip.item(), rel=TOLERANCE[dtype]), len(pairs))
    (siglip + 2 * captions).backward()
    check_encoder(step["gradients"], model, dtype)
    want = {name: one.grad for part in parts.values() for name, one in part.named_parameters()}
    heads = {n: g for n, g in step["gradients"].items() if n.startswith("siglip.")}
    assert heads.keys() == want.keys()
    for name, target in want.items():
        if name.endswith("k_proj.bias"):
            assert heads[name].norm() <= TOLERANCE[dtype], name  # zero except for rounding
            continue
        if name.endswith("in_proj_bias"):  # includes the bias of the keys
            width = len(target) // 3
            keys = slice(width, 2 * width)
            heads[name][keys] = target[keys] = 0
        assert (heads[name] - target).norm() <= TOLERANCE[dtype] * target.norm(), name


def captioning(model, documents):
    """Return the mean over all tokens that count."""
    tokens = sum(int((one["labels"] != -100).sum()) for one in documents)
    return sum(loss_of(model, one) for one in documents) / tokens


def caption_of(tokens, tokenizer) -> str:
    """Return the text after the medium; every sample here is a medium and a text."""
    ids = tokens.tolist()
    (mark,) = (at for at, one in enumerate(ids) if one == tokenizer.media_end)
    return tokenizer.decode(ids[mark + 1 : ids.index(tokenizer.eos)])


def their_heads(weights, dtype):
    """Return transformers' modules with our weights, under our names."""
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=2)
    text = siglip.SiglipTextConfig(
        vocab_size=60, num_hidden_layers=2, max_position_embeddings=12, **sizes
    )
    vision = siglip2.Siglip2VisionConfig(num_hidden_layers=1, **sizes)
    parts = torch.nn.ModuleDict(
        {
            "siglip": torch.nn.ModuleDict(
                {
                    "vision_model": torch.nn.ModuleDict(
                        {"head": siglip2.Siglip2MultiheadAttentionPoolingHead(vision)}
                    ),
                    "text_model": siglip.SiglipTextModel(text),
                }
            )
        }
    )
    parts["siglip"].register_parameter("logit_scale", torch.nn.Parameter(torch.zeros(1)))
    parts["siglip"].register_parameter("logit_bias", torch.nn.Parameter(torch.zeros(1)))
    parts.to(getattr(torch, dtype)).load_state_dict(weights, strict=True)
    return {"all": parts}


def their_siglip(model, parts, pairs, data_root):
    """Return the loss as `SiglipModel` computes it, for external towers."""
    heads = parts["all"]["siglip"]
    dtype, pooled = heads["text_model"].dtype, []
    for (grid, patches), _ in pairs:
        pixels = torch.from_numpy(patches).to(dtype) / 127.5 - 1
        seen = model.model.vision_tower(pixels, torch.tensor([grid])).last_hidden_state
        pooled.append(heads["vision_model"]["head"](seen[None]))
    tokenizer = tokenizers.Tokenizer.from_file(str(data_root / "text_tokenizer.json"))
    ids = [tokenizer.encode(text).ids for _, text in pairs]
    ids = [(one[:11] + [1] if len(one) > 12 else one + [1] * (12 - len(one))) for one in ids]
    texts = heads["text_model"](torch.tensor(ids)).pooler_output
    image = torch.cat(pooled)
    image = image / image.norm(p=2, dim=-1, keepdim=True)
    texts = texts / texts.norm(p=2, dim=-1, keepdim=True)
    logits = texts @ image.t() * heads.logit_scale.exp() + heads.logit_bias
    signs = 2 * torch.eye(len(pairs), dtype=dtype) - 1
    return -F.logsigmoid(signs * logits).sum(-1).mean()


def check_encoder(ours, model, dtype):
    """Compare every parameter of tower and projector."""
    vision = load_config("tiny_cpu", [*SMALL, *MODEL]).model.vision
    got = to_transformers({n: g for n, g in ours.items() if not n.startswith("siglip.")}, vision)
    want = {
        name.removeprefix("model."): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert got.keys() == want.keys()
    for name, target in want.items():
        # A key bias shifts all logits of a query equally, so its gradient nearly vanishes.
        scale = want[name.replace("k_proj.bias", "k_proj.weight")].double().norm()
        assert scale > 0
        assert (got[name] - target).double().norm() <= TOLERANCE[dtype] * scale, name


def test_their_class_takes_no_video_by_itself(found, monkeypatch):
    """transformers splits a video's tokens by the patches of all frames, which fails.

    The test therefore passes embeddings. If this test fails, the videos above can use the normal
    path.
    """
    model = theirs(found[0], "float32", monkeypatch)
    patches = torch.zeros(2 * 16, 3, 14, 14)
    with pytest.raises(RuntimeError, match="split"):
        model.get_video_features(patches, torch.tensor([[2, 4, 4]]))


def theirs(folder, dtype, monkeypatch):
    """Return transformers' model with a frozen language model; in float64 without internal float32.

    It computes norms, scores and softmax in float32 for any weights. Rotary angles of text stay
    float32 on both sides.
    """
    if dtype == "float64":
        for later in (kimi, deepseek, vision_utils):
            monkeypatch.setattr(later.module(), "torch", TorchInFloat64())
    model = transformers.Kimi_K25ForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).to(getattr(torch, dtype))
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = EPS
    model.requires_grad_(False)
    model.model.vision_tower.requires_grad_(True)
    model.model.mm_projector.requires_grad_(True)
    if dtype == "float64":
        rotary, tower = model.model.language_model.rotary_emb, model.model.vision_tower
        monkeypatch.setattr(rotary, "forward", in_float32(copy.deepcopy(rotary).float()))
        monkeypatch.setattr(tower, "forward", in_float64(tower.forward))
        # Recomputed, because `from_pretrained` keeps them in the dtype of the weights.
        tower.rotary_emb.inv_freq, _ = tower.rotary_emb.compute_axial_rope_parameters(tower.config)
        embedding = tower.patch_embed.pos_emb
        embedding.time_position_embeddings = embedding.compute_pos_embed()
    return model


def in_float32(rotary):
    """Wrap the rotary embedding to compute unpatched float32 angles."""

    def narrow(x, position_ids):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(deepseek.module(), "torch", torch)
            return tuple(y.to(x.dtype) for y in rotary(x.float(), position_ids))

    return narrow


def in_float64(forward):
    """Wrap a tower's forward so that its `.float()` calls give float64."""

    def wide(*args, **kwargs):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            return forward(*args, **kwargs)

    return wide


def loss_of(model, document):
    """Return the summed loss of one document."""
    dtype = model.lm_head.weight.dtype
    tokens = torch.from_numpy(document["tokens"])[None]
    parts = []
    for grid, patches in document["media"]:
        pixels = torch.from_numpy(patches).to(dtype) / 127.5 - 1
        if grid[0] == 1:
            sizes = torch.tensor([grid])
            parts += model.get_image_features(pixels, sizes, return_dict=True).pooler_output
        else:
            merged = model.model.vision_tower(pixels, torch.tensor([grid])).pooler_output
            parts.append(model.model.mm_projector(merged).squeeze(1))
    media = {"image": SimpleNamespace(pooler_output=parts)} if parts else None
    logits = model(tokens, mm_encoder_outputs=media, use_cache=False).logits
    labels = torch.from_numpy(document["labels"])
    return F.cross_entropy(logits[0], labels, ignore_index=-100, reduction="sum")
