"""Every attention in bfloat16, in a whole model: none loses more than the others."""

import pytest

from tests.dist.jobs import layout, run_job

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


def test_no_attention_loses_more_in_bfloat16_than_another(data_root, tmp_path):
    settings = ("model.language.experts_per_token=8", "data.rows_per_step=2")
    found = run_job(
        "attention_precision", tmp_path / "job", 1, f"data.root={data_root}", *layout(), *settings
    )
    errors = [one["gradients"] for one in found.values()]
    assert len(errors) == 3
    assert min(errors) > 1e-4, found  # bfloat16 was used
    assert max(errors) <= 1.5 * min(errors), found
    assert max(one["loss"] for one in found.values()) <= 2**-8, found
