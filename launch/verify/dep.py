"""`kimi-pretrain verify dep`: compares the gradients of a step with DEP and without it.

dep/         the user's layout with the Decoupled Encoder Process
reference/   one process with the encoder inside the graph
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from rich.table import Table

from kimi_pretrain.config import Config
from kimi_pretrain.reliability.preflight import check_start
from kimi_pretrain.verify import configs
from kimi_pretrain.verify.dep_compare import tolerance_for
from kimi_pretrain.verify.dep_faults import FAULTS
from kimi_pretrain.verify.dep_files import compare_jobs
from kimi_pretrain.verify.result import Result
from launch.verify.jobs import Jobs
from launch.verify.terminal import number, table
from launch.verify.verification import Verification
from launch.verify.worker import VerifyJob

NAMES = {
    "missing": "FAIL: no gradient with DEP",
    "extra": "FAIL: a gradient only with DEP",
    "differing": "FAIL: not the same on all ranks that hold a copy",
}


@dataclass(frozen=True)
class VerifyDep(Verification):
    """Verification that a step with DEP equals the step without it.

    Attributes:
        steps: number of steps; gradients are compared after the last step.
    """

    steps: int = 1
    faults = FAULTS
    verdicts = {
        "comparison": (
            "the step with DEP is the step without it",
            "the step with DEP is not the step without it",
        )
    }

    def prepare(self, config: Config) -> Config:
        """Return the config of the job with DEP."""
        return configs.decoupled(config)

    def run(self, config: Config, jobs: Jobs, faults: Sequence[str]) -> Result:
        """Run both jobs; the reference follows the expert choices of the other job at ties.

        Raises:
            ValueError: the last step has no media.
        """
        tolerance = tolerance_for(config.train.dtype, config.dep.exchange_dtype, self.steps)
        *_, last = check_start(config, self.steps, ranks_here=config.layout.world_size()).plans
        if not len(last.items):
            raise ValueError(
                "the step to compare holds no media, so there is nothing to verify; raise "
                "data.rows_per_step or the share of the sources with media, or change data.seed"
            )
        jobs.announce(config)
        own = [name for name in faults if FAULTS[name].own_reference]
        dep, alone = jobs.folder / "dep", jobs.folder / "reference"
        for folder, planted, follow, its in (
            (dep, faults, None, config),
            (alone, own, str(dep), configs.reference(config)),
        ):
            options = {"steps": self.steps, "faults": list(planted), "follow": follow}
            options["ties"] = tolerance.ties
            place = str(folder / "config.yaml"), str(folder)
            jobs.run(folder.name, VerifyJob(*place, kind="dep", options=options), its)
        return compare_jobs(dep, alone, tolerance, faults)

    def lines(self, result: dict[str, Any]) -> list[str | Table]:
        """Return the vision plan, the table of parameter groups, losses, norm and counts."""
        plan, comparison = result["plan"], result["comparison"]
        planned = (
            f"{plan['items']} media of {plan['patches']:,} patches, encoded by "
            f"{plan['encoding_ranks']} of {result['processes']} processes; {plan['moved_items']} "
            f"away from the rank that needs them, {plan['shared_items']} by several ranks together"
        )
        if inside := plan["items_in_bubbles"]:
            planned += f", {inside} in the pipeline's bubbles or before and behind its passes"
        bound = comparison["tolerance"]["matrices"]
        losses = ", ".join(_judged(error, bound) for error in comparison["loss_errors"])
        counts = []
        for name, (mine, wanted) in comparison["counts"].items():
            wrong = "" if mine == wanted else f" (FAIL: the reference has {wanted:,})"
            shown = "media" if name == "items" else name.replace("_", " ")
            counts.append(f"{shown} {mine:,}{wrong}")
        found: list[str | Table] = [planned, _groups_table(comparison), f"loss: error {losses}"]
        found.append(f"gradient norm: error {_judged(comparison['grad_norm_error'], bound)}")
        found += [*_routes_lines(comparison["routes"]), "; ".join(counts)]
        for key, text in NAMES.items():
            if names := comparison[key]:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                found.append(f"{text}: {', '.join(names[:3])}{more}")
        if result["dtype"] == "bfloat16":
            found.append("bfloat16 can hide small faults, train.dtype=float32 cannot")
        return found

    def evidence(self, comparison: dict[str, Any]) -> str:
        """Return the largest error, its group, and the loss error."""
        groups = comparison["groups"]
        worst = max(groups, key=lambda group: inf if group["error"] is None else group["error"])
        loss = number(comparison["loss_errors"][-1])
        return f"an error of {number(worst['error'])} in {worst['group']}; loss error {loss}"


def _groups_table(comparison: dict[str, Any]) -> Table:
    allowed = comparison["tolerance"]
    title = f"gradients; rounding explains errors of {allowed['matrices']:.0e}"
    if allowed["vectors"] != allowed["matrices"]:
        title += f", in biases and norms {allowed['vectors']:.0e}"
    found = table(title, "group", "", "parameters", "norm / reference", "worst error", "of")
    for group in comparison["groups"]:
        zero = f" ({group['zero']} zero)" if group["zero"] else ""
        bound = allowed["vectors" if group["vector"] else "matrices"]
        found.add_row(
            group["group"],
            "[green]ok[/green]" if group["passed"] else "[red]FAIL[/red]",
            f"{group['parameters']}{zero}",
            number(group["norm_ratio"], "{:.8f}"),
            number(group["error"]) + ("" if group["passed"] else f" > {bound:.0e}"),
            group["worst"],
        )
    return found


def _judged(error: float | None, bound: float) -> str:
    """Format an error, and its bound if the error exceeds it."""
    over = error is None or error > bound
    return number(error) + (f" (FAIL: over {bound:.0e})" if over else "")


def _routes_lines(routes: list[dict[str, Any]]) -> list[str]:
    """Return lines for the steps in which tokens chose different experts than in the reference."""

    def chose(count: int, step: dict[str, Any]) -> str:
        who = "one token" if count == 1 else f"{count:,} tokens"
        what = "another expert" if count == 1 else "other experts"
        return f"{who} of {step['tokens']:,} chose {what} in step {step['step']}"

    found = []
    for step in routes:
        if step["at_ties"]:
            found.append(f"{chose(step['at_ties'], step)}: rounding, and the reference followed")
        if step["wrong"]:
            first = step["first_wrong"]
            found.append(f"FAIL: {chose(step['wrong'], step)}, and at no tie: first {first}")
    return found
