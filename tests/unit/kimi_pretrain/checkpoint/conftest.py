"""Fixtures for tests that find checkpoints."""

import shutil

import pytest

from tests.unit.kimi_pretrain.checkpoint import ranks


@pytest.fixture(scope="session")
def three_saved(tmp_path_factory):
    """Return a folder with checkpoints of steps 1, 2 and 3, which tests must not change."""
    folder = tmp_path_factory.mktemp("saved")
    ranks.save(folder, 1, 2, 3)
    return folder


@pytest.fixture
def root(three_saved, tmp_path):
    """Return a copy that a test may damage."""
    return shutil.copytree(three_saved, tmp_path / "root")
