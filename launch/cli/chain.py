"""The `kimi-pretrain chain` command, which runs the stages of a pre-training from one file."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data_pipeline.store.addresses import check_local
from launch.cli.options import Overrides
from launch.cli.submit import JOB, JOB_CONFIG, PATIENCE_S, Begin, enqueue, script_of
from launch.local.job import LATEST
from launch.local.signals import end_in_order
from launch.local.user_errors import one_line_errors
from launch.slurm import queue as slurm_queue

if TYPE_CHECKING:
    from launch.chain.hand_over import CheckedStage
    from launch.chain.stages_file import PlannedStage


def chain(
    stages: Annotated[str, typer.Argument(help="YAML file, or the name of a shipped chain.")],
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where the stages' runs are kept; else the file says it.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and start nothing.")
    ] = False,
    submit: Annotated[
        bool, typer.Option("--submit", help="As SLURM jobs, each after the one before it.")
    ] = False,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="With --submit: skip the checks of data.")
    ] = False,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How often to restart a stage after a fault.")
    ] = 0,
) -> None:
    """Run the stages of a pre-training, each from the results of earlier stages.

    Every stage and every hand-over is checked before the first stage starts. The same
    command continues a chain that was stopped or killed, without running finished
    stages again. docs/STAGES.md explains the file.

    \b
    kimi-pretrain chain stages.yaml
    kimi-pretrain chain stages.yaml --dry-run data.root=/data/corpus
    kimi-pretrain chain stages.yaml --submit
    """
    end_in_order()
    with one_line_errors():
        if "RANK" in os.environ:
            raise ValueError(
                "chain starts the processes of its stages, and RANK is set: run it outside "
                "torchrun and srun; on several machines add --submit"
            )
        if run_dir is not None:
            check_local("--run-dir", run_dir)
        if unchecked and not submit:
            raise ValueError("--unchecked is for --submit")
        from launch.chain.hand_over import check_chain
        from launch.chain.run import run_chain
        from launch.chain.stages_file import read_stages

        planned = read_stages(stages, overrides or (), run_dir)
        first = f"{len(planned)} stages in {planned[0].folder.parent}"
        typer.echo(first, err=submit and dry_run)  # only scripts go to stdout
        if submit:
            submit_chain(check_chain(planned), unchecked, dry_run)
        elif dry_run:
            print_plan(check_chain(planned))
        elif code := run_chain(planned, max_restarts):
            raise typer.Exit(code)


def print_plan(checked: "Sequence[CheckedStage]") -> None:
    """Print what each stage would do; check its data if this machine has them."""
    from kimi_pretrain.config import describe
    from kimi_pretrain.memory.limits import check_memory_limit
    from kimi_pretrain.reliability.preflight import data_is_here
    from launch.chain.hand_over import Progress, of_stage
    from launch.chain.run import EndStates, check_place, check_stage, told

    to_come: EndStates = {}
    for one in checked:
        typer.echo(told(one))
        if one.progress is Progress.FINISHED:
            continue
        config, train = one.stage.config, one.stage.config.train
        for key, name in (("weights", "start_from"), ("encoder", "vision_weights")):
            if (uri := getattr(train, name)) is not None:
                earlier = one.stage.sources.get(f"train.{name}")
                typer.echo(f"  {key} from {f'stage {earlier}' if earlier else uri}")
        if train.start_optimizer == "keep":
            typer.echo("  the optimizer goes on")
        trained = [part for part in ("vision_tower", "projector", "language_model")
                   if part not in train.frozen]  # fmt: skip
        typer.echo(f"  trained: {', '.join(trained)}")
        for line in describe(config).splitlines():
            typer.echo(f"  {line}")
        for text in one.settings:
            typer.echo(f"  set otherwise than there: {text}")
        if data_is_here(config):
            check_stage(one, to_come)
        else:
            typer.echo(f"  data.root={config.data.root} is not on this machine: not checked")
            with of_stage(one.stage):
                if "://" not in (config.checkpoint.place or ""):
                    check_place(one)
                if train.memory_limit_gib is not None:
                    check_memory_limit(config)


def submit_chain(checked: "Sequence[CheckedStage]", unchecked: bool, dry_run: bool) -> None:
    """Submit each unfinished stage as a job that depends on the previous stage's job."""
    from launch.chain.hand_over import Progress, of_stage
    from launch.chain.run import told

    left = [one.stage for one in checked if one.progress is not Progress.FINISHED]
    for stage in left:
        with of_stage(stage):
            stage.slurm.options(stage.config.layout.world_size())
    if not dry_run:
        slurm_queue.check_slurm()
        if not unchecked:
            check_reachable(checked)
    queued = {} if dry_run else queued_jobs(left)
    after: tuple[int, ...] = ()
    for one in checked:
        stage, config = one.stage, one.stage.config
        if one.progress is Progress.FINISHED:
            typer.echo(told(one))
            continue
        if (number := queued.get(stage.name)) is not None:
            after = (number,)
            typer.echo(f"{stage}: job {number} is in the queue: {stage.folder}")
            continue
        options = stage.slurm.options(config.layout.world_size(), after)
        begun = one.progress is Progress.BEGUN
        begin = Begin(LATEST if begun else None, or_start=begun, unchecked=unchecked)
        with of_stage(stage):
            text = script_of(config, stage.folder, options, begin, dry_run)
            if dry_run:
                typer.echo(f"# {stage}, after the job of the stage before it", err=True)
                typer.echo(text, nl=False)
                continue
            number, log = enqueue(config, stage.folder, options, text)
        typer.echo(f"{stage}: job {number}; its log: {log}")
        after = (number,)


