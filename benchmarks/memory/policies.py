"""Steps of two decoder layers under each saved-tensor policy, at Kimi K2's widths.

Two layers with 16 experts each run microbatches of 4,096 tokens, four of them in flight as on an
early pipeline stage. On a CPU, widths and tokens are an eighth of this. Each policy of
docs/MEMORY.md runs steps over the same microbatches on one device. The results are seconds, peak
memory above weights and gradients, and the bytes that one microbatch leaves behind, next to those
of the memory plan. A policy that recomputes or moves tensors must give the same bits as no policy:
losses and gradients are compared, with a second step of `none` as the control.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import device as where
from benchmarks.memory.layer_bytes import left_bytes, microbatch_of
from benchmarks.result import table
from kimi_pretrain.config import Config, load_config
from kimi_pretrain.engine.backbone import Backbone, build_backbone
from kimi_pretrain.engine.mesh import Mesh
from kimi_pretrain.engine.microbatch import Microbatch
from kimi_pretrain.engine.packed_attention import PackedCoreAttention
from kimi_pretrain.memory.host_memory import SLAB_BYTES
from kimi_pretrain.memory.kept import head_tensors, layer_tensors
from kimi_pretrain.memory.plan import moves
from kimi_pretrain.tools.calibrate_passes import randomise

ALL = ["norms", "swiglu", "mla_up"]
POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "none, again": {},
    "recompute": {"recompute": ALL},
    "offload": {"offload": True},
    "recompute, offload": {"recompute": ALL, "offload": True},
    "recompute, fp8": {"recompute": ALL, "fp8_storage": True},
    "recompute, fp8, offload": {"recompute": ALL, "fp8_storage": True, "offload": True},
}
EQUALS = {"recompute, fp8": None, "recompute, fp8, offload": "recompute, fp8"}  # else "none"
AT_MOST = 1.10  # step with full recompute over a step without

K2 = {
    "hidden_size": 7168, "num_heads": 64, "expert_ffn_size": 2048, "dense_ffn_size": 18432,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_dim": 128, "qk_rope_dim": 64, "v_dim": 128,
}  # fmt: skip
LAYERS, EXPERTS, TOP = 2, 16, 8
IN_FLIGHT, MICROBATCHES = 4, 8

Found = Mapping[str, Any]


def measure(mesh: Mesh, device: torch.device, quick: bool) -> dict[str, Any]:
    """Return the time and memory of each policy, and the gradients that differ."""
    backbone = build_backbone(config_of(device.type, quick), mesh, randomise)
    return measured(backbone, device, 1 if quick else 5)


def config_of(device: str, quick: bool) -> Config:
    """Return the configuration of the layers; on CUDA attention is FlexAttention."""
    over = 1 if device == "cuda" else 64 if quick else 8
    tokens = 4096 if device == "cuda" else 64 if quick else 512
    sizes = {key: max(4, value // over) for key, value in K2.items()}
    sizes |= {
        "num_layers": LAYERS, "num_dense_layers": 0, "num_experts": EXPERTS,
        "experts_per_token": TOP, "num_shared_experts": 1, "vocab_size": 2048,
    }  # fmt: skip
    language = [f"model.language.{key}={value}" for key, value in sizes.items()]
    layout = ["layout.pp=1", "layout.vpp=1", "layout.dp=1", "layout.ep=1", "layout.stages=null"]
    rest = [
        f"model.vision.out_width={sizes['hidden_size']}", f"data.seq_len={tokens}",
        "train.rows_per_microbatch=1", "train.dtype=bfloat16", "train.offload_min_mib=1e-4",
    ]  # fmt: skip
    rest += ["train.attention=portable"] if device == "cpu" else []  # as in the memory plan
    return load_config("tiny_cpu", [*language, *layout, *rest])


# Steps --------------------------------------------------------------------------------------------


def measured(backbone: Backbone, device: torch.device, repeats: int) -> dict[str, Any]:
    """Return the sizes and the figures of each policy."""
    config = backbone.config
    microbatches = [microbatch_of(config, seed, device) for seed in range(MICROBATCHES)]
    found: dict[str, Any] = {
        "sizes": {
            "layers": LAYERS, "experts": EXPERTS, "tokens": config.data.seq_len,
            "hidden": config.model.language.hidden_size, "in_flight": IN_FLIGHT,
            "microbatches": MICROBATCHES, "attention": _attention(backbone),
        },
        "policies": {},
    }  # fmt: skip
    wanted: dict[str, dict[str, Tensor]] = {}
    for name, changes in POLICIES.items():
        train = config.train.model_copy(update=changes)
        backbone.config = config.model_copy(update={"train": train})
        backbone.apply_memory_policy()
        results = step(backbone, microbatches)  # compiles kernels; host memory learns the order
        if name in ("none", "recompute, fp8"):
            wanted[name] = results
        differ = differing(results, wanted.get(EQUALS.get(name, "none") or name, results))
        del results
        taken = where.timed(lambda: step(backbone, microbatches, keep=False), device, repeats)
        host = backbone.policy.host
        peak = where.peak_bytes(lambda: step(backbone, microbatches, keep=False), device)
        late, slabs = (host.late, host.pool.slabs) if host is not None else (None, 0)
        backbone.apply_memory_policy()
        found["policies"][name] = {
            "seconds": taken,
            "peak_bytes": peak,
            "left_bytes": left_bytes(backbone, microbatches[0]),
            "planned_bytes": planned(backbone.config),
            "late_groups": late,
            "host_bytes": slabs * SLAB_BYTES,
            "differing": differ,
        }
        print(f"{name:26} {taken['median'] * 1e3:9.1f} ms, differing: {len(differ)}", flush=True)
    return found


def _attention(backbone: Backbone) -> str:
    modules = backbone.chunks[0].modules()
    return next(type(one).__name__ for one in modules if isinstance(one, PackedCoreAttention))


def step(
    backbone: Backbone, microbatches: Sequence[Microbatch], keep: bool = True
) -> dict[str, Tensor]:
    """Run a step with several forwards in flight; return losses and gradients, if kept."""
    model = backbone.models[0]
    model.train()
    model.zero_grad_buffer()
    backbone.policy.begin_step()
    waiting: deque[Tensor] = deque()
    losses = []
    for one in microbatches:
        losses.append(_loss(backbone, one))
        waiting.append(losses[-1])
        if len(waiting) == IN_FLIGHT:
            waiting.popleft().backward()
    while waiting:
        waiting.popleft().backward()
    backbone.chunks[0].forget_plans()
    if not keep:
        return {}
    found = {view.name: backbone.grad_of(view).clone() for view in backbone.views()}
    return found | {"losses": torch.stack([loss.detach() for loss in losses])}


def _loss(backbone: Backbone, one: Microbatch) -> Tensor:
    losses = backbone.forward(one, backbone.models[0], one.labels)
    return (losses * one.loss_mask).sum()


def differing(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the relative distance of each tensor whose bits differ."""
    return {
        name: float((found[name] - value).norm() / value.norm())
        for name, value in wanted.items()
        if not torch.equal(found[name], value)
    }


