"""The jobs of `kimi-pretrain verify resume`, run and compared."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from launch.verify import jobs as verify_jobs
from launch.verify.jobs import Tell
from launch.verify.resume_jobs import ResumeJobs, temporary_place, told


def with_fault(result: dict[str, Any], fault: str) -> dict[str, Any]:
    """Return the result of `verify_resume` as if the run with a fault were the run to verify.

    Raises:
        ValueError: the fault could not be planted in this run.
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


def verify_resume(
    config_path: str,
    overrides: tuple[str, ...] = (),
    *,
    steps: int = 4,
    stop_after: int = 2,
    shrink: bool = False,
    processes: int = 4,
    elsewhere: tuple[str, ...] | None = None,
    faults: Sequence[str] = (),
    keep: Path | None = None,
    tell: Tell = lambda line: None,
) -> dict[str, Any]:
    """Run all jobs and compare them.

    Args:
        config_path: YAML file or name of a preset.
        overrides: `section.key=value`.
        steps: of the run that is never stopped.
        stop_after: step after which the other run is stopped.
        shrink: take a small copy of the configuration, of at most `processes` processes.
        elsewhere: resume also in another layout: overrides of it, or () to choose one.
        faults: names in `RESUME_FAULTS`; each is planted in a resumed run of its own.
        keep: empty folder for what is otherwise thrown away.
        tell: takes a line about what is going on.

    Returns:
        passed: nothing differs, and every fault that could be planted was found;
        comparison: `Comparison.as_dict()`, with "differences" and "suggestion" in words;
        elsewhere: `OtherLayout.as_dict()` with the layout, or None;
        faults: name -> {found, comparison}, or {obstacle} where this run cannot have it;
        processes, layout, dtype, steps, stop_after, place, changes, seconds.

    Raises:
        ValueError: the configuration cannot run here.
        JobStopped: a job failed.
    """
    from kimi_pretrain.config import describe
    from kimi_pretrain.reliability.preflight import check_start
    from kimi_pretrain.verify import resume_jobs

    verify_jobs.refuse_ranks()
    config, changes = verify_jobs.load(config_path, overrides, shrink=shrink, processes=processes)
    config = resume_jobs.proof(config, steps, stop_after)
    verify_jobs.check_machine(config)
    with (
        verify_jobs.working_folder(keep) as folder,
        temporary_place(config, folder) as place,
        ExitStack() as opened,
    ):
        jobs = ResumeJobs(config, folder, place, stop_after, tell, opened)
        other = None if elsewhere is None else jobs.in_layout(elsewhere)
        check_start(config, steps)
        for line in describe(config).splitlines():
            tell(line)
        comparison = jobs.stop_and_resume(tuple(faults))
        result: dict[str, Any] = {"passed": True, "comparison": told(comparison)}
        result["elsewhere"] = None if other is None else jobs.resume_in(other)
        result["faults"] = {name: jobs.verdict(name) for name in faults}
        if not comparison.passed:  # then a fault would be "found" whether it is there or not
            for fault in result["faults"].values():
                fault |= {"found": False} if "found" in fault else {}
        result |= {
            "passed": _passed(result),
            "processes": config.layout.world_size(),
            "layout": config.layout.model_dump(mode="json"),
            "dtype": config.train.dtype,
            "steps": steps,
            "stop_after": stop_after,
            "place": config.checkpoint.place or "run folder",
            "asynchronous": config.checkpoint.asynchronous,
            "changes": [list(change) for change in changes],
            "seconds": jobs.seconds,
        }
        if keep is not None:
            (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def _passed(result: dict[str, Any]) -> bool:
    elsewhere, faults = result["elsewhere"], result["faults"].values()
    return (
        result["comparison"]["passed"]
        and (elsewhere is None or elsewhere["passed"])
        and all(fault.get("found", True) for fault in faults)
    )
