"""Benchmarks checkpoints against the disk: bandwidth, stall, training slow-down, time to resume.

Two gloo processes of one thread each hold private state and shared weights, and write `--mib` MiB
each. Every round measures in turn:

    dd            the same bytes from memory to the disk, past the page cache and through it
    torch.save    the same bytes, and fsync
    save          a checkpoint, until it is complete: hashed, written, durable, committed
    dd reads, verify, load, torch.load    reads after the page cache is dropped; load follows
                  verify, so it may hit the cache
    stall         training time that a background save blocks: its start, and the wait before the
                  next update until all tensors are copied
    step          matrix products with one gather, without a save and while a save is written

Then a small model is trained for 5 and for 500 steps and resumed, timed from the command to the
first step. Figures are medians of the rounds. A run takes about eight minutes and needs a quiet
machine.

    python benchmarks/bench_checkpoint.py            # the committed results
    python benchmarks/bench_checkpoint.py --quick    # a minute; figures not to quote
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torch.multiprocessing.spawn import spawn

from benchmarks.checkpoint import resume
from benchmarks.checkpoint.ranks import rate, work
from benchmarks.result import named, versions, write

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "checkpoint_cpu.json"
ASIDE = ROOT / "runs" / "bench_checkpoint"
PROCESSES = 2
WRITES = ("dd past the cache", "dd through the cache", "torch.save", "save")
READS = ("dd reads", "verify", "load", "torch.load")


def summary(measured: dict[str, Any], resumed: dict[str, list[float]]) -> dict[str, Any]:
    """Return the medians, the rates and the figures that the targets use."""
    rounds, size = measured["rounds"], measured["bytes"]
    seconds = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    disk = max(rate(size, seconds[name]) for name in WRITES[:2])
    during = seconds["step while saving"] / seconds["step"]
    medians = {steps: statistics.median(found) for steps, found in resumed.items()}
    return {
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "GiB_per_second": {name: round(rate(size, seconds[name]), 3) for name in (*WRITES, *READS)},
        "save_of_disk": round(rate(size, seconds["save"]) / disk, 3),
        "save_over_torch": round(seconds["torch.save"] / seconds["save"], 2),
        "stall_of_save": round(seconds["stall"] / seconds["save"], 4),
        "first_stall_seconds": round(measured["first_stall"], 3),
        "step_while_saving": round(during, 3),
        "seconds_lost_a_save": round(seconds["stall"] + (1 - 1 / during) * seconds["save"], 3),
        "resume_seconds": {steps: round(value, 2) for steps, value in medians.items()},
        "resume_spread": {
            steps: [round(min(found), 2), round(max(found), 2)] for steps, found in resumed.items()
        },
    }


def targets(found: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """Return each target with the measured value and whether it is met."""
    few, many = found["resume_seconds"].values()
    low, high = found["resume_spread"][next(iter(found["resume_spread"]))]
    apart = many - few
    share, stall = found["save_of_disk"], found["stall_of_save"]
    return [
        ("a save reaches 80% of the disk's sequential write", f"{share:.0%}", share >= 0.8),
        ("a save in the background stalls 5% of a synchronous one", f"{stall:.1%}", stall <= 0.05),
        (
            "resuming takes no longer after more steps (within the spread of the repeats, 5% at "
            "least)",
            f"{apart:+.2f} s of {few:.2f} s",
            apart <= max(high - low, 0.05 * few),
        ),
    ]


def document(report: dict[str, Any]) -> str:
    """Return the results as a Markdown page."""
    found = report["summary"]
    lines = [
        "# Checkpoints against the disk",
        "",
        f"{report['date']}, {report['device']}; {report['versions']}. Made by "
        f"`benchmarks/bench_checkpoint.py`: {PROCESSES} processes of one thread each, "
        f"{report['bytes'] / 2**30:.2f} GiB in all, {report['rounds']} rounds, load average at the "
        f"start {report['load_average_at_start']}.",
        "",
        *(["**A quick run: figures not to quote.**", ""] if report["quick"] else []),
        "| target | found | met |",
        "|---|---|---|",
        *(f"| {what} | {seen} | {'yes' if met else 'no'} |" for what, seen, met in targets(found)),
        "",
        "| the same bytes | seconds | GiB/s |",
        "|---|---|---|",
        *(
            f"| {name} | {found['seconds'][name]:.3f} | {found['GiB_per_second'][name]:.2f} |"
            for name in (*WRITES, *READS)
        ),
        "",
        "`save` is everything until the checkpoint is complete: copied aside, hashed with SHA-256, "
        "written, durable, committed. `verify` hashes all files; `load` then reads each rank's "
        "tensors, from the page cache as far as it holds them. The last rows read what was dropped "
        "from the page cache before.",
        "",
        f"- {found['save_over_torch']:.2f} times as fast as torch.save, which hashes nothing.",
        f"- Stall of a save in the background: {found['seconds']['stall'] * 1000:.0f} ms. The "
        f"first of a run takes the memory: {found['first_stall_seconds']:.2f} s.",
        f"- A step takes {found['step_while_saving']:.2f} times as long while a save is written "
        "(two processes compute on as many cores, and their writers hash beside them); "
        f"{found['seconds_lost_a_save']:.2f} s are lost by a save in all.",
        "- From the command to the first step of a resumed run: "
        + ", ".join(
            f"{found['resume_seconds'][steps]:.2f} s after {steps} steps ({low:.2f} to {high:.2f})"
            for steps, (low, high) in found["resume_spread"].items()
        )
        + ".",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--mib", type=int, default=1024, help="that each process writes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=5, help="of each resumed run")
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    steps = [5, 500]
    if args.quick:
        args.mib, args.rounds, args.repeats, steps = 128, 2, 1, [2, 4]
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    load_average = round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        spawn(work, (PROCESSES, folder, args.mib, args.rounds), nprocs=PROCESSES)
        measured = json.loads(Path(folder, "rounds.json").read_text())
        resumed = resume.measure(Path(folder), steps, args.repeats)
    report = {
        "date": date.today().isoformat(),
        "device": f"CPU, {platform.machine()}, {os.cpu_count()} cores",
        "versions": named(versions("torch", "numpy")),
        "load_average_at_start": load_average,
        "quick": args.quick,
        "processes": PROCESSES,
        "bytes": measured["bytes"],
        "rounds": args.rounds,
        "summary": summary(measured, resumed),
        "measured": measured["rounds"],
        "resumed": resumed,
    }
    write(report, ASIDE / RESULT.name if args.quick else RESULT, document(report))


if __name__ == "__main__":
    main()
