"""One decoder layer's step under each policy over saved tensors, at Kimi K2's widths.

Two layers with 16 experts each, microbatches of 4,096 tokens, four of them in flight as on an early
pipeline stage. Each policy of docs/MEMORY.md
takes steps over the same microbatches, on one device: seconds, the highest memory above weights and
gradients, and the bytes that one microbatch leaves behind, beside those of the memory plan.
What recomputes or moves must give the bits of none: losses and gradients are compared, with a
second step of none as the control.

    python -m benchmarks.bench_memory                  # memory_cpu.*: an eighth of the widths
    python -m benchmarks.bench_memory --device cuda    # memory_cuda.*
    python -m benchmarks.bench_memory --quick          # seconds; figures not to quote
"""

import gc
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks import device as where
from benchmarks.memory.live import LiveBytes
from benchmarks.result import table, verdicts, write
from kimi_pretrain.config import Config, load_config
from kimi_pretrain.memory.kept import head_tensors, layer_tensors

if TYPE_CHECKING:
    from kimi_pretrain.engine.backbone import Backbone
    from kimi_pretrain.engine.microbatch import Microbatch

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
AT_MOST = 1.10  # a step with all recomputed, over one without

K2 = {
    "hidden_size": 7168, "num_heads": 64, "expert_ffn_size": 2048, "dense_ffn_size": 18432,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_dim": 128, "qk_rope_dim": 64, "v_dim": 128,
}  # fmt: skip
LAYERS, EXPERTS, TOP = 2, 16, 8
DOCUMENTS = [0.4, 0.3, 0.2, 0.1]  # of a microbatch's tokens
IN_FLIGHT, MICROBATCHES = 4, 8

Found = Mapping[str, Any]


def main() -> None:
    arguments = where.parser(__doc__, "memory").parse_args()
    device = where.device_of(arguments)
    about = where.about(arguments, device, "megatron-core", "triton")
    from kimi_pretrain.engine import mesh as engine_mesh
    from kimi_pretrain.engine.backbone import Backbone, build_backbone

    config = config_of(arguments.device, arguments.quick)
    Backbone.initialise = _initialise  # by name, on the CPU, it takes longer than all the rest
    mesh = engine_mesh.start(config.layout)
    try:
        backbone = build_backbone(config, mesh)
        found = {"about": about, **measure(backbone, device, 1 if arguments.quick else 5)}
    finally:
        engine_mesh.stop()
    found["targets"] = targets(found)
    write(found, arguments.out, page(found))
    if not all(one["met"] for one in found["targets"] if one["exact"]):
        sys.exit("error: a policy that must change no bit did")


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
        "train.rows_per_microbatch=1", "train.dtype=bfloat16", "train.offload_min_mib=0",
    ]  # fmt: skip
    return load_config("tiny_cpu", [*language, *layout, *rest])


def _initialise(backbone: "Backbone") -> None:
    """Fill every tensor on its device."""
    draw = torch.Generator(backbone.mesh.device).manual_seed(0)
    with torch.no_grad():
        for view in backbone.views(buffers=True):
            if view.name.endswith("norm.weight"):
                view.data.fill_(1.0)
            elif view.name.endswith("e_score_correction_bias"):
                view.data.zero_()
            else:
                view.data.normal_(0.0, 0.02, generator=draw)


def microbatches_of(config: Config, device: torch.device) -> list["Microbatch"]:
    """Return microbatches of a few documents each, random tokens, the last of them padding."""
    from kimi_pretrain.engine.microbatch import Microbatch
    from kimi_pretrain.engine.packed_attention import PackedRows

    tokens, vocabulary = config.data.seq_len, config.model.language.vocab_size
    draw, made = torch.Generator().manual_seed(0), []
    borders = [0]
    for share in DOCUMENTS:
        borders.append(borders[-1] + round(share * tokens))
    documents = [True] * (len(DOCUMENTS) - 1) + [False]
    for _ in range(MICROBATCHES):
        packed = PackedRows.of([*borders[:-1], tokens], documents, device)
        counted = torch.from_numpy(packed.spans.counted_Q)[None].to(device)
        text = torch.randint(0, vocabulary, (1, tokens), generator=draw).to(device)
        made.append(Microbatch(packed, ~counted, text, text.roll(-1), counted))
    return made


# Steps --------------------------------------------------------------------------------------------


