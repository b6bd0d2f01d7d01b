"""Timing, memory and machine helpers for benchmarks that run on both CPU and GPU."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.result import RESULTS, cores, named, versions
from kimi_pretrain.telemetry.stopwatch import Stopwatch

ASIDE = RESULTS.parent.parent / "runs" / "benchmarks"  # for quick runs
Call = Callable[[], Any]


def parser(doc: str | None, stem: str) -> argparse.ArgumentParser:
    """Return a parser with the options that these benchmarks share.

    Args:
        doc: module docstring of the benchmark.
        stem: file name of its results, without device and suffix.
    """
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--quick", action="store_true", help="tiny sizes; figures not to quote")
    made.add_argument("--out", type=Path, help=f"JSON; default {RESULTS.name}/{stem}_<device>.json")
    made.set_defaults(stem=stem)
    return made


def device_of(arguments: argparse.Namespace) -> torch.device:
    """Return the requested device and fill in the default path of the results.

    Raises:
        SystemExit: CUDA is requested but not available.
    """
    folder = ASIDE if arguments.quick else RESULTS
    arguments.out = arguments.out or folder / f"{arguments.stem}_{arguments.device}.json"
    if arguments.device == "cuda":
        if not torch.cuda.is_available():
            sys.exit("error: --device cuda: torch finds no CUDA device here")
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def about(arguments: argparse.Namespace, device: torch.device, *packages: str) -> dict[str, Any]:
    """Return the metadata needed to judge the results. Packages that are missing are omitted."""
    return {
        "date": date.today().isoformat(),
        "device": arguments.device,
        "machine": machine(device),
        "threads": torch.get_num_threads(),
        "load_before": [round(x, 2) for x in os.getloadavg()],
        "quick": arguments.quick,
        "versions": software(device, *packages),
    }


def machine(device: torch.device) -> str:
    """Return a description of the machine, for example "NVIDIA H200, 16 cores, x86_64"."""
    return f"{torch.cuda.get_device_name(device)}, {cores()}" if device.type == "cuda" else cores()


def software(device: torch.device, *packages: str) -> dict[str, str]:
    """Return versions of this package, Python, torch and others; on CUDA, also CUDA and cuDNN."""
    found = versions(*filter(_installed, ("torch", *packages)))
    if device.type == "cuda":
        found |= {"CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version())}
    return found


def _installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_seconds(call: Call, device: torch.device) -> float:
    """Return the wall-clock seconds from the call until the device has finished its work."""
    synchronise(device)
    start = time.perf_counter()
    call()
    synchronise(device)
    return time.perf_counter() - start


def timed(call: Call, device: torch.device, repeats: int) -> dict[str, float]:
    """Return the seconds of the first call, and the median, minimum and maximum of the later calls.

    The first call compiles kernels and allocates workspaces. On CUDA the later calls are timed with
    CUDA events.
    """
    first, taken = wall_seconds(call, device), []
    for _ in range(repeats):
        watch = Stopwatch(device)
        with watch.running():
            call()
        taken.append(watch.seconds())
    return {"first": first, "median": median(taken), "min": min(taken), "max": max(taken)}


def peak_bytes(call: Call, device: torch.device) -> int:
    """Return the peak of allocated bytes above the level before the call."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    results = seen.profiler
    assert results is not None
    found = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    live = top = 0
    for event in sorted(found, key=lambda e: e.start_ns()):
        live += event.nbytes()
        top = max(top, live)
    return top


def heading(title: str, found: Mapping[str, Any]) -> list[str]:
    """Return the first lines of a page: the title, then date, machine and versions of the run."""
    one = found["about"]
    lines = [f"# {title}: measured on {one['device'].upper()}", ""]
    lines += [
        f"{one['date']}, {one['machine']}, {one['threads']} threads; {named(one['versions'])}.",
        "",
    ]
    if one["quick"]:
        lines += ["**Tiny sizes: no figure here is to be quoted.**", ""]
    return lines
