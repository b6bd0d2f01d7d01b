"""Measures how long it takes to write the facts of 10 M samples and to compute their statistics.

Synthetic sources with the sizes of real ones (`bench_plan`) are written to disk as finished
sources; no sample data is read. Targets on two idle cores: all facts within 60 s, all statistics
within 3 s, and every integer equal to that of `source_stats`. Writes a result file and a page.

    python benchmarks/bench_facts.py
    python benchmarks/bench_facts.py --quick      # 60,000 samples
"""

import argparse
import dataclasses
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_plan import SHARD, SOURCES, made_source  # noqa: E402
from benchmarks.result import (  # noqa: E402
    RESULTS,
    cores,
    named,
    processor,
    table,
    verdicts,
    versions,
    write,
)
from data_pipeline.index.columns import SCHEMA, ShardInfo, SourceIndex  # noqa: E402
from data_pipeline.index.manifest import (  # noqa: E402
    index_key,
    manifest_key,
    read_index,
    table_of,
)
from data_pipeline.index.parts import content_hash  # noqa: E402
from data_pipeline.inspect.count import (  # noqa: E402
    by_category,
    compare,
    count_alike,
    count_source,
)
from data_pipeline.inspect.facts import write_facts  # noqa: E402
from data_pipeline.inspect.stats import source_stats  # noqa: E402
from data_pipeline.store.open import FolderStore  # noqa: E402
from moonvit3d.geometry import PatchLimits  # noqa: E402

SLICE = 250_000  # samples generated at once
VERSIONED = "captions"  # half of its samples are a second version, mostly identical to the first
CHANGED = 0.02  # share of the second version's samples that differ
FACTS_S, COUNT_S = 60.0, 3.0
LIMITS = PatchLimits()


def made_sources(samples: int) -> dict[str, int]:
    """Return the number of samples of each source. The versioned source counts as two."""
    found = {name: int(samples * share) for name, (share, *_) in SOURCES.items()}
    found[VERSIONED] //= 2
    return found | {f"{VERSIONED}_2": samples - sum(found.values())}


