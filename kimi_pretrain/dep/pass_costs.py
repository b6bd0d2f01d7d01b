"""What the passes of a pipeline cost: operations of a microbatch in each virtual stage. Pure.

Counts the matrix products of a forward pass, two operations per multiply-add, of the experts that a
token uses. Attention is counted over the whole row, causal: rows of short documents cost less, with
and without media alike.
"""

import numpy as np
from numpy.typing import NDArray

from kimi_pretrain.config import Config
from kimi_pretrain.weights.model_config import LanguageConfig

Floats = NDArray[np.float64]

BACKWARD = 2.0  # backward passes cost so many forwards


def active_parameters(model: LanguageConfig) -> tuple[int, int, int]:
    """Return the weights that one token meets in (a dense layer, an expert layer, the head)."""
    hidden, heads = model.hidden_size, model.num_heads
    query = model.qk_nope_dim + model.qk_rope_dim
    rank = model.q_lora_rank
    to_query = hidden * heads * query if rank is None else rank * (hidden + heads * query)
    latent = model.kv_lora_rank
    to_keys = hidden * (latent + model.qk_rope_dim)
    to_keys += latent * heads * (model.qk_nope_dim + model.v_dim)
    attention = to_query + to_keys + heads * model.v_dim * hidden
    experts = model.experts_per_token + model.num_shared_experts
    moe = experts * 3 * hidden * model.expert_ffn_size + hidden * model.num_experts
    dense = 3 * hidden * model.dense_ffn_size
    return attention + dense, attention + moe, model.vocab_size * hidden


def chunk_flops(config: Config) -> Floats:
    """Return the forward operations of each virtual stage for one microbatch, float64 [stages]."""
    model, rows = config.model.language, config.train.rows_per_microbatch
    dense, moe, head = active_parameters(model)
    tokens = config.data.seq_len
    per_key = model.num_heads * (model.qk_nope_dim + model.qk_rope_dim + model.v_dim)
    attention = tokens * tokens * per_key  # two operations, half of the pairs
    chunks = []
    for layers, has_loss in config.chunks():
        weights = sum(dense if layer < model.num_dense_layers else moe for layer in layers)
        weights += head if has_loss else 0
        chunks.append(rows * (2.0 * tokens * weights + len(layers) * attention))
    return np.array(chunks)


def pass_seconds(config: Config) -> tuple[Floats, Floats]:
    """Return what forward and backward passes of a rank take, float64 [virtual stages] each.

    Counted operations at `dep.flops_per_second`, divided among the ranks of a stage.
    """
    ranks = config.layout.cp * config.layout.tp
    forward = chunk_flops(config) / (config.dep.flops_per_second * ranks)
    return forward, BACKWARD * forward
