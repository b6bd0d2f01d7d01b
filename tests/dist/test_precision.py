"""Precision of all attention implementations in bfloat16, and losses read after being freed."""

import pytest

from tests import fork_server
from tests.dist.jobs import layout, run_job

pytestmark = [pytest.mark.dist]


def test_no_attention_loses_more_in_bfloat16_than_another(data_root, tmp_path):
    settings = ("model.language.experts_per_token=8", "data.rows_per_step=2")
    found = run_job(
        "attention_precision", tmp_path / "job", 1, f"data.root={data_root}", *layout(), *settings
    )
    errors = [one["gradients"] for one in found.values()]
    assert len(errors) == 3
    assert min(errors) > 1e-4, found  # proves that bfloat16 was used
    assert max(errors) <= 1.5 * min(errors), found
    assert max(one["loss"] for one in found.values()) <= 2**-8, found


FREED = """
import os
os.environ["CUDA_VISIBLE_DEVICES"] = ""
from kimi_pretrain.engine import host
host.enable()
import torch
from kimi_pretrain.engine.backbone import _sum_loss
for dtype in (torch.float32, torch.float64):
    losses = torch.tensor([1.0, 2.0, 4.0], dtype=dtype)
    summed, count, found = _sum_loss(torch.tensor([1.0, 0.0, 1.0], dtype=dtype), losses)
    losses.untyped_storage().resize_(0)
    summed.untyped_storage().resize_(0)
    assert found["losses"].tolist() == [1.0, 2.0, 4.0]
    assert found["loss_sum"].item() == 5.0
"""


def test_losses_are_read_after_their_storage_was_freed():
    """The combined schedule frees them after the loss's backward pass, only on CUDA."""
    done = fork_server.run(["-c", FREED], 60)
    assert done.returncode == 0, done.stderr
