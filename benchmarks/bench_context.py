"""Measures attention memory for a long document under context parallelism, now and before.

Today ranks gather latents and project them up a few heads at a time, and do so again in the
backward pass. Before, each rank gathered keys and values of all heads, and autograd kept them. The
benchmark runs one of four ranks, with K2's heads and latents, over one document of 8,192 tokens. It
reports the peak memory of a forward and backward pass above the weights, and the memory held
between the two passes. The other ranks' parts are copies of this rank's part: the byte counts are
right, the values are not (`tests/dist/test_sequence.py` compares values).

    python -m benchmarks.bench_context             # minutes; context_cpu.*
    python -m benchmarks.bench_context --quick     # seconds; figures not to quote
"""

import gc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import device as where
from benchmarks.memory.live import LiveBytes
from benchmarks.result import table, verdicts, write
from kimi_pretrain.config import Config, load_config

if TYPE_CHECKING:
    from kimi_pretrain.engine.latent_attention import PackedLatentAttention
    from kimi_pretrain.engine.packed_attention import PackedRows

RANKS, AT_MOST = 4, 0.25
POLICIES: dict[str, list[str]] = {"none": [], "mla_up": ["mla_up"]}
HEADS = {"num_heads": 64, "qk_nope_dim": 128, "qk_rope_dim": 64, "v_dim": 128, "kv_lora_rank": 512}
SHORT = {"num_heads": 64, "qk_nope_dim": 16, "qk_rope_dim": 8, "v_dim": 16, "kv_lora_rank": 64}

Found = Mapping[str, Any]


def main() -> None:
    arguments = where.parser(__doc__, "context").parse_args()
    device = where.device_of(arguments)
    about = where.about(arguments, device, "megatron-core")
    config = config_of(arguments.quick)
    from kimi_pretrain.engine import mesh as engine_mesh

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=RANKS)
    try:
        engine_mesh.build(config.layout, device)
        found = {"about": about, **measure(config, device)}
    finally:
        engine_mesh.stop()
    found["targets"] = targets(found)
    write(found, arguments.out, page(found))


def config_of(quick: bool) -> Config:
    """Return the configuration of one layer; everything except attention is small."""
    language = {
        **(SHORT if quick else HEADS), "hidden_size": 256, "num_layers": 1, "q_lora_rank": 96,
    }  # fmt: skip
    sizes = [f"model.language.{key}={value}" for key, value in language.items()]
    axes = {"pp": 1, "vpp": 1, "dp": 1, "ep": 1, "cp": RANKS, "stages": "null"}
    layout = [f"layout.{key}={value}" for key, value in axes.items()]
    rest = [
        "model.vision.out_width=256", f"data.seq_len={1024 if quick else 8192}",
        "train.rows_per_microbatch=1", "train.dtype=bfloat16", "train.attention=portable",
    ]  # fmt: skip
    return load_config("tiny_cpu", [*sizes, *layout, *rest])


