"""Shared helpers for the benchmarks' result files and pages."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kimi_pretrain import __version__

RESULTS = Path(__file__).parent / "results"


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of this package, Python and the given packages."""
    own = {"kimi-pretrain": __version__, "python": platform.python_version()}
    return own | {name: version(name) for name in packages}


def processor() -> str:
    """Return the CPU model name from /proc/cpuinfo, or the architecture if it has none."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def cores() -> str:
    """Return the core count and architecture, for example "2 cores, x86_64"."""
    return f"{os.cpu_count()} cores, {platform.machine()}"


def write(found: Mapping[str, Any], out: Path, page: str | None = None) -> None:
    """Write the JSON file. If a page is given, print it and write it next to the JSON file."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
    if page is not None:
        out.with_suffix(".md").write_text(page)
        print(page)
    print(f"written: {out}")


def named(found: Mapping[str, str]) -> str:
    """Return package versions as a comma-separated list."""
    return ", ".join(f"{name} {number}" for name, number in found.items())


def table(head: Sequence[Any], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return the lines of a markdown table."""
    lines = ["| " + " | ".join(map(str, head)) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]


def verdicts(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> list[str]:
    """Return the targets section as Markdown lines. `columns` maps row keys to column titles."""
    cells = [[yes(row[key]) if key == "met" else row[key] for key in columns] for row in rows]
    return ["## Targets", "", *table(list(columns.values()), cells), ""]


def yes(value: bool | None) -> str:
    """Return yes or no, or "not measured" for None."""
    return "not measured" if value is None else "yes" if value else "no"


def spread(value: Mapping[str, float], form: str) -> str:
    """Return the median and the range in a number format, as "median (min - max)"."""
    return f"{value['median']:{form}} ({value['min']:{form}} - {value['max']:{form}})"
