"""Measures the time to plan a global step of 16,384 rows of 4,096 tokens, and to resume anywhere.

Uses synthetic sources with the sizes of real ones (texts log-normal, pictures heavy-tailed), a
constant vision share, two stages, and augmentation on the pictures. No sample data is read. Writes
a result file with versions and date.

    python benchmarks/bench_plan.py
    python benchmarks/bench_plan.py --samples 200000 --steps 3      # a short form
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.result import RESULTS, write  # noqa: E402
from benchmarks.synthetic_index import synthetic_index  # noqa: E402
from data_pipeline.augment.config import AugmentConfig, CropConfig  # noqa: E402
from data_pipeline.config import BlendStage, DataConfig  # noqa: E402
from data_pipeline.index.columns import SourceIndex  # noqa: E402
from data_pipeline.plan.planner import Planner  # noqa: E402

SHARD = 5_000  # samples
# Source -> (share of all samples, median text tokens, media per sample, median pixels on a side)
SOURCES = {
    "captions": (0.25, 60, 1, 500),
    "code": (0.15, 700, 0, 0),
    "grounding": (0.10, 120, 1, 700),
    "interleaved": (0.10, 500, 3, 400),
    "ocr": (0.10, 300, 1, 1100),
    "web": (0.30, 500, 0, 0),
}


def made_source(name: str, samples: int, seed: int) -> SourceIndex:
    """Return an index of synthetic samples with log-normal sizes around the source's medians."""
    _, text, media, side = SOURCES[name]
    rng = np.random.default_rng(seed)
    tokens = np.minimum(rng.lognormal(np.log(text), 1.0, samples), 200_000).astype(int) + 1
    count = rng.integers(1, 2 * media, samples) if media else np.zeros(samples, int)
    ptr = np.concatenate([[0], np.cumsum(count)])
    items = int(ptr[-1])
    pixels = rng.lognormal(np.log(max(side, 1)), 0.5, (2, items)).clip(28, 6000)
    owner = np.repeat(np.arange(samples), count)
    return synthetic_index(
        name,
        tokens,
        category="caption" if media else "text",
        shard=np.arange(samples) // SHARD,
        item_ptr=ptr,
        item_media=np.arange(items) - ptr[owner],
        item_height=pixels[0],
        item_width=pixels[1],
        item_prefix=np.full(items, 3),
        flip_ok=np.ones(samples),
    )


def config_of(args: argparse.Namespace) -> DataConfig:
    """Return the configuration of the real global batch, by default 16,384 rows of 4,096 tokens."""
    shares = {name: 1.0 for name in SOURCES}
    return DataConfig(
        root="made up",
        sources=shares,
        vision_token_ratio=0.3,
        schedule=[BlendStage(after_tokens=10**11, sources=shares, vision_token_ratio=0.4)],
        seq_len=4096,
        rows_per_step=args.rows,
        augment={
            "captions": AugmentConfig(flip=0.5, crop=CropConfig(area=(0.5, 1.0))),
        },
    )


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def measure(args: argparse.Namespace) -> dict[str, Any]:
    config = config_of(args)
    indices = [
        made_source(name, int(args.samples * share), number)
        for number, (name, (share, *_)) in enumerate(SOURCES.items())
    ]
    build, planner = timed(lambda: Planner(indices, config))
    state, packing, packed, fill, vision = planner.state_dict(), [], [], [], []
    samples = items = windows = 0
    for _ in range(args.steps):
        seconds, (plan, after) = timed(lambda state=state: planner.plan(state))
        packing.append(seconds)
        packed.append(timed(lambda state=state: planner.plan(state))[0])
        fill.append(plan.fill_rate)
        vision.append(plan.vision_tokens / plan.num_tokens)
        windows = after["window"] - state["window"]
        samples, items = plan.samples.index.size, len(plan.items)
        state = after
    blend = [[segment.start, list(segment.weights)] for segment in planner.mixture.segments]
    far = {**state, "window": 5_000_000, "row": 7, "step": 250_000, "blend": blend}
    fresh = Planner(indices, config)
    resume, _ = timed(lambda: (fresh.load_state_dict(far), fresh.plan(far)))
    return {
        "samples_in_all": sum(index.num_samples for index in indices),
        "rows": config.rows_per_step,
        "seq_len": config.seq_len,
        "samples_of_a_step": samples,
        "items_of_a_step": items,
        "windows_of_a_step": windows,
        "build_planner_s": build,
        "plan_with_packing_ms": 1e3 * statistics.median(packing),
        "plan_once_packed_ms": 1e3 * statistics.median(packed),
        "plan_once_packed_ms_max": 1e3 * max(packed),
        "resume_far_away_s": resume,
        "resume_position": far["window"] * config.pack_window,
        "fill_rate_min": min(fill),
        "vision_share": statistics.mean(vision),
        "state_bytes": len(json.dumps(state)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=2_000_000, help="in all sources")
    parser.add_argument("--rows", type=int, default=16_384, help="of a step")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS / "plan_cpu.json")
    args = parser.parse_args()
    result = {
        "date": date.today().isoformat(),
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "machine": platform.machine(),
        **measure(args),
    }
    write(result, args.out)
    for name, value in result.items():
        print(f"{name:26s} {value}")


if __name__ == "__main__":
    main()
