"""Removing objects, which only ingest does, and only what it wrote itself."""

import contextlib
from pathlib import Path

from data_pipeline.store.open import FolderStore, MemoryStore, S3Store, Store


def remove(store: Store, key: str) -> bool:
    """Remove an object, if it is there.

    Returns:
        Whether this kind of store can do that.
    """
    if isinstance(store, S3Store):
        store._call("delete_object", key)
    elif isinstance(store, FolderStore):
        path = store._path(key)
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # as in S3, a folder is there only while it holds files
            path.parent.rmdir()
    elif isinstance(store, MemoryStore):
        with store._objects.lock:
            store._objects.held.pop(f"{store._prefix}{key}", None)
    else:
        return False
    return True


def remove_unfinished(store: Store, folder: str) -> None:
    """Remove what writers that were killed left behind in a folder on disk.

    Nobody sees such files as objects, but each may be as large as a shard. Only for a folder that
    no one else is writing to.
    """
    if isinstance(store, FolderStore):
        for path in Path(store.root, folder).glob(f"{store._TEMPORARY}*"):
            path.unlink(missing_ok=True)
