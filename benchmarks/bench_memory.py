"""Measures the activation memory that each saved-tensor policy leaves per layer, and its cost.

    layer       bytes per token that one layer of K2.5 leaves at its real widths, both counted and
                by the plan's formulas, and the total on the first of 16 stages
    attention   peak of attention over a document of 8,192 tokens against the whole-matrix form
    host_time   the policy's own host time for one saved tensor
    demo        the demo's step time with recompute over the time without, four processes
    policies    two layers under each policy: step time, memory, and whether results are bit-exact

On CUDA only `policies` runs. A part replaces its section of the result file and keeps the others:

    python -m benchmarks.bench_memory                     # memory_cpu.*, a quarter of an hour
    python -m benchmarks.bench_memory --device cuda       # memory_cuda.*
    python -m benchmarks.bench_memory --only layer demo   # some parts
    python -m benchmarks.bench_memory --quick             # a minute; figures not to quote
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import device as where
from benchmarks.memory import demo_steps, hook_cost, layer_bytes, policies
from benchmarks.memory.attention_peak import attention_peak
from benchmarks.result import table, verdicts, write
from kimi_pretrain.engine import mesh as engine_mesh

DOCUMENT, HEADS, OF_WHOLE = 8192, 4, 0.10
Found = Mapping[str, Any]


def main() -> None:
    parser = where.parser(__doc__, "memory")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    arguments = parser.parse_args()
    device = where.device_of(arguments)
    about = where.about(arguments, device, "megatron-core", "triton")
    found = {**earlier(arguments.out, about), "about": about}
    own = ["policies"] if arguments.device == "cuda" else list(PARTS)
    for name in arguments.only or own:
        if name not in own:
            sys.exit(f"error: --only {name}: without --device cuda")
        print(f"{name}:", flush=True)
        load = round(os.getloadavg()[0], 2)
        found |= {name: MEASURE[name](device, arguments.quick)}
        found.setdefault("measured", {})[name] = {"date": about["date"], "load_before": load}
        found["targets"] = targets(found)
        write(found, arguments.out)
    arguments.out.with_suffix(".md").write_text(page(found))
    print(page(found))
    if not all(one["met"] for one in found["targets"] if one["exact"]):
        sys.exit("error: a policy that must change no bit did, or bytes are not those of the plan")


def earlier(out: Path, about: Found) -> dict[str, Any]:
    """Return the existing results if software and sizes are the same, otherwise an empty dict."""
    found = json.loads(out.read_text()) if out.is_file() else {}
    same = all(found.get("about", {}).get(key) == about[key] for key in ("versions", "quick"))
    return found if same else {}


# Parts --------------------------------------------------------------------------------------------


def _of_one_process(measure: Callable[[engine_mesh.Mesh, torch.device, bool], dict[str, Any]]):
    def run(device: torch.device, quick: bool) -> dict[str, Any]:
        mesh = engine_mesh.start(policies.config_of(device.type, quick).layout)
        try:
            return measure(mesh, device, quick)
        finally:
            engine_mesh.stop()

    return run


def _attention(device: torch.device, quick: bool) -> dict[str, Any]:
    tokens = 512 if quick else DOCUMENT
    peaks = {form: attention_peak(form, tokens, HEADS) for form in ("blocks", "whole")}
    return {"tokens": tokens, "heads": HEADS, "peak_bytes": peaks}


def _demo(device: torch.device, quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return demo_steps.measure(Path(folder), quick)


MEASURE: dict[str, Callable[[torch.device, bool], dict[str, Any]]] = {
    "layer": _of_one_process(lambda mesh, _, quick: layer_bytes.measure(mesh, quick)),
    "attention": _attention,
    "host_time": _of_one_process(lambda mesh, _, quick: hook_cost.measure(mesh, quick)),
    "demo": _demo,
    "policies": _of_one_process(policies.measure),
}
PARTS = tuple(MEASURE)


# Results ------------------------------------------------------------------------------------------


def targets(found: Found) -> list[dict[str, Any]]:
    """Return the targets of all parts in the results, with the measured values."""
    made: list[dict[str, Any]] = []
    if "layer" in found:
        made += layer_bytes.targets(found["layer"])
    if "attention" in found:
        one = found["attention"]
        share = one["peak_bytes"]["blocks"] / one["peak_bytes"]["whole"]
        what = f"attention of {one['tokens']:,} tokens: at most {OF_WHOLE:.0%} of the whole matrix"
        met = share <= OF_WHOLE
        made.append({"target": what, "found": f"{share:.1%}", "met": met, "exact": False})
    if "host_time" in found:
        made += hook_cost.targets(found["host_time"])
    if "demo" in found:
        made += demo_steps.targets(found["demo"])
    if "policies" in found:
        made += policies.targets(found["policies"], found["about"]["device"])
    return made


def page(found: Found) -> str:
    """Return the results as a Markdown page."""
    made = where.heading("Policies over saved tensors", found)
    made += verdicts(found["targets"], {"target": "target", "found": "measured", "met": "met"})
    made += [
        "When, and the load of the machine before: "
        + "; ".join(f"{name} {one['date']}, {one['load_before']}"
                    for name, one in found["measured"].items()) + ".",
        "",
    ]  # fmt: skip
    sections = {"layer": _layer_lines, "attention": _attention_lines, "demo": _demo_lines,
                "host_time": _host_time_lines, "policies": policies.lines}  # fmt: skip
    for name, lines in sections.items():
        made += [*lines(found[name]), ""] if name in found else []
    return "\n".join(made)


def _layer_lines(found: Found) -> list[str]:
    stage = found["stage"]
    layers = max(stage["layers"])
    return [
        "## What a layer leaves for its backward pass",
        "",
        f"One layer with experts of `configs/{layer_bytes.PRESET}.yaml`, bf16, one process, "
        f"{found['tokens']} tokens, portable attention: live storages, and the formulas of the "
        f"plan. Fused attention adds {layer_bytes.LOG_SUMS} bytes a head and token. With offload: "
        "bytes that stay on the device. The first stage (PP16 x VPP2) has "
        f"{stage['in_flight']} microbatches of a chunk in flight, {stage['in_flight_overlapped']} "
        f"with overlapped experts, {stage['tokens']:,} tokens each: what its rank holds with "
        f"{layers} such layers a chunk. With offload {layer_bytes.ON_THEIR_WAY} layers on their "
        "way come on top of that.",
        "",
        *table(
            ["policy", "bytes a token", "by the plan", "MB a layer and microbatch",
             "first stage, GB", "overlapped, GB"],
            layer_bytes.rows(found),
        ),
    ]  # fmt: skip


def _attention_lines(found: Found) -> list[str]:
    rows = [[form, f"{peak / 2**20:,.1f}"] for form, peak in found["peak_bytes"].items()]
    return [
        "## Peak of attention",
        "",
        f"One document of {found['tokens']:,} tokens, {found['heads']} heads, widths 192 and 128, "
        "fp32, forward and backward, inputs and gradients included; counted on the meta device.",
        "",
        *table(["form", "peak, MiB"], rows),
    ]


def _host_time_lines(found: Found) -> list[str]:
    rows = [
        [kind, f"{one['added']:.1f}", f"{one['work']:.1f}", f"{one['own']:.1f}",
         found["layer"][kind]]
        for kind, one in found["kinds"].items()
    ]  # fmt: skip
    rows.append(["a layer's mean", "", "", f"{hook_cost.mean_own(dict(found)):.1f}",
                 sum(found["layer"].values())])  # fmt: skip
    return [
        "## Host time for a saved tensor",
        "",
        f"Microseconds, both ways; {found['tensors']} tensors of {list(hook_cost.SHAPE)} fp32, "
        f"the least of {found['rounds']} rounds. Work is what the policy has to do: compute the "
        "output again, FP8 codes and back, copies to the host and back. Own: the rest, without "
        "what is kept for it (an input of what is computed again, FP8 codes and scales), which "
        "counts by itself. Numbers of a layer with every treatment.",
        "",
        *table(["kind", "added", "work", "own", "of a layer"], rows),
    ]


def _demo_lines(found: Found) -> list[str]:
    rows = []
    for what in found["off"]:
        each = sorted(demo_steps.ratios(found, what))
        times = [f"{median(found[form][what]):.3f}" for form in demo_steps.FORMS]
        quartiles = f"{each[len(each) // 4]:.3f} - {each[-1 - len(each) // 4]:.3f}"
        rows.append([what, *times, f"{median(each):.3f}", quartiles])
    return [
        "## The demo's step with recompute",
        "",
        f"`configs/{demo_steps.PRESET}.yaml` in {found['processes']} processes: "
        f"{found['pairs']} batches, each with and without, in turns which first, behind "
        f"{found['warm_up']} that do not count. Seconds, medians; the ratio is the median of the "
        "batches' own, with its quartiles. Backbone: forward and backward passes of rank 0. "
        "Processor: of all processes together.",
        "",
        *table(["", *demo_steps.FORMS, "on / off", "quartiles"], rows),
    ]


if __name__ == "__main__":
    main()
