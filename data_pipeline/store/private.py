"""Folders that only this user can write to: for caches, locks and counters in shared places.

Where others may write they may plant: a link that leads to a file of this user's, a block of a
cache with a right checksum and wrong bytes. So such a folder is made with mode 0700, and one that
is there already is used only if its owner and mode are right.
"""

import os
import stat
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def private_folder(folder: Path) -> Path:
    """Return `folder`, made if missing; in one that many share, as /tmp is, a folder of one's own.

    Raises:
        PermissionError: others can write to it, or replace it; says what to do.
        OSError: it cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if _shared_in_order(folder):
        folder = folder / f"kimi-pretrain-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
    check_private(folder)
    return folder


def check_private(folder: Path) -> None:
    """Refuse a folder that others can write to, and a link of somebody else's.

    Raises:
        PermissionError: says what to do.
        OSError: it cannot be looked at.
    """
    link = os.lstat(folder)
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, os.getuid()):
        raise PermissionError(f"{folder} is a link that user {link.st_uid} has made; remove it")
    check_status(folder, os.stat(folder))


def check_status(folder: Path, status: os.stat_result) -> None:
    """Refuse a folder by its owner and mode.

    Raises:
        PermissionError: says what to do.
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
    """Whether anybody may make a folder here that then nobody else can replace, but its owner.

    That is root, also where it cannot be told: in a container without root (Apptainer, enroot) the
    /tmp of the host belongs to the number that stands for all who are not known inside.
    """
    status = os.stat(folder)
    sticky = bool(status.st_mode & _OTHERS_WRITE and status.st_mode & stat.S_ISVTX)
    return sticky and status.st_uid in (0, os.getuid(), _unknown_user())


def _unknown_user() -> int | None:
    """Return the number of those whom a user namespace does not know; None: it knows all."""
    try:
        known = Path("/proc/self/uid_map").read_text().split()
        if known == ["0", "0", str(2**32 - 1)]:  # this is the host: 65534 is a user as others are
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return None
