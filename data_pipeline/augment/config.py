"""How the images and captions of a source may be changed from epoch to epoch; all off by default.

Values live in YAML, under the source's name; `augment.draws` draws by them.
"""

from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from typed_config.section import IntPair, Pair, Section


def _within(low: float, high: float) -> AfterValidator:
    """Check a pair [least, most]."""

    def check(pair: tuple[float, float]) -> tuple[float, float]:
        if not all(low <= end <= high for end in pair):  # NaN is in no range
            raise ValueError(f"allowed: [least, most], both from {low:g} to {high:g}")
        if pair[0] > pair[1]:
            raise ValueError("allowed: [least, most] in this order")
        return pair

    return AfterValidator(check)


Share = Annotated[float, Field(ge=0, le=1)]
Strength = Annotated[float, Field(ge=0, le=0.9)]


class _Operation(Section):
    """An operation on images, which must have an effect: otherwise a key was forgotten."""

    @model_validator(mode="after")
    def _check_effect(self) -> Self:
        own = {n: f for n, f in type(self).model_fields.items() if n != "probability"}
        if all(getattr(self, name) == field.default for name, field in own.items()):
            raise ValueError(f"changes nothing; give it some of {', '.join(own)}, or leave it out")
        return self


class AffineConfig(_Operation):
    """Rotation, scale, shear and shift about the middle, on an unchanged canvas.

    What comes in from outside is black, as the padding to whole tokens is. For a picture longer
    than 2:1 the angle and shear shrink in proportion: a line of text would leave its own canvas.
    """

    probability: Share = 1.0
    """Share of images it is done to. [-; data_pipeline/augment/draws.py]"""
    degrees: float = Field(default=0.0, ge=0, le=45)
    """Most rotation, either way. [degrees; data_pipeline/augment/draws.py]"""
    scale: Annotated[Pair, _within(0.5, 2)] = (1.0, 1.0)
    """Least and most enlargement, drawn on a logarithmic scale; within 0.5 to 2.
    [-; data_pipeline/augment/draws.py]"""
    shear: float = Field(default=0.0, ge=0, le=0.5)
    """Most sideways shift of a row, per pixel from the middle.
    [pixels per pixel; data_pipeline/augment/draws.py]"""
    shift: float = Field(default=0.0, ge=0, le=0.5)
    """Most shift, as a share of width and height. [-; data_pipeline/augment/draws.py]"""


class CropConfig(_Operation):
    """A box of whole pixels is cut out, then scaled down."""

    probability: Share = 1.0
    """Share of images it is done to. [-; data_pipeline/augment/draws.py]"""
    area: Annotated[Pair, _within(0.01, 1)] = (1.0, 1.0)
    """Least and most share of the picture's area that is kept; within 0.01 to 1.
    [-; data_pipeline/augment/draws.py]"""
    aspect: Annotated[Pair, _within(0.1, 10)] = (1.0, 1.0)
    """Least and most ratio of the box's width/height to the picture's own, drawn on a logarithmic
    scale; within 0.1 to 10. A box that would not fit keeps its area.
    [-; data_pipeline/augment/draws.py]"""
    rescale: Annotated[Pair, _within(0.1, 1)] = (1.0, 1.0)
    """Least and most factor on the sides of what was cut out; within 0.1 to 1.
    [-; data_pipeline/augment/draws.py]"""


class ColourConfig(_Operation):
    """Factors drawn from 1 - x to 1 + x. Hues stay as they are: captions name colours."""

    probability: Share = 1.0
    """Share of images it is done to. [-; data_pipeline/augment/draws.py]"""
    brightness: Strength = 0.0
    """x of the factor on the values. [-; data_pipeline/augment/draws.py]"""
    contrast: Strength = 0.0
    """x of the factor on the distance from middle grey. [-; data_pipeline/augment/draws.py]"""
    saturation: Strength = 0.0
    """x of the factor on the distance from grey of the same lightness.
    [-; data_pipeline/augment/draws.py]"""
    gamma: Strength = 0.0
    """x of the exponent on the values. [-; data_pipeline/augment/draws.py]"""


class JpegConfig(Section):
    """Compressed and decompressed once, with 4:2:0 colour."""

    quality: Annotated[IntPair, _within(5, 100)]
    """Least and most quality of the Independent JPEG Group's scale, whole numbers; within 5 to 100.
    [-; data_pipeline/augment/draws.py]"""
    probability: Share = 1.0
    """Share of images it is done to. [-; data_pipeline/augment/draws.py]"""


class AugmentConfig(Section):
    """What is done to the images and captions of one source; nothing, unless it says so.

    Videos are left as they are.
    """

    flip: Share = 0.0
    """Share of images that are mirrored, of those the index allows (`flip_ok`).
    [-; data_pipeline/augment/draws.py]"""
    turn: Share = 0.0
    """Share of images turned by 90, 180 or 270 degrees, of those the index allows (`turn_ok`).
    [-; data_pipeline/augment/draws.py]"""
    affine: AffineConfig | None = None
    """Rotation, scale, shear and shift; null: none. [-; data_pipeline/augment/draws.py]"""
    crop: CropConfig | None = None
    """Cut and scaled down; null: not. [-; data_pipeline/augment/draws.py]"""
    colour: ColourConfig | None = None
    """Brightness, contrast, saturation and gamma; null: unchanged.
    [-; data_pipeline/augment/draws.py]"""
    jpeg: JpegConfig | None = None
    """Compressed once more; null: not. [-; data_pipeline/augment/draws.py]"""
    min_visible: Share = 0.3
    """Share of a box's area that must stay in the frame, or the box is dropped.
    [-; data_pipeline/plan/variation.py]"""
    variants: bool = False
    """Choose among a text's variants; otherwise the first one is taken.
    [-; data_pipeline/plan/variation.py]"""

    @property
    def changes_images(self) -> bool:
        """Whether any image may come out other than it went in."""
        parts = (self.affine, self.crop, self.colour, self.jpeg)
        return self.flip > 0 or self.turn > 0 or any(part is not None for part in parts)
