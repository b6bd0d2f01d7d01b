"""What a rank says of its machine before the first step."""

import pytest

from kimi_pretrain.config import load_config
from kimi_pretrain.reliability.preflight import check_node


@pytest.mark.parametrize(
    ("rank", "local_rank", "here", "told"),
    [(0, 0, 4, 0), (0, 0, 2, 1), (2, 0, 2, 1), (3, 1, 2, 0)],
)
def test_the_first_process_of_each_machine_compares_its_size(
    rank, local_rank, here, told, monkeypatch, caplog
):
    config = load_config("tiny_cpu", ["dep.ranks_per_node=8"])  # of four processes
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    check_node(config)
    assert len(caplog.records) == told
    assert all(f"set it to {here}" in record.getMessage() for record in caplog.records)
