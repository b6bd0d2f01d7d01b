"""Compares three forms of attention over packed documents in time, memory and error.

Widths are those of Kimi K2. `flex` is torch's FlexAttention (`train.attention: flex`). `portable`
works block by block. `torch` is torch's scaled_dot_product_attention, called once per document,
with values padded to the width of the queries. It returns no maxima, so QK-Clip cannot use it; it
shows the cost of the maxima and the mask. On CUDA it is restricted to torch's fused kernels.

Errors are relative to one matrix of logits in fp64 from the same inputs. Without CUDA `flex` is the
operator below torch's function, which holds whole matrices, so its time there means nothing.

    python -m benchmarks.bench_attention                 # writes attention_cpu.*; minutes
    python -m benchmarks.bench_attention --device cuda   # attention_cuda.*
    python -m benchmarks.bench_attention --quick         # seconds; figures not to quote
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import device as where
from benchmarks.muon.measure import matmul_peak
from benchmarks.result import table, verdicts, write
from kimi_pretrain.attention.blockwise import block_attention, blocks_of, whole_attention
from kimi_pretrain.attention.flex import block_mask, eager_kernel, flex_attention
from kimi_pretrain.attention.spans import KeySpans

FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
HEADS, QK, V = 64, 192, 128  # sizes of Kimi K2
ROWS = {
    "one document of 4,096": [4096],
    "16 documents in 4,096": [1450, 800, 520, 380, 260, 180, 130, 100, 80, 60, 45, 35, 25, 16, 9,
                              6],
    "one document of 32,768": [32768],
}  # fmt: skip
SMALL = {"one document": [96], "three documents": [40, 50, 6]}
WORST = {"bfloat16": 2**-6, "float32": 1e-4}  # relative errors; bf16 has a spacing of 2**-8
CHECKED = [300, 180, 32]  # document lengths of the row that is checked for errors
BACKWARD = 2.5  # operations of backward over forward; includes the recomputed logits

Found = Mapping[str, Any]
Form = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""Maps q, k [tokens, heads, qk] and v [tokens, heads, v] to output [tokens, heads, v] and maxima.
"""


@dataclass(frozen=True)
class Plan:
    """Sizes and repeats.

    Attributes:
        rows: document lengths of each row, by name.
        heads, qk, v: sizes of the attention.
        dtype: dtype of the inputs.
        repeats: timed calls of each form and pass.
        peak: side of the square product whose speed counts as the matmul peak.
    """

    rows: Mapping[str, Sequence[int]]
    heads: int
    qk: int
    v: int
    dtype: torch.dtype
    repeats: int
    peak: int


def main() -> None:
    arguments = where.parser(__doc__, "attention").parse_args()
    device = where.device_of(arguments)
    found: dict[str, Any] = {"about": where.about(arguments, device, "triton")}
    plan = plan_of(arguments.device, arguments.quick)
    rate = matmul_peak(plan.peak, 5, device, plan.dtype)
    found |= {
        "sizes": {"heads": plan.heads, "qk": plan.qk, "v": plan.v, "dtype": str(plan.dtype)[6:]},
        "matmul_flops_per_second": rate,
        "errors": errors(plan, device),
        "rows": [],
    }
    for name, lengths in plan.rows.items():
        for form in ("flex", "portable", "torch"):
            row = {"row": name, "tokens": sum(lengths), "form": form}
            row |= measure(form, lengths, plan, device)
            found["rows"].append(row)
            print(f"{name:24} {form:9} {row['both']['median'] * 1e3:10.2f} ms", flush=True)
    found["targets"] = targets(found)
    write(found, arguments.out, page(found))
    if not all(one["met"] for one in found["targets"]):
        sys.exit("error: a form is further from fp64 than its type explains")


def plan_of(device: str, quick: bool) -> Plan:
    """Return the plan for a device."""
    if quick:
        return Plan(SMALL, 2, 24, 16, torch.float32, 1, 256)
    if device == "cuda":
        return Plan(ROWS, HEADS, QK, V, torch.bfloat16, 10, 8192)
    short = {name: lengths for name, lengths in ROWS.items() if sum(lengths) == 4096}
    return Plan(short, 4, QK, V, torch.float32, 3, 2048)


# The forms ----------------------------------------------------------------------------------------


def form_of(name: str, lengths: Sequence[int], scale: float, device: torch.device) -> Form:
    """Return a form for these document lengths, with everything that a microbatch prepares once."""
    spans = spans_of(lengths)
    if name == "flex":
        mask, kernel = block_mask(spans, device), None if device.type == "cuda" else eager_kernel
        return lambda q, k, v: flex_attention(q, k, v, mask, scale, kernel)
    if name == "portable":
        blocks = blocks_of(spans, device)
        return lambda q, k, v: block_attention(q, k, v, blocks, scale)
    if name == "whole":
        return lambda q, k, v: whole_attention(q, k, v, spans, scale)
    return partial(_by_torch, lengths=list(lengths), scale=scale)


def spans_of(lengths: Sequence[int]) -> KeySpans:
    """Return the keys that each token of a row of documents attends to."""
    return KeySpans.of([0, *accumulate(lengths)], [True] * len(lengths))


