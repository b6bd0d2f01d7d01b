"""Memory that training the encoder takes, for planners. numpy only.

What autograd keeps is linear in patches: fused attention stores no logits. Counted from the code of
`block` and `projector`, one term for each tensor that a later backward step reads.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from moonvit3d.config import MoonViTConfig
from moonvit3d.geometry import MAX_FRAMES, MERGE, PATCH, PatchLimits, num_tokens


def activation_bytes(
    grids: Sequence[tuple[int, int, int]] | np.ndarray, config: MoonViTConfig, itemsize: int = 2
) -> np.ndarray:
    """Each item's share of the peak memory of a forward and backward pass, projector included.

    The sum over the items of a chunk is the chunk's peak, beyond weights, gradients and the uint8
    pixels. One weight's gradient comes on top while it is added up (20 MiB in float32 at Kimi
    K2.5's size), and on CPU the rows that fill a pack up (`rows.padding`).

    Args:
        grids: (t, h, w) patch grids, or an integer array [n, 3].
        config: sizes of the encoder.
        itemsize: bytes of a number: 2 for bfloat16, 4 for float32, 8 for float64.

    Returns:
        int64 [n].
    """
    t, h, w = np.asarray(grids, dtype=np.int64).reshape(-1, 3).T
    patches, tokens = t * h * w, num_tokens(t, h, w)
    width, hidden = config.width, config.mlp_width
    angles = 2 * max(4, itemsize) * config.head_dim // 2
    blocks = config.depth * _block(config, itemsize)
    kept = patches * (blocks + 3 * PATCH**2 * itemsize + angles)
    # On top of the blocks: at first all of the projector, later the gradients inside one MLP.
    gradients = patches * (width + 2 * hidden)
    return kept + itemsize * np.maximum(_projector(patches, tokens, config), gradients)


def begin_bytes(patches: Any, config: MoonViTConfig, itemsize: int = 2) -> Any:
    """Return the bytes of what all blocks begin with; patches of items, integers or arrays."""
    return config.depth * config.width * itemsize * patches


def kept_bytes(patches: Any, config: MoonViTConfig, itemsize: int = 2) -> Any:
    """Return what autograd keeps of all blocks, beside what they begin with (`begin_bytes`)."""
    return config.depth * _block(config, itemsize) * patches - begin_bytes(
        patches, config, itemsize
    )


def _block(config: MoonViTConfig, itemsize: int) -> int:
    """Return the bytes that autograd keeps of one block, for each patch."""
    # Two norm inputs, two norm outputs, q, k and v, and attention's output as the kernel keeps it
    # and again as one tensor (the CUDA kernel keeps it once); then the MLP before its GELU.
    numbers = 9 * config.width + config.mlp_width
    statistics = 4 * (config.heads + 4)  # float32: log-sums of each head, mean and scale of a norm
    return numbers * itemsize + statistics


def frozen_tower_bytes(
    grids: Sequence[tuple[int, int, int]] | np.ndarray, config: MoonViTConfig, itemsize: int = 2
) -> np.ndarray:
    """The same where the tower is frozen: it runs without a graph, the projector with one.

    Args:
        grids: (t, h, w) patch grids, or an integer array [n, 3].
        config: sizes of the encoder.
        itemsize: bytes of a number.

    Returns:
        int64 [n].
    """
    t, h, w = np.asarray(grids, dtype=np.int64).reshape(-1, 3).T
    patches, tokens = t * h * w, num_tokens(t, h, w)
    # Cosines and sines, alone and as complex numbers; the most of a block's two halves: query, key
    # and value around their rotation, or the MLP around its GELU. The pixels are gone by then.
    angles = 4 * max(4, itemsize) * config.head_dim // 2
    block = max(9 * config.width, config.width + 2 * config.mlp_width)
    tower = patches * (angles + block * itemsize)
    pixels = patches * 3 * (3 * PATCH**2) * max(4, itemsize)  # of their normalisation
    return np.maximum(np.maximum(tower, pixels), itemsize * _projector(patches, tokens, config))


def _projector(patches: np.ndarray, tokens: np.ndarray, config: MoonViTConfig) -> np.ndarray:
    """Numbers that the projector keeps, its input included."""
    joined = MERGE**2 * config.width
    wide = 2 * joined + config.projector_width + config.out_width
    return patches * config.width + tokens * wide


def most_patches(limits: PatchLimits) -> int:
    """Return a bound on the patches of one image or video chunk once padded.

    At the published limits 21,984, where 21,408 were found: a clip of thin frames. The limits bound
    a size before padding, counted in whole patches of the source. With x and y patches on the sides
    before padding, and (a, b) whole ones at the source, x y is at most limit (1 + 1/a) (1 + 1/b),
    and a is more than x - 1; padding brings x to the next even number.
    """

    def bound(limit: int, height: int) -> int:
        if height == MERGE:
            return height * limits.side
        whole = height - MERGE  # fewer, y or b, would be padded to less than `height`
        most = 1 - (-limit * (whole + 1) // whole**2)  # from (x - 1) y <= limit (1 + 1/b)
        return height * min(limits.side, MERGE * -(-most // MERGE))

    heights = range(MERGE, limits.side + 1, MERGE)
    return max(
        max(bound(limits.image, h) for h in heights),
        MAX_FRAMES * max(bound(limits.frame, h) for h in heights),
    )
