"""SigLIP's loss over ranks with uneven numbers of pairs, including none, against one process.

Equal numbers are also compared with open_clip, which supports no others.
"""

import json

import pytest
import torch

from tests.dist import open_clip_case, pair_loss_case
from tests.dist.jobs import run_ranks

pytestmark = [pytest.mark.dist]


def test_ranks_with_uneven_pairs_give_what_one_process_gives(tmp_path):
    found = run_ranks(pair_loss_case.__file__, 4, tmp_path)
    for rank in found:
        of_open_clip = rank.pop("equal counts")
        assert len(rank) == len(pair_loss_case.COUNTS)
        for counts, distances in rank.items():
            for name, distance in distances.items():
                assert distance <= 1e-12, (counts, name)
        kept = json.loads(open_clip_case.FOUND.read_text())
        for name, value in of_open_clip.items():
            target = torch.tensor(kept[name], dtype=torch.float64)
            assert (value - target).norm() <= 1e-12 * target.norm(), name