def _by_torch(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float
) -> tuple[Tensor, None]:
    wide = F.pad(v, (0, q.shape[2] - v.shape[2]))
    parts = zip(*(x.transpose(0, 1)[None].split(lengths, 2) for x in (q, k, wide)), strict=True)
    with sdpa_kernel(FUSED) if q.is_cuda else nullcontext():
        out = [F.scaled_dot_product_attention(*part, is_causal=True, scale=scale) for part in parts]
    return torch.cat(out, 2)[0].transpose(0, 1)[..., : v.shape[2]], None


def inputs(plan: Plan, tokens: int, device: torch.device) -> list[Tensor]:
    """Return random q, k and v, and a random gradient of the output, [tokens, heads, width]."""
    draw = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(tokens, plan.heads, width, generator=draw, device=device).to(plan.dtype)
        for width in (plan.qk, plan.qk, plan.v, plan.v)
    ]


def backward(form: Form, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor | None]:
    """Return the output, the gradients of q, k and v, and the maxima."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, maxima = form(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad), maxima]


# Measuring ----------------------------------------------------------------------------------------


def errors(plan: Plan, device: torch.device) -> dict[str, dict[str, float | None]]:
    """Return the relative error (Frobenius) of output, gradients and maxima for each form."""
    scale = plan.qk**-0.5
    given = inputs(plan, sum(CHECKED), device)
    whole = form_of("whole", CHECKED, scale, device)
    wanted = backward(whole, *(x.double() for x in given))
    found: dict[str, dict[str, float | None]] = {}
    for name in ("flex", "portable", "torch"):
        got = backward(form_of(name, CHECKED, scale, device), *given)
        pairs = zip(("out", "dq", "dk", "dv", "maxima"), got, wanted, strict=True)
        found[name] = {part: _distance(one, other) for part, one, other in pairs}
    return found


def _distance(got: Tensor | None, wanted: Tensor | None) -> float | None:
    if got is None or wanted is None:
        return None
    return float((got.double() - wanted).norm() / wanted.norm())


def measure(name: str, lengths: Sequence[int], plan: Plan, device: torch.device) -> dict[str, Any]:
    """Return the seconds, the peak of allocated bytes and the necessary operations."""
    q, k, v, grad = inputs(plan, sum(lengths), device)
    form = form_of(name, lengths, plan.qk**-0.5, device)

    def forward() -> None:
        with torch.no_grad():
            form(q, k, v)

    def both() -> None:
        backward(form, q, k, v, grad)

    pairs = sum(length * (length + 1) // 2 for length in lengths)
    operations = 2 * pairs * plan.heads * (plan.qk + plan.v)
    return {
        "forward": where.timed(forward, device, plan.repeats),
        "both": where.timed(both, device, plan.repeats),
        "peak_bytes": where.peak_bytes(both, device),
        "operations": {"forward": operations, "both": operations * (1 + BACKWARD)},
    }


def targets(found: Found) -> list[dict[str, Any]]:
    """Return the error bound of each form with the measured error."""
    bound = WORST[found["sizes"]["dtype"]]
    rows = []
    for name, each in found["errors"].items():
        worst = max(value for value in each.values() if value is not None)  # a NaN fails below
        met = all(value < bound for value in each.values() if value is not None)
        what = f"{name}: error at most {bound:.1e}"
        rows.append({"target": what, "found": f"{worst:.1e}", "met": met})
    return rows


# The page -----------------------------------------------------------------------------------------


def page(found: Found) -> str:
    """Return the results as a Markdown page."""
    sizes, rate = found["sizes"], found["matmul_flops_per_second"]
    lines = where.heading("Attention over packed documents", found)
    lines += [
        *verdicts(found["targets"], {"target": "target", "found": "measured", "met": "met"}),
        f"{sizes['heads']} heads, queries and keys {sizes['qk']} wide, values {sizes['v']}, "
        f"{sizes['dtype']}. Operations are those of the logits that are shown, a backward "
        f"pass {BACKWARD} times a forward; the matmul peak, {rate / 1e12:.3g} TFLOP/s, is the "
        "fastest of five square products. Peak memory: above the inputs, the gradients included.",
        "",
        *table(
            ["row", "form", "forward, ms", "and backward, ms", "tokens/s", "TFLOP/s",
             "of the matmul peak", "peak, MiB", "first call, s"],
            [_cells(row, rate) for row in found["rows"]],
        ),
        "",
        "## Error against one matrix of logits in fp64",
        "",
        "Relative, Frobenius. torch's attention gives no maxima.",
        "",
        *table(
            ["form", "output", "dq", "dk", "dv", "maxima"],
            [
                [name, *("" if value is None else f"{value:.1e}" for value in row.values())]
                for name, row in found["errors"].items()
            ],
        ),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _cells(row: Found, rate: float) -> list[str]:
    seconds = row["both"]["median"]
    speed = row["operations"]["both"] / seconds
    return [
        row["row"], row["form"], f"{row['forward']['median'] * 1e3:.2f}", f"{seconds * 1e3:.2f}",
        f"{row['tokens'] / seconds:,.0f}", f"{speed / 1e12:.3g}", f"{speed / rate:.0%}",
        f"{row['peak_bytes'] / 2**20:,.0f}",
        f"{row['forward']['first'] + row['both']['first']:.1f}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
