"""Sample processing that all peers share, with the same libraries."""

import io
import zlib
from typing import Any


def payload(jpeg: bytes | memoryview, mode: str) -> Any:
    """Return the JPEG in the form that the mode requires.

    litdata returns views of a mapped file, which cannot leave the process and may not have been
    read yet. Raw means bytes for every loader; `bytes` of bytes costs nothing.
    """
    if mode == "raw":
        return bytes(jpeg)
    if mode == "views":
        return jpeg
    if mode == "sums":
        return zlib.crc32(jpeg)
    import numpy as np
    import torch
    from PIL import Image

    return torch.from_numpy(np.array(Image.open(io.BytesIO(jpeg)).convert("RGB")))


def collate(samples: list[tuple[int, Any, Any]], mode: str) -> dict[str, Any]:
    """Return a batch from the (number, payload, document) of each sample."""
    numbers, payloads, documents = (list(column) for column in zip(*samples))
    if mode == "pixels":
        import torch

        return {"ids": numbers, "x": torch.stack(payloads), "cap": documents}
    return {"ids": numbers, "x": payloads, "cap": documents}
