"""One process of a training job: `python -m launch.local.worker JSON`, started by torchrun or srun.

It installs the handlers for stop signals before anything else; torch is imported much later.
Importing this module has no effect.
"""

import logging
import os
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launch.local.signals import StopSignal, follow_torchrun

STOP = StopSignal()
if __name__ == "__main__":  # before slow imports: a signal without a handler kills the process
    STOP.install()

from kimi_pretrain.reliability.exit_report import (  # noqa: E402
    ExitReport,
    remove_private_report,
    write_exit_report,
)
from launch.local.job import Job  # noqa: E402
from launch.local.quiet import quiet_libraries  # noqa: E402
from launch.local.user_errors import exit_code, user_message  # noqa: E402


def run_job(
    job: Job, stop: StopSignal = STOP, prepare: Callable[[Any], None] | None = None
) -> None:
    """Train; rank and world size come from the environment (RANK, WORLD_SIZE).

    Args:
        job: the training job.
        stop: records a request to stop this process.
        prepare: see `kimi_pretrain.train.train`.
    """
    allow_many_files()
    quiet_libraries()
    from kimi_pretrain.reliability import run_lock
    from kimi_pretrain.reliability.status import mark_failed

    run_dir = Path(job.run_dir)
    if rank_of_this() != 0:  # only rank 0 holds the folder's lock and status
        _train(job, stop, prepare)
        return
    lock = run_lock.take(run_dir)  # first, because no process of this start may write there before
    try:
        _train(job, stop, prepare)
    except Exception as error:
        mark_failed(run_dir, user_message(error) or f"{type(error).__name__}: {error}")
        raise
    finally:
        lock.release()


def _train(job: Job, stop: StopSignal, prepare: Callable | None) -> None:
    # In this order, so that a wrong argument is reported before torch has loaded.
    from kimi_pretrain.config import load_config

    config = load_config(job.config, job.overrides)
    from kimi_pretrain.train import train

    # torchrun restarts all ranks when one has died; they resume from the newest checkpoint.
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    train(
        config,
        Path(job.run_dir),
        job.resume,
        otherwise=job.otherwise,
        or_start=job.or_start,
        restarted=restarted,
        change_data=job.change_data,
        stop=stop.reason,
        prepare=prepare,
    )


def allow_many_files() -> None:
    """Raise the soft limit of open files to the hard limit.

    Rank 0 opens one file per rank of the job, and 1,024 is a common soft limit.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def rank_of_this() -> int:
    """Return the rank of this process, from RANK; 0 if it is not set."""
    return int(os.environ.get("RANK", "0"))


def main(
    argument: str,
    parse: Callable = Job.parse,
    run: Callable = run_job,
    *,
    stops: bool | None = None,
) -> int:
    """Run one process of a job; return its exit code. `launch.verify` passes its own jobs.

    Args:
        argument: the job as text.
        parse: converts the text to the job.
        run: runs the job.
        stops: True if `run` checks `STOP`; if False, signals end the process as usual. None: True
            only for a training (`run_job`).
    """
    if run is run_job if stops is None else stops:
        STOP.install()
        follow_torchrun()
    job = parse(argument)
    run_dir, rank = Path(job.run_dir), rank_of_this()
    remove_private_report(rank)
    try:
        run(job)
    except Exception as error:
        message = user_message(error)
        # For the rank's log; the terminal gets one line, or the traceback below.
        logging.getLogger("launch").info("stopped", exc_info=True)
        if message is None:
            traceback.print_exc()
            return 1
        # Write the file before the line: `launch.local.supervise` shows only one of the two.
        code = exit_code(error)
        write_exit_report(run_dir, rank, ExitReport(message, code))
        print(f"error: {message}", file=sys.stderr, flush=True)
        return code
    return 0


def leave(exit_code: int) -> None:
    """End this process at once, without the interpreter's shutdown.

    After a failure other ranks may hang in a collective; torchrun ends them once this process is
    gone. After success, remaining gloo threads have aborted the process during shutdown, which
    would turn a finished run into a failed one.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    leave(main(sys.argv[1]))
