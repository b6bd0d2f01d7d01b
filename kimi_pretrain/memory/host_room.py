"""How much more memory this machine gives its processes: what is free, within its cgroups' limits.

A container or a SLURM job may use less than the machine has. Linux puts that limit on a control
group: `memory.max` of version 2, `memory.limit_in_bytes` of version 1, on the process's own group
or any above it. In a container the path in `/proc/self/cgroup` may be the host's while the files
are those of the container, so whatever exists on the way to the root counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

# Limit, use, and what of that use gives way to a process: cached pages of files, and their names.
_VERSION_2 = (
    "memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable"),
)  # fmt: skip
_VERSION_1 = (
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"),
)  # fmt: skip


@dataclass(frozen=True)
class Room:
    """Bytes that processes of this machine can still have, and what bounds them, for messages."""

    size: int
    bound: str


def host_room(
    groups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> Room:
    """Return the least of what is available on this machine and in each of our control groups.

    Args:
        groups: where control groups are mounted.
        membership: the file that names this process's groups.
    """
    rooms = [Room(psutil.virtual_memory().available, "the available memory of this machine")]
    return min((*rooms, *_rooms(groups, membership)), key=lambda room: room.size)


def _rooms(groups: Path, membership: Path) -> Iterator[Room]:
    lines = membership.read_text().splitlines() if membership.is_file() else []
    for number, kinds, path in (line.split(":", 2) for line in lines):
        if number == "0":
            root, files = groups, _VERSION_2
        elif "memory" in kinds.split(","):
            root, files = groups / "memory", _VERSION_1
        else:
            continue
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(root):
                yield from _room_in(folder, *files)


def _room_in(folder: Path, limit: str, used: str, cached: tuple[str, ...]) -> Iterator[Room]:
    """Yield what a control group leaves, if it has a limit."""
    try:
        most = (folder / limit).read_text().strip()
        if most == "max":
            return
        size = int(most) - int((folder / used).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:  # a group of another container, the root of version 2, or not for us to read
        return
    size += sum(int(stat.get(kind, 0)) for kind in cached)
    yield Room(max(0, size), f"{folder / limit} ({int(most):,} bytes)")
