"""The configurations of the jobs that a verification compares. Pure.

`verify dep`: the user's layout with the Decoupled Encoder Process, and a reference in one process
with the encoder inside the graph: no exchange, no second forward, no parallelism. Both start from
the same weights and take the same step of the same data.

`verify resume`: all jobs have the user's configuration but for its length and for where checkpoints
go, so that nothing that looks at the length of the run (`train.steps`) can tell them apart: the job
that is stopped ends because it is told to, not because it is shorter.
"""

from collections.abc import Sequence
from typing import Any

from kimi_pretrain.config import Config, ConfigError, parse_config
from kimi_pretrain.dep.config import DepConfig
from kimi_pretrain.parallel.layout import LayoutConfig


def decoupled(config: Config) -> Config:
    """Return the configuration of the job with DEP: the user's own, without prefetching."""
    values = config.model_dump(mode="json")
    values["dep"]["placement"] = "decoupled"
    return parse_config(_without_prefetch(values), where="verify dep")


def reference(config: Config) -> Config:
    """Return the configuration of the reference: the same model and data, one process, no DEP."""
    values = config.model_dump(mode="json")
    plain = DepConfig(placement="colocated", max_patches_per_chunk=config.dep.max_patches_per_chunk)
    values["layout"] = LayoutConfig().model_dump(mode="json")
    values["dep"] = plain.model_dump(mode="json")
    return parse_config(_without_prefetch(values), where="verify dep, reference")


def _without_prefetch(values: dict[str, Any]) -> dict[str, Any]:
    values["data"] |= {"workers": 0, "prefetch_steps": 0}
    values["train"]["threads"] = None  # set by the environment of each job
    values["optim"]["deepspeed"] = None  # gradients are compared, which it would keep in shards
    return values


def resumable(config: Config, steps: int, stop: int) -> Config:
    """Return the configuration of `verify resume`: so many steps, a checkpoint after the last.

    How checkpoints are written stays as it is. Retention goes: the checkpoint of the stop is used
    several times.

    Raises:
        ValueError: the stop is not inside the steps.
    """
    if not 0 < stop < steps:
        raise ValueError(
            f"--stop-after {stop} with --steps {steps}: there must be a step before the stop and "
            f"one after it; take for example --stop-after {max(1, steps // 2)}"
        )
    values = config.model_dump(mode="json")
    values["train"] |= {"steps": steps, "trace_step": None, "efficiency_pairs": 0}
    values["checkpoint"] |= {"every": steps, "keep_last": None, "keep_every": None}
    return parse_config(values, where="verify resume")


def saving_to(config: Config, place: str, **changes: object) -> Config:
    """Return the configuration with its checkpoints elsewhere; `changes` of that section too."""
    return config.replace(checkpoint=config.checkpoint.replace(place=place, **changes))


def other_layout(config: Config) -> Config:
    """Return the configuration in another layout: one process; or two, where it has one already.

    Raises:
        ConfigError: it cannot be cut in two.
    """
    values = config.model_dump(mode="json")
    plain = LayoutConfig()
    if config.layout.world_size() == 1:
        halves = config.num_microbatches() % 2 == 0
        plain = LayoutConfig(dp=2) if halves else LayoutConfig(pp=2)
    dep = DepConfig(
        max_patches_per_chunk=config.dep.max_patches_per_chunk,
        exchange_dtype=config.dep.exchange_dtype,
    )
    values["layout"], values["dep"] = plain.model_dump(mode="json"), dep.model_dump(mode="json")
    return parse_config(values, where="verify resume, other layout")


def check_other_layout(config: Config, other: Config, overrides: Sequence[str]) -> None:
    """Refuse `overrides` that give another layout that is none, or change more than the layout.

    Raises:
        ConfigError: with what to give.
    """
    wrong = [one for one in overrides if not one.startswith(("layout.", "dep."))]
    if wrong:
        raise ConfigError(
            f"--other-layout: {wrong[0]} is no part of the layout; give layout.* or dep.* only, "
            'for example "layout.pp=1 layout.dp=2"'
        )
    if other.layout == config.layout:
        raise ConfigError(
            f"--other-layout {' '.join(overrides)!r} is the configuration's own layout; change "
            "layout.pp, vpp, ep, dp, cp or tp"
        )
