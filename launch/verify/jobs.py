"""What all verifications share: where they may run, a folder for it, and the jobs they start."""

import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from data_pipeline.store.addresses import check_local
from launch.local.job import Job

if TYPE_CHECKING:
    from kimi_pretrain.config import Config

# Processes on a machine without GPUs: more than this for each core take longer than they are worth.
PROCESSES_PER_CORE = 4
Tell = Callable[[str], None]


class JobStopped(ValueError):
    """One of the jobs did not come to its end; the message says which."""


def refuse_ranks() -> None:
    """Refuse to be one of several processes.

    Raises:
        ValueError: torchrun started this process.
    """
    if "RANK" in os.environ or "LOCAL_RANK" in os.environ:
        raise ValueError(
            "verify starts its own processes: run it once, not under torchrun (RANK is set)"
        )


def chosen_faults(plant: str | None, self_test: bool, known: Collection[str]) -> tuple[str, ...]:
    """Return the faults to plant, of those that are known.

    Raises:
        ValueError: an unknown one, or both options at once.
    """
    if plant is not None and plant not in known:
        raise ValueError(f"--plant {plant}: no such fault; there are {', '.join(known)}")
    if plant is not None and self_test:
        raise ValueError("--self-test plants every fault; leave out --plant")
    return tuple(known) if self_test else (plant,) if plant else ()


def check_machine(config: "Config") -> None:
    """Refuse a layout whose processes this machine cannot hold.

    Raises:
        ValueError: with what to do.
    """
    import torch

    wanted, gpus = config.layout.world_size(), torch.cuda.device_count()
    cores = len(os.sched_getaffinity(0))
    room = gpus or PROCESSES_PER_CORE * cores
    if wanted > room:
        held = f"{gpus} GPUs, one for each" if gpus else f"no GPU and {cores} cores"
        raise ValueError(
            f"the layout has {wanted} processes, this machine has {held}; verify a small copy "
            f"with --shrink --processes {min(4, room)}"
            + (", or hide the GPUs with CUDA_VISIBLE_DEVICES=" if gpus else "")
        )


def load(
    config_path: str, overrides: Sequence[str], *, shrink: bool, processes: int
) -> tuple["Config", Sequence[Any]]:
    """Return the configuration to verify, and what shrinking changed in it.

    Args:
        config_path: YAML file or name of a preset.
        overrides: `section.key=value`.
        shrink: take a small copy, of at most `processes` processes.
    """
    from kimi_pretrain.config import load_config

    config = load_config(config_path, overrides)
    return shrunk(config, processes) if shrink else (config, [])


def shrunk(config: "Config", processes: int) -> tuple["Config", Sequence[Any]]:
    """Return a small copy of a configuration, and what was changed in it."""
    from data_pipeline.access import open_data, open_tokenizer
    from kimi_pretrain.verify.shrink import shrink

    small = shrink(config, processes).config  # whose cache and limits fit this machine
    tokenizer = open_tokenizer(small.data, open_data(small.data))
    found = shrink(config, processes, tokenizer.vocab_size)
    return found.config, found.changes


@contextmanager
def working_folder(keep: Path | None) -> Iterator[Path]:
    """Give a folder for all jobs, which goes again unless it is to be kept."""
    if keep is None:
        with TemporaryDirectory(prefix="kimi-pretrain-verify-") as folder:
            yield Path(folder)
        return
    check_local("--keep", keep)
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise ValueError(f"--keep {keep} is not empty; give a new folder")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep.resolve()


def run(job: Job, worker: str, config: "Config", name: str, tell: Tell) -> float:
    """Run one job to its end in processes of its own; returns its seconds.

    Args:
        job: what each process is told; `job.config` is written here.
        worker: module that each process runs.
        config: of the job.
        name: of the job, for people.
        tell: takes a line about what is going on.

    Raises:
        JobStopped: it failed.
    """
    from kimi_pretrain.config import dump_config
    from launch.local import supervise, torchrun

    folder = Path(job.run_dir)
    folder.mkdir(exist_ok=True)
    Path(job.config).write_text(dump_config(config))
    processes = config.layout.world_size()
    tell(f"running {name}: {processes} process{'es' if processes > 1 else ''} ...")
    start = time.perf_counter()
    with torchrun.prepared(job, torchrun.Nodes(processes), worker) as (command, env):
        if processes == 1:
            command = [sys.executable, "-m", worker, job.argument()]
        code, message = supervise.run(command, env, folder)
    if message:
        raise JobStopped(f"{name} job: {message}")
    if code:
        raise JobStopped(f"the {name} job stopped with exit code {code}; see above why")
    return time.perf_counter() - start
