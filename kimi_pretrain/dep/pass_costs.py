"""Estimates the costs of pipeline passes, gradient sums and updates per stage of a replica. Pure.

`dep.pass_cost`, measured by `plan --calibrate`, gives the seconds of passes. Without it, the FLOPs
of matrix products are counted, two per multiply-add, for the experts that a token uses. Attention
is counted as causal over the whole row; rows of short documents cost less, with or without media. A
frozen language model has no weight gradients: its backward pass has only one of the two products,
attention is unchanged, and every stage runs it, because the trained parts precede the first stage.
`dep.update_cost` gives the seconds of the update.
"""

import numpy as np
from numpy.typing import NDArray

from kimi_pretrain.config import Config
from kimi_pretrain.weights.model_config import LanguageConfig

Floats = NDArray[np.float64]

BACKWARD = 2.0  # cost of a backward pass in forward passes


def active_parameters(model: LanguageConfig) -> tuple[int, int, int]:
    """Return the weights that a token passes in (a dense layer, an expert layer, the head)."""
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
    """Return the forward FLOPs of each virtual stage for one microbatch, float64 [stages]."""
    products, attention = _operations(config)
    return products + attention


def _operations(config: Config) -> tuple[Floats, Floats]:
    """Return the forward FLOPs of weight products and of attention, [stages] each."""
    model, rows = config.model.language, config.train.rows_per_microbatch
    dense, moe, head = active_parameters(model)
    tokens, parts = config.data.seq_len, chunk_parts(config)
    attention = tokens * tokens * _per_key(model)  # two FLOPs for half of the pairs
    layers = parts[:, 1] + parts[:, 2]
    return rows * 2.0 * tokens * (parts @ [0, dense, moe, head]), rows * layers * attention


def products_backward(config: Config) -> float:
    """Return the cost of the backward pass of a weight product, in forward passes."""
    return BACKWARD - 1 if "language_model" in config.train.frozen else BACKWARD


def pass_seconds(config: Config) -> tuple[Floats, Floats]:
    """Return the seconds of a rank's forward and backward passes, float64 [virtual stages] each.

    They are measured (`dep.pass_cost`), or FLOPs at `dep.flops_per_second`, divided among the ranks
    of a stage. The costs of memory settings are excluded, because the planner of work in bubbles
    uses the result, and the assignment of items must not depend on those settings.
    """
    ranks = config.layout.cp * config.layout.tp
    if config.dep.pass_cost is not None:
        cost, parts = config.dep.pass_cost, chunk_parts(config) / ranks
        if cost.rows is not None:  # may have been measured with another microbatch size
            parts = parts * (config.train.rows_per_microbatch / cost.rows)
        forward = [cost.embedding_forward, cost.dense_forward, cost.expert_forward]
        backward = [cost.embedding_backward, cost.dense_backward, cost.expert_backward]
        return parts @ [*forward, cost.head_forward], parts @ [*backward, cost.head_backward]
    products, attention = _operations(config)
    rate = config.dep.flops_per_second * ranks
    backward = products_backward(config) * products + BACKWARD * attention
    return (products + attention) / rate, backward / rate


def operation_seconds(config: Config) -> float:
    """Return the seconds per FLOP of a layer's forward pass on a single rank.

    With measured passes, it refers to a layer with experts, or to a dense layer if there are none.
    """
    if config.dep.pass_cost is None:
        return 1.0 / config.dep.flops_per_second
    cost, model, tokens = config.dep.pass_cost, config.model.language, config.data.seq_len
    dense, moe, _ = active_parameters(model)
    has_experts = model.num_layers > model.num_dense_layers
    active, seconds = (moe, cost.expert_forward) if has_experts else (dense, cost.dense_forward)
    rows = cost.rows or config.train.rows_per_microbatch
    return seconds / (rows * tokens * (2.0 * active + tokens * _per_key(model)))


def routed_seconds(config: Config) -> tuple[Floats, Floats]:
    """Return the part of `pass_seconds` that routed experts take, by their share of the FLOPs.

    It scales with the tokens that reach a rank's experts; their mean equals the rank's own tokens.
    """
    model, tokens = config.model.language, config.data.seq_len
    _, active, _ = active_parameters(model)
    routed = 2.0 * model.experts_per_token * 3 * model.hidden_size * model.expert_ffn_size
    layers, ranks = chunk_parts(config)[:, 2], config.layout.cp * config.layout.tp
    rows, back = config.train.rows_per_microbatch, products_backward(config)
    if config.dep.pass_cost is not None:
        cost, attention = config.dep.pass_cost, tokens * _per_key(model)
        layers = layers * (rows / (cost.rows or rows)) / ranks
        share = routed / (2.0 * active + attention)
        share_back = back * routed / (back * 2.0 * active + BACKWARD * attention)
        return layers * share * cost.expert_forward, layers * share_back * cost.expert_backward
    forward = layers * rows * tokens * routed / (config.dep.flops_per_second * ranks)
    return forward, back * forward


def up_projections(model: LanguageConfig) -> tuple[int, int]:
    """Return the number of weights in the up-projections of queries, and of keys and values."""
    query = model.num_heads * (model.qk_nope_dim + model.qk_rope_dim)
    inner = model.hidden_size if model.q_lora_rank is None else model.q_lora_rank
    keys = model.kv_lora_rank * model.num_heads * (model.qk_nope_dim + model.v_dim)
    return inner * query, keys


def chunk_parts(config: Config) -> Floats:
    """Return each virtual stage's number of (embeddings, dense layers, expert layers, heads).

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
    """Return the same counts per stage, summed over its virtual stages, float64 [stages, 4]."""
    chunks = chunk_parts(config)
    return chunks.reshape(-1, config.layout.pp, chunks.shape[1]).sum(axis=0)


def sharing_ranks(config: Config) -> tuple[int, int]:
    """Return the number of ranks with a copy of (a dense tensor, an expert) of a stage."""
    layout = config.layout
    ranks = layout.dp * layout.cp * layout.tp
    return ranks, ranks // layout.ep


def stage_parameters(config: Config) -> tuple[Floats, Floats]:
    """Return the language model's parameters on a rank of each stage, excluding norms.

    Returns:
        parameters that all ranks of the stage have, and those of the rank's experts, float64
        [stages] each.
    """
    model = config.model.language
    dense, active, head = active_parameters(model)
    expert = 3 * model.hidden_size * model.expert_ffn_size
    parts = stage_parts(config)
    shared = parts @ [head, dense, active - model.experts_per_token * expert, head]
    return shared, parts[:, 2] * expert * model.num_experts / config.layout.ep


def update_seconds(config: Config) -> float:
    """Return the seconds of the update on the busiest rank; 0 without `dep.update_cost`.

    The ranks of a stage share the tensors that they replicate evenly. The encoder's tensors go to
    the ranks with the least work, as in `optim.owners`. Without `optim.shard_state`, each rank
    updates everything it holds.
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
    # The encoder levels the loads of the least busy stages; each has the same number of ranks.
    share, counts = cost.encoder / dense_ranks, np.arange(1, len(loads) + 1)
    level = ((np.cumsum(loads) + share) / counts).min()
    return max(float(level), float(loads[-1]))
