"""Computes activation bytes and FLOPs of the `train.siglip` heads from their sizes. Pure."""

from kimi_pretrain.siglip.config import SiglipConfig


def text_bytes(config: SiglipConfig, width: int, itemsize: int) -> int:
    """Return the peak memory of the text tower in bytes: a chunk of texts, forward and backward.

    Args:
        width: `model.vision.width`.
    """
    tokens = config.texts_per_chunk * config.positions
    # Two norm inputs, two norm outputs, query, key and value, and attention's output twice (as the
    # kernel returns it and as one tensor); then the MLP before and after its GELU.
    block = 9 * width + 2 * config.mlp_width
    statistics = 4 * (config.heads + 4)
    ends = 3 * width  # input and output of the final norm, and positions added to tokens
    gradients = width + 2 * config.mlp_width
    kept = config.depth * (block * itemsize + statistics) + (ends + gradients) * itemsize
    return tokens * kept


def pooling_bytes(patches: int, width: int, itemsize: int) -> int:
    """Return the peak memory of the pooling head in bytes: patches, keys, values, and gradients.

    Args:
        width: `model.vision.width`.
    """
    # Patches, keys and values; their gradients per item and concatenated; patch gradients twice.
    return patches * 9 * width * itemsize


def pair_flops(config: SiglipConfig, width: int, pairs: int, patches: int) -> float:
    """Return the forward FLOPs of the matrix products of a step's pairs.

    Args:
        width: `model.vision.width`.
        pairs: pairs of the global batch.
        patches: patches of these pairs' media.
    """
    mlp = 4 * width * config.mlp_width
    block = config.positions * (8 * width**2 + mlp) + 4 * config.positions**2 * width
    text = config.depth * block + 2 * width**2
    # Keys and values of all patches, and one query per item.
    image = patches * (4 * width**2 + 4 * width) + pairs * (2 * width**2 + mlp)
    return float(pairs * text + image + 2 * pairs**2 * width)
