"""What `kimi-pretrain verify resume` prints: what was compared, what differs first, the verdict."""

from typing import Any

from rich.table import Table

from launch.verify.dep_view import Terminal, changes_table, number


class ResumeTerminal(Terminal):
    """Prints to standard output."""

    def show(self, result: dict[str, Any]) -> None:
        """Print the result of `verify_resume`."""
        if result["changes"]:
            self.console.print(changes_table(result["changes"]))
        for line in lines(result):
            self.console.print(line, markup=False)
        if result["faults"]:
            self.console.print(faults_table(result["faults"]))
        self.console.print(verdict(result))


def lines(result: dict[str, Any]) -> list[str]:
    """Return what was compared, and what differs."""
    comparison, stop = result["comparison"], result["stop_after"]
    found = [
        f"stopped in step {stop} of {result['steps']}, resumed in new processes: compared "
        f"{comparison['numbers']:,} numbers of {_count(comparison['steps'], 'step')} and "
        f"{comparison['tensors']:,} tensors"
    ]
    if comparison["restored_tensors"] is not None and not comparison["restored_tensors"]:
        found[0] += ", these also at the moment the run went on"
    found += [f"  {line}" for line in comparison["differences"]]
    if comparison["suggestion"]:
        found.append(f"  this suggests: {comparison['suggestion']}")
    return found + (elsewhere_lines(result["elsewhere"]) if result["elsewhere"] else [])


def elsewhere_lines(elsewhere: dict[str, Any]) -> list[str]:
    """Return what became of the run that went on in another layout."""
    axes = {name: value for name, value in elsewhere["layout"].items() if value not in (1, None)}
    layout = " ".join(f"{name}={value}" for name, value in axes.items()) or "one process"
    losses, norms = (
        ", ".join(number(error, "{:.1e}") for error in elsewhere[name])
        for name in ("loss_errors", "norm_errors")
    )
    first, others = elsewhere["allowed"]
    found = [
        f"resumed with {layout}: errors of the loss {losses}, of the gradient norm {norms} "
        f"(rounding explains {first:.0e} in the first step, {others:.0e} after it)"
    ]
    if not elsewhere["after"]:
        return [f"{found[0]}; every step read the same samples"]
    one = elsewhere["after"][0]
    told = f"  step {one['step']} read others: {one['name']} is {one['found']}, was {one['wanted']}"
    return [*found, told]


def faults_table(faults: dict[str, dict[str, Any]]) -> Table:
    """Return what became of the planted faults."""
    from kimi_pretrain.verify.resume_faults import RESUME_FAULTS

    table = Table("fault", "", "by", title="planted faults", title_justify="left", box=None)
    for name, fault in faults.items():
        if "obstacle" in fault:
            table.add_row(name, "not planted", fault["obstacle"])
            continue
        caught = "[green]found[/green]" if fault["found"] else "[red]NOT FOUND[/red]"
        table.add_row(name, caught, next(iter(fault["comparison"]["differences"]), ""))
    table.caption = "; ".join(f"{name}: {RESUME_FAULTS[name].what}" for name in faults)
    table.caption_justify = "left"
    return table


def verdict(result: dict[str, Any]) -> str:
    """Return the last line, with markup."""
    elsewhere, faults = result["elsewhere"], result["faults"]
    planted = f" (planted: {result['planted']})" if "planted" in result else ""
    if not result["comparison"]["passed"]:
        return f"[red]FAIL[/red]: the resumed run is not the run that was never stopped{planted}"
    if planted:
        return f"PASS: nothing was found{planted}"
    if elsewhere is not None and not elsewhere["passed"]:
        return "[red]FAIL[/red]: in the other layout it is another run"
    missed = [name for name, fault in faults.items() if not fault.get("found", True)]
    if missed:
        return f"[red]FAIL[/red]: planted and not found: {', '.join(missed)}"
    layouts = ", and in another layout the same but for rounding" if elsewhere else ""
    return (
        "[green]PASS[/green]: the resumed run is the run that was never stopped, bit for bit"
        + layouts
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
