"""Measures the cost of sharing one item between two processes, for `dep.split_efficiency`.

Two gloo processes of one thread each take three turns for every item:

    alone    one process encodes the whole item, the other sleeps
    both     both encode a whole item each at the same time: the throughput without sharing
    split    both encode one item together (kimi_pretrain/dep/sharded.py)

A turn does the work of a training step: forward without a graph, recompute, backward. Efficiency is
seconds(both) / (2 * seconds(split)). `of_cpu` is the same ratio in CPU seconds: it includes the
work of the exchange, but not the wait for the other process. Wall-clock seconds are unreliable on a
busy machine. `share_of_cores` is CPU seconds over wall-clock seconds. If it is below 0.9 in the
turns without an exchange, the wall-clock efficiencies are omitted. Each figure is the best of its
repeats. Outputs are compared before anything is timed. Writes a result file.

    python benchmarks/bench_split.py
    python benchmarks/bench_split.py --patches 4096 --repeats 5
"""

import argparse
import json
import math
import os
import platform
import tempfile
import time
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from benchmarks.result import write
from kimi_pretrain.dep import sharded
from moonvit3d.config import MoonViTConfig
from moonvit3d.model import VisionEncoder, initialise

PARTS = 2
UNDISTURBED = 0.9  # share of the cores below which wall-clock seconds are not compared
CONFIG = MoonViTConfig(
    width=432, depth=1, heads=6, mlp_width=1612, pos_init_std=0.02, out_width=1024
)
RESULT = Path(__file__).parent / "results" / "split_cpu.json"


def grid_of(patches: int) -> tuple[int, int, int]:
    """Return the grid of a square image with this number of patches."""
    side = math.isqrt(patches)
    if side * side != patches or side % 2:
        raise SystemExit(f"--patches {patches}: want the square of an even number")
    return 1, side, side


def split_bytes(patches: int, config: MoonViTConfig, parts: int, itemsize: int) -> int:
    """Return the bytes that one member sends to the others in a forward pass.

    A recompute and a backward pass each send the same amount again. The count excludes the pixels
    (588 bytes per patch), which the block's first rank scatters once.

    Args:
        patches: patches of the whole item.
        config: sizes of the encoder.
        parts: members of the block.
        itemsize: bytes per number: 2 for bfloat16, 4 for float32, 8 for float64.
    """
    own = -(-patches // parts)
    sent = 4 * own * config.width * (parts - 1) // parts  # q, k and v go out, the result comes back
    return config.depth * sent * itemsize


class Exchanges:
    """Total seconds spent in all-to-alls, including the wait for the other process."""

    def __init__(self):
        self.seconds, self.plain = 0.0, dist.all_to_all_single
        dist.all_to_all_single = self.timed

    def timed(self, *args: Any, **kwargs: Any) -> None:
        start = time.perf_counter()
        self.plain(*args, **kwargs)
        self.seconds += time.perf_counter() - start


class Item:
    """One item on this process, both whole and shared."""

    def __init__(self, patches: int, group: dist.ProcessGroup, exchanges: Exchanges):
        self.grid, self.group, self.exchanges = grid_of(patches), group, exchanges
        self.module = VisionEncoder(CONFIG)
        initialise(self.module, seed=0)
        draw = torch.Generator().manual_seed(0)
        shape = (patches, 3, 14, 14)
        self.whole = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw)
        mine = self.whole.numpy() if group.rank() == 0 else None
        self.own = sharded.scatter_patches(mine, self.grid, group, torch.device("cpu"))

    def encode(self, turn: str) -> Tensor:
        if turn == "split":
            return sharded.encode(self.module, self.own, self.grid, self.group)
        return self.module(self.whole, [self.grid])

    def check(self) -> float:
        """Return the relative distance between shared and unshared tokens of this process."""
        with torch.no_grad():
            found, expected = self.encode("split"), self.encode("both")
        own = sharded.token_range(len(expected), PARTS, self.group.rank())
        return float((found - expected[own.start : own.stop]).norm() / expected.norm())

    def measure(self, turn: str) -> dict[str, float]:
        """Return the seconds of a turn on this process, which are about zero if it sleeps."""
        self.module.zero_grad(set_to_none=True)
        dist.barrier()
        self.exchanges.seconds = 0.0
        start, cpu = time.perf_counter(), time.process_time()
        forward = 0.0
        if turn != "alone" or self.group.rank() == 0:
            with torch.no_grad():
                self.encode(turn)
            forward = time.perf_counter() - start
            self.encode(turn).sum().backward()
        step, cpu = time.perf_counter() - start, time.process_time() - cpu
        return {"forward": forward, "step": step, "cpu": cpu, "exchange": self.exchanges.seconds}


