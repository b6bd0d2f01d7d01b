import pytest

from data_pipeline.store.open import FolderStore
from data_pipeline.text import Tokenizer, train_ranks

WORDS = "the map shows 12 rivers, 345 towns and a Straße; 中文字符 can't\n\tdef f(x): return x\n"
TRAINING_TEXT = [WORDS + f"row {i} of {i * i}; image video 00:00:0{i % 10}.500 " for i in range(99)]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(train_ranks(TRAINING_TEXT, 400), "tiny")


@pytest.fixture
def store(tmp_path) -> FolderStore:
    return FolderStore(tmp_path / "bucket")
