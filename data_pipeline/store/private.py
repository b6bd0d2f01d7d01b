"""Makes and checks folders that only this user can write to, for caches, locks and counters.

In a folder that others can write to, they can plant a link to one of this user's files, or a cache
block with a correct checksum and wrong bytes. So folders are created with mode 0700, and an
existing folder is used only if its owner and mode are safe.
"""

import os
import stat
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def private_folder(folder: Path) -> Path:
    """Return `folder`, created if missing; for a shared folder like /tmp, a subfolder per user.

    Raises:
        PermissionError: other users can write to it or replace it; the message says what to do.
        OSError: it cannot be created.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if _shared_in_order(folder):
        folder = folder / f"kimi-pretrain-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
    check_private(folder)
    return folder


def check_private(folder: Path) -> None:
    """Refuse a folder that others can write to, and a link made by another user.

    Raises:
        PermissionError: the folder is not private; the message says what to do.
        OSError: its status cannot be read.
    """
    link = os.lstat(folder)
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, os.getuid()):
        raise PermissionError(f"{folder} is a link that user {link.st_uid} has made; remove it")
    check_status(folder, os.stat(folder))


def check_status(folder: Path, status: os.stat_result) -> None:
    """Refuse a folder that has another owner or that others can write to.

    Raises:
        PermissionError: the folder is not private; the message says what to do.
    """
    if status.st_uid != os.getuid():
        raise PermissionError(
            f"{folder} belongs to user {status.st_uid}, who could change what is in it; remove it "
            "or give a folder of your own"
        )
    if status.st_mode & _OTHERS_WRITE:
        raise PermissionError(
            f"{folder} may be written by other users (mode {stat.S_IMODE(status.st_mode):o}); "
            f"chmod go-w {folder}, and remove what you did not put there"
        )


def _shared_in_order(folder: Path) -> bool:
    """Return whether all users may create folders here that others cannot replace, as in /tmp.

    The owner must be root or this user. In a rootless container (Apptainer, enroot), the host's
    /tmp shows the overflow user id as its owner, which is accepted as well.
    """
    status = os.stat(folder)
    sticky = bool(status.st_mode & _OTHERS_WRITE and status.st_mode & stat.S_ISVTX)
    return sticky and status.st_uid in (0, os.getuid(), _unknown_user())


def _unknown_user() -> int | None:
    """Return the overflow user id for unmapped users; None if the namespace maps all users."""
    try:
        known = Path("/proc/self/uid_map").read_text().split()
        if known == ["0", "0", str(2**32 - 1)]:  # on the host, 65534 is an ordinary user
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return None
