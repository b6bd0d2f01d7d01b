"""Finds the kind of file system that a path is on, from Linux's mount table."""

import re
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
# SQLite depends on local file locks: over these file systems, two machines corrupt a database.
_NETWORK = re.compile(
    r"(nfs4?|cifs|smb3?|smbfs|lustre|gpfs|beegfs(_nodev)?|ceph|glusterfs|9p|virtiofs|afs|wekafs"
    r"|panfs|pvfs2|orangefs|ocfs2|gfs2|fuse\..*|fuse)"
)


def network_kind(path: Path, mounts: str | None = None) -> str | None:
    """Return the kind of network file system that a path is on; None for a local one.

    Args:
        path: of a file or folder, which need not exist.
        mounts: contents of `MOUNTS`.

    FUSE counts as a network file system, because the storage behind it is unknown.
    """
    if mounts is None:
        try:
            mounts = MOUNTS.read_text()
        except OSError:  # not Linux: the kind is unknown
            return None
    place, depth, kind = path.resolve(), 0, ""
    for line in mounts.splitlines():
        fields, _, kinds = line.partition(" - ")
        mount = Path(_unescaped(fields.split()[4]))
        # Of two mounts at one path, the later one hides the earlier.
        if place.is_relative_to(mount) and len(mount.parts) >= depth:
            depth, kind = len(mount.parts), kinds.split()[0]
    return kind if _NETWORK.fullmatch(kind) else None


def _unescaped(name: str) -> str:
    """Undo the octal escapes of blanks and similar characters."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), name)
