"""Bytes per token that a K2.5 layer with experts leaves for backward, at its real widths.

Live storages are counted with all 384 experts and the widths of `configs/kimi_k25_1t.yaml`. The
result is the difference between a model of two layers and a model of one, so that embedding, head
and loss cancel. All experts of a layer share one matrix, so that a host can hold the model. This
does not affect the count, which depends on sizes and not on the routing of tokens. Attention is the
portable one; the fused kernels keep four more bytes per token and head (`LOG_SUMS`).
"""

import gc
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.memory.live import LiveBytes
from kimi_pretrain.config import Config, load_config
from kimi_pretrain.engine.backbone import Backbone
from kimi_pretrain.engine.experts import GroupedExperts
from kimi_pretrain.engine.mesh import Mesh
from kimi_pretrain.engine.microbatch import Microbatch
from kimi_pretrain.engine.model_builder import build_chunks, engine_config
from kimi_pretrain.engine.packed_attention import PackedRows
from kimi_pretrain.memory.host_memory import SLAB_BYTES
from kimi_pretrain.memory.kept import layer_tensors
from kimi_pretrain.memory.plan import microbatches_in_flight, moves
from kimi_pretrain.memory.switches import EVERYTHING

CPU = torch.device("cpu")
PRESET = "kimi_k25_1t"
RECOMPUTE, FP8 = {"recompute": EVERYTHING}, {"fp8_storage": True}
POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "recompute": RECOMPUTE,
    "recompute, fp8": RECOMPUTE | FP8,
    "recompute, fp8, offload": RECOMPUTE | FP8 | {"offload": True},
}
AT_MOST = dict(zip(POLICIES, (400_000, 250_000, 160_000, 1_000), strict=True))  # bytes per token
TOKENS, IN_A_RUN = 256, 4096  # tokens of a microbatch, here and in the preset
LOG_SUMS = 4  # bytes per token and head
ON_THEIR_WAY = 4  # layers on the device under offload, as in docs/MEMORY.md
DOCUMENTS = [0.4, 0.3, 0.2, 0.1]  # shares of a microbatch's tokens; the last is padding


def measure(mesh: Mesh, quick: bool) -> dict[str, Any]:
    """Return the bytes of a layer under each policy, counted and by the plan's formulas."""
    counted: dict[str, list[int]] = {name: [] for name in POLICIES}
    for num_layers in (1, 2):
        backbone = build(config_of(num_layers, quick), mesh)
        plain = backbone.config
        microbatch = microbatch_of(plain, 0)
        for name, changes in POLICIES.items():
            backbone.config = with_policy(plain, changes)
            backbone.apply_memory_policy()
            counted[name].append(left_bytes(backbone, microbatch))
            print(f"{num_layers} layers, {name}: {counted[name][-1]:,} bytes", flush=True)
    plain, run = config_of(1, quick), load_config(PRESET)
    found: dict[str, Any] = {"tokens": plain.data.seq_len, "policies": {}}
    for name, changes in POLICIES.items():
        (one, two), config = counted[name], with_policy(plain, changes)
        found["policies"][name] = {"counted": two - one, "planned": planned(config)}
    chunks = run.chunks()[0 :: run.layout.pp]
    held = {}
    for overlap in (False, True):
        layout = run.layout.replace(overlap_experts=overlap)
        held[overlap] = sum(
            microbatches_in_flight(run.replace(layout=layout), 0, [1] * len(chunks))
        )
    found["stage"] = {
        "layers": [len(layers) for layers, _ in chunks], "tokens": run.data.seq_len,
        "in_flight": held[False], "in_flight_overlapped": held[True],
    }  # fmt: skip
    return found


def config_of(num_layers: int, quick: bool) -> Config:
    """Return the preset with few layers and a short vocabulary, in one process."""
    tokens = 64 if quick else TOKENS
    sizes = {"num_layers": num_layers, "num_dense_layers": 0, "vocab_size": 512}
    if quick:
        sizes |= {"hidden_size": 112, "num_heads": 4, "expert_ffn_size": 32, "num_experts": 24,
                  "q_lora_rank": 24, "kv_lora_rank": 8}  # fmt: skip
    language = [f"model.language.{key}={value}" for key, value in sizes.items()]
    width = [f"model.vision.out_width={sizes['hidden_size']}"] if quick else []
    layout = [f"layout.{axis}=1" for axis in ("pp", "vpp", "dp", "ep")]
    rest = [
        "layout.stages=null", "layout.overlap_experts=false", f"data.seq_len={tokens}",
        "data.limits={image: 64, frame: 64}", "data.rows_per_step=1", "train.attention=portable",
        "train.recompute=[]", "train.fp8_storage=false",
        f"train.offload_min_mib={tokens / IN_A_RUN}",  # 1 MiB, scaled down like the tokens
    ]  # fmt: skip
    return load_config(PRESET, [*language, *width, *layout, *rest])


