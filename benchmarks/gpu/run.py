"""Runs all parts of `make gpu`, one after the other, and writes a page of the results.

A part that fails or exceeds its limit is killed with all its child processes, and the next part
starts. The results so far are written after each part. The exit code is the number of failed parts.
docs/GPU.md lists the requirements.

    python -m benchmarks.gpu.run                       # on the CUDA device of this machine
    python -m benchmarks.gpu.run --device cpu          # the same code in a short form
    python -m benchmarks.gpu.run --only attention      # one part; the page keeps the rest
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.gpu.page import page
from benchmarks.gpu.parts import PARTS, Part

ROOT = Path(__file__).resolve().parent.parent.parent
SLOWER = 12  # factor on the limits on a CPU, which other programs may use
TAIL = 4000  # characters of a failed part's output to keep in the results

Start = Callable[[list[str], float], tuple[int | None, str]]
"""Takes Python arguments and a limit in seconds; returns exit code (None if killed) and output."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], metavar="PART")
    parser.add_argument("--out", type=Path, help="folder; default benchmarks/results or runs/gpu")
    arguments = parser.parse_args()
    default = ROOT / ("benchmarks/results" if arguments.device == "cuda" else "runs/gpu")
    parts = [part for part in PARTS if arguments.only is None or part.name in arguments.only]
    sys.exit(run(parts, arguments.device, (arguments.out or default).resolve()))


def run(parts: Sequence[Part], device: str, folder: Path, start: Start | None = None) -> int:
    """Run parts and return the number of failures.

    Args:
        parts: parts in order.
        device: "cuda" or "cpu".
        folder: folder of the results and of the page, gpu_<device>.md.
        start: function that runs a part.
    """
    from benchmarks.result import write

    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"about": _about(device), "parts": {}}
    for part in parts:
        out = part.result(device, folder)
        out.unlink(missing_ok=True)  # a failed part must not show an older result
        limit = part.seconds * (1 if device == "cuda" else SLOWER)
        print(f"== {part.name}: {part.about}, at most {limit:.0f} s", flush=True)
        begin = time.monotonic()
        code, output = (start or _start)(part.arguments(device, folder), limit)
        outcome = "ok" if code == 0 and out.is_file() else "failed"
        if code == 0 and not out.is_file():
            output += f"\n{part.name} ended well but wrote no {out.name}"
        if code is None:
            outcome = "took too long"
        found["parts"][part.name] = {
            "outcome": outcome,
            "exit_code": code,
            "seconds": round(time.monotonic() - begin, 1),
            "limit": limit,
            "output": "" if outcome == "ok" else output[-TAIL:],
        }
        print(f"== {part.name}: {outcome}\n{found['parts'][part.name]['output']}", flush=True)
        text = page(found, device, folder)
        write(found, folder / f"gpu_{device}.json")
        (folder / f"gpu_{device}.md").write_text(text)
    print(text if parts else "", flush=True)
    return sum(one["outcome"] != "ok" for one in found["parts"].values())


def _about(device: str) -> dict[str, Any]:
    """Return versions, read in a separate process, because importing torch may fail."""
    code = (
        "import torch, json; from benchmarks.device import machine, software;"
        f"d = torch.device({device!r});"
        "p = ('triton', 'megatron-core', 'transformers', 'numpy', 'einops', 'pydantic');"
        "print(json.dumps([machine(d), software(d, *p)]))"
    )
    code_of, output = _start(["-c", code], 60)
    about: dict[str, Any] = {"date": date.today().isoformat(), "device": device}
    if code_of != 0:
        return about | {"machine": "not known", "versions": {}, "error": output[-TAIL:]}
    import json

    machine, versions = json.loads(output.strip().splitlines()[-1])
    return about | {"machine": machine, "versions": versions}


def _start(arguments: list[str], seconds: float) -> tuple[int | None, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONWARNINGS": "ignore", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=environment, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=seconds)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        _end(process)
        output, _ = process.communicate()
        return None, output
    except BaseException:
        _end(process)
        raise


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the session of the process, including all its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
