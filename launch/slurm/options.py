"""Options of a SLURM job, checked before anything is submitted."""

import re
from dataclasses import dataclass

# SLURM checks its timers once a minute, so the signal may come this much early.
EARLY_SECONDS = 60
# Part of --save-seconds that is reserved for the requeue after the ranks are ended.
SPARE_SECONDS = 30


@dataclass(frozen=True)
class SlurmOptions:
    """Options of a SLURM job.

    Attributes:
        nodes: number of nodes.
        tasks_per_node: ranks on each node, one per GPU.
        gpus_per_node: GPUs to request; 0 requests none (CPU).
        cpus_per_task: cores for each rank.
        name: name of the job.
        time: time limit, "days-hours:minutes:seconds".
        partition, account: names on the cluster; None for its default.
        save_seconds: upper bound of a step plus a save, in seconds. The signal is requested this
            time plus a minute before the limit. Ranks that are still running shortly before the
            end of this time are ended (`stop_seconds`).
        requeue: requeue the job after the time limit, pre-emption and failures.
        max_restarts: consecutive failures without a newer checkpoint that are retried; pre-emption
            and lost nodes do not count.
        after: numbers of jobs that must succeed first; if one fails, this job is cancelled.
        seeds: seeds of an array, with one element and one run folder each; empty for no array.
        modules: names for `module load`.
        setup: shell lines to run before training, for example to activate an environment.
        container: image for `srun --container-image` (pyxis and enroot).
        mounts: "outside:inside" folders for the container; the run folder is added.
        python: interpreter that has this package, inside the container if there is one.
        directives: further options of sbatch, as "key=value" or "key".

    Raises:
        ValueError: an option has an impossible value; names the option.
    """

    nodes: int
    tasks_per_node: int
    gpus_per_node: int = 0
    cpus_per_task: int = 1
    name: str = "kimi-pretrain"
    time: str = "1-00:00:00"
    partition: str | None = None
    account: str | None = None
    save_seconds: int = 700
    requeue: bool = True
    max_restarts: int = 3
    after: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    container: str | None = None
    mounts: tuple[str, ...] = ()
    python: str = "python3"
    directives: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        counts = ("nodes", "tasks_per_node", "cpus_per_task", "save_seconds")
        for field in counts:
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 1")
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts is {self.max_restarts}; it must be 0 or more")
        if self.gpus_per_node not in (0, self.tasks_per_node):
            raise ValueError(
                f"gpus_per_node is {self.gpus_per_node} with {self.tasks_per_node} tasks per node; "
                "each task drives one GPU, so give the same number (or 0 for CPU)"
            )
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(f"job name {self.name!r}: use letters, digits, '.', '_' and '-'")
        for field in ("partition", "account"):
            if (value := getattr(self, field)) and not re.fullmatch(r"\S+", value):
                raise ValueError(f"{field} {value!r}: a name without spaces is expected")
        for text in self.directives:
            if not re.fullmatch(r"[a-z][a-z-]*(=\S+)?", text):
                raise ValueError(f"--sbatch {text!r}: expected KEY or KEY=VALUE, without dashes")
        self._check_time()

    @property
    def signal_seconds(self) -> int:
        """Seconds before the time limit at which SLURM is asked to send the signal."""
        return self.save_seconds + EARLY_SECONDS

    @property
    def stop_seconds(self) -> int:
        """Seconds after the signal at which late ranks are ended, so that a requeue is possible."""
        spare = max(SPARE_SECONDS, self.save_seconds // 10)
        return self.save_seconds - min(spare, self.save_seconds // 2)

    def _check_time(self) -> None:
        limit = limit_seconds(self.time)
        if limit is not None and limit <= self.signal_seconds + EARLY_SECONDS:
            raise ValueError(
                f"--time {self.time} is {limit} s, but the job is told to stop up to "
                f"{self.signal_seconds + EARLY_SECONDS} s before (--save-seconds "
                f"{self.save_seconds} for a step and a save, and {2 * EARLY_SECONDS} s because "
                "SLURM's clock is coarse): nothing would be trained; give more time, or less for "
                "the save"
            )


def limit_seconds(text: str) -> int | None:
    """Parse a time limit as sbatch does; return seconds, or None for no limit.

    The forms are "minutes", "minutes:seconds", "hours:minutes:seconds", "days-hours",
    "days-hours:minutes" and "days-hours:minutes:seconds" (man sbatch).

    Raises:
        ValueError: the text has none of these forms.
    """
    if text.lower() in ("infinite", "unlimited"):
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise ValueError(
            f'--time {text!r}: expected days-hours:minutes:seconds, such as "1-12:00:00", '
            'or minutes, such as "90"'
        )
    days, *rest = match.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is None:  # the first of one or two numbers is minutes, the first of three is hours
        numbers = numbers if len(numbers) == 3 else [0, *numbers]
    hours, minutes, seconds = (*numbers, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def nodes_for(world_size: int, gpus_per_node: int, tasks_per_node: int | None) -> dict[str, int]:
    """Return the numbers of nodes, tasks and GPUs per node, as fields of `SlurmOptions`.

    Raises:
        ValueError: the layout does not divide over the nodes.
    """
    tasks = tasks_per_node or min(max(1, gpus_per_node), world_size)
    if world_size % tasks:
        raise ValueError(
            f"the layout's {world_size} processes (pp x dp x cp x tp) do not divide over "
            f"nodes of {tasks} tasks; give --tasks-per-node or --gpus-per-node"
        )
    gpus = tasks if gpus_per_node else 0
    return {"nodes": world_size // tasks, "tasks_per_node": tasks, "gpus_per_node": gpus}


def parse_seeds(text: str | None) -> tuple[int, ...]:
    """Parse seeds such as "1,2,5-8" and return them sorted; () for None.

    Raises:
        ValueError: the text has another form, or a seed occurs twice.
    """
    if text is None:
        return ()
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f'--seeds {text!r}: expected numbers and ranges, such as "1,2,5-8"')
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    if len(set(found)) < len(found):
        raise ValueError(f"--seeds {text!r}: a seed stands there twice")
    return tuple(sorted(found))


def late_watchdog(options: SlurmOptions, timeout_seconds: float) -> str | None:
    """Return a warning if a rank that hangs at a stop is ended before the watchdog can name it.

    Args:
        options: options of the job.
        timeout_seconds: `train.timeout_seconds`, after which the watchdog names such a rank.

    Returns:
        the warning; None if the watchdog is fast enough.
    """
    if not options.requeue or timeout_seconds < options.stop_seconds:
        return None
    return (
        f"a rank that hangs while the job stops will not be named: the ranks are given up after "
        f"{options.stop_seconds} s (--save-seconds {options.save_seconds}), the watchdog comes "
        f"after {timeout_seconds:g} s (train.timeout_seconds); give more of the one or less of "
        "the other"
    )
