"""Shares of an item: the patches of each share; a share of all tokens equals the item."""

import numpy as np
import pytest
import torch

from moonvit3d.attention import Segments, attend
from moonvit3d.share import Share, patch_rows

GRIDS = [(1, 2, 2), (1, 6, 10), (3, 4, 6), (4, 2, 8), (2, 10, 2)]


def slow_rows(grid, tokens):
    """Number the patches of an item and return those of the tokens."""
    t, h, w = grid
    numbers = np.arange(t * h * w).reshape(grid)
    found = []
    for frame in numbers:
        for upper in (0, 1):
            for token in tokens:
                row, column = divmod(token, w // 2)
                found += frame[2 * row + upper, 2 * column : 2 * column + 2].tolist()
    return found


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_rows_are_those_of_the_tokens(grid):
    tokens = grid[1] * grid[2] // 4
    for start in range(tokens + 1):
        for stop in range(start, tokens + 1):
            found = patch_rows(grid, range(start, stop))
            assert found.dtype == np.int64
            assert found.tolist() == slow_rows(grid, range(start, stop))


@pytest.mark.parametrize("tokens", [range(-1, 2), range(4, 7), range(0, 4, 2), range(4, 2)])
def test_tokens_that_an_item_does_not_have_are_refused(tokens):
    with pytest.raises(ValueError, match="item of 6 tokens"):
        patch_rows((3, 4, 6), tokens)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_share_of_all_tokens_is_the_item(grid, encoder, make_patches):
    encoder.double()
    patches = make_patches([grid])

    def of_the_whole(q_LNH, k_LNH, v_LNH, segments):
        held = segments.lengths[0]
        assert held == len(patches)
        alone = Segments.of([held, len(q_LNH) - held], q_LNH.device)
        return attend(q_LNH, k_LNH, v_LNH, alone)

    share = Share(grid, range(grid[1] * grid[2] // 4), of_the_whole)
    found = encoder.forward_share(patches[torch.from_numpy(share.rows)], share)
    torch.testing.assert_close(found, encoder(patches, [grid]), rtol=1e-11, atol=1e-11)


def test_patches_of_another_share_are_refused(encoder, make_patches):
    share = Share((1, 6, 10), range(3, 7), attend)
    with pytest.raises(ValueError, match=r"range\(3, 7\) holds 16 patches, but 60 came"):
        encoder.forward_share(make_patches([(1, 6, 10)]), share)
