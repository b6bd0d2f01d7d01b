"""Compares our sample stream with public loaders: speed, requests, resume, other world sizes.

All loaders read the same samples, from local disk and from the same S3 server, in turns. The peers
are mosaicml-streaming, webdataset, litdata and megatron-energon. They run in a separate environment
of about 2 GB, which the first run creates (PEERS_VENV or --peers sets its path). The first run also
makes the data (about 1 GB under --work). After that, a full run takes about ten minutes.

    python benchmarks/bench_loader.py                    # everything, to results/loader_*
    python benchmarks/bench_loader.py --rounds 1         # a first look
    python benchmarks/bench_loader.py --quick            # ours only, 1,000 samples, seconds
    python benchmarks/bench_loader.py --only speed,requests --loaders litdata
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.loaders import decoding, environment, measure, packed, report, targets
from benchmarks.loaders.job import PAIRS
from benchmarks.loaders.measure import BATCH, Bench, Cell
from benchmarks.result import RESULTS, processor, write
from data_pipeline.index.manifest import read_index
from data_pipeline.store.open import FolderStore

PEERS = ["litdata", "webdataset", "mosaicml-streaming", "megatron-energon"]
OURS = ["ours", "ours, unchecked"]
ELASTIC = ["ours", "ours, blended"]
PARTS = ("speed", "resume", "elastic", "requests")


def cells(places: Sequence[str], workers: Sequence[int]) -> list[Cell]:
    return [Cell(p, mode, w) for p in places for mode in ("raw", "pixels") for w in workers]


def speed(bench: Bench, names: list[str], wanted: list[Cell], rounds: int, pixels: int) -> Any:
    """Return the rounds of each loader."""
    found: dict[str, list[Any]] = {name: [] for name in names}
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            mine = wanted
            if name == "ours, unchecked":  # shows the cost of checking
                mine = [cell for cell in wanted if cell.workers == 0 and cell.mode == "raw"]
            begin = time.monotonic()
            found[name].append(measure.speed_round(bench, name, mine, pixels))
            took = time.monotonic() - begin
            print(f"round {number + 1}: {name:28}{took:6.1f} s", flush=True)
    return found


def each(names: Sequence[str], what: str, call: Callable[[str], Any]) -> dict[str, Any]:
    """Return the result of `call` for each loader. A loader that fails is reported and left out."""
    found = {}
    for name in names:
        begin = time.monotonic()
        try:
            found[name] = call(name)
        except RuntimeError as error:
            print(f"{what}: {name} left out: {error}", flush=True)
            continue
        print(f"{what:9}{name:28}{time.monotonic() - begin:6.1f} s", flush=True)
    return found


def run(args: argparse.Namespace, bench: Bench, peers: list[str], notes: list[str]) -> Any:
    load_before = [round(x, 2) for x in os.getloadavg()]
    places = ["disk"] + (["s3"] if bench.bucket else [])
    wanted = cells(places, (0,) if args.quick else (0, 1, 2))
    names = [*(OURS[:1] if args.quick else OURS), *peers]
    parts = args.only.split(",")
    rounds: Any = {}
    if "speed" in parts:
        rounds = speed(bench, names, wanted, args.rounds, args.pixels)
    cell_names = [cell.name for cell in wanted] if rounds else []
    counts = [0] if args.quick else [0, 2]
    repeats = 3 if args.quick else 9
    resumed: Any = {}
    if "resume" in parts:
        resumed = each(
            ["ours", *peers], "resume",
            lambda name: [measure.resume(bench, name, w, repeats) for w in counts],
        )  # fmt: skip
    elastic: Any = {}
    if "elastic" in parts:
        ours = ELASTIC[:1] if args.quick else ELASTIC
        elastic = each([*ours, *peers], "elastic", lambda name: measure.elastic(bench, name))
        steps = 12 if args.quick else packed.STEPS
        name = "ours, blended and packed"
        elastic |= each([name], "elastic", lambda _: packed.elastic(bench.root, steps))
    asked: Any = {}
    if "requests" in parts and bench.bucket:
        asked = each(["ours", *peers], "requests", lambda name: measure.requests(bench, name))
    index = read_index(FolderStore(bench.root / "ours"), PAIRS)
    found: dict[str, Any] = {
        "about": {
            "date": date.today().isoformat(), "machine": f"{processor()}, {os.cpu_count()} cores",
            "python": platform.python_version(), "samples": bench.count,
            "mean_bytes": round(float(index.item_length.mean())), "shards": len(index.shards),
            "batch": BATCH, "rounds": args.rounds, "load_before": load_before,
            "versions": bench.versions,
            "cells": cell_names, "notes": notes,
        },
        "speed": report.summary(rounds, cell_names),
        "ratios": report.ratios(rounds, cell_names, "ours", peers) if rounds and peers else {},
        "resume": resumed, "elastic": elastic, "requests": asked,
        "decode": decoding.overhead(bench.root), "rounds": rounds,
    }  # fmt: skip
    found["targets"] = targets.targets(found, peers)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=environment.REPOSITORY / "runs/bench_loader")
    default = os.environ.get("PEERS_VENV", environment.REPOSITORY / ".venv-peers")
    parser.add_argument("--peers", type=Path, default=default)
    parser.add_argument("--loaders", default=",".join(PEERS), help="peers, separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", type=int, default=20_000, help="samples")
    parser.add_argument("--pixels", type=int, default=4_000, help="samples of a decoded pass")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--quick", action="store_true", help="ours only and few samples")
    parser.add_argument("--no-s3", action="store_true", help="local disk only")
    parser.add_argument("--out", type=Path, help="default: results/loader_<cores>_cores.json")
    args = parser.parse_args()
    peers, notes = [name for name in args.loaders.split(",") if name], []
    if args.quick:
        args.rounds, args.count, args.pixels = 1, min(args.count, 1_000), 200
        peers, notes = [], ["Quick run: ours only, few samples; no figure here means anything."]
    if unknown := sorted(set(peers) - set(PEERS)):
        parser.error(f"loaders {unknown}; known are {PEERS}")
    if peers:
        environment.make_peers(args.peers.resolve())
    root = args.work.resolve() / str(args.count)
    environment.make_data(root, args.count, args.peers.resolve() if peers else None)
    with ExitStack() as stack:
        served = None if args.no_s3 else stack.enter_context(environment.bucket(root))
        bench = Bench(root, args.count, args.peers.resolve() if peers else None, served)
        found = run(args, bench, peers, notes)
    out = args.out or RESULTS / f"loader_{os.cpu_count()}_cores.json"
    write(found, out, report.page(found))


if __name__ == "__main__":
    main()
