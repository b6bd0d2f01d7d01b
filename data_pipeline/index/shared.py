"""Shares one copy of an index per node: the first process loads it, the others map it.

The columns are files in a node-local folder (`data_pipeline.cache.node`) that is removed with the
last process that uses it, so a later start never sees the leftovers of a crash. The writer checks
the columns against the manifest and renames them into place once they are complete.
"""

import errno
import logging
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data_pipeline.cache.node import SHARED_MEMORY, NodeFolder, locked_file
from data_pipeline.index.columns import HASHED, SourceIndex
from data_pipeline.index.manifest import attributes_of, read_index, read_manifest
from data_pipeline.store.open import Store

log = logging.getLogger(__name__)

WAIT_S = 3600.0  # for the process that loads the index, which can take minutes
_KEYS = ("key_ptr", "key_bytes")
_FULL = "full"  # marker file: this folder has no room for the columns


def read_shared_index(
    store: Store, name: str, parents: Sequence[Path] = (SHARED_MEMORY, Path(tempfile.gettempdir()))
) -> SourceIndex:
    """Read a source as `index.manifest.read_index` does, once for all processes of the node.

    If no folder of `parents` has room for the columns, each process loads its own copy and logs a
    warning.

    Raises:
        MissingKey, IndexMismatch, ValueError: as for `read_index`.
        CacheTimeout: another process has held the lock for an hour.
    """
    manifest = read_manifest(store, name)
    own: SourceIndex | None = None
    for parent in parents:
        try:
            node = NodeFolder(parent, f"index-{manifest['content_hash']}", WAIT_S)
        except OSError:
            continue  # not writable; try the next folder
        columns, full = node.path / "columns", node.path / _FULL
        with locked_file(node.path / "lock", WAIT_S):
            if not columns.exists() and not full.exists():
                own = own or read_index(store, name)
                if not _written(own, columns):
                    full.touch()
        if columns.exists():
            if own is not None:  # otherwise Arrow keeps the memory used for reading
                own = None
                pa.default_memory_pool().release_unused()
            found = _mapped(columns, manifest)
            weakref.finalize(found, node.close)
            return found
        node.close()
    log.warning(
        "source %r: each process of this node has its own copy of the index: there is no room for "
        "one that they share in %s", name, " or ".join(map(str, parents)),
    )  # fmt: skip
    return own or read_index(store, name)


def _written(index: SourceIndex, columns: Path) -> bool:
    """Write the columns of an index and move them into place; return False if the disk is full."""
    part = columns.with_name("part")
    shutil.rmtree(part, ignore_errors=True)  # left by a killed process
    part.mkdir()
    keys = pa.array(index.key, pa.string()).cast(pa.large_string())
    _, ptr, text = keys.buffers()
    arrays = {name: getattr(index, name) for name in HASHED}
    first = np.frombuffer(ptr, np.int64)[keys.offset : keys.offset + len(keys) + 1]
    arrays["key_ptr"] = first if len(keys) else np.zeros(1, np.int64)
    arrays["key_bytes"] = np.frombuffer(text or b"", np.uint8)
    try:
        for name, array in arrays.items():
            np.save(part / f"{name}.npy", array)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return False
        raise
    part.rename(columns)
    return True


def _mapped(columns: Path, manifest: Mapping[str, Any]) -> SourceIndex:
    """Map the columns that `_written` wrote; the folder name is their content hash."""
    redacted = manifest.get("redacted") or {}
    arrays: dict[str, Any] = {name: _array(columns / f"{name}.npy") for name in (*HASHED, *_KEYS)}
    ptr, text = (arrays.pop(name) for name in _KEYS)
    buffers = [None, pa.py_buffer(ptr), pa.py_buffer(text)]
    found = SourceIndex(
        **attributes_of(manifest),
        key=pa.Array.from_buffers(pa.large_string(), manifest["samples"], buffers),
        index_sha256=manifest["index_sha256"],
        redacted=tuple(redacted.get("samples", ())),  # the columns already have their new checksums
        made_as=redacted.get("made_as", ""),
        **arrays,
    )
    # The writer computed and compared the hash; computing it again would read every page.
    vars(found)["content_hash"] = manifest["content_hash"]
    return found


def _array(path: Path) -> NDArray[Any]:
    found = np.load(path, mmap_mode="r", allow_pickle=False)
    return found.view(np.ndarray)
