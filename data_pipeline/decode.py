"""Decodes media files into patches and checks them against the source's index.

`moonvit3d.media` decodes the pixels and `moonvit3d.preprocess` makes the patches. The rules for
users are in docs/data_format.md.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from data_pipeline.augment.draws import Draw
from data_pipeline.augment.pixels import apply
from moonvit3d import media
from moonvit3d.geometry import KIND_IMAGE, PatchLimits, grid
from moonvit3d.media import MediaError, Probe, read_image, read_video
from moonvit3d.preprocess import image_patches, video_patches

# Formats allowed in a shard. Every reader of the schema must support them; `media` may read more.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "MP4")


def verify(data: bytes, kind: int, check: Callable[[Probe], object] | None = None) -> Probe:
    """Decode a whole file before it goes into a shard, to ensure that it decodes in a run.

    Args:
        check: see `moonvit3d.media.verify`.

    Raises:
        MediaError: the file is not usable; the message says why.
    """
    found = media.verify(data, kind, check)
    if found.format not in FORMATS:
        raise MediaError(f"{found.format} file; a source holds {', '.join(FORMATS)}")
    return found


def decode_item(
    data: bytes, kind: int, chunk: int, limits: PatchLimits, grid: Sequence[int]
) -> NDArray[np.uint8]:
    """Return the patches of one item.

    Args:
        data: the whole media file.
        kind: KIND_IMAGE or KIND_VIDEO.
        chunk: chunk number of a video; 0 for an image.
        limits: patch limits to which the pixels are scaled down.
        grid: patch grid (t, h, w) that the plan expects.

    Returns:
        uint8 [t*h*w, 3, 14, 14].

    Raises:
        MediaError: the file does not decode, or gives another grid.
    """
    return decode_items(data, kind, [chunk], limits, [grid])[0]


Decode = Callable[..., list[NDArray[np.uint8]]]
"""Function with the interface of `decode_items`; it may decode in another process."""


def decode_items(
    data: bytes,
    kind: int,
    chunks: Sequence[int],
    limits: PatchLimits,
    grids: Sequence[Sequence[int]],
    draw: Draw | None = None,
) -> list[NDArray[np.uint8]]:
    """Return the patches of several chunks of one file, decoding the file only once.

    Args:
        draw: augmentation of an image; the other arguments are as in `decode_item`.
    """
    if kind == KIND_IMAGE:
        check = partial(_check_draw, draw) if draw else partial(_check_grid, kind, limits, grids)
        pixels = read_image(data, check)
        if draw is not None:
            pixels = apply(draw, pixels)
        found = dict.fromkeys(chunks, image_patches(pixels, limits))
    else:
        check = partial(_check_grid, kind, limits, grids)
        frames = (frames for frames, _ in read_video(data, chunks, check))
        found = {
            chunk: video_patches(pixels, limits)
            for chunk, pixels in zip(sorted(set(chunks)), frames, strict=True)
        }
    for chunk, expected in zip(chunks, grids, strict=True):
        actual = found[chunk][1]
        if tuple(map(int, actual)) != tuple(map(int, expected)):
            raise MediaError(
                f"chunk {chunk}: decodes to {tuple(map(int, actual))} patches (t, h, w), the "
                f"index promises {tuple(map(int, expected))}"
            )
    return [found[chunk][0] for chunk in chunks]


def _check_grid(
    kind: int, limits: PatchLimits, grids: Sequence[Sequence[int]], found: Probe
) -> None:
    """Refuse a file whose size differs from the index, because decoding could exhaust memory."""
    actual = grid(kind, 1, found.height, found.width, limits)[1:]
    for expected in grids:
        if actual != tuple(map(int, expected[1:])):
            raise MediaError(
                f"{found.width} x {found.height} pixels give {actual} patches (h, w), the index "
                f"promises {tuple(map(int, expected[1:]))}"
            )


def _check_draw(draw: Draw, found: Probe) -> None:
    """Refuse an image whose size differs from the index, because its crop would be wrong."""
    if (found.height, found.width) != (draw.height, draw.width):
        raise MediaError(
            f"decodes to {found.width} x {found.height} pixels, the index promises "
            f"{draw.width} x {draw.height}"
        )
