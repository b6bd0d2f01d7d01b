"""Compares an interrupted run with an uninterrupted one.

Times, memory, traffic and values derived from them differ from run to run. All other numbers must
be bit-identical, and so must the SHA-256 of the run's whole state.
"""

import json
from pathlib import Path
from typing import Any

from kimi_pretrain.verify.traces import numbers_of


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a JSON-lines file without a torn last line; [] if there is no file."""
    if not file.is_file():
        return []
    whole = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [json.loads(line) for line in whole]


def difference_of_lines(run: Path, straight: Path) -> str | None:
    """Return the first step whose line differs from the uninterrupted run's; None if all are equal.

    The run may have done fewer steps, but no step in between may be missing.
    """
    lines, expected = (read_lines(folder / "metrics.jsonl") for folder in (run, straight))
    for number, (line, wanted) in enumerate(zip(lines, expected), 1):
        found, known = numbers_of(line), numbers_of(wanted)
        if found != known:
            names = [name for name in known if found.get(name) != known[name]]
            return f"step {number}: {', '.join(names)} differ"
    return None if len(lines) <= len(expected) else f"{len(lines)} steps, not {len(expected)}"


def difference(run: Path, straight: Path) -> str | None:
    """Return how a finished run differs from the uninterrupted one; None if they are equal."""
    if found := difference_of_lines(run, straight):
        return found
    steps = [len(read_lines(folder / "metrics.jsonl")) for folder in (run, straight)]
    if steps[0] != steps[1]:
        return f"{steps[0]} lines of metrics, not {steps[1]}"
    hashes = [folder / "state_hashes.json" for folder in (run, straight)]
    if not hashes[0].is_file():
        return "no state_hashes.json: it did not finish"
    mine, wanted = (json.loads(file.read_text()) for file in hashes)
    names = [name for name in wanted if mine.get(name) != wanted[name]]
    return f"final state: {', '.join(names)} differ" if names else None
