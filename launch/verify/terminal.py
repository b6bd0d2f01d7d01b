"""Prints the result of any `kimi-pretrain verify`: changes, differences, faults, verdict."""

from typing import Any

from rich.console import Console
from rich.table import Table

from launch.verify.verification import Verification

WIDTH = 160  # columns


class Terminal:
    """Prints to standard output."""

    def __init__(self) -> None:
        # The tables need this width: on a narrow terminal the names in the last column would wrap.
        self.console = Console(highlight=False, soft_wrap=True)
        self.console.width = max(self.console.width, WIDTH)

    def line(self, text: str) -> None:
        """Print a line without markup."""
        self.console.print(text, markup=False)

    def show(self, kind: Verification, result: dict[str, Any]) -> None:
        """Print `Result.as_dict()`."""
        if result["changes"]:
            changed = table("shrunk", "key", "old", "new")
            for key, *values in result["changes"]:
                changed.add_row(key, *("null" if v is None else str(v) for v in values))
            self.console.print(changed)
        for line in kind.lines(result):
            self.line(line) if isinstance(line, str) else self.console.print(line)
        if result["faults"]:
            self.console.print(faults_table(kind, result["faults"]))
        self.console.print(verdict(kind, result))


def table(title: str, *columns: str) -> Table:
    """Return an empty table."""
    return Table(*columns, title=title, title_justify="left", box=None, caption_justify="left")


def faults_table(kind: Verification, faults: dict[str, dict[str, Any]]) -> Table:
    """Return the table of planted faults and their outcomes."""
    found = table("planted faults", "fault", "", "by")
    for name, fault in faults.items():
        if "obstacle" in fault:
            found.add_row(name, "not planted", fault["obstacle"])
            continue
        caught = "[green]found[/green]" if fault["found"] else "[red]NOT FOUND[/red]"
        found.add_row(name, caught, kind.evidence(fault["comparison"]))
    found.caption = "; ".join(f"{name}: {kind.faults[name].what}" for name in faults)
    return found


def verdict(kind: Verification, result: dict[str, Any]) -> str:
    """Return the verdict line, with markup."""
    planted = f" (planted: {result['planted']})" if "planted" in result else ""
    compared = {key: both for key, both in kind.verdicts.items() if result[key]}
    for key, (_, different) in compared.items():  # "comparison" comes first
        if not result[key]["passed"]:
            return f"[red]FAIL[/red]: {different}{planted}"
        if planted:
            return f"PASS: nothing was found{planted}"
    missed = [name for name, fault in result["faults"].items() if not fault.get("found", True)]
    if missed:
        return f"[red]FAIL[/red]: planted and not found: {', '.join(missed)}"
    return f"[green]PASS[/green]: {', and '.join(same for same, _ in compared.values())}"


def number(value: float | None, form: str = "{:.1e}") -> str:
    """Format a number; None means not finite."""
    return "not finite" if value is None else form.format(value)
