"""`kimi-pretrain verify resume`: is a run that was stopped and resumed the run that never was?

Three jobs are started here, one after the other, each in new processes: one that does all steps,
one that is stopped in the middle by a scheduler's signal, and one that goes on from what it saved.
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from launch.cli.options import ConfigOption, JsonOption, Overrides
from launch.local.errors import told_plainly
from launch.verify import jobs as verify_jobs
from launch.verify.jobs import Tell, chosen_faults
from launch.verify.resume_jobs import ResumeJobs, temporary_place, told


def resume(
    config: ConfigOption,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=2, help="Of the run that is never stopped.")] = 4,
    stop_after: Annotated[int, typer.Option(min=1, help="Step after which the other is.")] = 2,
    shrink: Annotated[
        bool, typer.Option("--shrink", help="Take a small copy of it; says what was changed.")
    ] = False,
    processes: Annotated[int, typer.Option(min=1, help="The most that --shrink leaves.")] = 4,
    other_layout: Annotated[
        str | None,
        typer.Option(help='Also resume in this one, for example "layout.pp=1 layout.dp=2".'),
    ] = None,
    layouts: Annotated[
        bool, typer.Option("--layouts", help="Also resume in one process (or two, if it is one).")
    ] = False,
    plant: Annotated[
        str | None,
        typer.Option(
            help="See it fail: unsaved-rng, loader-off-by-one, lost-momentum, lost-expert-bias, "
            "lost-master, lost-step-count or swapped-states."
        ),
    ] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Plant every fault, and see each of them found.")
    ] = False,
    keep: Annotated[
        Path | None, typer.Option(help="Empty folder for configurations, runs and result.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Stop a run in the middle, resume it, and compare it with one that was never stopped.

    The stop is a scheduler's: a rank gets USR1, the run saves and ends, and new
    processes go on from the checkpoint. They are written as the configuration
    says (asynchronously, to s3:// where checkpoint.place is), but beside the
    user's own, and removed at the end. Every number of every step, every tensor
    of model and optimizer and the loader's state must be the same bit for bit. In
    another layout the steps must read the same samples, and losses may differ by
    rounding. All processes run on this machine.

    Exit code 0: the same, 1: not the same, 2: could not be compared.

    \b
    kimi-pretrain verify resume --config my.yaml
    kimi-pretrain verify resume --config configs/kimi_k25_1t.yaml --shrink \\
        data.root=s3://corpus
    kimi-pretrain verify resume --config my.yaml --shrink --layouts --self-test \\
        --json
    kimi-pretrain verify resume --config my.yaml --other-layout \\
        "layout.pp=1 layout.dp=4"
    """
    from launch.cli.main import end_in_order

    end_in_order()
    with told_plainly():
        from kimi_pretrain.verify.resume_faults import RESUME_FAULTS
        from launch.verify.resume_view import ResumeTerminal

        terminal = ResumeTerminal()
        result = verify_resume(
            config,
            tuple(overrides or ()),
            steps=steps,
            stop_after=stop_after,
            shrink=shrink,
            processes=processes,
            elsewhere=chosen_layout(other_layout, layouts),
            faults=chosen_faults(plant, self_test, RESUME_FAULTS),
            keep=keep,
            tell=terminal.line,
        )
        if plant is not None:
            result = with_fault(result, plant)
        terminal.show(result)
        if as_json:
            typer.echo(json.dumps(result))
        raise typer.Exit(0 if result["passed"] else 1)


def chosen_layout(other_layout: str | None, layouts: bool) -> tuple[str, ...] | None:
    """Return the overrides of the other layout to resume in; () to choose one, None for none.

    Raises:
        ValueError: both options at once, or nothing in the text.
    """
    if other_layout is None:
        return () if layouts else None
    if layouts:
        raise ValueError("--layouts chooses another layout itself; leave out --other-layout")
    if not other_layout.split():
        raise ValueError('--other-layout is empty; give for example "layout.pp=1 layout.dp=2"')
    return tuple(other_layout.split())


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
