"""Benchmarks the Muon step against torch.optim.Muon, and the accuracy of Newton-Schulz in bf16.

Both sides update the same matrices from the same gradients in one process, in turns: one layer of
Moonlight and one of Kimi K2, with some of their experts. Ratios are computed within a round. Then
the benchmark times single matrices and compares each form with the same iteration in fp64. A run
takes about 8 minutes on 2 cores, uses 20 GB of memory and needs a quiet machine.

    python benchmarks/bench_muon.py                  # the committed results
    python benchmarks/bench_muon.py --quick          # seconds; figures not to quote
    python benchmarks/bench_muon.py --scale 4        # every width a quarter; not to quote either
    python benchmarks/bench_muon.py --device cuda    # writes muon_h200.*: K2 with 64 experts, the
                                                     # share of the matmul peak, AdamW's step

All but the first and the last write to runs/bench_muon, so that the committed results stay.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.muon import accuracy, measure, report
from benchmarks.muon.layers import Layer, k2, moonlight
from benchmarks.result import RESULTS, cores, versions, write

ROOT = Path(__file__).resolve().parent.parent
ASIDE = ROOT / "runs" / "bench_muon"  # for partial runs
NAMES = {"cpu": "muon_cpu.json", "cuda": "muon_h200.json"}
# Experts of Moonlight and of K2, K2's query up-projection (first whole, as its size is often
# quoted, then only the content rows, as Kimi splits it), a square matrix and a small one.
SHAPES = [(1408, 2048), (2048, 7168), (1536, 12288), (8192, 1536), (2048, 2048), (512, 2048)]
# Aspect ratios of both layers' shapes. The last shape is also run with other segments.
STUDIED = [(512, 704), (512, 512), (256, 2048), (512, 1792)]


@dataclass(frozen=True)
class Plan:
    """Scope of the measurement.

    Attributes:
        layers: layers by their names in the results.
        rounds: steps of each side, for each layer.
        shapes: shapes of the single matrices.
        studied: shapes of the accuracy study.
        adamw: True if AdamW's step is timed as well.
        peak: side of the square product whose speed counts as the matmul peak.
    """

    layers: Mapping[str, Layer]
    rounds: Mapping[str, int]
    shapes: Sequence[tuple[int, int]]
    studied: Sequence[tuple[int, int]]
    adamw: bool
    peak: int


def main() -> None:
    arguments = parse()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("error: --device cuda: torch finds no CUDA device here")
    plan = plan_of(arguments)
    load, begin = [round(x, 2) for x in os.getloadavg()], time.monotonic()
    found: dict[str, Any] = {"layers": {}}
    for name, layer in plan.layers.items():
        found["layers"][name] = measure.steps(layer, plan.rounds[name], device, plan.adamw)
        print(f"{name}: {json.dumps(found['layers'][name]['ratio'])}", flush=True)
    found["shapes"] = measure.shapes(plan.shapes, 3, device)
    found["matmul"] = {
        "size": plan.peak,
        "flops_per_second": measure.matmul_peak(plan.peak, 5, device, torch.bfloat16),
    }
    found["accuracy"] = [accuracy.study(*shape) for shape in plan.studied]
    found["orders"] = accuracy.orders(*plan.studied[-1])
    found = {"about": describe(arguments, device, load, time.monotonic() - begin), **found}
    found["targets"] = report.targets(found)
    write(found, arguments.out, report.page(found))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=sorted(NAMES), default="cpu")
    parser.add_argument("--quick", action="store_true", help="two experts, an eighth of each width")
    parser.add_argument("--scale", type=int, default=1, choices=(1, 2, 4, 8), help="divides widths")
    parser.add_argument("--rounds", type=int, help="steps of each side; default 5 and 3")
    parser.add_argument("--only", choices=("moonlight", "k2"), help="one layer")
    parser.add_argument("--out", type=Path, help=f"JSON; default {NAMES['cpu']} or {NAMES['cuda']}")
    arguments = parser.parse_args()
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: expected 1 or more")
    if arguments.quick:
        arguments.scale = 8
    whole = arguments.scale == 1 and not arguments.only and arguments.rounds is None
    folder = RESULTS if whole else ASIDE
    arguments.out = arguments.out or folder / NAMES[arguments.device]
    return arguments


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Return the plan that the arguments select."""
    scale, on_gpu = arguments.scale, arguments.device == "cuda"
    experts = {"moonlight": 64, "k2": 64} if on_gpu else {"moonlight": 16, "k2": 8}
    if arguments.quick:
        experts = {"moonlight": 2, "k2": 2}
    make = {"moonlight": moonlight, "k2": k2}
    names = [arguments.only] if arguments.only else list(make)
    rounds = {"moonlight": 10, "k2": 10} if on_gpu else {"moonlight": 5, "k2": 3}
    return Plan(
        layers={name: make[name](experts[name], scale) for name in names},
        rounds={
            name: arguments.rounds or (1 if arguments.quick else rounds[name]) for name in names
        },
        shapes=[(rows // scale, columns // scale) for rows, columns in SHAPES],
        studied=[(64, 160)] if arguments.quick else STUDIED,
        adamw=on_gpu,
        peak=8192 if on_gpu else 4096 // scale,
    )


def describe(
    arguments: argparse.Namespace, device: torch.device, load: Sequence[float], seconds: float
) -> dict[str, Any]:
    """Return the metadata needed to judge the results."""
    where = cores()
    if device.type == "cuda":
        where = f"{torch.cuda.get_device_name(device)}; {where}"
    return {
        "date": date.today().isoformat(),
        "machine": where,
        "device": device.type,
        "threads": torch.get_num_threads(),
        "load_before": list(load),
        "seconds": round(seconds),
        "quick": arguments.scale != 1,
        "scale": arguments.scale,
        "versions": versions("torch"),
    }


if __name__ == "__main__":
    main()
