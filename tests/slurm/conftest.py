"""A lab for the tests of a file."""

import pytest

from tests.slurm.lab import Lab, obstacle


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A real SLURM with two nodes; skips where it cannot run."""
    if reason := obstacle():
        pytest.skip(f"no real SLURM here: {reason}")
    lab = Lab(tmp_path_factory.mktemp("lab"))
    try:
        lab.up(nodes=2)
        yield lab
    finally:
        lab.down()
