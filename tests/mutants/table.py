"""Writes the page with the outcomes of the faults."""

import platform
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from typing import NamedTuple

from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.faults import Fault
from tests.mutants.run import Planted

HEAD = """\
# Planted faults

`make mutants` writes this page: one-line faults, planted one at a time, each run with the tests of
its organ that reach the changed line. `CONTRIBUTING.md` says how to read and use it.

"""


class Row(NamedTuple):
    """An organ, its drawn faults and their known outcomes."""

    organ: str
    faults: Sequence[Fault]
    outcomes: Mapping[str, Planted]


def page(rows: Sequence[Row], number: int, seed: int) -> str:
    """Return the page as Markdown."""
    used = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "pytest"))
    parts = [
        HEAD,
        f"{date.today()}, Python {platform.python_version()}, {used}; at most {number} faults of "
        f"each organ, seed {seed}.\n\n",
        "| organ | drawn | noticed | of these by a time-out or a death | proven equivalent "
        "| survived | not run yet |\n|---|---|---|---|---|---|---|\n",
        *(_counts(row) for row in rows),
        _survivors(rows),
        _named(rows),
        _equivalents(rows),
    ]
    return "".join(parts)


def _counts(row: Row) -> str:
    found = [one for one in row.outcomes.values() if one.key not in EQUIVALENT]
    same = sum(fault.key in EQUIVALENT for fault in row.faults)
    noticed = [one for one in found if one.noticed]
    late = sum(one.outcome != "killed" for one in noticed)
    left = len(row.faults) - same - len(found)
    counts = len(row.faults), len(noticed), late, same, len(found) - len(noticed), left
    return f"| {row.organ} | {' | '.join(map(str, counts))} |\n"


def _survivors(rows: Sequence[Row]) -> str:
    left = [
        f"| `{_cell(key)}` | {one.outcome} | {one.tried} |\n"
        for row in rows
        for key, one in row.outcomes.items()
        if not one.noticed and key not in EQUIVALENT
    ]
    if not left:
        return "\nNo fault that was planted survived.\n"
    return "\n## Survivors\n\n| fault | outcome | tests tried |\n|---|---|---|\n" + "".join(left)


def _named(rows: Sequence[Row]) -> str:
    lines = [
        f"| `{_cell(fault.key)}` | {_outcome(row.outcomes.get(fault.key))} |\n"
        for row in rows
        if row.organ == "named"
        for fault in row.faults
    ]
    return "\n## Named faults\n\n| fault | noticed by |\n|---|---|\n" + "".join(lines)


def _outcome(one: Planted | None) -> str:
    if one is None:
        return "not run yet"
    return f"`{_cell(one.killer or '')}`" if one.noticed else f"**{one.outcome}**"


def _equivalents(rows: Sequence[Row]) -> str:
    keys = {fault.key for row in rows for fault in row.faults}
    lines = [f"| `{_cell(key)}` | {proof} |\n" for key, proof in EQUIVALENT.items() if key in keys]
    if not lines:
        return ""
    return "\n## Proven equivalents\n\n| fault | why it changes nothing |\n|---|---|\n" + "".join(
        lines
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("`", "'")
