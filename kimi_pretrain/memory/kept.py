"""Counts the bytes that a rank keeps of a microbatch for its backward pass, from shapes. Pure.

There is one term for each tensor that autograd keeps under the policy of `train.recompute` and
`train.fp8_storage`; docs/MEMORY.md has the table. Without tensor parallelism the sum equals the
memory alive after a forward pass, to the byte; a test checks this. With tensor parallelism a rank
keeps its share, in the same terms. Routed tokens assume an even expert load: a rank that receives
more keeps more.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kimi_pretrain.config import ITEMSIZE, Config

ROW_HEADS = 4
"""Number of heads whose keys and values of a shared row exist at a time. With the 4,096 queries
that a rank of a long row usually has, four heads make 128 blocks of queries: about one for each of
a GPU's multiprocessors.
"""

_TILE = 128  # of `fp8_tiles`; each tile has a scale of four bytes
_INDEX = 8  # int64


@dataclass(frozen=True)
class Tokens:
    """Numbers of tokens in a microbatch.

    Attributes:
        row: in all its rows together.
        cp: at one context-parallel rank, whose tensor-parallel ranks divide heads and widths.
        part: at one rank in the layers that also divide the tokens: norms, routers, experts.
    """

    row: int
    cp: int
    part: int

    @classmethod
    def of(cls, config: Config) -> "Tokens":
        """Return the tokens of a run's microbatches."""
        row = config.train.rows_per_microbatch * config.data.seq_len
        return cls(row, row // config.layout.cp, row // (config.layout.cp * config.layout.tp))


@dataclass(frozen=True)
class Kept:
    """One tensor that a layer keeps of a microbatch.

    Attributes:
        kind: its name in tables.
        size: in bytes.
        moves: True if `train.offload` may move it: a floating-point tensor inside our modules.
        of_weights: True if only weight gradients need it; a frozen language model does not keep it.
    """

    kind: str
    size: int
    moves: bool = True
    of_weights: bool = False


def layer_tensors(config: Config, dense: bool) -> Iterator[Kept]:
    """Yield the tensors that one decoder layer keeps of a microbatch.

    Args:
        dense: whether the layer has a plain MLP.
    """
    yield from _needed(config, _attention(config, dense))
    yield from _needed(config, _dense_mlp(config) if dense else _experts(config))


def head_tensors(config: Config) -> Iterator[Kept]:
    """Yield the tensors that the final norm, the head and the loss keep of a microbatch. The policy
    does not cover the head, so the norm's output stays.
    """
    yield from _needed(config, _head(config))


def _is_frozen(config: Config) -> bool:
    return "language_model" in config.train.frozen


def _needed(config: Config, tensors: Iterator[Kept]) -> Iterator[Kept]:
    frozen = _is_frozen(config)
    return (tensor for tensor in tensors if not (frozen and tensor.of_weights))


def _head(config: Config) -> Iterator[Kept]:
    language, tokens = config.model.language, Tokens.of(config)
    item, tp = ITEMSIZE[config.train.dtype], config.layout.tp
    wide, hidden = max(4, item), tokens.part * language.hidden_size * item
    yield Kept("residuals", hidden)
    yield Kept("statistics of norms", tokens.part * wide)
    yield Kept("norms", hidden, False, of_weights=True)
    yield Kept("logits", tokens.cp * language.vocab_size // tp * wide, False)
    # Labels inside this rank's part of the vocabulary, the mask of the rest, losses.
    yield Kept("logits", tokens.cp * (_INDEX + 1 + wide), False)


def row_bytes(config: Config) -> int:
    """Return the peak bytes of a layer's temporaries for a shared row: keys, values and projections
    of some heads with their gradients, and the fp32 gradient of the latents. The result is 0
    without context parallelism.
    """
    language, layout, tokens = config.model.language, config.layout, Tokens.of(config)
    if layout.cp == 1:
        return 0
    item = ITEMSIZE[config.train.dtype]
    wide = item if config.train.attention != "portable" else item + max(4, item)  # sum and cast
    heads = min(ROW_HEADS, language.num_heads // layout.tp)
    plain, rope = language.qk_nope_dim + language.v_dim, language.qk_rope_dim
    latents = (language.kv_lora_rank + rope) * max(4, item)
    if item < 4:  # a copy for some heads, its gradient, and the fp32 sum of gradients
        latents += (language.kv_lora_rank + rope) * (2 * item + 4)
    return tokens.row * (heads * (plain * item + (plain + rope) * (item + wide)) + latents)


def _attention(config: Config, dense: bool) -> Iterator[Kept]:
    language, tokens, tp = config.model.language, Tokens.of(config), config.layout.tp
    item, recompute = ITEMSIZE[config.train.dtype], config.train.recompute
    hidden, heads, rope = language.hidden_size, language.num_heads // tp, language.qk_rope_dim
    query, latent = heads * (language.qk_nope_dim + rope), language.kv_lora_rank
    value, wide = heads * language.v_dim, max(4, item)
    shared, remade = config.layout.cp > 1, "mla_up" in recompute
    # For each norm: kind, width, width of the tensor that contains its input (for the latents it
    # also holds the rotary key), and the reader of its output. Readers: "products" only; "recipe"
    # or "router", which keep the output; "nobody" for a shared row, whose gathered copy is used
    # instead.
    hidden_latent = language.q_lora_rank is None and remade
    norms = [("residuals", hidden, hidden, "recipe" if hidden_latent else "products")]
    norms.append(("residuals", hidden, hidden, "products" if dense else "router"))
    reader = "recipe" if remade else "products"
    if language.q_lora_rank is not None:
        norms.append(("latents", language.q_lora_rank, language.q_lora_rank, reader))
    norms.append(("latents", latent, latent + rope, "nobody" if shared and not remade else reader))
    for kind, width, whole, reader in norms:
        yield Kept(kind, tokens.part * whole * item)
        yield Kept("statistics of norms", tokens.part * wide)
        if reader != "nobody" and "norms" not in recompute:
            yield Kept("norms", tokens.part * width * item, of_weights=reader == "products")
    for number in [tokens.cp, tokens.part if shared else tokens.cp]:  # for queries, for keys
        for _ in range(2):  # cosines and sines
            yield Kept("rotary angles", number * rope * item)
    if not remade:
        yield Kept("query, key, value", tokens.cp * query * item)
        if shared:  # only the gathered latents are kept, never keys and values
            yield Kept("latents of the row", tokens.row * (latent + rope) * wide)
        else:
            yield Kept("query, key, value", tokens.row * query * item)
            yield Kept("query, key, value", tokens.row * value * item)
    together = ROW_HEADS if shared else heads  # heads in one call of attention
    portable = config.train.attention == "portable"  # other kernels keep their output, too
    for first in range(0, heads, together):
        some = tokens.cp * min(together, heads - first)
        yield Kept("attention's output", some * language.v_dim * item, of_weights=portable)
        if not portable:  # log-sum-exp of the fused kernels
            yield Kept("attention's output", some * 4)


def _dense_mlp(config: Config) -> Iterator[Kept]:
    tokens, width = Tokens.of(config), config.model.language.dense_ffn_size // config.layout.tp
    yield from _swiglu(config, tokens.cp, width, "dense MLP")


def _experts(config: Config) -> Iterator[Kept]:
    language, layout, tokens = config.model.language, config.layout, Tokens.of(config)
    experts, wide = language.num_experts, max(4, ITEMSIZE[config.train.dtype])
    sent = tokens.part * language.experts_per_token
    shared = language.num_shared_experts * language.expert_ffn_size // layout.tp
    balanced = language.aux_loss_coeff > 0 and not _is_frozen(config)
    for _ in range(1 + balanced):  # scores and their sums, for the choice and the balance loss
        yield Kept("router", tokens.part * experts * wide)
        yield Kept("router", tokens.part * wide)
    yield Kept("router", sent * _INDEX, False)  # choices
    yield Kept("router", sent * wide)  # their weights
    # Of the sent tokens in their new order: indices into tokens x experts, tokens, and weights.
    yield Kept("router", sent * _INDEX, False)
    yield Kept("router", sent * _INDEX, False)
    yield Kept("router", sent * wide)
    yield Kept("router", experts // layout.ep * 2 * 4, False)  # end offsets of the experts' tokens
    if balanced:  # padding, tokens of each expert, scalars
        yield Kept("router", tokens.part + experts * _INDEX + 3 * wide, False)
    yield from _stored(config, sent, language.hidden_size, "dispatched tokens", of_weights=True)
    yield from _swiglu(config, sent, language.expert_ffn_size, "experts")
    yield from _swiglu(config, tokens.cp, shared, "shared experts")


def _swiglu(config: Config, rows: int, width: int, name: str) -> Iterator[Kept]:
    yield from _stored(config, rows, 2 * width, f"gate and up of {name}")
    if "swiglu" not in config.train.recompute:
        size = rows * width * ITEMSIZE[config.train.dtype]
        yield Kept(f"SwiGLU of {name}", size, of_weights=True)


def _stored(
    config: Config, rows: int, width: int, kind: str, *, of_weights: bool = False
) -> Iterator[Kept]:
    """Yield a tensor that `train.fp8_storage` covers: itself, or its codes and their scales."""
    if config.train.fp8_storage:
        yield Kept(kind, rows * width, of_weights=of_weights)
        yield Kept(kind, rows * 4 * -(-width // _TILE), of_weights=of_weights)
    else:
        yield Kept(kind, rows * width * ITEMSIZE[config.train.dtype], of_weights=of_weights)
