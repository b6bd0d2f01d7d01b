"""One copy of an index in the memory of a node: whoever comes first reads it, all map it.

The columns lie as files in a folder of the node (`data_pipeline.cache.node`), which is gone with
the last process that uses it: a later start never sees what a crash left there. Who wrote them has
checked them against the manifest; they are renamed into place when they are whole.
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

WAIT_S = 3600.0  # for the process that reads: a large index takes minutes
_KEYS = ("key_ptr", "key_bytes")
_FULL = "full"  # a mark: there is no room for the columns here


def read_shared_index(
    store: Store, name: str, parents: Sequence[Path] = (SHARED_MEMORY, Path(tempfile.gettempdir()))
) -> SourceIndex:
    """Read a source as `index.manifest.read_index` does, once for all processes of the node.

    Where no folder of `parents` has room for its columns each process has its own, and is told so.

    Raises:
        MissingKey, IndexMismatch, ValueError: as `read_index`.
        CacheTimeout: another process has not been through with it for an hour.
    """
    manifest = read_manifest(store, name)
    own: SourceIndex | None = None
    for parent in parents:
        try:
            node = NodeFolder(parent, f"index-{manifest['content_hash']}", WAIT_S)
        except OSError:
            continue  # not writable: the next one, or the warning below
        columns, full = node.path / "columns", node.path / _FULL
        with locked_file(node.path / "lock", WAIT_S):
            if not columns.exists() and not full.exists():
                own = own or read_index(store, name)
                if not _written(own, columns):
                    full.touch()
        if columns.exists():
            if own is not None:  # Arrow would keep the memory that reading took
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
    """Write the columns of an index, and move them into place; False: there is no room."""
    part = columns.with_name("part")
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
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
    """Map what `_written` wrote: of the content that the folder is named after."""
    redacted = manifest.get("redacted") or {}
    arrays: dict[str, Any] = {name: _array(columns / f"{name}.npy") for name in (*HASHED, *_KEYS)}
    ptr, text = (arrays.pop(name) for name in _KEYS)
    buffers = [None, pa.py_buffer(ptr), pa.py_buffer(text)]
    found = SourceIndex(
        **attributes_of(manifest),
        key=pa.Array.from_buffers(pa.large_string(), manifest["samples"], buffers),
        index_sha256=manifest["index_sha256"],
        redacted=tuple(redacted.get("samples", ())),  # their checksums are in the columns
        made_as=redacted.get("made_as", ""),
        **arrays,
    )
    # Computed by who wrote them, and compared: it takes every page.
    vars(found)["content_hash"] = manifest["content_hash"]
    return found


def _array(path: Path) -> NDArray[Any]:
    found = np.load(path, mmap_mode="r", allow_pickle=False)
    return found.view(np.ndarray)