def planned(config: Config) -> int:
    """Return the bytes left on the device according to the memory plan."""
    kept = [*layer_tensors(config, dense=False)] * LAYERS + [*head_tensors(config)]
    return sum(tensor.size for tensor in kept if not moves(config, tensor))


# Results ------------------------------------------------------------------------------------------


def targets(found: Found, device: str) -> list[dict[str, Any]]:
    """Return the targets with the measured values; `exact` marks targets whose miss is an error.

    Tensors that also differ in the control do not count against a policy.
    """
    policies = found["policies"]
    control = policies["none, again"]["differing"]
    rows = [("none: the same bits twice", f"{len(control)} tensors differ", not control, False)]
    for name in POLICIES:
        equals = EQUALS.get(name, "none")
        if name in ("none", "none, again") or equals is None:
            continue
        differ = policies[name]["differing"].keys() - control.keys()
        rows.append((f"{name}: the bits of {equals}", f"{len(differ)} tensors differ",
                     not differ, True))  # fmt: skip
    off = [one["left_bytes"] - one["planned_bytes"] for one in policies.values()]
    rows.append(("bytes left on the device: the plan's", f"differences {off}", not any(off),
                 device == "cpu"))  # fmt: skip
    if device == "cuda":
        ratio = _ratio(found, "recompute")
        rows.append((f"recompute: at most {AT_MOST} x the step without", f"{ratio:.3f}",
                     ratio <= AT_MOST, False))  # fmt: skip
    return [{"target": a, "found": b, "met": c, "exact": d} for a, b, c, d in rows]


def _ratio(found: Found, name: str) -> float:
    policies = found["policies"]
    return policies[name]["seconds"]["median"] / policies["none"]["seconds"]["median"]


def lines(found: Found) -> list[str]:
    """Return the section of the page."""
    sizes = found["sizes"]
    rows = [
        [
            name, f"{one['seconds']['median'] * 1e3:.1f}", f"{_ratio(found, name):.3f}",
            f"{one['peak_bytes'] / 2**20:,.0f}", f"{one['left_bytes'] / sizes['tokens']:,.0f}",
            f"{one['planned_bytes'] / sizes['tokens']:,.0f}",
            f"{one['host_bytes'] / 2**20:,.0f}" if one["host_bytes"] else "",
            "" if one["late_groups"] is None else one["late_groups"],
        ]
        for name, one in found["policies"].items()
    ]  # fmt: skip
    return [
        "## Steps of two layers under each policy",
        "",
        f"{sizes['layers']} layers of width {sizes['hidden']}, {sizes['experts']} experts, "
        f"{sizes['microbatches']} microbatches of {sizes['tokens']:,} tokens, "
        f"{sizes['in_flight']} in flight, {sizes['attention']}. Peak: above weights and gradients. "
        "Bytes a token: on the device after a forward pass, of both layers, the last norm, head "
        "and loss.",
        "",
        *table(
            ["policy", "step, ms", "over none", "peak, MiB", "bytes a token", "by the plan",
             "host, MiB", "groups brought late"],
            rows,
        ),
    ]  # fmt: skip
