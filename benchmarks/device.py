"""What benchmarks that run on a CPU and on a GPU have in common: time, memory, where they ran."""

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

ASIDE = RESULTS.parent.parent / "runs" / "benchmarks"  # for short forms
Call = Callable[[], Any]


def parser(doc: str | None, stem: str) -> argparse.ArgumentParser:
    """Return the options that they share.

    Args:
        doc: of the benchmark's module.
        stem: of its result files.
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
    """Return the device that was asked for, and fill in where the results go.

    Raises:
        SystemExit: it is not there.
    """
    folder = ASIDE if arguments.quick else RESULTS
    arguments.out = arguments.out or folder / f"{arguments.stem}_{arguments.device}.json"
    if arguments.device == "cuda":
        if not torch.cuda.is_available():
            sys.exit("error: --device cuda: torch finds no CUDA device here")
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def about(arguments: argparse.Namespace, device: torch.device, *packages: str) -> dict[str, Any]:
    """Return what a reader needs to judge the figures; packages that are not there are left out."""
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
    """Return such as "NVIDIA H200, 16 cores, x86_64"."""
    return f"{torch.cuda.get_device_name(device)}, {cores()}" if device.type == "cuda" else cores()


def software(device: torch.device, *packages: str) -> dict[str, str]:
    """Return versions of this package, Python, torch, other packages, and CUDA where it is used."""
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
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_seconds(call: Call, device: torch.device) -> float:
    """Return the seconds from the call to the end of its work on the device."""
    synchronise(device)
    start = time.perf_counter()
    call()
    synchronise(device)
    return time.perf_counter() - start


def timed(call: Call, device: torch.device, repeats: int) -> dict[str, float]:
    """Return the seconds of the first call, of a median one after it, of the least and the most.

    The first compiles kernels and makes workspaces. On CUDA seconds are the device's, by events.
    """
    first, taken = wall_seconds(call, device), []
    for _ in range(repeats):
        watch = Stopwatch(device)
        with watch.running():
            call()
        taken.append(watch.seconds())
    return {"first": first, "median": median(taken), "min": min(taken), "max": max(taken)}


def peak_bytes(call: Call, device: torch.device) -> int:
    """Return the highest sum of allocations above what was there before the call."""
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
    """Return the first lines of a page: its title, and where the figures are from."""
    one = found["about"]
    lines = [f"# {title}: measured on {one['device'].upper()}", ""]
    lines += [
        f"{one['date']}, {one['machine']}, {one['threads']} threads; {named(one['versions'])}.",
        "",
    ]
    if one["quick"]:
        lines += ["**Tiny sizes: no figure here is to be quoted.**", ""]
    return lines