def together(measured: dict[str, float]) -> dict[str, float]:
    """Return the seconds of the slower process and the CPU seconds of both."""
    largest = torch.tensor(list(measured.values()), dtype=torch.float64)
    total = largest.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
    found = dict(zip(measured, largest.tolist(), strict=True))
    return found | {"cpu": float(total[list(measured).index("cpu")])}


def best(runs: list[dict[str, float]], turn: str) -> dict[str, float]:
    """Return the best of each figure. The exchange time is the one of the fastest step."""
    found = {name: min(run[name] for run in runs) for name in runs[0]}
    found["exchange"] = min(runs, key=lambda run: run["step"])["exchange"]
    if turn != "split":
        del found["exchange"]
    return {f"{name}_seconds": round(value, 3) for name, value in found.items()}


def bench(patches: int, repeats: int, group: dist.ProcessGroup, exchanges: Exchanges) -> dict:
    item = Item(patches, group, exchanges)
    apart = item.check()
    runs: dict[str, list[dict[str, float]]] = {"alone": [], "both": [], "split": []}
    for _ in range(repeats):  # interleaved, so that a load spike affects all three turns
        for turn, seen in runs.items():
            seen.append(together(item.measure(turn)))
    turns = {turn: best(seen, turn) for turn, seen in runs.items()}
    shares = {
        turn: found["cpu_seconds"] / found["step_seconds"] / (1 if turn == "alone" else PARTS)
        for turn, found in turns.items()
    }
    alone, both, split = turns.values()
    efficiency = {"of_cpu": round(both["cpu_seconds"] / (PARTS * split["cpu_seconds"]), 3)}
    if min(shares["alone"], shares["both"]) >= UNDISTURBED:
        efficiency |= {
            "step": round(both["step_seconds"] / (PARTS * split["step_seconds"]), 3),
            "forward": round(both["forward_seconds"] / (PARTS * split["forward_seconds"]), 3),
            "step_against_alone": round(alone["step_seconds"] / (PARTS * split["step_seconds"]), 3),
        }
    return {
        "patches": patches,
        "outputs_apart": float(f"{apart:.1e}"),
        "efficiency": efficiency,
        "share_of_cores": {turn: round(share, 2) for turn, share in shares.items()},
        "MiB_sent_by_a_member_in_a_forward": round(
            split_bytes(patches, CONFIG, PARTS, itemsize=4) / 2**20, 1
        ),
        **turns,
    }


def work(rank: int, folder: str, sizes: list[int], repeats: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=PARTS,
        timeout=timedelta(minutes=10),
    )  # fmt: skip
    group = sharded.blocks([range(PARTS)], PARTS, 600.0)[PARTS]
    exchanges = Exchanges()
    results = []
    for patches in sizes:
        results.append(bench(patches, repeats, group, exchanges))
        if rank == 0:
            print(json.dumps(results[-1], indent=1), flush=True)
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--patches", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    for patches in args.patches:
        grid_of(patches)
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        given = (folder, args.patches, args.repeats)
        spawn(work, given, nprocs=PARTS)
        results = json.loads(Path(folder, "results.json").read_text())
    report = {
        "date": date.today().isoformat(),
        "device": f"CPU, {platform.machine()}, {os.cpu_count()} cores",
        "load_average_at_start": round(load, 2),
        "processes": PARTS,
        "threads_each": 1,
        "backend": "gloo, loopback",
        "dtype": "float32",
        "width": CONFIG.width,
        "heads": CONFIG.heads,
        "layers": CONFIG.depth,
        "mlp_width": CONFIG.mlp_width,
        "repeats": args.repeats,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "results": results,
    }
    write(report, args.out)


if __name__ == "__main__":
    main()
