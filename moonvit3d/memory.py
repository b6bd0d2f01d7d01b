"""Memory that training the encoder needs, for planners. numpy only.

The memory of saved tensors is linear in patches, because fused attention stores no logits. It is
counted from the code of `block` and `projector`, with one term per tensor that the backward pass
reads.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from moonvit3d.config import MoonViTConfig
from moonvit3d.geometry import MAX_FRAMES, MERGE, PATCH, PatchLimits, num_tokens


def activation_bytes(
    grids: Sequence[tuple[int, int, int]] | np.ndarray, config: MoonViTConfig, itemsize: int = 2
) -> np.ndarray:
    """Return each item's share of the peak memory of forward and backward, projector included.

    The sum over the items of a chunk is the chunk's peak, excluding weights, gradients and the
    uint8 pixels. The gradient of one weight comes on top while it is accumulated (20 MiB in float32
    at Kimi K2.5's size), and on CPU the rows that pad a pack (`rows.padding`).

    Args:
        grids: (t, h, w) patch grids, or an integer array [n, 3].
        config: sizes of the encoder.
        itemsize: bytes per number: 2 for bfloat16, 4 for float32, 8 for float64.

    Returns:
        int64 [n].
    """
    t, h, w = np.asarray(grids, dtype=np.int64).reshape(-1, 3).T
    patches, tokens = t * h * w, num_tokens(t, h, w)
    width, hidden = config.width, config.mlp_width
    angles = 2 * max(4, itemsize) * config.head_dim // 2
    blocks = config.depth * _block(config, itemsize)
    kept = patches * (blocks + 3 * PATCH**2 * itemsize + angles)
    # Peak beyond the blocks: first the whole projector, later the gradients inside one MLP.
    gradients = patches * (width + 2 * hidden)
    return kept + itemsize * np.maximum(_projector(patches, tokens, config), gradients)


def begin_bytes(patches: Any, config: MoonViTConfig, itemsize: int = 2) -> Any:
    """Return the bytes of the inputs of all blocks; patches of items, integers or arrays."""
    return config.depth * config.width * itemsize * patches


def kept_bytes(patches: Any, config: MoonViTConfig, itemsize: int = 2) -> Any:
    """Return the bytes that autograd keeps for all blocks, without inputs (`begin_bytes`)."""
    return config.depth * _block(config, itemsize) * patches - begin_bytes(
        patches, config, itemsize
    )


def _block(config: MoonViTConfig, itemsize: int) -> int:
    """Return the bytes per patch that autograd keeps for one block."""
    # Two norm inputs, two norm outputs, q, k and v, attention's output as the kernel keeps it and
    # again as one tensor (the CUDA kernel keeps it once), and the MLP before its GELU.
    numbers = 9 * config.width + config.mlp_width
    statistics = 4 * (config.heads + 4)  # float32: log-sum per head, mean and scale per norm
    return numbers * itemsize + statistics


def frozen_tower_bytes(
    grids: Sequence[tuple[int, int, int]] | np.ndarray, config: MoonViTConfig, itemsize: int = 2
) -> np.ndarray:
    """Return the peak memory with a frozen tower: only the projector runs with a graph.

    Args:
        grids: (t, h, w) patch grids, or an integer array [n, 3].
        config: sizes of the encoder.
        itemsize: bytes per number.

    Returns:
        int64 [n].
    """
    t, h, w = np.asarray(grids, dtype=np.int64).reshape(-1, 3).T
    patches, tokens = t * h * w, num_tokens(t, h, w)
    # Cosines and sines, separate and as complex numbers. The larger half of a block: query, key and
    # value around their rotation, or the MLP around its GELU. The pixels are freed by then.
    angles = 4 * max(4, itemsize) * config.head_dim // 2
    block = max(9 * config.width, config.width + 2 * config.mlp_width)
    tower = patches * (angles + block * itemsize)
    pixels = patches * 3 * (3 * PATCH**2) * max(4, itemsize)  # for their normalisation
    return np.maximum(np.maximum(tower, pixels), itemsize * _projector(patches, tokens, config))


def _projector(patches: np.ndarray, tokens: np.ndarray, config: MoonViTConfig) -> np.ndarray:
    """Return how many numbers the projector keeps, its input included."""
    joined = MERGE**2 * config.width
    wide = 2 * joined + config.projector_width + config.out_width
    return patches * config.width + tokens * wide


def most_patches(limits: PatchLimits) -> int:
    """Return an upper bound on the patches of one image or video chunk after padding.

    At the published limits the bound is 21,984; the largest item found has 21,408 (a clip of thin
    frames). The limits bound a size before padding, counted in whole patches of the source. With x
    and y patches on the sides before padding, and (a, b) whole patches at the source, x y is at
    most limit (1 + 1/a) (1 + 1/b), and a is more than x - 1; padding rounds x up to an even number.
    """

    def bound(limit: int, height: int) -> int:
        if height == MERGE:
            return height * limits.side
        whole = height - MERGE  # with fewer, y or b would be padded to less than `height`
        most = 1 - (-limit * (whole + 1) // whole**2)  # from (x - 1) y <= limit (1 + 1/b)
        return height * min(limits.side, MERGE * -(-most // MERGE))

    heights = range(MERGE, limits.side + 1, MERGE)
    return max(
        max(bound(limits.image, h) for h in heights),
        MAX_FRAMES * max(bound(limits.frame, h) for h in heights),
    )
