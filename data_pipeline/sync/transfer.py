"""Hashes one file in its store, or copies it and hashes it during the copy.

A file appears in the target only if its bytes have the right SHA-256. The target's copy is verified
by the server, part by part, or by reading the file again if the server does not support that.
"""

import hashlib
from collections.abc import Callable

from data_pipeline.store.open import Store, StoreError, Written, WrongBytes
from data_pipeline.sync.contents import Item
from data_pipeline.sync.rate import Meter, Rate

_PIECE = 8 << 20


class Damaged(StoreError):
    """A file's bytes do not match the manifest; the message names the file and its location."""


def hash_of(store: Store, item: Item, rate: Rate, meter: Meter) -> str:
    """Return the SHA-256 (hex) of a file, read in pieces."""
    digest = hashlib.sha256()
    meter.expect(item.size)
    for offset in range(0, item.size, _PIECE):
        length = min(_PIECE, item.size - offset)
        rate.take(length)
        digest.update(store.get(item.key, offset, length))
        meter.add(length)
    return digest.hexdigest()


def copy(
    source: Store,
    target: Store,
    item: Item,
    rate: Rate,
    meter: Meter,
    may_appear: Callable[[], None],
) -> Written:
    """Copy a file and compare both sides with its hash.

    Args:
        source, target: the stores; the key is the same in both.
        item: the file.
        rate: bandwidth limit, applied to each piece.
        meter: counts the pieces; the caller has added the file's size to the total.
        may_appear: called before the file's last bytes are read, so before the file appears in the
            target; an exception from it cancels the copy.

    Raises:
        Damaged: the source has wrong bytes, even when read again, or the target stored other bytes;
            no file is left in the target.
        Stopped: as in `Rate.take`.
    """
    seen = 0
    if not item.size:
        may_appear()

    def read(offset: int, length: int) -> bytes:
        nonlocal seen
        if offset + length == item.size:
            may_appear()
        rate.take(length)
        piece = source.get(item.key, offset, length)
        seen += length
        meter.add(length)
        return piece

    try:
        written = target.put_verified(item.key, item.size, item.sha256, read)
    except WrongBytes:  # try again, since the damage may be in transit
        meter.add(-seen)
        try:
            written = target.put_verified(item.key, item.size, item.sha256, read)
        except WrongBytes as error:
            raise Damaged(
                f"{source.uri}/{item.key}: sha256 is {error.found}, read twice, expected "
                f"{item.sha256}; nothing of it was written: restore the file, or ingest the source "
                "again"
            ) from error
    if not written.confirmed:
        found = hash_of(target, item, rate, Meter(lambda *_: None))
        if found != written.sha256:
            target.delete(item.key)
            raise Damaged(
                f"{target.uri}/{item.key}: sha256 is {found} after it was written, expected "
                f"{written.sha256}; it was removed again: check the disk or server, then run the "
                "sync again"
            )
    return written