def measure(backbone: "Backbone", device: torch.device, repeats: int) -> dict[str, Any]:
    """Return what each policy costs and holds, and what differs of its gradients."""
    config, microbatches = backbone.config, microbatches_of(backbone.config, device)
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
        results = step(backbone, microbatches)  # compiles kernels; of host memory learns the order
        if name in ("none", "recompute, fp8"):
            wanted[name] = results
        differ = differing(results, wanted.get(EQUALS.get(name, "none") or name, results))
        del results
        taken = where.timed(lambda: step(backbone, microbatches, keep=False), device, repeats)
        host = backbone.policy.host
        found["policies"][name] = {
            "seconds": taken,
            "peak_bytes": where.peak_bytes(
                lambda: step(backbone, microbatches, keep=False), device
            ),
            "left_bytes": left(backbone, microbatches[0]),
            "planned_bytes": planned(backbone.config),
            "late_groups": host.late if host is not None else None,
            "host_bytes": host.pool.slabs * 64 * 2**20 if host is not None else 0,
            "differing": differ,
        }
        print(f"{name:26} {taken['median'] * 1e3:9.1f} ms, differing: {len(differ)}", flush=True)
    return found


def _attention(backbone: "Backbone") -> str:
    from kimi_pretrain.engine.packed_attention import PackedCoreAttention

    modules = backbone.chunks[0].modules()
    return next(type(one).__name__ for one in modules if isinstance(one, PackedCoreAttention))


def step(
    backbone: "Backbone", microbatches: Sequence["Microbatch"], keep: bool = True
) -> dict[str, Tensor]:
    """Go forward and backward, some forward passes ahead; return losses and gradients, if kept."""
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


def _loss(backbone: "Backbone", one: "Microbatch") -> Tensor:
    losses = backbone._forward(one, backbone.models[0], one.labels)
    return (losses * one.loss_mask).sum()


def differing(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the tensors whose bits differ, each with its relative distance."""
    return {
        name: float((found[name] - value).norm() / value.norm())
        for name, value in wanted.items()
        if not torch.equal(found[name], value)
    }


def left(backbone: "Backbone", one: "Microbatch") -> int:
    """Return the bytes on the device that a forward pass leaves behind, one before it likewise.

    With host memory: of groups that have been let go by, so the last two layers' are still there.
    """
    backbone.policy.begin_step()
    graphs, found = [], []
    with LiveBytes() as live:
        for _ in range(2):
            graphs.append(_loss(backbone, one))
            gc.collect()
            found.append(live.now())
    return found[1] - found[0]


def planned(config: Config) -> int:
    """Return what the memory plan says of the same bytes; none of it moved."""
    layer = sum(tensor.size for tensor in layer_tensors(config, dense=False))
    return LAYERS * layer + sum(tensor.size for tensor in head_tensors(config))


# Results ------------------------------------------------------------------------------------------


def targets(found: Found) -> list[dict[str, Any]]:
    """Return what must hold, with what was found; `exact` where a miss is an error.

    A kernel that does not repeat itself (the control) says nothing of a policy.
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
    if found["about"]["device"] == "cuda":
        ratio = _ratio(found, "recompute")
        rows.append((f"recompute: at most {AT_MOST} x the step without", f"{ratio:.3f}",
                     ratio <= AT_MOST, False))  # fmt: skip
    return [{"target": a, "found": b, "met": c, "exact": d} for a, b, c, d in rows]


def _ratio(found: Found, name: str) -> float:
    policies = found["policies"]
    return policies[name]["seconds"]["median"] / policies["none"]["seconds"]["median"]


def page(found: Found) -> str:
    """Return the results as a page to read."""
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
    lines = [
        *where.heading("Policies over saved tensors", found),
        *verdicts(found["targets"], {"target": "target", "found": "measured", "met": "met"}),
        f"{sizes['layers']} layers of width {sizes['hidden']}, {sizes['experts']} experts, "
        f"{sizes['microbatches']} microbatches of {sizes['tokens']:,} tokens, "
        f"{sizes['in_flight']} in flight, {sizes['attention']}. Peak: above weights and gradients. "
        "Bytes a token: on the device after a forward pass, of both layers, the last norm, head "
        "and loss; the plan counts what waits on the host as well.",
        "",
        *table(
            ["policy", "step, ms", "over none", "peak, MiB", "bytes a token", "by the plan",
             "host, MiB", "groups brought late"],
            rows,
        ),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
