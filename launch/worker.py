"""One process of a training job: `python -m launch.worker JSON`, started by torchrun or srun.

Megatron-Core's checkpoint writer may start processes that import this module again, so nothing
happens outside the guard at the end.
"""

import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from launch.errors import EXIT_CODE, user_message
from launch.job import Job
from launch.quiet import quiet_libraries


def error_file(run_dir: Path, rank: int) -> Path:
    """Return where a rank leaves the one line that tells why it stopped."""
    return run_dir / "logs" / f"error_rank_{rank}.txt"


def latest_checkpoint(run_dir: Path) -> Path | None:
    """Return the newest complete checkpoint of a run folder, or None."""
    complete = complete_checkpoints(run_dir)
    return complete[max(complete)] if complete else None


def complete_checkpoints(run_dir: Path) -> dict[int, Path]:
    """Return step -> folder of the checkpoints that have their final name and a manifest."""
    return {
        int(number): manifest.parent
        for manifest in (run_dir / "checkpoints").glob("step_*/manifest.json")
        if (number := manifest.parent.name.removeprefix("step_")).isdigit()
    }


def resume_folder(job: Job) -> Path | None:
    """Return the checkpoint that a job starts from, or None to start from scratch.

    Raises:
        FileNotFoundError: the named checkpoint does not exist or was never completed.

    """
    if job.resume is None:
        return None
    if job.resume == "latest":
        return latest_checkpoint(Path(job.run_dir))
    return complete_checkpoint(Path(job.resume))


def complete_checkpoint(folder: Path) -> Path:
    """Return `folder` if it is a complete checkpoint.

    Raises:
        FileNotFoundError: it does not exist or was never completed.

    """
    if not (folder / "manifest.json").is_file():
        raise FileNotFoundError(
            f"{folder} is not a complete checkpoint (no manifest.json inside); give a folder "
            "such as runs/demo/checkpoints/step_00000110"
        )
    return folder


def check_fresh(job: Job) -> None:
    """Refuse to start from scratch in the folder of an earlier run.

    Raises:
        ValueError: a later resume would mix the two.

    """
    run_dir = Path(job.run_dir)
    if job.resume is None and (
        complete_checkpoints(run_dir) or (run_dir / "metrics.jsonl").is_file()
    ):
        raise ValueError(
            f"{run_dir} holds an earlier run; go on with --resume latest, or choose another "
            "--run-dir"
        )


def run_job(job: Job) -> None:
    """Train; the rank and the world come from the environment."""
    quiet_libraries()
    # Imported here so that a wrong argument is told before torch has loaded.
    from kimi_pretrain.config import load_config
    from kimi_pretrain.train import train

    config = load_config(job.config, job.overrides)
    if os.environ.get("RANK", "0") == "0":  # others might already see what this run writes
        check_fresh(job)
    train(config, Path(job.run_dir), resume_folder(job))


def main(argument: str, parse: Callable = Job.parse, run: Callable = run_job) -> int:
    """Run one process of a job, of another kind by `parse` and `run`; returns its exit code."""
    job = parse(argument)
    try:
        run(job)
    except Exception as error:
        message = user_message(error)
        logging.getLogger("launch").exception("stopped")
        if message is None:
            traceback.print_exc()
            return 1
        file = error_file(Path(job.run_dir), int(os.environ.get("RANK", "0")))
        file.parent.mkdir(parents=True, exist_ok=True)
        # First the file, then the line: who watches this process shows one of them.
        file.write_text(message + "\n")
        print(f"error: {message}", file=sys.stderr, flush=True)
        return EXIT_CODE
    return 0


def leave(exit_code: int) -> None:
    """End this process at once, without taking the interpreter down.

    After a failure other ranks may sit in a collective that will never end; torchrun ends them when
    it sees this process gone. After success, what is left of gloo's threads was seen to abort the
    process on its way out, which would turn a finished run into a failed one.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    leave(main(sys.argv[1]))
