"""Builds the demo's corpus in a folder and trains on it through `kimi_pretrain.train`."""

import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.muonclip.settings import PRESET, Plan, Run, overrides_of
from data_pipeline.index.manifest import read_index
from data_pipeline.plan.planner import Planner
from data_pipeline.store.open import FolderStore
from kimi_pretrain.config import Config, load_config
from kimi_pretrain.train import train
from launch.demo.corpus import CorpusSize, build_corpus

SMALL = CorpusSize(
    digits=40, digits_heldout=2, where=12, charts=2, per_photo=1, per_clip=1, pages=2,
    prose_bytes=20_000, code_bytes=20_000,
)  # fmt: skip


def make_corpus(root: Path, *, small: bool) -> dict[str, Any]:
    """Write the corpus under `root`; return samples, text tokens and patches of each source."""
    root.mkdir(parents=True)
    report = build_corpus(FolderStore(root), size=SMALL if small else None)
    kept = ("samples", "text_tokens", "patches")
    return {name: {key: one[key] for key in kept} for name, one in report.items()}


def train_run(run: Run, plan: Plan, root: Path, folder: Path) -> dict[str, Any]:
    """Train a run; return its loss, largest logit and number of clipped heads at every step.

    A loss that is not finite is None; `not_applied` counts the steps without an update.
    """
    config = load_config(PRESET, overrides_of(run, plan, str(root)))
    shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted try
    begin = time.perf_counter(), time.process_time()
    train(config, folder)
    seconds, busy = time.perf_counter() - begin[0], time.process_time() - begin[1]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(folder)
    return {
        "part": run.part,
        "optimizer": run.optimizer,
        "lr": run.lr,
        "seed": run.seed,
        "scale": run.scale,
        "seconds": round(seconds, 1),
        "processor_seconds": round(busy, 1),
        "not_applied": sum(not line["applied"] for line in lines),
        "loss": [_finite(line["loss"], 5) for line in lines],
        "max_logit": [_finite(line["max_logit"], 3) for line in lines],
        "clipped_heads": [line["clipped_heads"] for line in lines],
    }


def _finite(value: float | None, digits: int) -> float | None:
    return round(value, digits) if value is not None and math.isfinite(value) else None


def seen_before(config: Config) -> dict[str, Any]:
    """Return the share of a run's tokens that belong to samples drawn before, in total and by
    source.

    The planner computes it, so only the indices are read.
    """
    store = FolderStore(config.data.root)
    indices = [read_index(store, name) for name in config.data.source_names]
    planner = Planner(indices, config.data)
    again, total = np.zeros(len(indices)), np.zeros(len(indices))
    state = planner.state_at(0)
    for _ in range(config.train.steps):
        plan, state = planner.plan(state)
        samples = plan.samples
        weights = samples.length.astype(np.float64)
        total += np.bincount(samples.source, weights, len(indices))
        again += np.bincount(samples.source, weights * (samples.epoch > 0), len(indices))
    shares = again / np.maximum(1, total)
    return {
        "all": round(float(again.sum() / total.sum()), 4),
        "sources": {n: round(float(s), 4) for n, s in zip(config.data.source_names, shares)},
        "token_shares": {
            n: round(float(s), 4) for n, s in zip(config.data.source_names, total / total.sum())
        },
    }
