"""Classifies a thread's stack: its position, and whether it waits for other ranks.

With gloo the host waits inside the collective, or in a call that waits for it. On a CUDA device a
collective is only enqueued, and the host waits later: wherever it copies from the device or the
queue is full. Any code that feeds the device can block there. A rank whose host blocks the other
ranks is in different code: it reads, sleeps, or waits for a lock, a queue or another process.

A stack is a list of (file, line, function), innermost first. C code has no frame, so its Python
caller is the innermost frame.
"""

import linecache
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

Lines = Sequence[tuple[str, int, str]]

ROOT = Path(__file__).parent.parent.parent
ROOMS = ("kimi_pretrain", "data_pipeline", "moonvit3d", "typed_config", "launch", "tests")
# Files that wait for other ranks, and calls that wait for work started elsewhere.
COLLECTIVES = ("torch/distributed/", "megatron/core/pipeline_parallel/p2p_communication")
WAITING_CALLS = (".wait(", "synchronize(", ".barrier(", "all_reduce(", "all_gather")
# Packages that feed a device.
FEEDING = (
    "kimi_pretrain", "moonvit3d", "megatron", "torch", "transformer_engine",
    "transformer_engine_torch", "triton", "flash_attn", "flash_attn_interface",
)  # fmt: skip
# Parts of those packages that run on the host; launching compiled code feeds the device again.
COMPILING = ("torch/_dynamo/", "torch/_inductor/", "torch/fx/", "triton/compiler/", "/compiler.py")
LAUNCHING = ("torch/_inductor/runtime/",)
# Files of those packages that also do file I/O: the source line decides.
FILING = (
    "kimi_pretrain/checkpoint/", "kimi_pretrain/weights/", "kimi_pretrain/telemetry/recorder.py",
    "kimi_pretrain/telemetry/run_dir.py", "kimi_pretrain/reliability/run_files.py",
    "kimi_pretrain/reliability/anomaly_guard.py", "kimi_pretrain/reliability/run_lock.py",
    "kimi_pretrain/reliability/status.py", "moonvit3d/files.py",
    "moonvit3d/safetensors_io.py",
)  # fmt: skip
DEVICE_CALLS = (*WAITING_CALLS, ".cpu(", ".item(", ".tolist(", ".copy_(", ".to(")
_STDLIB = sysconfig.get_path("stdlib") + os.sep


def stack_of(frame: FrameType | None) -> list[tuple[str, int, str]]:
    """Return the frames of a thread."""
    lines = []
    while frame is not None:
        lines.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return lines


def waits(lines: Lines, *, on_device: bool = False) -> bool:
    """Return whether a thread is waiting for other ranks, or for the CUDA device it computes on."""
    if not lines:
        return False
    if any(part in line[0] for line in lines[:4] for part in COLLECTIVES):
        return True
    if on_device:
        return _feeds(lines)
    file, number, _ = lines[0]
    return _ours(file) and _calls(file, number, WAITING_CALLS)


def where(lines: Lines) -> str:
    """Describe the innermost frame, and this project's innermost frame if it is a different one."""
    if not lines:
        return "an unknown line"
    ours = next((line for line in lines if _ours(line[0])), lines[0])
    told = _line(*lines[0])
    return told if ours == lines[0] else f"{told} called from {_line(*ours)}"


def _feeds(lines: Lines) -> bool:
    """Return True if a thread is in code that feeds a device.

    Generated code counts as its caller.
    """
    file, number, _ = next((line for line in lines if not _generated(line[0])), lines[0])
    if _package(file) not in FEEDING:
        return False
    if any(part in file for part in COMPILING):
        return any(part in file for part in LAUNCHING)
    if any(file.startswith(str(ROOT / part)) for part in FILING):
        return _calls(file, number, DEVICE_CALLS)
    return True


def _package(file: str) -> str:
    """Return the top-level package that a file belongs to, or "" if there is none."""
    parts = Path(file).parts
    if _ours(file):
        return parts[len(ROOT.parts)]
    for folder in ("site-packages", "dist-packages"):
        if folder in parts[:-1]:
            return parts[parts.index(folder) + 1].removesuffix(".py")
    if file.startswith((_STDLIB, "<")):
        return ""
    # The package may be imported from a source checkout at any path.
    return next((part for part in parts if part in FEEDING), "")


def _generated(file: str) -> bool:
    """Return True for code that a compiler generated at run time."""
    return "torchinductor_" in file or (file.startswith("<") and not file.startswith("<frozen"))


def _calls(file: str, number: int, calls: Sequence[str]) -> bool:
    line = linecache.getline(file, number)
    return any(call in line for call in calls)


def _line(file: str, number: int, function: str) -> str:
    path = Path(file)
    short = path.relative_to(ROOT) if _ours(file) else Path(*path.parts[-3:])
    return f"{short}:{number} ({function})"


def _ours(file: str) -> bool:
    return any(file.startswith(f"{ROOT / room}{os.sep}") for room in ROOMS)
