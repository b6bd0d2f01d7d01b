"""What `kimi-pretrain verify dep` prints: the table of parameter groups, and the verdict."""

from math import inf
from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 160  # columns
OTHER = "other experts"
COUNTS = {
    "steps": "steps",
    "loss_tokens": "loss tokens",
    "vision_tokens": "vision tokens",
    "items": "media",
    "skipped_samples": "skipped samples",
}


class Terminal:
    """Prints to standard output."""

    def __init__(self) -> None:
        # As wide as the table needs: on a narrow terminal its last column, names, is what wraps.
        self.console = Console(highlight=False, soft_wrap=True)
        self.console.width = max(self.console.width, WIDTH)

    def line(self, text: str) -> None:
        """Print a line of progress."""
        self.console.print(text, markup=False)

    def show(self, result: dict[str, Any]) -> None:
        """Print the result of `verify_dep`."""
        if result["changes"]:
            self.console.print(changes_table(result["changes"]))
        self.console.print(plan_line(result["plan"], result["processes"]), markup=False)
        self.console.print(groups_table(result["comparison"]))
        for line in other_lines(result["comparison"]):
            self.console.print(line, markup=False)
        if result["faults"]:
            self.console.print(faults_table(result["faults"]))
        self.console.print(verdict(result))


def changes_table(changes: list[list[Any]]) -> Table:
    """Return what `--shrink` changed."""
    table = Table("key", "old", "new", title="shrunk", title_justify="left", box=None)
    for key, old, new in changes:
        table.add_row(key, shown(old), shown(new))
    return table


def plan_line(plan: dict[str, int], processes: int) -> str:
    """Return what DEP had to do in this step."""
    return (
        f"{plan['items']} media of {plan['patches']:,} patches, encoded by "
        f"{plan['encoding_ranks']} of {processes} processes; {plan['moved_items']} away from the "
        f"rank that needs them, {plan['shared_items']} by several ranks together"
    )


def groups_table(comparison: dict[str, Any]) -> Table:
    """Return the table of parameter groups."""
    columns = ("", "parameters", "norm / reference", "worst error", "of")
    allowed = comparison["tolerance"]
    title = f"gradients; rounding explains errors of {allowed['matrices']:.0e}"
    if allowed["vectors"] != allowed["matrices"]:
        title += f", in biases and norms {allowed['vectors']:.0e}"
    table = Table("group", *columns, title=title, title_justify="left", box=None)
    for group in comparison["groups"]:
        zero = f" ({group['zero']} zero)" if group["zero"] else ""
        table.add_row(
            group["group"],
            "[green]ok[/green]" if group["passed"] else "[red]FAIL[/red]",
            f"{group['parameters']}{zero}",
            number(group["norm_ratio"], "{:.8f}"),
            number(group["error"], "{:.1e}") + over(group, allowed),
            group["worst"],
        )
    return table


def other_lines(comparison: dict[str, Any]) -> list[str]:
    """Return loss, norm and counts, and whatever else is wrong."""
    bound = comparison["tolerance"]["matrices"]
    losses = ", ".join(judged(error, bound) for error in comparison["loss_errors"])
    found = [f"loss: error {losses}"]
    found.append(f"gradient norm: error {judged(comparison['grad_norm_error'], bound)}")
    found += routes_lines(comparison["routes"])
    counts = []
    for name, (mine, wanted) in comparison["counts"].items():
        text = f"{COUNTS[name]} {mine:,}"
        counts.append(text if mine == wanted else f"{text} (FAIL: the reference has {wanted:,})")
    found.append("; ".join(counts))
    told = {
        "missing": "FAIL: no gradient with DEP",
        "extra": "FAIL: a gradient only with DEP",
        "differing": "FAIL: not the same on all ranks that hold a copy",
    }
    for key, text in told.items():
        if names := comparison[key]:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            found.append(f"{text}: {', '.join(names[:3])}{more}")
    return found


def judged(error: float | None, bound: float) -> str:
    """Return an error, and if it is over its bound that and the bound."""
    text = number(error, "{:.1e}")
    return text if error is not None and error <= bound else f"{text} (FAIL: over {bound:.0e})"


def over(group: dict[str, Any], allowed: dict[str, float]) -> str:
    """Return the bound that a group's worst error is over, or nothing."""
    if group["passed"]:
        return ""
    return f" > {allowed['vectors' if group['vector'] else 'matrices']:.0e}"


def routes_lines(routes: list[dict[str, Any]]) -> list[str]:
    """Return a line for each step in which tokens chose other experts than in the reference."""
    found = []
    for step in routes:
        where = f"of {step['tokens']:,} chose {{}} in step {step['step']}"
        if ties := step["at_ties"]:
            who, what = (
                ("one token", "another expert") if ties == 1 else (f"{ties:,} tokens", OTHER)
            )
            found.append(f"{who} {where.format(what)}: rounding, and the reference followed")
        if wrong := step["wrong"]:
            who = "one token" if wrong == 1 else f"{wrong:,} tokens"
            first = step["first_wrong"]
            found.append(f"FAIL: {who} {where.format(OTHER)}, and at no tie: first {first}")
    return found


def faults_table(faults: dict[str, dict[str, Any]]) -> Table:
    """Return what became of the planted faults."""
    from kimi_pretrain.verify.faults import FAULTS

    title = "planted faults"
    table = Table("fault", "", "worst error", "in", "loss error", title=title, box=None)
    table.title_justify = "left"
    for name, fault in faults.items():
        if "obstacle" in fault:
            table.add_row(name, "not planted", "", fault["obstacle"], "")
            continue
        caught = "[green]found[/green]" if fault["found"] else "[red]NOT FOUND[/red]"
        groups = fault["comparison"]["groups"]
        worst = max(groups, key=lambda group: inf if group["error"] is None else group["error"])
        loss = number(fault["comparison"]["loss_errors"][-1], "{:.1e}")
        table.add_row(name, caught, number(worst["error"], "{:.1e}"), worst["group"], loss)
    table.caption = "; ".join(f"{name}: {FAULTS[name].what}" for name in faults)
    table.caption_justify = "left"
    return table


def verdict(result: dict[str, Any]) -> str:
    """Return the last line, with markup."""
    comparison, faults = result["comparison"], result["faults"]
    planted = f" (planted: {result['planted']})" if "planted" in result else ""
    if not comparison["passed"]:
        return f"[red]FAIL[/red]: the step with DEP is not the step without it{planted}"
    if planted:
        return f"PASS: nothing was found{planted}{advice(result)}"
    missed = [name for name, fault in faults.items() if not fault.get("found", True)]
    if missed:
        return f"[red]FAIL[/red]: planted and not found: {', '.join(missed)}" + advice(result)
    return "[green]PASS[/green]: the step with DEP is the step without it" + advice(result)


def advice(result: dict[str, Any]) -> str:
    """Return what a coarse type hides, or nothing."""
    if result["dtype"] != "bfloat16":
        return ""
    return "; bfloat16 can hide small faults, train.dtype=float32 cannot"


def number(value: float | None, form: str) -> str:
    """Return a number for the table; None stands for one that is not finite."""
    return "not finite" if value is None else form.format(value)


def shown(value: Any) -> str:
    """Return a configuration value as one writes it in YAML."""
    return "null" if value is None else str(value)
