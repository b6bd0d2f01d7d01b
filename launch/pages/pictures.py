"""Turns patches back into a picture, and draws regions on it, as inline SVG.

The page decides where the bytes of a picture go (`Src`): into the page itself, or to a server that
sends them from an address.
"""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from einops import rearrange
from numpy.typing import NDArray
from PIL import Image

from launch.pages.html import text
from moonvit3d.geometry import PATCH

# Pixels of the longer side on the page. Larger pictures are scaled down to LONGEST, smaller ones
# up to SMALLEST by a factor of at most eight.
LONGEST, SMALLEST = 448, 140
# Most pixels of a picture stored as PNG; larger pictures are stored as JPEG.
_LOSSLESS_PIXELS = 160 * 160
# Colours of regions, used in rotation; they are visible on pictures and on the page.
COLOURS = ("#e6194b", "#1f77ff", "#109618", "#ff7f0e", "#911eb4", "#008b8b", "#b8860b", "#d6249f")


Src = Callable[[bytes, str], str]
"""Stores the bytes of a picture, given its media type, and returns the URL for HTML elements."""


@dataclass(frozen=True)
class Shape:
    """A region to draw.

    Attributes:
        name: "point", "box" or "polygon".
        points: [(x, y), ...] in pixels of the frame; two corners for a box.
        number: number of the region in its document, which selects the colour.
        label: text of the tooltip.
    """

    name: str
    points: Sequence[tuple[float, float]]
    number: int
    label: str


def unpatchify(patches: NDArray[np.uint8], grid: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Assemble patches into pictures; this is the inverse of `moonvit3d.preprocess`.

    Args:
        patches: uint8 [t * h * w, 3, 14, 14].
        grid: (t, h, w).

    Returns:
        Pictures with the padding to whole tokens, uint8 [t, 14 * h, 14 * w, 3].
    """
    t, h, w = grid
    return rearrange(
        patches, "(t h w) c p q -> t (h p) (w q) c", t=t, h=h, w=w, p=PATCH, q=PATCH
    )  # fmt: skip


def colour(number: int) -> str:
    """Return the colour of region `number` of a document."""
    return COLOURS[number % len(COLOURS)]


def colour_class(number: int) -> str:
    """Return the CSS class that colours text and its underline like region `number`."""
    return f"c{number % len(COLOURS)}"


def drawing(
    pixels: NDArray[np.uint8],
    frame: tuple[float, float],
    shapes: Sequence[Shape],
    src: Src,
) -> str:
    """Return a picture with shapes on it, as SVG.

    Args:
        pixels: picture as the model gets it, with padding, uint8 [H, W, 3].
        frame: (width, height) in pixels without padding; a dashed line marks it if there is
            padding.
        shapes: shapes to draw, in pixels of the frame.
        src: stores the picture.
    """
    height, width = pixels.shape[:2]
    return overlay(src(*encoded(pixels)), (width, height), frame, shapes)


def overlay(
    href: str,
    size: tuple[int, int],
    frame: tuple[float, float],
    shapes: Sequence[Shape],
    longest: int = LONGEST,
) -> str:
    """Return shapes on a picture, as SVG; the picture ignores the EXIF orientation.

    Args:
        href: URL of the picture.
        size: (width, height) of the picture in pixels, with its padding.
        frame: (width, height) in pixels without padding.
        shapes: shapes to draw, in pixels.
        longest: most pixels of the longer side on the page.
    """
    width, height = size
    scale = min(longest / max(width, height), 1.0)
    scale = max(scale, min(SMALLEST / max(width, height), 8.0))
    stroke = 1.6 / scale  # gives lines the same width on every picture
    inside = "".join(_shape(shape, stroke) for shape in shapes)
    if frame[0] < width or frame[1] < height:
        inside = (
            f'<rect x="0" y="0" width="{frame[0]:g}" height="{frame[1]:g}" fill="none" '
            f'stroke="#888" stroke-width="{stroke:.3g}" stroke-dasharray="{3 * stroke:.3g}"/>'
        ) + inside
    smooth = "auto" if scale < 1 else "pixelated"
    return (
        f'<svg width="{width * scale:.0f}" height="{height * scale:.0f}" '
        f'viewBox="0 0 {width} {height}"><image width="{width}" height="{height}" '
        f'preserveAspectRatio="none" image-rendering="{smooth}" href="{text(href)}"/>'
        f"{inside}</svg>"
    )


def _shape(shape: Shape, stroke: float) -> str:
    line = f'fill="none" stroke="{colour(shape.number)}" stroke-width="{stroke:.3g}"'
    title = f"<title>{text(shape.label)}</title>"
    if shape.name == "point":
        ((x, y),) = shape.points
        return (
            f'<circle cx="{x:.4g}" cy="{y:.4g}" r="{3 * stroke:.3g}" {line}>{title}</circle>'
            f'<circle cx="{x:.4g}" cy="{y:.4g}" r="{stroke:.3g}" fill="{colour(shape.number)}"/>'
        )
    if shape.name == "box":
        (left, top), (right, bottom) = shape.points
        return (
            f'<rect x="{left:.4g}" y="{top:.4g}" width="{right - left:.4g}" '
            f'height="{bottom - top:.4g}" {line}>{title}</rect>'
        )
    points = " ".join(f"{x:.4g},{y:.4g}" for x, y in shape.points)
    return f'<polygon points="{points}" {line}>{title}</polygon>'


def encoded(pixels: NDArray[np.uint8], longest: int = LONGEST) -> tuple[bytes, str]:
    """Return a picture as a file for a page, and its media type.

    Args:
        pixels: uint8 [H, W, 3].
        longest: most pixels of the longer side.
    """
    image = Image.fromarray(np.ascontiguousarray(pixels))
    if max(image.size) > longest:
        image.thumbnail((longest, longest), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    lossless = image.width * image.height <= _LOSSLESS_PIXELS
    if lossless:
        image.save(out, "PNG")
    else:
        image.save(out, "JPEG", quality=88)
    return out.getvalue(), f"image/{'png' if lossless else 'jpeg'}"


def data_uri(data: bytes, kind: str) -> str:
    """Return a file as a data URI; this is a `Src`."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
