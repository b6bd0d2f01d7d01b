"""The two jobs of `kimi-pretrain verify dep`, one after the other, and their gradients compared.

The user's layout with the Decoupled Encoder Process, and one process with the encoder inside the
graph.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.verify import jobs as verify_jobs

if TYPE_CHECKING:
    from kimi_pretrain.config import Config
    from kimi_pretrain.verify.compare import Comparison, Tolerance


def with_fault(result: dict[str, Any], fault: str) -> dict[str, Any]:
    """Return the result of `verify_dep` as if the step with a fault were the step to verify.

    Raises:
        ValueError: the fault could not be planted in this step.
    """
    told = result["faults"][fault]
    if "obstacle" in told:
        raise ValueError(f"--plant {fault} cannot be done here: {told['obstacle']}")
    comparison = told["comparison"]
    return result | {
        "passed": comparison["passed"],
        "comparison": comparison,
        "planted": fault,
        "faults": {},
    }


def verify_dep(
    config_path: str,
    overrides: tuple[str, ...] = (),
    *,
    shrink: bool = False,
    processes: int = 4,
    steps: int = 1,
    faults: Sequence[str] = (),
    keep: Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run both jobs and compare them.

    Args:
        config_path: YAML file or name of a preset.
        overrides: `section.key=value`.
        shrink: take a small copy of the configuration, of at most `processes` processes.
        steps: to run; gradients are compared after the last.
        faults: names in `kimi_pretrain.verify.faults.FAULTS`; each is planted in a step of its own.
        keep: empty folder for what is otherwise thrown away.
        tell: takes a line about what is going on.

    Returns:
        passed: nothing differs, and every fault that could be planted was found;
        comparison: `Comparison.as_dict()` of the step as it is;
        faults: name -> {found, comparison}, or {obstacle} where the step cannot have it;
        plan, processes, layout, dtype, steps, changes, seconds.

    Raises:
        ValueError: the configuration cannot run here, or the step has no media to verify.
        JobStopped: a job failed.
    """
    from kimi_pretrain.config import describe
    from kimi_pretrain.verify import jobs
    from kimi_pretrain.verify.compare import tolerance_for
    from kimi_pretrain.verify.faults import FAULTS
    from launch.verify.dep_worker import WORKER, VerifyJob

    verify_jobs.refuse_ranks()
    config, changes = verify_jobs.load(config_path, overrides, shrink=shrink, processes=processes)
    config = jobs.decoupled(config)
    verify_jobs.check_machine(config)
    tolerance = tolerance_for(config.train.dtype, config.dep.exchange_dtype, steps)
    with verify_jobs.working_folder(keep) as folder:
        check_step(config, steps)
        for line in describe(config).splitlines():
            tell(line)
        dep = VerifyJob.inside(folder / "dep", steps, faults)
        routed = [name for name in faults if FAULTS[name].routes]
        alone = VerifyJob.inside(folder / "reference", steps, routed, dep.run_dir, tolerance.ties)
        seconds = {
            "dep": verify_jobs.run(dep, WORKER, config, "dep", tell),
            "reference": verify_jobs.run(alone, WORKER, jobs.reference(config), "reference", tell),
        }
        result = compare_jobs(folder, tolerance, faults) | {
            "processes": config.layout.world_size(),
            "layout": config.layout.model_dump(mode="json"),
            "dtype": config.train.dtype,
            "steps": steps,
            "changes": [list(change) for change in changes],
            "seconds": seconds,
        }
        if keep is not None:
            (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def check_step(config: "Config", steps: int) -> None:
    """Refuse what the jobs could not run, or a last step that says nothing, before they start."""
    from kimi_pretrain.reliability.preflight import check_start

    *_, last = check_start(config, steps)
    if not len(last.items.row):
        raise ValueError(
            "the step to compare holds no media, so there is nothing to verify; raise "
            "data.rows_per_step or the share of the sources with media, or change data.seed"
        )


def compare_jobs(folder: Path, tolerance: "Tolerance", faults: Sequence[str]) -> dict[str, Any]:
    """Compare what both jobs left under `folder`; see `verify_dep` for the result."""
    from kimi_pretrain.verify import compare, gradients, jobs

    plan: dict[str, Any] = {}

    def judged(name: str) -> "Comparison | str":
        found = jobs.read_facts(folder / "dep" / name)
        if isinstance(found, str):
            return found
        plan.update(found[1])
        # A fault in the choice of experts has a reference of its own, that was to follow it.
        own = folder / "reference" / name
        beside = own if own.is_dir() else folder / "reference" / jobs.CLEAN
        wanted = jobs.read_facts(beside)
        assert not isinstance(wanted, str)  # only faults have obstacles
        files = gradients.GradientFiles(folder / "dep" / name)
        reference = gradients.GradientFiles(beside)
        return compare.compare(files, reference, found[0], wanted[0], tolerance)

    clean = judged(jobs.CLEAN)
    assert not isinstance(clean, str)
    found = {name: _verdict(judged(name)) for name in faults}
    if not clean.passed:  # then a fault would be "found" whether it is there or not
        for fault in found.values():
            fault["found"] = False
    return {
        "passed": clean.passed and all(fault.get("found", True) for fault in found.values()),
        "comparison": clean.as_dict(),
        "faults": found,
        "plan": plan,
    }


def _verdict(comparison: "Comparison | str") -> dict[str, Any]:
    """Return what became of a planted fault."""
    if isinstance(comparison, str):
        return {"obstacle": comparison}
    return {"found": not comparison.passed, "comparison": comparison.as_dict()}
