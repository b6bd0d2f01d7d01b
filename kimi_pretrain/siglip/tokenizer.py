"""SigLIP's own tokenizer: the text tower's vocabulary is not the language model's.

Read from a `tokenizer.json` (Hugging Face's format), which holds the lower-casing, the removal of
punctuation and the pieces. Loads no torch: it is checked before processes are started.
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
"""Which token pads, where the file does not say: SigLIP's end token does."""


class TextTokenizer:
    """Texts to ids of the text tower, each cut or padded to `positions`.

    Args:
        content: of the file.
        config: of the run.

    Raises:
        ValueError: no tokenizer, a larger vocabulary than the tower's, or no token that pads.
    """

    def __init__(self, content: bytes, config: SiglipConfig):
        key = f"train.siglip.tokenizer={config.tokenizer}"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # whatever the library raises: its errors have no common class
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
        """Read the file: a key under the data's root, or a path or URI of its own.

        Raises:
            StoreError, ValueError: it is not there, or not what is wanted.
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
