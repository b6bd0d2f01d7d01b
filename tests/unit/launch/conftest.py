from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def root(data_root) -> Path:
    """Return the root of the small corpus, which tests must not change."""
    return data_root
