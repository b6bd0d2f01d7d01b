"""SigLIP's loss over ranks with uneven numbers of pairs, none included, against one process."""

import pytest

from tests.dist import pair_loss_case
from tests.dist.jobs import run_ranks

pytestmark = [pytest.mark.dist]


def test_ranks_with_uneven_pairs_give_what_one_process_gives(tmp_path):
    for rank in run_ranks(pair_loss_case.__file__, 4, tmp_path):
        assert len(rank) == len(pair_loss_case.COUNTS)
        for counts, distances in rank.items():
            for name, distance in distances.items():
                assert distance <= 1e-12, (counts, name)
