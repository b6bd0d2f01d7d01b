"""What passes of a pipeline, gradient sums and the update cost each stage of a replica. Pure.

Passes take what `dep.pass_cost` says, as `plan --calibrate` measured it. Without it their matrix
products are counted, two operations per multiply-add, of the experts that a token uses. Attention
is counted over the whole row, causal: rows of short documents cost less, with and without media
alike. The update takes what `dep.update_cost` says.
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


def _per_key(model: LanguageConfig) -> int:
    """Return the multiply-adds of attention for each pair of a query and a key."""
    return model.num_heads * (model.qk_nope_dim + model.qk_rope_dim + model.v_dim)


def chunk_flops(config: Config) -> Floats:
    """Return the forward operations of each virtual stage for one microbatch, float64 [stages]."""
    model, rows = config.model.language, config.train.rows_per_microbatch
    dense, moe, head = active_parameters(model)
    tokens, parts = config.data.seq_len, chunk_parts(config)
    attention = tokens * tokens * _per_key(model)  # two operations, half of the pairs
    layers = parts[:, 1] + parts[:, 2]
    return rows * (2.0 * tokens * (parts @ [0, dense, moe, head]) + layers * attention)


def pass_seconds(config: Config) -> tuple[Floats, Floats]:
    """Return what forward and backward passes of a rank take, float64 [virtual stages] each.

    As measured (`dep.pass_cost`), or counted operations at `dep.flops_per_second`; divided among
    the ranks of a stage.
    """
    ranks = config.layout.cp * config.layout.tp
    if config.dep.pass_cost is not None:
        cost, parts = config.dep.pass_cost, chunk_parts(config) / ranks
        forward = [cost.embedding_forward, cost.dense_forward, cost.expert_forward]
        backward = [cost.embedding_backward, cost.dense_backward, cost.expert_backward]
        return parts @ [*forward, cost.head_forward], parts @ [*backward, cost.head_backward]
    forward = chunk_flops(config) / (config.dep.flops_per_second * ranks)
    return forward, BACKWARD * forward


def routed_seconds(config: Config) -> tuple[Floats, Floats]:
    """Return what of `pass_seconds` the routed experts take, by their share of the operations.

    It goes by the tokens that come to a rank's experts, on the mean as many as it has.
    """
    model, tokens = config.model.language, config.data.seq_len
    _, active, _ = active_parameters(model)
    routed = 2.0 * model.experts_per_token * 3 * model.hidden_size * model.expert_ffn_size
    layers, ranks = chunk_parts(config)[:, 2], config.layout.cp * config.layout.tp
    if config.dep.pass_cost is not None:
        cost, share = config.dep.pass_cost, routed / (2.0 * active + tokens * _per_key(model))
        forward, backward = (
            layers * share * one / ranks for one in (cost.expert_forward, cost.expert_backward)
        )
        return forward, backward
    rows = config.train.rows_per_microbatch
    forward = layers * rows * tokens * routed / (config.dep.flops_per_second * ranks)
    return forward, BACKWARD * forward


def chunk_parts(config: Config) -> Floats:
    """Return what each virtual stage holds of (embeddings, dense layers, expert layers, heads).

    Returns:
        float64 [virtual stages, 4].
    """
    dense = config.model.language.num_dense_layers
    return np.array(
        [
            [number == 0, sum(n < dense for n in layers), sum(n >= dense for n in layers), has_loss]
            for number, (layers, has_loss) in enumerate(config.chunks())
        ],
        np.float64,
    )


def stage_parts(config: Config) -> Floats:
    """Return the same of each stage, all its chunks together, float64 [stages, 4]."""
    chunks = chunk_parts(config)
    return chunks.reshape(-1, config.layout.pp, chunks.shape[1]).sum(axis=0)


def sharing_ranks(config: Config) -> tuple[int, int]:
    """Return how many ranks have a copy of (a dense tensor, an expert) of a stage."""
    layout = config.layout
    ranks = layout.dp * layout.cp * layout.tp
    return ranks, ranks // layout.ep


def stage_parameters(config: Config) -> tuple[Floats, Floats]:
    """Return the language model's parameters on a rank of each stage, norms left out.

    Returns:
        those that all ranks of the stage have, and those of the rank's experts, float64 [stages]
        each.
    """
    model = config.model.language
    dense, active, head = active_parameters(model)
    expert = 3 * model.hidden_size * model.expert_ffn_size
    parts = stage_parts(config)
    shared = parts @ [head, dense, active - model.experts_per_token * expert, head]
    return shared, parts[:, 2] * expert * model.num_experts / config.layout.ep


def update_seconds(config: Config) -> float:
    """Return the seconds of the update on the busiest rank; 0 without `dep.update_cost`.

    The ranks of a stage share the tensors that they have copies of, evenly; those of the encoder
    go to the ranks that have the least to do, as `optim.owners` has it. With `optim.shard_state`
    off each rank updates all it holds.
    """
    cost, layout = config.dep.update_cost, config.layout
    if cost is None:
        return 0.0
    parts = stage_parts(config)
    shared = parts @ [cost.vocabulary, cost.dense_layer, cost.expert_layer, cost.vocabulary]
    experts = parts[:, 2] * cost.expert * config.model.language.num_experts / layout.ep
    if "language_model" in config.train.frozen:
        shared, experts = 0 * shared, 0 * experts
    if not config.optim.shard_state:
        return float((shared + experts).max()) + cost.encoder
    dense_ranks, expert_ranks = sharing_ranks(config)
    loads = np.sort(shared / dense_ranks + experts / expert_ranks)
    # The encoder raises the least busy stages to one level; each has as many ranks.
    share, counts = cost.encoder / dense_ranks, np.arange(1, len(loads) + 1)
    level = ((np.cumsum(loads) + share) / counts).min()
    return max(float(level), float(loads[-1]))
