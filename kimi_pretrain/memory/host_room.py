"""Measures the memory that processes of this machine can still use, within cgroup limits.

A container or a SLURM job may use less than the machine has. Linux sets that limit on a control
group: `memory.max` in version 2, `memory.limit_in_bytes` in version 1, on the process's own group
or any of its ancestors. In a container, `/proc/self/cgroup` may show the path on the host while the
mounted files are the container's, so every existing folder on the path to the root counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

# Files with the limit and the use, and the reclaimable parts of the use: file cache and slabs.
_VERSION_2 = (
    "memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable"),
)  # fmt: skip
_VERSION_1 = (
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"),
)  # fmt: skip


@dataclass(frozen=True)
class Room:
    """Bytes that processes of this machine can still allocate, and the name of the bound."""

    size: int
    bound: str


def host_room(
    groups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> Room:
    """Return the minimum of the memory available on this machine and in its control groups.

    Args:
        groups: mount point of the control groups.
        membership: file that names this process's groups.
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
    """Yield the memory left in a control group, if it has a limit."""
    try:
        most = (folder / limit).read_text().strip()
        if most == "max":
            return
        size = int(most) - int((folder / used).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:  # a group of another container, the root of version 2, or no permission
        return
    size += sum(int(stat.get(kind, 0)) for kind in cached)
    yield Room(max(0, size), f"{folder / limit} ({int(most):,} bytes)")
