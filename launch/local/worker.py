"""One process of a training job: `python -m launch.local.worker JSON`, started by torchrun or srun.

The first thing it does is to take over the signals that ask a training to stop; torch is imported
much later. Nothing happens outside the guard at the end, for who imports this to use a part of it.
"""

import logging
import os
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.local.signals import StopSignal, follow_torchrun

STOP = StopSignal()
if __name__ == "__main__":  # before anything that takes time: until then a signal kills the process
    STOP.install()

from kimi_pretrain.reliability.exit_report import ExitReport, remove_exit_report, write_exit_report  # noqa: E402
from launch.local.errors import exit_code, user_message  # noqa: E402
from launch.local.job import Job  # noqa: E402
from launch.local.quiet import quiet_libraries  # noqa: E402

if TYPE_CHECKING:
    from kimi_pretrain.config import Config


def run_job(
    job: Job, stop: StopSignal = STOP, prepare: Callable[[Any], None] | None = None
) -> None:
    """Train; the rank and the world come from the environment.

    Args:
        job: what to do.
        stop: says whether this process was asked to end.
        prepare: see `kimi_pretrain.train.train`.

    """
    allow_many_files()
    quiet_libraries()
    # Imported here so that a wrong argument is told before torch has loaded.
    from kimi_pretrain.config import load_config
    from kimi_pretrain.reliability import run_lock
    from kimi_pretrain.reliability.status import mark_failed

    config, run_dir = load_config(job.config, job.overrides), Path(job.run_dir)
    if rank_of_this() != 0:  # of which one looks after the folder for all
        _train(config, job, stop, prepare)
        return
    lock = run_lock.take(run_dir)
    try:
        _train(config, job, stop, prepare)
    except Exception as error:
        mark_failed(run_dir, user_message(error) or f"{type(error).__name__}: {error}")
        raise
    finally:
        lock.release()


def _train(config: "Config", job: Job, stop: StopSignal, prepare: Callable | None) -> None:
    from kimi_pretrain.train import train

    # torchrun starts all ranks again when one has died; then they go on from where they were.
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    train(
        config,
        Path(job.run_dir),
        job.resume,
        otherwise=job.otherwise,
        or_start=job.or_start,
        restarted=restarted,
        stop=stop.reason,
        prepare=prepare,
    )


def allow_many_files() -> None:
    """Raise the limit of open files as far as this process may.

    Rank 0 has one for every rank of the job, and 1,024 is a common limit.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def rank_of_this() -> int:
    """Return the rank of this process, which who started it has set."""
    return int(os.environ.get("RANK", "0"))


def main(
    argument: str,
    parse: Callable = Job.parse,
    run: Callable = run_job,
    *,
    stops: bool | None = None,
) -> int:
    """Run one process of a job, of another kind by `parse` and `run`; returns its exit code.

    Args:
        argument: the job.
        parse: reads it.
        run: does it.
        stops: whether `run` heeds `STOP`; otherwise the signals end the process, as usual. A
            training does.

    """
    if run is run_job if stops is None else stops:
        STOP.install()
        follow_torchrun()
    job = parse(argument)
    run_dir, rank = Path(job.run_dir), rank_of_this()
    remove_exit_report(run_dir, rank)
    try:
        run(job)
    except Exception as error:
        message = user_message(error)
        # For the log alone: on the terminal there is one line, or the traceback below.
        logging.getLogger("launch").info("stopped", exc_info=True)
        if message is None:
            traceback.print_exc()
            return 1
        # First the file, then the line: who watches this process shows one of them.
        code = exit_code(error)
        write_exit_report(run_dir, rank, ExitReport(message, code))
        print(f"error: {message}", file=sys.stderr, flush=True)
        return code
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
