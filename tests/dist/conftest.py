from pathlib import Path

import pytest

from tests.dist import corpus


@pytest.fixture(scope="session")
def data_root(tmp_path_factory) -> Path:
    """A folder with a small ingested corpus, built once."""
    root = tmp_path_factory.mktemp("corpus")
    corpus.build(root)
    return root