def part_of(name: str, first: int, samples: int, shards: tuple[ShardInfo, ...]) -> SourceIndex:
    """Return a slice of a synthetic source with lengths and checksums; every 500th is a copy."""
    base, later = name.removesuffix("_2"), name.endswith("_2")
    seed = 1 + list(SOURCES).index(base) + 100 * (first // SLICE)
    index, rng = made_source(base, samples, seed), np.random.default_rng(seed)
    columns: dict[str, Any] = {}
    for group, count in (("json", index.num_samples), ("item", index.num_items)):
        columns[f"{group}_length"] = rng.integers(200, 200_000, count)
        columns[f"{group}_crc"] = rng.integers(0, 2**32, count, np.uint32)
        columns[f"{group}_offset"] = np.cumsum(columns[f"{group}_length"])
        for column in (columns[f"{group}_length"], columns[f"{group}_crc"]):
            column[499::500] = column[: 500 * (column.size // 500) : 500]
    if later:
        other = rng.random(samples) < CHANGED
        columns["json_crc"] = np.where(other, ~columns["json_crc"], columns["json_crc"])
    return dataclasses.replace(
        index,
        name=name,
        shards=shards,
        key=[f"{base}-{number:09d}" for number in range(first, first + samples)],
        shard=((first + np.arange(samples)) // SHARD).astype(np.int32),
        **columns,
    )


MakePart = Callable[[str, int, int, tuple[ShardInfo, ...]], SourceIndex]


def write_source(root: Path, name: str, samples: int, make: MakePart = part_of) -> None:
    """Write index and manifest of a synthetic source, one slice at a time."""
    counts = [min(SHARD, samples - first) for first in range(0, samples, SHARD)]
    shards = tuple(
        ShardInfo(
            f"{name}/{i:06d}.tar", 10**8, hashlib.sha256(f"{name} {i}".encode()).hexdigest(), n
        )
        for i, n in enumerate(counts)
    )
    path, items = root / index_key(name), 0
    path.parent.mkdir(parents=True)
    writer = None
    for first in range(0, samples, SLICE):
        part = make(name, first, min(SLICE, samples - first), shards)
        items += part.num_items
        rows = table_of(part)
        writer = writer or pq.ParquetWriter(path, rows.schema, compression="zstd")
        writer.write_table(rows)
    assert writer is not None
    writer.close()
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest = {
        "schema": SCHEMA,
        "name": name,
        "category": part.category,
        "tokenizer": {"name": part.tokenizer_name, "sha256": part.tokenizer_hash},
        "samples": samples,
        "items": items,
        "shards": [dataclasses.asdict(shard) for shard in shards],
        "index_sha256": sha256,
    }
    with pq.ParquetFile(path) as file:
        manifest["content_hash"] = content_hash(file, manifest)
    (root / manifest_key(name)).write_text(json.dumps(manifest))


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def write_all(root: Path, folder: Path) -> dict[str, Any]:
    """Write the facts of all sources."""
    store, sources = FolderStore(root), {}
    for path in sorted(root.glob("*/manifest.json")):
        name = path.parent.name
        seconds, (file, new) = timed(lambda name=name: write_facts(store, name, LIMITS, folder))
        assert new, f"{name}: the facts were there"
        sources[name] = {"seconds": seconds, "bytes": file.path.stat().st_size}
    return {"sources": sources}


def count_all(root: Path, folder: Path) -> dict[str, Any]:
    """Compute every statistic of all sources."""
    store = FolderStore(root)
    names = sorted(path.parent.name for path in root.glob("*/manifest.json"))
    files = {name: write_facts(store, name, LIMITS, folder)[0] for name in names}
    each: dict[str, float] = {}
    counted, seconds = {}, {}
    for name, file in files.items():
        each[name], counted[name] = timed(lambda file=file: count_source(file, 4096))
    seconds["sources"] = sum(each.values())
    seconds["categories"], _ = timed(lambda: by_category(list(counted.values())))
    seconds["alike"], alike = timed(lambda: count_alike(list(files.values())))
    new, old = f"{VERSIONED}_2", VERSIONED
    seconds["versions"], compared = timed(
        lambda: compare(files[new], files[old], (counted[new], counted[old]))
    )
    figures = {name: one.figures for name, one in counted.items()}
    return {
        "seconds": seconds | {"all": sum(seconds.values())},
        "each_source_s": each,
        "figures": figures,
        "alike": {kind: alike[kind]["redundant"] for kind in ("media", "samples")},
        "keys": {name: value for name, value in compared["keys"].items() if name != "examples"},
    }


STAGES = {"write": write_all, "count": count_all}


def run_stage(stage: str, root: Path, folder: Path) -> dict[str, Any]:
    """Run a stage in a subprocess, so that its memory is measured separately."""
    command = [sys.executable, str(Path(__file__)), "--stage", stage, "--work", str(root.parent)]
    seconds, done = timed(lambda: subprocess.run(command, capture_output=True, text=True))
    if done.returncode:
        raise SystemExit(done.stderr)
    return {"process_s": seconds, **json.loads(done.stdout.splitlines()[-1])}


def integers(found: Any, where: str = "") -> dict[str, int]:
    """Return all integers in nested values, and the counts of histograms, keyed by their path."""
    if isinstance(found, dict):
        parts = found.items()
    elif isinstance(found, list):
        parts = enumerate(found)
    else:
        whole = isinstance(found, int) or (isinstance(found, float) and "/counts/" in where)
        return {where: int(found)} if whole else {}
    return {
        key: value
        for name, part in parts
        for key, value in integers(part, f"{where}/{name}").items()
    }


def differing(root: Path, name: str, figures: dict[str, Any]) -> tuple[int, list[str]]:
    """Return the number of integers that `source_stats` gives, and the keys that differ."""
    expected = integers(source_stats(read_index(FolderStore(root), name), LIMITS, 4096))
    found = integers(figures)
    return len(expected), [key for key, value in expected.items() if found.get(key) != value]


def measure(samples: int, work: Path) -> dict[str, Any]:
    root, folder = work / "corpus", work / "facts"
    sources = made_sources(samples)
    for name, count in sources.items():
        write_source(root, name, count)
    written = run_stage("write", root, folder)
    counted = run_stage("count", root, folder)
    figures = counted.pop("figures")
    compared = min(sources, key=sources.__getitem__) if samples > 1_000_000 else None
    checked, wrong = 0, []
    for name in sources if compared is None else [compared]:
        number, others = differing(root, name, figures[name])
        checked, wrong = checked + number, wrong + [f"{name}{key}" for key in others]
    facts_s = sum(one["seconds"] for one in written["sources"].values())
    count_s = counted["seconds"]["all"]
    found = {
        "samples": sum(sources.values()),
        "items": sum(one["items"] for one in figures.values()),
        "index_bytes": sum(path.stat().st_size for path in root.glob("*/index.parquet")),
        "facts_bytes": sum(one["bytes"] for one in written["sources"].values()),
        "written": written,
        "counted": counted,
        "integers_compared": checked,
        "integers_wrong": wrong,
    }
    whole = samples >= 10_000_000
    found["targets"] = [
        target("facts of all samples, s", facts_s, FACTS_S, facts_s <= FACTS_S if whole else None),
        target("all statistics, s", count_s, COUNT_S, count_s <= COUNT_S if whole else None),
        target("integers unlike source_stats", len(wrong), 0, not wrong and checked > 0),
    ]
    return found


def target(what: str, found: float, wanted: float, met: bool | None) -> dict[str, Any]:
    return {"what": what, "found": f"{found:.3g}", "wanted": f"{wanted:g}", "met": met}


def page(found: dict[str, Any]) -> str:
    written, counted = found["written"], found["counted"]
    rows = [
        [name, f"{written['sources'][name]['seconds']:.1f}", f"{seconds:.2f}"]
        for name, seconds in counted["each_source_s"].items()
    ]
    steps = [[name, f"{seconds:.2f}"] for name, seconds in counted["seconds"].items()]
    lines = [
        "# Statistics at size",
        "",
        f"{found['samples']:,} samples with {found['items']:,} items, made up, in "
        f"{len(rows)} sources; {found['machine']}, {found['processor']}; load when it began "
        f"{found['load']:.1f}; {named(found['versions'])}; {found['date']}.",
        "",
        *verdicts(
            found["targets"], {"what": "", "found": "found", "wanted": "wanted", "met": "met"}
        ),
        f"Indices {found['index_bytes'] / 1e6:,.0f} MB, facts {found['facts_bytes'] / 1e6:,.0f} "
        f"MB. Most memory: {written['most_memory_bytes'] / 1e6:,.0f} MB to write, "
        f"{counted['most_memory_bytes'] / 1e6:,.0f} MB to count. Whole processes: "
        f"{written['process_s']:.1f} s, {counted['process_s']:.1f} s. "
        f"{found['integers_compared']:,} integers compared.",
        "",
        *table(["source", "facts, s", "statistics, s"], rows),
        "",
        *table(["statistics", "s"], steps),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=10_000_000, help="in all sources")
    parser.add_argument("--quick", action="store_true", help="60,000 samples")
    parser.add_argument("--work", type=Path, help="empty folder for 1.5 GB; else a temporary one")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS / "facts_cpu.json")
    args = parser.parse_args()
    if args.stage:
        found = STAGES[args.stage](args.work / "corpus", args.work / "facts")
        most = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps(found | {"most_memory_bytes": most}))
        return
    head = {
        "date": date.today().isoformat(),
        "versions": versions("duckdb", "pyarrow", "numpy"),
        "machine": cores(),
        "processor": processor(),
        "load": os.getloadavg()[0],
    }
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        found = measure(60_000 if args.quick else args.samples, work)
    result = head | found
    write(result, args.out, page(result))


if __name__ == "__main__":
    main()