def measure(config: Config, device: torch.device) -> dict[str, Any]:
    """Return the peak bytes and the remaining bytes of both forms under both policies."""
    from kimi_pretrain.engine.latent_attention import PackedLatentAttention
    from kimi_pretrain.engine.packed_attention import PackedRows
    from kimi_pretrain.memory.saved import Policy, apply
    from kimi_pretrain.parallel.sequence import SequenceParts

    attention = attention_of(config, device)
    tokens, language = config.data.seq_len, config.model.language
    rows = PackedRows.of([0, tokens], [True], device, None, SequenceParts(tokens, RANKS), 1)
    forms = {"before": keys_and_values_gathered(), "now": PackedLatentAttention}
    forward = torch.ones(tokens // RANKS, 1, language.hidden_size, dtype=torch.bfloat16)
    found: dict[str, Any] = {"sizes": {"tokens": tokens, "heads": language.num_heads}, "forms": {}}
    for form, kind in forms.items():
        for name, kinds in POLICIES.items():
            attention.__class__ = kind
            apply(Policy([*kinds, "row"]), attention.modules(), attention.parameters())

            def step(again: bool = True) -> Tensor:
                x = forward.to(device).requires_grad_()
                out = attention(x, None, packed_seq_params=rows)[0]
                if again:
                    out.sum().backward()
                return out

            kept = _left(step)
            peak = where.peak_bytes(step, device)
            found["forms"][f"{form}, {name}"] = {"peak_bytes": peak, "left_bytes": kept}
            print(f"{form}, {name}: peak {peak / 2**20:,.0f} MiB", flush=True)
    return found


def attention_of(config: Config, device: torch.device) -> "PackedLatentAttention":
    """Return one layer's attention in training mode, with small random weights."""
    from megatron.core.tensor_parallel import mappings

    from kimi_pretrain.engine.model_builder import build_chunks, engine_config

    def gather(output: Tensor, part: Tensor, group: Any) -> None:
        output.view(group.size(), *part.shape).copy_(part.expand(group.size(), *part.shape))

    def scatter(output: Tensor, whole: Tensor, group: Any) -> None:
        output.copy_(whole[: len(output)])

    # The fake group leaves the other ranks' parts uninitialized, possibly NaN.
    mappings.dist_all_gather_func, mappings.dist_reduce_scatter_func = gather, scatter
    (chunk,) = build_chunks(config, engine_config(config, "portable"), "portable")
    attention = chunk.to(device).decoder.layers[0].self_attention
    with torch.no_grad():
        for param in attention.parameters():
            param.normal_(0.0, 0.02)
    return attention.train()


def keys_and_values_gathered() -> type:
    """Return the class of the former form, which gathers keys and values."""
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    from kimi_pretrain.engine.latent_attention import PackedLatentAttention

    class Former(PackedLatentAttention):
        def get_query_key_value_tensors(
            self, hidden_states: Tensor, one: Any, two: Any, rows: "PackedRows", **_: Any
        ) -> tuple[Tensor, ...]:
            cp = self.pg_collection.cp
            down, key_value = self._qkv_down_projection(hidden_states)
            widths = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
            latent, rotary = key_value.squeeze(1).split(widths, -1)
            latents = self.q_layernorm(down.squeeze(1)), self.kv_layernorm(latent)

            def up(*latents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
                return self._up_projections(*latents, rows=rows)

            query, *own = self.policy.remade("mla_up", up, *latents, rotary)
            key, value = (
                gather_from_sequence_parallel_region(x, group=cp).index_select(0, rows.row_order)
                for x in own
            )
            return query, key, value, *latents

    return Former


def _left(step: Any) -> int:
    """Return the bytes that a second forward pass leaves allocated on top of a first."""
    graphs, found = [], []
    with LiveBytes() as live:
        for _ in range(2):
            graphs.append(step(again=False))
            gc.collect()
            found.append(live.now())
    return found[1] - found[0]


def targets(found: Found) -> list[dict[str, Any]]:
    """Return the targets with the measured values."""
    rows = []
    for name in POLICIES:
        ratio = _ratio(found, name, "peak_bytes")
        told = f"policy {name}: peak at most {AT_MOST:.0%} of the former"
        rows.append({"target": told, "found": f"{ratio:.1%}", "met": ratio <= AT_MOST})
    return rows


def _ratio(found: Found, name: str, key: str) -> float:
    forms = found["forms"]
    return forms[f"now, {name}"][key] / forms[f"before, {name}"][key]


def page(found: Found) -> str:
    """Return the results as a Markdown page."""
    sizes = found["sizes"]
    rows = [
        [name, f"{one['peak_bytes'] / 2**20:,.0f}", f"{one['left_bytes'] / 2**20:,.1f}"]
        for name, one in found["forms"].items()
    ]
    lines = [
        *where.heading("Attention of a document over several ranks", found),
        *verdicts(found["targets"], {"target": "target", "found": "measured", "met": "met"}),
        f"One layer's attention in bfloat16, {sizes['heads']} heads, one document of "
        f"{sizes['tokens']:,} tokens over {RANKS} ranks, portable attention. Left: between forward "
        "and backward pass.",
        "",
        *table(["form, policy", "peak, MiB", "left, MiB"], rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
