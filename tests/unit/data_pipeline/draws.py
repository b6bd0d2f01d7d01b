"""An augmentation config that sets every option, and random draws made with it."""

import numpy as np

from data_pipeline.augment.config import (
    AffineConfig,
    AugmentConfig,
    ColourConfig,
    CropConfig,
    JpegConfig,
)
from data_pipeline.augment.draws import draw, media_keys, sample_keys

GEOMETRY = AugmentConfig(
    flip=0.5,
    turn=0.5,
    affine=AffineConfig(probability=0.5, degrees=20, scale=(0.8, 1.25), shear=0.15, shift=0.05),
    crop=CropConfig(probability=0.5, area=(0.3, 1.0), aspect=(0.6, 1.6), rescale=(0.5, 1.0)),
)
EVERYTHING = AugmentConfig(
    flip=GEOMETRY.flip,
    turn=GEOMETRY.turn,
    affine=GEOMETRY.affine,
    crop=GEOMETRY.crop,
    colour=ColourConfig(probability=0.5, brightness=0.3, contrast=0.4, saturation=0.5, gamma=0.2),
    jpeg=JpegConfig(quality=(30, 95), probability=0.5),
    variants=True,
)


def some_keys(num, seed=0):
    """Return the keys of the first media item of samples 0 ... num-1."""
    zeros = np.zeros(num, np.int64)
    return media_keys(sample_keys(seed, "some", np.arange(num), zeros), zeros)


def some_draws(config, num, height, width, seed=0, allowed=True):
    """Draw for `num` images of one size, or of sizes [num]."""
    full = [np.broadcast_to(value, num) for value in (height, width, allowed, allowed)]
    return draw(config, some_keys(num, seed), *full)