def with_policy(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return the configuration with other keys of `train`."""
    return config.replace(train=config.train.replace(**changes))


def build(config: Config, mesh: Mesh) -> Backbone:
    """Return a language model without gradient buffers, whose experts share a matrix."""
    engine = engine_config(config, "portable")
    with mock.patch.object(GroupedExperts, "_weight", _shared):
        backbone = Backbone(config, mesh, engine, build_chunks(config, engine, "portable"))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in backbone.chunks[0].parameters():
            own = param if param.is_contiguous() else param[0]
            own.fill_(1.0) if own.ndim == 1 else own.uniform_(-0.03, 0.03, generator=draw)
    return backbone


def _shared(self: GroupedExperts, experts: int, out: int, inner: int) -> nn.Parameter:
    one = torch.empty(1, out, inner, dtype=self.config.params_dtype)
    return nn.Parameter(one.expand(experts, out, inner))


def microbatch_of(config: Config, seed: int, device: torch.device = CPU) -> Microbatch:
    """Return a microbatch of random tokens: three documents, followed by padding."""
    tokens, vocabulary = config.data.seq_len, config.model.language.vocab_size
    borders = [0]
    for share in DOCUMENTS:
        borders.append(borders[-1] + round(share * tokens))
    documents = [True] * (len(DOCUMENTS) - 1) + [False]
    packed = PackedRows.of([*borders[:-1], tokens], documents, device)
    assert packed.spans is not None
    counted = torch.from_numpy(packed.spans.counted_Q)[None].to(device)
    draw = torch.Generator().manual_seed(seed)
    text = torch.randint(0, vocabulary, (1, tokens), generator=draw).to(device)
    return Microbatch(packed, ~counted, text, text.roll(-1), counted)


def left_bytes(backbone: Backbone, microbatch: Microbatch) -> int:
    """Return the bytes on the device that one more forward pass leaves behind.

    The first passes do not count: modules keep some state of the last microbatch only, and
    offloaded tensors stay on the device until the layer after the next begins. Passes repeat until
    two in a row leave the same number of bytes, because a pass may free memory of the pass before.

    Args:
        backbone: model whose policy has saved nothing yet; host memory is counted when it is
            allocated, and subtracted.
    """
    backbone.chunks[0].train()
    backbone.policy.begin_step()
    host, graphs, found = backbone.policy.host, list[Tensor](), list[int]()
    with LiveBytes() as live:
        while len(found) < 4 or (len(found) < 8 and found[-1] - found[-2] != found[-2] - found[-3]):
            graphs.append(backbone.forward(microbatch, backbone.chunks[0], microbatch.labels))
            gc.collect()
            slabs = host.pool.slabs if host is not None else 0
            found.append(live.settled() - slabs * SLAB_BYTES)
    return found[-1] - found[-2]


def planned(config: Config) -> int:
    """Return the bytes that a layer with experts leaves on the device according to the plan."""
    kept = layer_tensors(config, dense=False)
    return sum(tensor.size for tensor in kept if not moves(config, tensor))


# Results ------------------------------------------------------------------------------------------


def targets(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the bounds on bytes per token, and the target that formulas and counts agree."""
    rows = []
    for name, one in found["policies"].items():
        size = one["counted"] / found["tokens"]
        rows.append((f"{name}: at most {AT_MOST[name] / 1000:,.0f} KB a token",
                     f"{size:,.0f} bytes", size <= AT_MOST[name]))  # fmt: skip
    differ = [one["counted"] - one["planned"] for one in found["policies"].values()]
    rows.append(("the plan's formulas: to the byte", f"differences {differ}", not any(differ)))
    return [{"target": a, "found": b, "met": c, "exact": "byte" in a} for a, b, c in rows]


def rows(found: Mapping[str, Any]) -> list[list[str]]:
    """Return the bytes per token of each policy, and the total on the first stage's rank in GB."""
    stage, made = found["stage"], []
    layers = max(stage["layers"])
    for name, one in found["policies"].items():
        size = one["counted"] / found["tokens"]
        held = [
            stage[key] * layers * size * stage["tokens"] / 1e9
            for key in ("in_flight", "in_flight_overlapped")
        ]
        made.append([
            name, f"{size:,.0f}", f"{one['planned'] / found['tokens']:,.0f}",
            f"{size * stage['tokens'] / 1e6:,.1f}", *(f"{one:,.1f}" for one in held),
        ])  # fmt: skip
    return made
