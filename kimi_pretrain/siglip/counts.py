"""What `train.siglip`'s heads take: bytes of activations and operations, from sizes. Pure."""

from kimi_pretrain.siglip.config import SiglipConfig


def text_bytes(config: SiglipConfig, width: int, itemsize: int) -> int:
    """Return the peak of the text tower: a chunk of texts, forward and backward.

    Args:
        width: `model.vision.width`.
    """
    tokens = config.texts_per_chunk * config.positions
    # Two norm inputs, two norm outputs, query, key and value, attention's output as the kernel has
    # it and again as one tensor; then the MLP before and behind its GELU.
    block = 9 * width + 2 * config.mlp_width
    statistics = 4 * (config.heads + 4)
    ends = 3 * width  # the final norm's input and output, and positions beside tokens
    gradients = width + 2 * config.mlp_width
    kept = config.depth * (block * itemsize + statistics) + (ends + gradients) * itemsize
    return tokens * kept


def pooling_bytes(patches: int, width: int, itemsize: int) -> int:
    """Return the peak of the pooling head: a chunk's patches, keys and values, with gradients.

    Args:
        width: `model.vision.width`.
    """
    # Patches, keys and values; gradients of these item by item, put together, and of patches twice.
    return patches * 9 * width * itemsize


def pair_flops(config: SiglipConfig, width: int, pairs: int, patches: int) -> float:
    """Return the matrix products of a step's pairs, forward alone.

    Args:
        width: `model.vision.width`.
        pairs: of the global batch.
        patches: of these pairs' media.
    """
    mlp = 4 * width * config.mlp_width
    block = config.positions * (8 * width**2 + mlp) + 4 * config.positions**2 * width
    text = config.depth * block + 2 * width**2
    # Keys and values of all patches, one query for each item.
    image = patches * (4 * width**2 + 4 * width) + pairs * (2 * width**2 + mlp)
    return float(pairs * text + image + 2 * pairs**2 * width)
