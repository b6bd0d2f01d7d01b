"""Runs any verification: loads a config, checks it, runs the jobs, and keeps the result.

The kinds (`launch.verify.dep`, `launch.verify.resume`) define the comparison.
"""

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from rich.table import Table

from data_pipeline.access import open_data, open_tokenizer
from data_pipeline.store.addresses import check_local
from kimi_pretrain.config import Config
from kimi_pretrain.verify.fault import Fault
from kimi_pretrain.verify.result import Result
from kimi_pretrain.verify.shrink import shrink as smaller
from launch.local.versions import load_pinned
from launch.verify.jobs import Jobs

# Limit on a machine without GPUs: with more processes per core, a run takes too long.
PROCESSES_PER_CORE = 4


class Verification:
    """One kind of verification.

    Attributes:
        faults: faults that can be planted.
        verdicts: key of a comparison in the result -> texts for a pass and for a failure.
        steps: number of steps to run.
    """

    faults: ClassVar[Mapping[str, Fault[*tuple[Any, ...]]]]
    verdicts: ClassVar[Mapping[str, tuple[str, str]]]
    steps: int

    def prepare(self, config: Config) -> Config:
        """Return the config to run, derived from the user's config."""
        raise NotImplementedError

    def run(self, config: Config, jobs: Jobs, faults: Sequence[str]) -> Result:
        """Run all checks that need no process, then run the jobs and compare them."""
        raise NotImplementedError

    def lines(self, result: dict[str, Any]) -> Sequence[str | Table]:
        """Return lines about the comparison and the differences, from `Result.as_dict()`."""
        raise NotImplementedError

    def evidence(self, comparison: dict[str, Any]) -> str:
        """Return the part of the comparison that reveals a planted fault."""
        raise NotImplementedError


def verify(
    kind: Verification, config: str, overrides: Sequence[str] = (), *, shrink: bool = False,
    processes: int = 4, faults: Sequence[str] = (), keep: Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Result:  # fmt: skip
    """Run a verification and return its result, with facts about the runs.

    Args:
        kind: kind of verification.
        config: YAML file or name of a preset.
        overrides: `section.key=value`.
        shrink: run a small copy of the config, with at most `processes` processes.
        faults: names of faults; each is planted in a separate run.
        keep: empty folder in which to keep the files, which are otherwise deleted.
        tell: called with a line of progress.

    Raises:
        ValueError: the config cannot run here.
        JobStopped: a job failed.
    """
    if "RANK" in os.environ or "LOCAL_RANK" in os.environ:
        raise ValueError(
            "verify starts its own processes: run it once, not under torchrun (RANK is set)"
        )
    chosen, changes = load_pinned(config, overrides)[0], ()
    if shrink:
        small = smaller(chosen, processes).config  # its cache and limits suit this machine
        tokenizer = open_tokenizer(small.data, open_data(small.data))
        chosen, changes = smaller(chosen, processes, tokenizer.vocab_size)
    prepared = kind.prepare(chosen)
    check_machine(prepared)
    with working_folder(keep) as folder:
        jobs = Jobs(folder, tell)
        result = kind.run(prepared, jobs, faults)
        facts = {
            "processes": prepared.layout.world_size(),
            "layout": prepared.layout.model_dump(mode="json"),
            "dtype": prepared.train.dtype,
            "steps": kind.steps,
            "changes": [list(change) for change in changes],
            "seconds": jobs.seconds,
        }
        result = replace(result, facts={**result.facts, **facts})
        if keep is not None:
            (folder / "result.json").write_text(json.dumps(result.as_dict(), indent=1) + "\n")
    return result


def chosen_faults(plant: str | None, self_test: bool, known: Collection[str]) -> tuple[str, ...]:
    """Return the faults to plant.

    Raises:
        ValueError: the fault is unknown, or both options are given.
    """
    if plant is not None and plant not in known:
        raise ValueError(f"--plant {plant}: no such fault; there are {', '.join(known)}")
    if plant is not None and self_test:
        raise ValueError("--self-test plants every fault; leave out --plant")
    return tuple(known) if self_test else (plant,) if plant else ()


def check_machine(config: Config) -> None:
    """Refuse a layout with more processes than this machine can run.

    Raises:
        ValueError: states the remedy.
    """
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


@contextmanager
def working_folder(keep: Path | None) -> Iterator[Path]:
    """Yield a folder for all jobs, which is deleted at the end unless `keep` is given."""
    if keep is None:
        with TemporaryDirectory(prefix="kimi-pretrain-verify-") as folder:
            yield Path(folder)
        return
    check_local("--keep", keep)
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise ValueError(f"--keep {keep} is not empty; give a new folder")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep.resolve()
