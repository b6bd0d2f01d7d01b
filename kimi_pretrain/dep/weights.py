"""Where a fresh run's encoder starts from, if not from the seed: `train.vision_weights`."""

from kimi_pretrain.config import Config
from moonvit3d.model import VisionEncoder
from moonvit3d.weights import check, load


def check_vision_weights(config: Config) -> None:
    """Raise ValueError or FileNotFoundError unless the file fits; reads headers only."""
    if config.train.vision_weights is not None:
        check(config.train.vision_weights, config.model.vision)


def load_vision_weights(config: Config, encoder: VisionEncoder) -> None:
    """Fill the encoder in place; numbers in a wider type than the run's are rounded.

    Raises:
        ValueError, FileNotFoundError: as `moonvit3d.weights.load`.
    """
    if config.train.vision_weights is not None:
        load(encoder, config.train.vision_weights, rounding=True)
