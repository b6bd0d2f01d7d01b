"""What is refused before a run starts because it would not fit: on a device, or on its machine."""

from collections.abc import Iterable

from kimi_pretrain.config import GIB, Config, ConfigError
from kimi_pretrain.memory.host_room import host_room
from kimi_pretrain.memory.plan import host_bytes, plan_memory, switches_of


def check_memory_limit(config: Config) -> None:
    """Refuse a run whose fullest rank is over `train.memory_limit_gib`.

    Raises:
        ConfigError: names the rank, both sizes, and the single change that suffices, if one does.
    """
    limit = config.train.memory_limit_gib
    if limit is None:
        return
    plan = plan_memory(config)
    most = plan.fullest
    if most.peak <= limit * GIB:
        return
    enough = next((s for s in plan.switches if s.peak <= limit * GIB), None)
    if enough is not None:
        advice = f"{enough.setting} alone brings it to {enough.peak / GIB:.1f} GiB"
    elif plan.switches:
        best = min(plan.switches, key=lambda switch: switch.peak)
        advice = f"no single switch suffices; {best.setting} brings it to {best.peak / GIB:.1f} GiB"
    else:
        advice = "give it more ranks (layout.pp, layout.ep, layout.cp)"
    raise ConfigError(
        f"train.memory_limit_gib={limit:g}: rank {most.rank} (stage {most.stage}) would hold "
        f"{most.peak / GIB:.1f} GiB: weights {most.weights / GIB:.1f}, gradients "
        f"{most.gradients / GIB:.1f}, optimizer {most.optimizer / GIB:.1f}, activations "
        f"{most.activations.total() / GIB:.1f}; {advice}"
    )


def check_host_memory(config: Config, machines: Iterable[range]) -> None:
    """Refuse a run whose activations in host memory (`train.offload`) have no room on this machine.

    Args:
        machines: the ranks that this machine may be given: one range, or one for each machine where
            it is not known yet which it will be. The one that needs most counts.

    Raises:
        ConfigError: names what is needed, what is free and by what bound, and the change that
            suffices, if one does.
    """
    if not config.train.offload:
        return
    places = list(machines)
    ranks, needed = max(_needed(config, places), key=lambda one: one[1])
    room = host_room()
    if needed <= room.size:
        return
    others = [
        (setting, max(size for _, size in _needed(changed, places)))
        for setting, changed in switches_of(config)
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
    """Return each machine's ranks with the bytes that they have in host memory together."""
    sizes, per_stage = host_bytes(config), config.layout.world_size() // config.layout.pp
    return [(ranks, sum(sizes[rank // per_stage] for rank in ranks)) for ranks in machines]