def check_reachable(checked: "Sequence[CheckedStage]") -> None:
    """Check data and checkpoint locations now, rather than after hours in the queue.

    Raises:
        ValueError: as for `check_stage`; suggests --unchecked if this machine may be the cause.
    """
    from data_pipeline.store.open import StoreError
    from kimi_pretrain.checkpoint.errors import CheckpointError
    from launch.chain.run import EndStates, check_stage

    to_come: EndStates = {}
    try:
        for one in checked:
            check_stage(one, to_come, PATIENCE_S)
    except ValueError as error:
        if not isinstance(error.__cause__, StoreError | CheckpointError):
            raise
        raise ValueError(
            f"{error}; if the nodes reach it and this machine does not, add --unchecked"
        ) from error


def queued_jobs(stages: "Sequence[PlannedStage]") -> dict[str, int]:
    """Return the numbers of the stages' pending and running jobs, keyed by stage name.

    Raises:
        ValueError: a job differs from the current file, or waits for a job that has ended; or a
            run outside the queue uses a stage's folder.
    """
    from kimi_pretrain.config import load_config
    from kimi_pretrain.reliability import run_lock
    from launch.chain.hand_over import differences, of_stage

    queued, anew = dict[str, int](), ""
    for stage in stages:
        with of_stage(stage):
            if (number := job_of(stage.folder)) is None:
                run_lock.check_free(stage.folder)
                anew = anew or stage.name
                continue
            if anew:
                raise ValueError(
                    f"its job {number} is in the queue, after a job of stage {anew} that is there "
                    f"no more; scancel {number} first"
                )
            found = load_config(stage.folder / JOB_CONFIG).model_dump(mode="json")
            if changed := list(differences(found, stage.config.model_dump(mode="json"))):
                raise ValueError(
                    f"its job {number} is in the queue with {'; '.join(changed)}; scancel {number} "
                    "first, or set it as it was"
                )
            queued[stage.name] = number
    return queued


def job_of(folder: Path) -> int | None:
    """Return the number of the job submitted for a run folder, or None if it has ended."""
    file = folder / JOB
    if not file.is_file():
        return None
    try:
        number = int(json.loads(file.read_text())["job"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file}: expected the number of a job; remove it") from None
    try:
        found = slurm_queue.states(number)
    except RuntimeError:  # SLURM no longer knows the job
        return None
    if found is None:
        raise ValueError(f"SLURM says nothing about job {number} of {folder}; try again later")
    gone = (state.ended or state.reason == "DependencyNeverSatisfied" for state in found)
    return None if all(gone) else number
