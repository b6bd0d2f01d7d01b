"""How the images and captions of a source may be changed from epoch to epoch; all off by default.

Values live in YAML, under the source's name; these dataclasses only check them where they enter.
`augment.draws` draws by them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar


@dataclass(frozen=True)
class AffineConfig:
    """Rotation, scale, shear and shift about the middle, on an unchanged canvas.

    What comes in from outside is black, as the padding to whole tokens is. For a picture longer
    than 2:1 the angle and shear shrink in proportion: a line of text would leave its own canvas.

    Attributes:
        probability: share of images it is done to.
        degrees: most degrees of rotation, either way; 0 to 45.
        scale: least and most enlargement, drawn on a logarithmic scale; within 0.5 to 2.
        shear: most pixels that a row moves sideways, per pixel from the middle; 0 to 0.5.
        shift: most shift, as a share of width and height; 0 to 0.5.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    probability: float = 1.0
    degrees: float = 0.0
    scale: tuple[float, float] = (1.0, 1.0)
    shear: float = 0.0
    shift: float = 0.0

    def __post_init__(self) -> None:
        _check_number("affine.probability", self.probability, 0, 1)
        _check_number("affine.degrees", self.degrees, 0, 45)
        _check_range("affine.scale", self.scale, 0.5, 2)
        _check_number("affine.shear", self.shear, 0, 0.5)
        _check_number("affine.shift", self.shift, 0, 0.5)
        _check_effect("affine", self)


@dataclass(frozen=True)
class CropConfig:
    """A box of whole pixels is cut out, then scaled down.

    Attributes:
        probability: share of images it is done to.
        area: least and most share of the picture's area that is kept; within 0.01 to 1.
        aspect: least and most ratio of the box's width/height to the picture's own, drawn on a
            logarithmic scale; within 0.1 to 10. A box that would not fit keeps its area.
        rescale: least and most factor on the sides of what was cut out; within 0.1 to 1.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    probability: float = 1.0
    area: tuple[float, float] = (1.0, 1.0)
    aspect: tuple[float, float] = (1.0, 1.0)
    rescale: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        _check_number("crop.probability", self.probability, 0, 1)
        _check_range("crop.area", self.area, 0.01, 1)
        _check_range("crop.aspect", self.aspect, 0.1, 10)
        _check_range("crop.rescale", self.rescale, 0.1, 1)
        _check_effect("crop", self)


@dataclass(frozen=True)
class ColourConfig:
    """Factors drawn from 1 - x to 1 + x. Hues stay as they are: captions name colours.

    Attributes:
        probability: share of images it is done to.
        brightness: factor on the values; x within 0 to 0.9, as for the others.
        contrast: factor on the distance from middle grey.
        saturation: factor on the distance from grey of the same lightness.
        gamma: exponent on the values.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    probability: float = 1.0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    gamma: float = 0.0

    def __post_init__(self) -> None:
        _check_number("colour.probability", self.probability, 0, 1)
        for name in ("brightness", "contrast", "saturation", "gamma"):
            _check_number(f"colour.{name}", getattr(self, name), 0, 0.9)
        _check_effect("colour", self)


@dataclass(frozen=True)
class JpegConfig:
    """Compressed and decompressed once, with 4:2:0 colour.

    Attributes:
        quality: least and most quality of the Independent JPEG Group's scale; within 5 to 100.
        probability: share of images it is done to.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    quality: tuple[int, int]
    probability: float = 1.0

    def __post_init__(self) -> None:
        _check_number("jpeg.probability", self.probability, 0, 1)
        _check_range("jpeg.quality", self.quality, 5, 100)
        if any(not isinstance(value, int) for value in self.quality):
            raise ValueError(f"jpeg.quality is {list(self.quality)}; allowed: whole numbers")


@dataclass(frozen=True)
class AugmentConfig:
    """What is done to the images and captions of one source; nothing, unless it says so.

    Videos are left as they are.

    Attributes:
        flip: share of images that are mirrored, of those the index allows (`flip_ok`).
        turn: share of images that are turned by 90, 180 or 270 degrees (`turn_ok`).
        affine, crop, colour, jpeg: None leaves the operation out.
        min_visible: share of a box's area that must stay in the frame, or the box is dropped.
        variants: choose among a text's variants; otherwise the first one is taken.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    flip: float = 0.0
    turn: float = 0.0
    affine: AffineConfig | None = None
    crop: CropConfig | None = None
    colour: ColourConfig | None = None
    jpeg: JpegConfig | None = None
    min_visible: float = 0.3
    variants: bool = False

    def __post_init__(self) -> None:
        for name in ("flip", "turn", "min_visible"):
            _check_number(name, getattr(self, name), 0, 1)

    @property
    def changes_images(self) -> bool:
        """Whether any image may come out other than it went in."""
        parts = (self.affine, self.crop, self.colour, self.jpeg)
        return self.flip > 0 or self.turn > 0 or any(part is not None for part in parts)


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if not _is_within(value, low, high):
        raise ValueError(f"{name} is {value!r}; allowed: a number from {low:g} to {high:g}")


def _check_range(name: str, value: Sequence[float], low: float, high: float) -> None:
    pair = isinstance(value, tuple | list) and len(value) == 2
    if not pair or not all(_is_within(end, low, high) for end in value):
        raise ValueError(
            f"{name} is {value!r}; allowed: [least, most], both from {low:g} to {high:g}"
        )
    if value[0] > value[1]:
        raise ValueError(f"{name} is {list(value)}; allowed: [least, most] in this order")


def _is_within(value: object, low: float, high: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return low <= value <= high  # NaN is in no range


def _check_effect(name: str, config: AffineConfig | CropConfig | ColourConfig) -> None:
    """Refuse an operation that is asked for and does nothing: a key was forgotten."""
    named = [field for field in fields(config) if field.name != "probability"]
    if all(getattr(config, field.name) == field.default for field in named):
        keys = ", ".join(field.name for field in named)
        raise ValueError(f"{name} changes nothing; give it some of {keys}, or leave it out")
