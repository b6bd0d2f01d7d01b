"""Simulates DEP at Kimi K2.5's size, from 8 to 4,096 ranks, with the project's own planners.

The pipeline of the language model is simulated pass by pass. The project's code plans and packs the
data, estimates item costs and assigns items to ranks. Device speeds are assumptions
(`benchmarks/sim/assumptions.py`). No GPU is needed, and nothing was timed on one. Writes
results/sim_dep.json and .md, the picture of the docs and the tables of docs/dep_simulation.md.

    python benchmarks/sim_dep.py               # the committed results, minutes on one core
    python benchmarks/sim_dep.py --bubbles     # update only the tables of work in bubbles
    python benchmarks/sim_dep.py --quick       # seconds; figures not to quote
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.result import RESULTS, versions, write
from benchmarks.sim import report
from benchmarks.sim.assumptions import Assumptions, gradient_sum_seconds
from benchmarks.sim.backbone import text_seconds
from benchmarks.sim.bubbles import SCATTER, bubble_grid, run_bubbles
from benchmarks.sim.corpus import (
    DOCUMENT_TEXT,
    TEXT_MEDIAN,
    Library,
    Mix,
    facts,
    read_mix,
)
from benchmarks.sim.phases import BYTES
from benchmarks.sim.study import SCHEMES, Case, Found, config_of, run
from benchmarks.sim.variations import STEPS, grid, variations
from kimi_pretrain.dep.pass_costs import BACKWARD
from kimi_pretrain.telemetry.mfu import active_weights
from kimi_pretrain.tools.step_parts import encoder_weights

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "dep_simulation.md"
PICTURE = ROOT / "docs" / "pictures" / "dep_efficiency.png"


def simulate(quick: bool) -> dict[str, Any]:
    """Return all results, ready for JSON."""
    begin, mix = time.process_time(), read_mix()
    library = Library(mix)
    cases = []
    for case in grid(quick):
        found = run(case, list(SCHEMES), library)
        cases.append({**_key(case), "found": _plain(found)})
        _say(f"{case.ranks} ranks, {case.vision:.0%}", found)
    varied = []
    for variation in variations(quick):
        found = run(variation.case, variation.schemes, library)
        entry = {"group": variation.group, "label": variation.label, **_key(variation.case)}
        brief = {n: {"efficiency": f.efficiency, "error": f.error} for n, f in found.items()}
        varied.append({**entry, "found": _rounded(brief)})
        _say(f"{variation.case.vision:.0%}, {variation.group}: {variation.label}", found)
    return {
        "date": date.today().isoformat(),
        "bubbles_date": date.today().isoformat(),
        "versions": versions("numpy"),
        "quick": quick,
        "processor_seconds": time.process_time() - begin,
        "assumptions": assumptions(mix),
        "layouts": {ranks: layout(ranks) for ranks in STEPS},
        "grid": cases,
        "bubbles": simulate_bubbles(quick),
        "variations": varied,
    }


def simulate_bubbles(quick: bool) -> list[dict[str, Any]]:
    """Return the results with vision work inside the pipeline's bubbles, ready for JSON."""
    library, cases = Library(read_mix()), []
    for one in bubble_grid(quick):
        # The baseline is DEP without bubbles, at the same cost error.
        off = replace(one.case, assumed=replace(one.case.assumed, cost_scatter=SCATTER))
        today = _plain({"split": run(off, ["split"], library)["split"]}) if not one.chunks else {}
        found = today | run_bubbles(one, library)
        chunks = one.chunks or config_of(one.case).layout.vpp
        cases.append({**_key(one.case), "chunks": chunks, "found": _rounded(found)})
        shown = ", ".join(f"{name} {100 * way['efficiency']:.1f}" for name, way in found.items())
        print(f"bubbles, {one.case.ranks} ranks, {chunks} chunks, {one.case.vision:.0%}: {shown}")
    return cases


def _key(case: Case) -> dict[str, Any]:
    return {"ranks": case.ranks, "vision": case.vision, "steps": case.num_steps}


def _plain(found: dict[str, Found]) -> dict[str, Any]:
    return {name: _rounded(asdict(one)) for name, one in found.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return round(value, 6) if isinstance(value, float) else value


def _say(what: str, found: dict[str, Found]) -> None:
    shown = ", ".join(f"{name} {100 * one.efficiency:.1f}" for name, one in found.items())
    print(f"{what}: {shown}", flush=True)


def assumptions(mix: Mix) -> dict[str, Any]:
    """Return every assumption with its value, and the quantities that follow from them."""
    case = Case(max(STEPS), 0.1, 1)
    config, assumed = config_of(case), case.assumed
    return {
        **asdict(Assumptions()),
        "gradient_sum_seconds": round(gradient_sum_seconds(config, assumed), 4),
        "encoder_parameters": encoder_weights(config),
        "active_parameters": active_weights(config.model.language),
        "language_backward": BACKWARD,
        "bubble_filling": False,
        "seq_len": config.data.seq_len,
        "rows_per_rank": case.rows_per_rank,
        "limits": dict(case.limits),
        "max_patches_per_chunk": config.dep.max_patches_per_chunk,
        "planned_split_efficiency": config.dep.split_efficiency,
        "bytes_of_a_number": BYTES,
        "document_text": DOCUMENT_TEXT,
        "text_median": TEXT_MEDIAN,
        "seed": case.seed,
        **facts(mix, config.data.limits, config.model.vision, config.data.seq_len),
    }


def layout(ranks: int) -> dict[str, Any]:
    """Return the layout for a number of ranks."""
    case = Case(ranks, 0.1, 1)
    config = config_of(case)
    sizes = config.layout
    return {
        "pp": sizes.pp,
        "vpp": sizes.vpp,
        "dp": sizes.dp,
        "ep": sizes.ep,
        "microbatches": config.num_microbatches(),
        "rows": config.data.rows_per_step,
        "text_seconds": round(text_seconds(config, case.assumed), 4),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few steps, few variations")
    parser.add_argument(
        "--bubbles", action="store_true", help="only work in bubbles; keep the rest"
    )
    parser.add_argument("--out", type=Path, help="JSON file; the page goes beside it")
    parser.add_argument("--picture", type=Path, help="PNG file")
    args = parser.parse_args(arguments)
    if args.quick and not (args.out and args.picture):
        parser.error("--quick needs --out and --picture: its figures must not replace the results")
    out, picture = args.out or RESULTS / "sim_dep.json", args.picture or PICTURE
    if args.bubbles:
        known = json.loads(out.read_text())
        today, bubbles = date.today().isoformat(), simulate_bubbles(args.quick)
        again = {"bubbles_date": today, "bubbles": bubbles}
        found = json.loads(json.dumps(known | again))
    else:
        found = json.loads(json.dumps(simulate(args.quick)))
    write(found, out, report.page(found))
    report.picture(found, picture)
    if not args.quick:
        DOCUMENT.write_text(report.filled(DOCUMENT.read_text(), found))


if __name__ == "__main__":
    main()
