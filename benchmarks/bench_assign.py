"""Measures how well the vision planner balances a global batch, and how long planning takes.

Quality is the load of the slowest rank over max(mean, largest item), for longest processing time
and for `place`, with and without splits, at several loads. A certified lower bound is reported next
to it: where the bound is above 1.02, no assignment is within 2%. The benchmark also reports how far
tokens travel. Speed is the time for 20,000 items on 4,096 ranks, including splits, balance and
locality. Writes a result file with versions and date.

    python benchmarks/bench_assign.py
    python benchmarks/bench_assign.py --ranks 8 64 --repeats 3      # a short form
"""

import argparse
import platform
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.heavy_tail import (  # noqa: E402
    PATCHES_PER_TOKEN,
    certified_bound,
    heavy_tailed_tokens,
    simple_bound,
)
from benchmarks.result import RESULTS, write  # noqa: E402
from kimi_pretrain.dep.assign import (  # noqa: E402
    Placement,
    Places,
    choose_splits,
    loads,
    longest_processing_time,
    moved,
    place,
)
from kimi_pretrain.dep.cost import CostModel  # noqa: E402
from moonvit3d.config import MoonViTConfig  # noqa: E402

COSTS = CostModel.from_flops(MoonViTConfig(), 3e14)
EFFICIENCY, NODE, STAGES = 0.85, 8, 16
ROWS = (1, 2, 4, 8, 16, 20, 24, 32, 128)  # rows of 4,096 tokens per rank
VISION = 0.1  # vision share of the tokens
MOST_ITEMS = 60_000
UNCAPPED = 10**9  # tokens


def layout(num_ranks: int) -> tuple[Places, np.ndarray]:
    """Return ranks of pipelines whose stages are on different nodes, and the first-stage ranks."""
    replicas = max(1, num_ranks // STAGES)
    rank = np.arange(num_ranks)
    return Places(rank % replicas, rank // NODE), np.arange(replicas)


def step(num_ranks: int, items: int, seed: int, largest: int | None = None) -> tuple[Any, ...]:
    """Return the ranks of a layout, and the token counts, costs and home ranks of a step's items.

    Items are sorted by home rank.
    """
    places, first = layout(num_ranks)
    tokens = heavy_tailed_tokens(items, seed, *([] if largest is None else [largest]))
    home = np.sort(
        first[np.random.Generator(np.random.Philox(key=seed)).integers(0, len(first), items)]
    )
    return places, tokens, COSTS.seconds(tokens * PATCHES_PER_TOKEN), home


def planned(step: tuple[Any, ...], max_split: int) -> Placement:
    places, _, costs, home = step
    parts = choose_splits(costs, places.num_ranks, max_split, EFFICIENCY, places)
    return place(costs, parts, home, places, EFFICIENCY)


def quality(num_ranks: int, rows: float, seed: int) -> dict[str, Any]:
    tokens_per_item = float(heavy_tailed_tokens(100_000, 0).mean())
    items = round(num_ranks * rows * 4096 * VISION / tokens_per_item)
    case = step(num_ranks, items, seed)
    places, tokens, costs, home = case
    bound = simple_bound(costs, num_ranks)

    def of_bound(placement: Placement) -> float:
        return round(float(loads(placement, costs, num_ranks, EFFICIENCY).max()) / bound, 4)

    alone = np.ones(items, dtype=np.int64)
    lpt = Placement(longest_processing_time(costs, num_ranks), alone)
    whole, split = planned(case, 1), planned(case, NODE)
    return {
        "ranks": num_ranks,
        "rows_per_rank": rows,
        "items": items,
        "largest_over_mean": round(float(costs.max() / costs.sum() * num_ranks), 3),
        "lpt": of_bound(lpt),
        "ours": of_bound(whole),
        "nobody_below": round(certified_bound(costs, num_ranks) / bound, 4),
        "ours_split": of_bound(split),
        "split_items": int((split.parts > 1).sum()),
        "travel_lpt": shares(lpt, case),
        "travel_ours": shares(whole, case),
        "travel_split": shares(split, case),
    }


def shares(placement: Placement, case: tuple[Any, ...]) -> dict[str, float]:
    """Return the shares of tokens by distance, and the share encoded in the item's home replica."""
    places, tokens, _, home = case
    item, _, rank = placement.members()
    near = places.replica[rank] == places.replica[home[item]]
    weight = tokens[item] / placement.parts[item]
    found = {
        name: int(number) / int(tokens.sum())
        for name, number in moved(placement, tokens, home, places)._asdict().items()
    }
    found["in_replica"] = float(weight[near].sum() / tokens.sum())
    return {name: round(value, 3) for name, value in found.items()}


def speed(items: int, num_ranks: int, repeats: int) -> list[dict[str, Any]]:
    """Return the best wall time and CPU time of several runs; other jobs disturb CPU time less."""
    rows = []
    for name, largest in (("mix", None), ("mix, pages uncapped", UNCAPPED)):
        case = step(num_ranks, items, 1, largest)
        for max_split in (1, NODE):
            wall, cpu = [], []
            for _ in range(repeats):
                begin, spent = time.perf_counter(), time.process_time()
                placement = planned(case, max_split)
                wall.append(time.perf_counter() - begin)
                cpu.append(time.process_time() - spent)
            rows.append(
                {
                    "sizes": name,
                    "items": items,
                    "ranks": num_ranks,
                    "max_split": max_split,
                    "split_items": int((placement.parts > 1).sum()),
                    "wall_ms": round(1e3 * min(wall), 1),
                    "wall_ms_median": round(1e3 * float(np.median(wall)), 1),
                    "cpu_ms": round(1e3 * min(cpu), 1),
                }
            )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 4096])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "assign_cpu.json")
    args = parser.parse_args()
    timing = speed(20_000, 4_096, args.repeats)
    show(timing)
    table = []
    for ranks in args.ranks:
        for rows in ROWS:
            if ranks * rows * 0.41 <= MOST_ITEMS:
                table.append(quality(ranks, rows, args.seed))
                show(table[-1:])
    result = {
        "date": date.today().isoformat(),
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "machine": platform.machine(),
        "split_efficiency": EFFICIENCY,
        "ranks_per_node": NODE,
        "pipeline_stages": STAGES,
        "vision_share": VISION,
        "speed": timing,
        "quality": table,
    }
    write(result, args.out)


if __name__ == "__main__":
    main()
