from pathlib import Path

import pytest

from tests.dist import corpus


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """A folder with a small ingested corpus, built once."""
    folder = tmp_path_factory.mktemp("corpus")
    corpus.build(folder)
    return folder
