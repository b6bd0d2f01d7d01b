"""`kimi-pretrain verify resume` with checkpoints in an object store, next to the user's own."""

import json
import os
import subprocess
import sys

import pytest

from data_pipeline.store.open import open_store
from tests import ROOT
from tests.dist import corpus
from tests.dist.jobs import SMALL, layout

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(300)]


def test_checkpoints_in_an_object_store_are_verified_and_removed(s3_environment, tmp_path):
    corpus.build(tmp_path / "corpus")
    own = f"s3://{s3_environment.bucket}/verify-resume/run"
    store = open_store(own)
    store.put("step_00000007/manifest.json", b"the user's own")
    command = [
        sys.executable, "-m", "launch.cli", "verify", "resume", "--json", "--config", "tiny_cpu",
        *SMALL, *layout(), f"data.root={tmp_path / 'corpus'}", f"checkpoint.place={own}",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["comparison"]["tensors"] > 300
    assert result["place"] == own
    assert store.list() == ["step_00000007/manifest.json"]
    store.close()
