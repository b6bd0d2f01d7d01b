"""What is refused, or warned of, before a run becomes expensive."""

import logging
import os
from collections.abc import Sequence

import numpy as np

from data_pipeline.access import open_tokenizer
from data_pipeline.index.columns import SourceIndex
from data_pipeline.store.open import Store
from data_pipeline.text import Tokenizer
from kimi_pretrain.config import Config, ConfigError
from moonvit3d.geometry import grids

log = logging.getLogger("kimi_pretrain.checks")


def check_item_sizes(config: Config, indices: Sequence[SourceIndex]) -> None:
    """Refuse media that no chunk could hold, before anything expensive starts.

    Raises:
        ConfigError: names the source, the sample and both sizes.
    """
    budget = config.dep.max_patches_per_chunk
    for index in indices:
        shape = (index.item_frames, index.item_height, index.item_width)
        sizes = grids(index.item_kind, *shape, config.data.limits).prod(axis=1)
        if len(sizes) and sizes.max() > budget:
            sample = int(np.searchsorted(index.item_ptr, sizes.argmax(), side="right")) - 1
            raise ConfigError(
                f"source {index.name!r}, sample {index.key_of(sample)!r}: a medium of "
                f"{sizes.max()} patches is over dep.max_patches_per_chunk={budget}; raise it, or "
                "lower data.limits so that media are shrunk"
            )


def check_node(config: Config) -> None:
    """Warn where the plan takes machines to be larger or smaller than they are."""
    here, per_node = os.environ.get("LOCAL_WORLD_SIZE"), config.dep.ranks_per_node
    world = config.layout.world_size()
    if here is not None and min(per_node, world) != int(here):
        log.warning(
            "dep.ranks_per_node=%d, but this machine runs %s of %d processes: items may be shared "
            "across machines, which is slow; set it to %s",
            per_node, here, world, here,
        )  # fmt: skip


def load_tokenizer(config: Config, store: Store) -> Tokenizer:
    """Read the tokenizer named in the config from the store and check it against the model.

    Raises:
        ConfigError: its vocabulary is larger than the model's.
    """
    tokenizer = open_tokenizer(config.data, store)
    if tokenizer.vocab_size > config.model.language.vocab_size:
        raise ConfigError(
            f"tokenizer {config.data.tokenizer} has {tokenizer.vocab_size} ids, "
            f"model.language.vocab_size is {config.model.language.vocab_size}"
        )
    return tokenizer
