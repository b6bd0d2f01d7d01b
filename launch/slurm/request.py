"""User options of a SLURM job: the options of `submit`, and `slurm` in the file of a chain."""

import sys
from typing import Self

from pydantic import Field

from launch.slurm.options import SlurmOptions, nodes_for
from typed_config.section import Section


class SlurmRequest(Section):
    """The options of `kimi-pretrain submit`, under the same names."""

    gpus_per_node: int = Field(default=8, ge=0)
    """GPUs per node; 0 runs on CPU. [GPUs; launch/slurm/request.py]"""
    tasks_per_node: int | None = Field(default=None, ge=1)
    """Ranks per node; null: the number of GPUs. [ranks; launch/slurm/request.py]"""
    cpus_per_task: int = Field(default=8, ge=1)
    """Cores per rank. [cores; launch/slurm/options.py]"""
    time: str = "1-00:00:00"
    """Time limit, days-hours:minutes:seconds. [-; launch/slurm/options.py]"""
    save_seconds: int = Field(default=700, ge=1)
    """Upper bound of a step plus a save; later ranks are ended. [s; launch/slurm/options.py]"""
    name: str = "kimi-pretrain"
    """Name of the job. [-; launch/slurm/options.py]"""
    partition: str | None = None
    """Partition of the cluster; null: its default. [-; launch/slurm/options.py]"""
    account: str | None = None
    """Account on the cluster; null: its default. [-; launch/slurm/options.py]"""
    sbatch: list[str] = Field(default_factory=list)
    """Further options of sbatch, KEY=VALUE. [-; launch/slurm/options.py]"""
    module: list[str] = Field(default_factory=list)
    """Names for `module load`. [-; launch/slurm/options.py]"""
    setup: list[str] = Field(default_factory=list)
    """Shell lines to run before training. [-; launch/slurm/options.py]"""
    container: str | None = None
    """Image for srun (pyxis). [-; launch/slurm/options.py]"""
    mount: list[str] = Field(default_factory=list)
    """Mounts of the container, outside:inside. [-; launch/slurm/options.py]"""
    python: str | None = None
    """Interpreter with this package; null: the current one, or python3 in a container.
    [-; launch/slurm/request.py]"""
    requeue: bool = True
    """Requeue after time limit, pre-emption, failures, lost nodes. [-; launch/slurm/options.py]"""
    max_restarts: int = Field(default=3, ge=0)
    """Consecutive failures without a newer checkpoint that are retried.
    [-; launch/slurm/options.py]"""

    def over(self, other: "SlurmRequest") -> Self:
        """Return a copy in which the fields that `other` sets override these."""
        return self.replace(**{name: getattr(other, name) for name in other.model_fields_set})

    def options(
        self, world_size: int, after: tuple[int, ...] = (), seeds: tuple[int, ...] = ()
    ) -> SlurmOptions:
        """Return the options of a job with this number of ranks.

        Raises:
            ValueError: the ranks do not divide over the nodes, or an option has an impossible
                value; names the option.
        """
        return SlurmOptions(
            **nodes_for(world_size, self.gpus_per_node, self.tasks_per_node),
            cpus_per_task=self.cpus_per_task,
            name=self.name,
            time=self.time,
            partition=self.partition,
            account=self.account,
            save_seconds=self.save_seconds,
            requeue=self.requeue,
            max_restarts=self.max_restarts,
            after=after,
            seeds=seeds,
            modules=tuple(self.module),
            setup=tuple(self.setup),
            container=self.container,
            mounts=tuple(self.mount),
            python=self.python or ("python3" if self.container else sys.executable),
            directives=tuple(self.sbatch),
        )
