"""Bytes that one microbatch leaves on a rank for its backward pass, by kind, from shapes. Pure.

One term for each tensor that autograd keeps, under the policy of `train.recompute` and
`train.fp8_storage`; docs/MEMORY.md has the table. Without tensor parallelism they are what is alive
after a forward pass, to the byte: a test compares. With it a rank keeps its share, in the same
terms. Routed tokens are those of an even load of experts: a rank that gets more keeps more.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kimi_pretrain.config import ITEMSIZE, Config

ROW_HEADS = 4
"""Heads whose keys and values of a shared row exist at a time. At the 4,096 queries that a rank of
a long row usually has, four heads are 128 blocks of queries: one for each of a GPU's processors.
"""

_TILE = 128  # of `fp8_tiles`; a scale of four bytes each
_INDEX = 8  # int64


@dataclass(frozen=True)
class Tokens:
    """Tokens of a microbatch.

    Attributes:
        row: of the rows together.
        cp: at this context-parallel rank; its tensor-parallel ranks share heads and widths.
        part: at this rank where every rank has its own tokens: norms, routers, experts.
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
        kind: what it is, for tables.
        size: in bytes.
        moves: whether `train.offload` may move it: floating, and inside our modules.
    """

    kind: str
    size: int
    moves: bool = True


def layer_tensors(config: Config, dense: bool) -> Iterator[Kept]:
    """Yield what one decoder layer keeps of a microbatch.

    Args:
        dense: whether the layer has a plain MLP.
    """
    yield from _attention(config)
    yield from _dense_mlp(config) if dense else _experts(config)


def head_tensors(config: Config) -> Iterator[Kept]:
    """Yield what the final norm, the head and the loss keep of a microbatch; the head lies outside
    the policy, so the norm's output stays.
    """
    language, tokens = config.model.language, Tokens.of(config)
    item, tp = ITEMSIZE[config.train.dtype], config.layout.tp
    wide, hidden = max(4, item), tokens.part * language.hidden_size * item
    yield Kept("residuals", hidden)
    yield Kept("statistics of norms", tokens.part * wide)
    yield Kept("norms", hidden, False)
    yield Kept("logits", tokens.cp * language.vocab_size // tp * wide, False)
    # Labels among this rank's part of the vocabulary, the others' mask, losses.
    yield Kept("logits", tokens.cp * (_INDEX + 1 + wide), False)


def row_bytes(config: Config) -> int:
    """Return the most that a layer makes and drops of a shared row: keys, values and projections of
    some heads with their gradients, and the gradient of the latents in fp32; 0 without context
    parallelism.
    """
    language, layout, tokens = config.model.language, config.layout, Tokens.of(config)
    if layout.cp == 1:
        return 0
    item = ITEMSIZE[config.train.dtype]
    wide = item if config.train.attention != "portable" else item + max(4, item)  # sums, and cast
    heads = min(ROW_HEADS, language.num_heads // layout.tp)
    plain, rope = language.qk_nope_dim + language.v_dim, language.qk_rope_dim
    latents = (language.kv_lora_rank + rope) * max(4, item)
    if item < 4:  # a copy for some heads, its gradient, and that as it is summed
        latents += (language.kv_lora_rank + rope) * (2 * item + 4)
    return tokens.row * (heads * (plain * item + (plain + rope) * (item + wide)) + latents)


def _attention(config: Config) -> Iterator[Kept]:
    language, tokens, tp = config.model.language, Tokens.of(config), config.layout.tp
    item, recompute = ITEMSIZE[config.train.dtype], config.train.recompute
    hidden, heads, rope = language.hidden_size, language.num_heads // tp, language.qk_rope_dim
    query, latent = heads * (language.qk_nope_dim + rope), language.kv_lora_rank
    value, wide = heads * language.v_dim, max(4, item)
    shared = config.layout.cp > 1
    # Of each norm its width, that of the tensor that its input is part of (one holds the rotary key
    # as well), and whether its output is needed: that of a shared row is gathered, a copy, and is
    # needed only to be gathered again.
    norms = [("residuals", hidden, hidden, True)] * 2
    if language.q_lora_rank is not None:
        norms.append(("latents", language.q_lora_rank, language.q_lora_rank, True))
    norms.append(("latents", latent, latent + rope, not shared or "mla_up" in recompute))
    for kind, width, whole, needed in norms:
        yield Kept(kind, tokens.part * whole * item)
        yield Kept("statistics of norms", tokens.part * wide)
        if needed and "norms" not in recompute:
            yield Kept("norms", tokens.part * width * item)
    for number in [tokens.cp, tokens.part if shared else tokens.cp]:  # of queries, of keys
        for _ in range(2):  # cosines and sines
            yield Kept("rotary angles", number * rope * item)
    if "mla_up" not in recompute:
        yield Kept("query, key, value", tokens.cp * query * item)
        if shared:  # gathered; its keys and values are never kept
            yield Kept("latents of the row", tokens.row * (latent + rope) * wide)
        else:
            yield Kept("query, key, value", tokens.row * query * item)
            yield Kept("query, key, value", tokens.row * value * item)
    together = ROW_HEADS if shared else heads  # heads of one call of attention
    for first in range(0, heads, together):
        some = tokens.cp * min(together, heads - first)
        yield Kept("attention's output", some * language.v_dim * item)
        if config.train.attention != "portable":  # log-sums of the fused kernels
            yield Kept("attention's output", some * 4)


def _dense_mlp(config: Config) -> Iterator[Kept]:
    tokens, width = Tokens.of(config), config.model.language.dense_ffn_size // config.layout.tp
    yield from _swiglu(config, tokens.cp, width, "dense MLP")


def _experts(config: Config) -> Iterator[Kept]:
    language, layout, tokens = config.model.language, config.layout, Tokens.of(config)
    experts, wide = language.num_experts, max(4, ITEMSIZE[config.train.dtype])
    sent = tokens.part * language.experts_per_token
    shared = language.num_shared_experts * language.expert_ffn_size // layout.tp
    for _ in range(2):  # scores, for the choice and for the balance loss; and their sums
        yield Kept("router", tokens.part * experts * wide)
        yield Kept("router", tokens.part * wide)
    yield Kept("router", sent * _INDEX, False)  # choices
    yield Kept("router", sent * wide)  # their weights
    # Of what is sent, in its new order: places among tokens x experts, tokens, and weights.
    yield Kept("router", sent * _INDEX, False)
    yield Kept("router", sent * _INDEX, False)
    yield Kept("router", sent * wide)
    # Padding; tokens of each expert, and where they end; scalars of the balance loss.
    few = experts // layout.ep * (_INDEX + 2 * 4) + 3 * wide
    yield Kept("router", tokens.part + few, False)
    yield from _stored(config, sent, language.hidden_size, "dispatched tokens")
    yield from _swiglu(config, sent, language.expert_ffn_size, "experts")
    yield from _swiglu(config, tokens.cp, shared, "shared experts")


def _swiglu(config: Config, rows: int, width: int, name: str) -> Iterator[Kept]:
    yield from _stored(config, rows, 2 * width, f"gate and up of {name}")
    if "swiglu" not in config.train.recompute:
        yield Kept(f"SwiGLU of {name}", rows * width * ITEMSIZE[config.train.dtype])


def _stored(config: Config, rows: int, width: int, kind: str) -> Iterator[Kept]:
    """Yield what FP8 storage is for: the tensor, or its codes and their scales."""
    if config.train.fp8_storage:
        yield Kept(kind, rows * width)
        yield Kept(kind, rows * 4 * -(-width // _TILE))
    else:
        yield Kept(kind, rows * width * ITEMSIZE[config.train.dtype])
