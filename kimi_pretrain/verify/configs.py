"""Builds the configs of the jobs that a verification compares. Pure.

`verify dep` compares the user's layout with the Decoupled Encoder Process (DEP) to a reference in
one process with the encoder inside the graph: no exchange, no second forward, no parallelism. Both
start from the same weights and run the same step on the same data.

`verify resume` gives all jobs the user's config except for the number of steps and the checkpoint
location. The number of steps (`train.steps`) is equal in all jobs, so that nothing in a run can
depend on it: the stopped job ends because it is asked to, not because it is shorter.
"""

from collections.abc import Sequence
from typing import Any

from kimi_pretrain.config import Config, ConfigError, parse_config
from kimi_pretrain.dep.config import DepConfig
from kimi_pretrain.parallel.layout import LayoutConfig


def decoupled(config: Config) -> Config:
    """Return the config of the job with DEP: the user's config without prefetching."""
    values = config.model_dump(mode="json")
    values["dep"]["placement"] = "decoupled"
    return parse_config(_without_prefetch(values), where="verify dep")


def reference(config: Config) -> Config:
    """Return the config of the reference: the same model and data, one process, no DEP."""
    values = config.model_dump(mode="json")
    plain = DepConfig(placement="colocated", max_patches_per_chunk=config.dep.max_patches_per_chunk)
    values["layout"] = LayoutConfig().model_dump(mode="json")
    values["dep"] = plain.model_dump(mode="json")
    return parse_config(_without_prefetch(values), where="verify dep, reference")


def _without_prefetch(values: dict[str, Any]) -> dict[str, Any]:
    values["data"] |= {"workers": 0, "prefetch_steps": 0}
    values["train"]["threads"] = None  # the environment of each job sets it
    values["optim"]["deepspeed"] = None  # would shard the gradients, which are compared
    return values


def resumable(config: Config, steps: int, stop: int) -> Config:
    """Return the config of `verify resume`, with this many steps and a checkpoint after the last.

    The other checkpoint settings are kept, except retention, because several runs use the
    checkpoint of the stop.

    Raises:
        ValueError: there is no step before the stop or none after it.
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
    """Return the config with another checkpoint location; `changes` also apply to that section."""
    return config.replace(checkpoint=config.checkpoint.replace(place=place, **changes))


def other_layout(config: Config) -> Config:
    """Return the config in another layout: one process, or two if it already has one.

    Raises:
        ConfigError: the config cannot be split into two.
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
    """Refuse `overrides` that keep the layout or change more than the layout.

    Raises:
        ConfigError: names valid overrides.
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
