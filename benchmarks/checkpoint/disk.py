"""Baselines for the same bytes: the disk with dd, and torch.save."""

import os
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

WAYS = {"past the cache": ("oflag=direct", "conv=fsync"), "through the cache": ("conv=fsync",)}


def write(source: Path, target: Path, way: str) -> float:
    """Return the seconds that dd takes to write a file from memory and sync it to the disk."""
    command = ["dd", f"if={source}", f"of={target}", "bs=16M", *WAYS[way]]
    seconds = _timed(command)
    target.unlink()
    return seconds


def read(files: Iterable[Path]) -> float:
    """Return the seconds that dd takes to read files past the page cache."""
    return sum(_timed(["dd", f"if={f}", "of=/dev/null", "bs=16M", "iflag=direct"]) for f in files)


def save_by_torch(tensors: dict[str, Tensor], target: Path) -> float:
    """Return the seconds of torch.save until the file is on the disk."""
    start = time.perf_counter()
    with target.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - start


def load_by_torch(source: Path, tensors: dict[str, Tensor]) -> float:
    """Return the seconds of torch.load into existing tensors."""
    start = time.perf_counter()
    for name, tensor in torch.load(source, weights_only=True).items():
        tensors[name].copy_(tensor)
    return time.perf_counter() - start


def forget(files: Iterable[Path]) -> None:
    """Drop files from the page cache."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _timed(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start
