"""Checks before a run starts that it fits into device memory and host memory."""

from collections.abc import Iterable

from kimi_pretrain.config import GIB, Config, ConfigError
from kimi_pretrain.memory.host_room import host_room
from kimi_pretrain.memory.plan import host_bytes, plan_memory, single_changes
from kimi_pretrain.memory.search import Search, search
from kimi_pretrain.memory.states import divide_config


def check_memory_limit(config: Config) -> None:
    """Raise if the fullest rank of a run exceeds `train.memory_limit_gib`.

    Raises:
        ConfigError: names the rank, both sizes and a remedy: the cheapest sufficient switch, a
            combination of switches, or more ranks.
    """
    limit = config.train.memory_limit_gib
    if limit is None:
        return
    division = divide_config(config)
    plan = plan_memory(config, division)
    most = plan.fullest
    if most.peak <= limit * GIB:
        return
    enough = next((s for s in plan.switches if s.peak <= limit * GIB), None)
    if enough is not None:
        advice = f"{enough.setting} alone brings it to {enough.peak / GIB:.1f} GiB"
    else:
        advice = "no single switch suffices; "
        advice += _together(search(config, int(limit * GIB), division), config.layout.world_size())
    least = max(stage.weights for stage in plan.stages)
    if least > limit * GIB:
        advice = f"weights alone take up to {least / GIB:.1f} GiB; {advice}"
    raise ConfigError(
        f"train.memory_limit_gib={limit:g}: rank {most.rank} (stage {most.stage}) would hold "
        f"{most.peak / GIB:.1f} GiB: weights {most.weights / GIB:.1f}, gradients "
        f"{most.gradients / GIB:.1f}, optimizer {most.optimizer / GIB:.1f}, activations "
        f"{most.activations.total() / GIB:.1f}; {advice}"
    )


def _together(found: Search, ranks: int) -> str:
    """Return the smallest sufficient change, as text."""
    least = found.least
    fewest = f"all that helps brings {ranks} ranks to {least.fullest.peak / GIB:.1f} GiB at least"
    if not found.fits:
        return (
            f"{fewest}, and eight times the replicas (layout.dp, layout.ep) do not suffice; "
            "layout.pp and layout.tp divide what a rank has of the model"
        )
    fit = found.fits[0]
    settings = " ".join(fit.settings)
    if fit.ranks == ranks:
        return f"{settings} bring it to {fit.fullest.peak / GIB:.1f} GiB"
    return f"{fewest}; {fit.ranks} ranks suffice with {settings}"


def check_host_memory(config: Config, machines: Iterable[range]) -> None:
    """Raise if offloaded activations (`train.offload`) do not fit into this machine's memory.

    Args:
        machines: the ranks of this machine as one range; or one range for each machine, if it is
            not known yet which one this is. The range that needs most memory counts.

    Raises:
        ConfigError: names the needed and the free memory, the bound of the latter, and a sufficient
            change, if there is one.
    """
    if not config.train.offload:
        return
    places = list(machines)
    ranks, needed = max(_needed(config, places), key=lambda one: one[1])
    room = host_room()
    if needed <= room.size:
        return
    others = [
        (str(change), max(size for _, size in _needed(other, places)))
        for change, other in single_changes(config)
    ]
    advice = "train.offload=false keeps them on the devices"
    if enough := [setting for setting, size in others if size <= room.size]:
        advice = f"with {enough[0]} they fit, and {advice}"
    raise ConfigError(
        f"train.offload=true: ranks {ranks[0]} to {ranks[-1]} of one machine would keep "
        f"{needed / GIB:.1f} GiB of activations in host memory, where {room.size / GIB:.1f} GiB "
        f"are free ({room.bound}); {advice}"
    )


def _needed(config: Config, machines: Iterable[range]) -> list[tuple[range, int]]:
    """Return each machine's ranks with the sum of their bytes in host memory."""
    sizes, per_stage = host_bytes(config), config.layout.world_size() // config.layout.pp
    return [(ranks, sum(sizes[rank // per_stage] for rank in ranks)) for ranks in machines]
