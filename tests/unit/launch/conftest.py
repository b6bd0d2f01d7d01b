from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def root(data_root) -> Path:
    """The small corpus; not to be changed."""
    return data_root
