"""Config of the random changes to a source's images and captions per epoch; all off by default.

Values are in the YAML file under the source's name; `augment.draws` draws with them.
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
    """An image operation; rejected if it has no effect, because then a key was forgotten."""

    @model_validator(mode="after")
    def _check_effect(self) -> Self:
        own = {n: f for n, f in type(self).model_fields.items() if n != "probability"}
        if all(getattr(self, name) == field.default for name, field in own.items()):
            raise ValueError(f"changes nothing; give it some of {', '.join(own)}, or leave it out")
        return self


class AffineConfig(_Operation):
    """Rotation, scale, shear and shift about the center, on an unchanged canvas.

    Pixels from outside the image are black, like the padding to whole tokens. For an aspect ratio
    above 2:1, angle and shear shrink in proportion; otherwise a long line of text would leave the
    canvas.
    """

    probability: Share = 1.0
    """Share of images that this operation changes. [-; data_pipeline/augment/draws.py]"""
    degrees: float = Field(default=0.0, ge=0, le=45)
    """Maximum rotation in either direction. [degrees; data_pipeline/augment/draws.py]"""
    scale: Annotated[Pair, _within(0.5, 2)] = (1.0, 1.0)
    """Minimum and maximum scale factor, drawn on a logarithmic scale; within 0.5 to 2.
    [-; data_pipeline/augment/draws.py]"""
    shear: float = Field(default=0.0, ge=0, le=0.5)
    """Maximum sideways shift of a row, per pixel from the center.
    [pixels per pixel; data_pipeline/augment/draws.py]"""
    shift: float = Field(default=0.0, ge=0, le=0.5)
    """Maximum shift, as a share of width and height. [-; data_pipeline/augment/draws.py]"""


class CropConfig(_Operation):
    """Crop to a box of whole pixels, then scale down."""

    probability: Share = 1.0
    """Share of images that this operation changes. [-; data_pipeline/augment/draws.py]"""
    area: Annotated[Pair, _within(0.01, 1)] = (1.0, 1.0)
    """Minimum and maximum share of the image area that is kept; within 0.01 to 1.
    [-; data_pipeline/augment/draws.py]"""
    aspect: Annotated[Pair, _within(0.1, 10)] = (1.0, 1.0)
    """Minimum and maximum ratio of the box's width/height to the image's, drawn on a logarithmic
    scale; within 0.1 to 10. A box that would not fit keeps its area.
    [-; data_pipeline/augment/draws.py]"""
    rescale: Annotated[Pair, _within(0.1, 1)] = (1.0, 1.0)
    """Minimum and maximum scale factor of the crop's sides; within 0.1 to 1.
    [-; data_pipeline/augment/draws.py]"""


class ColourConfig(_Operation):
    """Factors drawn from 1 - x to 1 + x. Hues do not change, because captions name colours."""

    probability: Share = 1.0
    """Share of images that this operation changes. [-; data_pipeline/augment/draws.py]"""
    brightness: Strength = 0.0
    """x of the factor on the pixel values. [-; data_pipeline/augment/draws.py]"""
    contrast: Strength = 0.0
    """x of the factor on the distance from middle grey. [-; data_pipeline/augment/draws.py]"""
    saturation: Strength = 0.0
    """x of the factor on the distance from the grey of the same lightness.
    [-; data_pipeline/augment/draws.py]"""
    gamma: Strength = 0.0
    """x of the exponent on the pixel values. [-; data_pipeline/augment/draws.py]"""


class JpegConfig(Section):
    """JPEG compression and decompression, with 4:2:0 chroma subsampling."""

    quality: Annotated[IntPair, _within(5, 100)]
    """Minimum and maximum quality on the Independent JPEG Group's scale, integers; within 5 to 100.
    [-; data_pipeline/augment/draws.py]"""
    probability: Share = 1.0
    """Share of images that this operation changes. [-; data_pipeline/augment/draws.py]"""


class AugmentConfig(Section):
    """Random changes to the images and captions of one source; by default there are none.

    Videos do not change.
    """

    flip: Share = 0.0
    """Share of images that are mirrored, among the images that the index allows (`flip_ok`).
    [-; data_pipeline/augment/draws.py]"""
    turn: Share = 0.0
    """Share of images turned by 90, 180 or 270 degrees, among the images that the index allows
    (`turn_ok`). [-; data_pipeline/augment/draws.py]"""
    affine: AffineConfig | None = None
    """Rotation, scale, shear and shift; null for none. [-; data_pipeline/augment/draws.py]"""
    crop: CropConfig | None = None
    """Crop and downscale; null for none. [-; data_pipeline/augment/draws.py]"""
    colour: ColourConfig | None = None
    """Brightness, contrast, saturation and gamma; null for none.
    [-; data_pipeline/augment/draws.py]"""
    jpeg: JpegConfig | None = None
    """JPEG compression artifacts; null for none. [-; data_pipeline/augment/draws.py]"""
    min_visible: Share = 0.3
    """Share of a box's area that must stay in the frame; below it the box is dropped.
    [-; data_pipeline/plan/variation.py]"""
    variants: bool = False
    """Draw one of a text's variants per epoch; if false, the first variant is used.
    [-; data_pipeline/plan/variation.py]"""

    @property
    def changes_images(self) -> bool:
        """True if any operation may change an image."""
        parts = (self.affine, self.crop, self.colour, self.jpeg)
        return self.flip > 0 or self.turn > 0 or any(part is not None for part in parts)
