"""SigLIP's tokenizer for the text tower, whose vocabulary differs from the language model's.

It is read from a `tokenizer.json` (Hugging Face format), which defines lower-casing, removal of
punctuation and the vocabulary. The module does not import torch, because it is checked before
processes start.
"""

from collections.abc import Sequence

import numpy as np
import tokenizers
from numpy.typing import NDArray

from data_pipeline.config import DataConfig
from data_pipeline.store.objects import MissingKey
from data_pipeline.store.open import Store, open_store
from kimi_pretrain.siglip.config import SiglipConfig

PADS = ("</s>", "<pad>")
"""Candidates for the padding token if the file names none; SigLIP pads with its end token."""


class TextTokenizer:
    """Converts texts to ids of the text tower, each cut or padded to `positions`.

    Args:
        content: content of the file.
        config: `train.siglip` section of the run.

    Raises:
        ValueError: no valid tokenizer, a vocabulary larger than the tower's, or no padding token.
    """

    def __init__(self, content: bytes, config: SiglipConfig):
        key = f"train.siglip.tokenizer={config.tokenizer}"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library's errors have no common class
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"{key}: no tokenizer.json ({reason}); expected that of a SigLIP model"
            ) from None
        size = self._tokenizer.get_vocab_size()
        if size > config.vocabulary:
            raise ValueError(
                f"{key} has {size} tokens, train.siglip.vocabulary is {config.vocabulary}: the "
                "text tower has no embedding for the others"
            )
        stated = (self._tokenizer.padding or {}).get("pad_token")
        ids = {one: self._tokenizer.token_to_id(one) for one in (stated, *PADS) if one is not None}
        pad = next((one for one, number in ids.items() if number is not None), None)
        if pad is None:
            raise ValueError(f"{key} has none of {', '.join(ids)}: which token is to pad?")
        self._tokenizer.enable_truncation(config.positions)
        self._tokenizer.enable_padding(length=config.positions, pad_id=ids[pad], pad_token=pad)
        self.positions = config.positions

    @classmethod
    def open(cls, config: SiglipConfig, data: DataConfig, store: Store) -> "TextTokenizer":
        """Read the file: a key under the data's root, or a path or URI.

        Raises:
            StoreError, ValueError: the file is missing or not a valid tokenizer.
        """
        name = config.tokenizer
        if "://" in name or name.startswith(("/", "~")):
            folder, _, name = name.rpartition("/")
            store = open_store(folder or "/", endpoint=data.endpoint)
        try:
            return cls(store.get(name), config)
        except MissingKey as error:
            raise ValueError(f"train.siglip.tokenizer: {error}") from None

    def __call__(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """Return ids, int64 [texts, positions]."""
        found = [one.ids for one in self._tokenizer.encode_batch(list(texts))]
        return np.array(found, np.int64).reshape(len(found), self.positions)
