"""Measures memory and load time of an index on a node: one shared copy against a private copy.

Eight processes read an index of ten million captions as training does, and build its planner. One
copy is the size of the columns and keys. Memory is what the processes add to their private memory,
plus the whole shared copy.

    python benchmarks/bench_index.py
    python benchmarks/bench_index.py --quick       # 100,000 captions, two processes
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
from datetime import date
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import pyarrow as pa

from benchmarks.result import RESULTS, cores, named, table, verdicts, versions, write
from benchmarks.synthetic_index import synthetic_index
from data_pipeline.config import DataConfig
from data_pipeline.index.columns import HASHED, SourceIndex
from data_pipeline.index.manifest import read_index, write_index
from data_pipeline.index.shared import read_shared_index
from data_pipeline.plan.planner import Planner
from data_pipeline.store.open import FolderStore

RESULT = RESULTS / "index_cpu.json"
MOST = 1.2  # copies that eight processes may hold
MIB = 1 << 20


def captions(samples: int) -> SourceIndex:
    """Return an index of pictures with one caption each."""
    rng = np.random.default_rng(0)
    side = rng.lognormal(np.log(500), 0.5, (2, samples)).clip(28, 6000).astype(np.int32)
    return synthetic_index(
        "captions",
        rng.lognormal(np.log(60), 1.0, samples).clip(1, 2000).astype(np.int64),
        category="caption",
        key=pa.array([f"{number:08d}" for number in range(samples)]),
        shard=np.arange(samples) // 10_000,
        item_ptr=np.arange(samples + 1),
        item_height=side[0],
        item_width=side[1],
        item_length=rng.integers(10_000, 500_000, samples),
    )


def bytes_of(index: SourceIndex) -> int:
    """Return the bytes of an index's columns and keys."""
    columns = sum(getattr(index, name).nbytes for name in HASHED)
    return columns + pa.array(index.key).nbytes


def held_kib() -> int:
    """Return the anonymous memory of this process, in KiB."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Anon:"):
            return int(line.split()[1])
    raise RuntimeError("/proc/self/smaps_rollup has no Pss_Anon")


def rank(root: str, shared: bool, together: Barrier, results: Any) -> None:
    """Read the index and plan a step with it, as a rank does."""
    store, before = FolderStore(Path(root)), held_kib()
    together.wait()
    began = time.perf_counter()
    index = read_shared_index(store, "captions") if shared else read_index(store, "captions")
    read = time.perf_counter() - began
    config = DataConfig(
        root=root, tokenizer="none", sources={"captions": 1.0}, seq_len=4096, rows_per_step=64,
        pack_window=256,
    )  # fmt: skip
    planner = Planner([index], config)
    planner.plan(planner.state_dict())
    seconds = time.perf_counter() - began
    together.wait()
    found = {"read": read, "seconds": seconds, "mib": (held_kib() - before) / 1024}
    together.wait()
    results.put(found)


def measure(root: Path, processes: int, shared_mib: float | None) -> dict[str, float]:
    """Run the ranks; return their total memory and the seconds of the slowest rank.

    Args:
        shared_mib: size of the copy that the ranks share; None if they share none.
    """
    context = multiprocessing.get_context("spawn")
    together, results = context.Barrier(processes), context.Queue()
    ranks = [
        context.Process(target=rank, args=(str(root), shared_mib is not None, together, results))
        for _ in range(processes)
    ]
    for one in ranks:
        one.start()
    found = [results.get() for _ in ranks]
    for one in ranks:
        one.join()
    return {
        "processes": processes,
        "mib": sum(one["mib"] for one in found) + (shared_mib or 0.0),
        "read": max(one["read"] for one in found),
        "seconds": max(one["seconds"] for one in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="100,000 captions, two processes")
    parser.add_argument("--out", type=Path, help="JSON; default: benchmarks/results/")
    arguments = parser.parse_args()
    samples, processes = (100_000, 2) if arguments.quick else (10_000_000, 8)
    aside = Path(__file__).resolve().parent.parent / "runs" / "bench_index" / RESULT.name
    out = arguments.out or (aside if arguments.quick else RESULT)
    with tempfile.TemporaryDirectory() as folder:
        index = captions(samples)
        one_copy = bytes_of(index) / MIB
        write_index(FolderStore(Path(folder)), index)
        del index
        alone = measure(Path(folder), 1, None)
        together = measure(Path(folder), processes, one_copy)
    copies = together["mib"] / one_copy
    found = {
        "about": {
            "date": date.today().isoformat(), "machine": cores(), "quick": arguments.quick,
            "versions": versions("numpy", "pyarrow"),
        },
        "samples": samples,
        "one_copy_mib": one_copy,
        "alone": alone,
        "shared": together,
        "targets": [{
            "target": f"{processes} processes hold at most {MOST} copies",
            "found": f"{copies:.2f}", "met": copies <= MOST,
        }],
    }  # fmt: skip
    write(found, out, page(found))


def page(found: dict[str, Any]) -> str:
    """Return the results as a Markdown page."""
    about, rows = found["about"], []
    for title, key in (("one process, its own copy", "alone"), ("shared", "shared")):
        one = found[key]
        copies = one["mib"] / found["one_copy_mib"]
        rows.append([
            title, one["processes"], f"{one['mib']:,.0f}", f"{copies:.2f}", f"{one['read']:.1f}",
            f"{one['seconds']:.1f}",
        ])  # fmt: skip
    head = ("", "processes", "MiB together", "copies", "s until read", "s until the first plan")
    lines = [
        "# The index of a node", "",
        f"{about['date']}, {about['machine']}, {named(about['versions'])}. "
        f"{found['samples']:,} captions, whose columns and keys are {found['one_copy_mib']:,.0f} "
        "MiB. Made by `python benchmarks/bench_index.py`.", "",
        *verdicts(found["targets"], {"target": "target", "found": "found", "met": "met"}),
        *table(head, rows), "",
    ]  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    main()
