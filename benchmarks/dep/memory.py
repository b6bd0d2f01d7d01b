"""Memory part of the job: the mix, and one microbatch with a growing number of images.

Memory is the resident memory of the process (VmHWM, which the kernel resets for each phase) above
its level before the step. Weights, gradient buffers, optimizer state and the step's pixels exist
before the step. The C library must return memory when a tensor is freed; otherwise an earlier peak
would hide a later one. `settings.GIVING_BACK` makes it map every block of 16 KiB or more
separately, and keeps MKL from caching its buffers. This slows steps down, so nothing is timed here.
"""

import ctypes
import gc
from pathlib import Path
from typing import Any

from benchmarks.dep.settings import COLOCATED, DEP, SETTINGS, TEXT_ONLY
from benchmarks.dep.variants import Bench, Variant, fetch
from data_pipeline.loader import StepBatch
from kimi_pretrain.config import Config
from kimi_pretrain.engine.mesh import Mesh

CHUNK = 512  # patches; small enough that the curve reaches several chunks per rank
WARM = (COLOCATED, DEP)  # together they touch all state


def measure(config: Config, mesh: Mesh, pages: dict[str, Any], counts: list[int]) -> dict[str, Any]:
    """Return peaks in bytes above the start of the step, for each rank and phase.

    Args:
        pages: keys of `data` for the sources of pages with N images, one row per microbatch.
        counts: values of N.
    """
    return {
        "mix": _mix(Bench(config, mesh)),
        "curve": _curve(config, mesh, pages, counts),
    }


def _mix(bench: Bench) -> dict[str, Any]:
    """Return the peaks of every variant on the same rows of the mix."""
    (batch,) = fetch(bench.config, 1)
    variants = {name: bench.variant(name) for name in SETTINGS}
    for name in WARM:  # creates the optimizer state and the caches of libraries
        variants[name].run(batch)
    return {name: _peaks(bench.mesh, variant, batch) for name, variant in variants.items()}


def _curve(
    config: Config, mesh: Mesh, pages: dict[str, Any], counts: list[int]
) -> list[dict[str, Any]]:
    """Return the peaks of steps whose microbatches are one row with N images, for each N."""
    train = config.train.model_copy(update={"rows_per_microbatch": 1})
    dep = config.dep.model_copy(update={"max_patches_per_chunk": CHUNK})
    data = config.data.replace(**pages)
    config = config.model_copy(update={"data": data, "train": train, "dep": dep})
    bench, points = None, []
    for count in counts:
        data = config.data.replace(sources={f"pages_{count}": 1.0})
        config = config.model_copy(update={"data": data})
        (batch,) = fetch(config, 1)
        items, rows = len(batch.plan.items), batch.plan.num_rows
        assert items == count * rows, f"{items} images in {rows} rows, expected {count} in each"
        if bench is None:
            bench = Bench(config, mesh)
            for name in WARM:
                bench.variant(name).run(batch)
        names = WARM if points else (*WARM, TEXT_ONLY)  # text rows are the same for every N
        peaks = {name: _peaks(mesh, bench.variant(name, config), batch) for name in names}
        points.append(
            {
                "images": count,
                "patches": int(batch.plan.items.patches.sum()) // rows,
                "microbatches": rows,
                "chunk": CHUNK,
                "embedding_bytes": int(batch.plan.vision_tokens)
                * config.model.vision.out_width
                * 4,
                "peaks": peaks,
            }
        )
        if mesh.rank == 0:
            print(f"memory: {count} images in a microbatch", flush=True)
    return points


def _peaks(mesh: Mesh, variant: Variant, batch: StepBatch) -> list[dict[str, int]]:
    """Return the peak bytes above the level before the step, by phase, for each rank."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    mesh.barrier()
    before = _resident()
    report = variant.run(batch)
    mine = {phase: peak - before for phase, peak in report.peak_bytes.items()}
    everyone: list[Any] = mesh.all_gather_object(mine)
    return everyone


def _resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmRSS: memory can be measured on Linux alone")
