"""A lab for the tests of a file, and the corpus that they train on."""

import pytest

from tests.dist import corpus
from tests.slurm.lab import Lab, obstacle


@pytest.fixture(scope="session")
def data_root(tmp_path_factory):
    """A folder with a small ingested corpus, built once."""
    root = tmp_path_factory.mktemp("corpus")
    corpus.build(root)
    return root


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Two nodes of a real SLURM; skips where it cannot be."""
    if reason := obstacle():
        pytest.skip(f"no real SLURM here: {reason}")
    lab = Lab(tmp_path_factory.mktemp("lab"))
    try:
        lab.up(nodes=2)
        yield lab
    finally:
        lab.down()
