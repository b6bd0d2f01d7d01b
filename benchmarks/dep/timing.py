"""Timing part of the job: all variants on the same rows, in turns."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.dep.settings import ALONE, DEP, SETTINGS, TEXT_ONLY
from benchmarks.dep.variants import Bench, Variant, fetch
from data_pipeline.loader import StepBatch
from kimi_pretrain.config import Config
from kimi_pretrain.dep.config import CostConfig
from kimi_pretrain.dep.vision_plan import VisionPlan
from kimi_pretrain.engine.mesh import Mesh
from kimi_pretrain.telemetry.phases import seconds_of_phases
from kimi_pretrain.tools.calibrate import calibrate

SCHEDSTAT = Path("/proc/thread-self/schedstat")  # nanoseconds: running, ready without a core, ...


def time_steps(config: Config, mesh: Mesh, rounds: int, seconds: float) -> dict[str, Any]:
    """Calibrate, then run every variant and the bare encoder `rounds` times, in turns.

    Args:
        config: configuration; the calibrated costs replace its `dep.cost`.
        rounds: rounds that count, each on other rows, after one warm-up round.
        seconds: time limit of the calibration.

    Returns:
        plain values for `predict` and `report`.
    """
    mesh.barrier()  # ranks calibrate at the same time because they also encode at the same time
    calibrations = _calibrate(config, mesh, seconds)
    cost = CostConfig(**calibrations[0]["cost"])  # plans of all ranks must agree
    config = config.model_copy(update={"dep": config.dep.model_copy(update={"cost": cost})})
    bench = Bench(config, mesh)
    variants = {name: bench.variant(name) for name in SETTINGS}
    names = [*variants, ALONE]
    done = []
    for number, batch in enumerate(fetch(config, rounds + 1)):
        first = number % len(names)
        runs = {
            name: _run(bench, name, variants.get(name, variants[DEP]), batch)
            for name in names[first:] + names[:first]
        }
        done.append({"work": _work(variants, batch), "runs": runs})
        if mesh.rank == 0:
            shown = ", ".join(f"{name} {runs[name]['seconds']:.2f} s" for name in names)
            print(f"{f'round {number} of {rounds}' if number else 'warm-up'}: {shown}", flush=True)
    return {
        "calibration": calibrations,
        "model": {"cost": cost.model_dump(), **_facts(bench)},
        "rounds": done[1:],
    }


def _calibrate(config: Config, mesh: Mesh, seconds: float) -> list[Any]:
    found = calibrate(config, seconds)
    mine = {
        "cost": asdict(found.fit.cost),
        "per_chunk": found.fit.per_chunk,
        "forward_share": found.forward_share,
        "median_error": found.fit.median_error,
        "worst_error": found.fit.worst_error,
        "loads": len(found.measured.timings),
        "repeats": found.measured.repeats,
    }
    return mesh.all_gather_object(mine)


def _run(bench: Bench, name: str, variant: Variant, batch: StepBatch) -> dict[str, Any]:
    """Run one step or the bare encoder between two barriers; return the same on every rank."""
    vision, mesh = variant.plan(batch), bench.mesh
    mesh.barrier()
    ready, thread, process = ready_seconds(), time.thread_time(), time.process_time()
    start = time.perf_counter()
    report = None
    if name == ALONE:
        bench.encode_alone(vision, batch)
    else:
        report = variant.run(batch)
    own = time.perf_counter() - start
    thread, process = time.thread_time() - thread, time.process_time() - process
    mine: dict[str, Any] = {
        "own": own,
        "busy": thread,
        "other_threads": process - thread,
        "no_core": ready_seconds() - ready,
    }
    mesh.barrier()
    mine["seconds"] = time.perf_counter() - start
    if report is not None:
        mine["phases"] = seconds_of_phases(report.spans)
        mine["busy_phases"] = dict(variant.clock.busy)
        mine["sent"] = 0 if variant.text_only else sum(report.exchange_bytes.values())
    everyone: list[Any] = mesh.all_gather_object(mine)
    found = {"seconds": max(one.pop("seconds") for one in everyone), "ranks": everyone}
    return found if report is None else {**found, "loss": report.loss}


def _work(variants: dict[str, Variant], batch: StepBatch) -> dict[str, Any]:
    """Return the work of a batch: patches of each item, in pack order."""
    plans = {name: one.plan(batch) for name, one in variants.items() if name != TEXT_ONLY}
    vision = plans[DEP]
    return {
        "items": len(vision.patches),
        "patches": int(vision.patches.sum()),
        "vision_tokens": int(batch.plan.vision_tokens),
        "tokens": int(batch.plan.num_tokens),
        "microbatches": _of_microbatches(vision),
        "encoded": {name: _of_ranks(plan) for name, plan in plans.items()},
        "loads": {name: plan.predicted_seconds().tolist() for name, plan in plans.items()},
    }


def _of_ranks(vision: VisionPlan) -> list[list[int]]:
    ranks = range(vision.num_ranks)
    return [vision.patches[vision.encoded_by(rank).item].tolist() for rank in ranks]


def _of_microbatches(vision: VisionPlan) -> list[list[int]]:
    """Return the patches of each microbatch's items. One replica has one first stage."""
    spans = vision.spans
    count = int(spans.microbatch.max(initial=-1)) + 1
    return [
        vision.patches[np.unique(spans.item[spans.microbatch == number])].tolist()
        for number in range(count)
    ]


def _facts(bench: Bench) -> dict[str, Any]:
    """Return the sizes that the page shows."""
    config = bench.config
    encoder = sum(p.numel() for p in bench.model.encoder.module.parameters())
    mine = sum(view.data.numel() for view in bench.model.backbone.views())
    return {
        "encoder_parameters": encoder,
        "language_parameters_by_stage": bench.mesh.all_gather_object(mine),
        "microbatches": config.num_microbatches(),
        "rows_per_microbatch": config.train.rows_per_microbatch,
        "seq_len": config.data.seq_len,
        "vision_token_ratio": config.data.vision_token_ratio,
        "max_patches_per_chunk": config.dep.max_patches_per_chunk,
        "dtype": config.train.dtype,
    }


def ready_seconds() -> float:
    """Return the seconds in which this thread was ready but had no core; NaN if unavailable."""
    try:
        return int(SCHEDSTAT.read_text().split()[1]) / 1e9
    except OSError:
        return float("nan")
