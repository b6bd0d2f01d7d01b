"""Which kind of file system a path lies on, by Linux's table of mounts."""

import re
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
# SQLite's locks need those of a local file system: over these two machines corrupt a database.
_NETWORK = re.compile(
    r"(nfs4?|cifs|smb3?|smbfs|lustre|gpfs|beegfs(_nodev)?|ceph|glusterfs|9p|virtiofs|afs|wekafs"
    r"|panfs|pvfs2|orangefs|ocfs2|gfs2|fuse\..*|fuse)"
)


def network_kind(path: Path, mounts: str | None = None) -> str | None:
    """Return the kind of network file system that a path lies on; None for a local one.

    Args:
        path: of a file or folder that need not be there.
        mounts: what stands in `MOUNTS`.

    FUSE counts as a network: what is behind it does not show.
    """
    if mounts is None:
        try:
            mounts = MOUNTS.read_text()
        except OSError:  # not Linux: nothing is known
            return None
    place, depth, kind = path.resolve(), 0, ""
    for line in mounts.splitlines():
        fields, _, kinds = line.partition(" - ")
        mount = Path(_unescaped(fields.split()[4]))
        # Of two at one place the later one is seen.
        if place.is_relative_to(mount) and len(mount.parts) >= depth:
            depth, kind = len(mount.parts), kinds.split()[0]
    return kind if _NETWORK.fullmatch(kind) else None


def _unescaped(name: str) -> str:
    """Undo the octal escapes of blanks and the like."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), name)
