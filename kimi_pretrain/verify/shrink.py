"""Shrinks a config so that a laptop can run it, with every mechanism of the original enabled.

Sizes shrink to those of the tiny preset: widths, layers, experts, rows, images. The structure of a
step stays: every layout axis above 1 stays above 1 while there are processes for it, virtual stages
stay virtual, dense and expert layers both remain, and there are several microbatches and several
chunks of media. Pure.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from kimi_pretrain.config import Config, parse_config
from kimi_pretrain.parallel.layout import LayoutConfig

SEQ_LEN = 512
LAYERS = 4
SIDE = 32  # patches
LANGUAGE = {
    "hidden_size": 128, "num_heads": 4, "dense_ffn_size": 384, "expert_ffn_size": 96,
    "q_lora_rank": 64, "kv_lora_rank": 48, "qk_nope_dim": 24, "qk_rope_dim": 8, "v_dim": 24,
    "experts_per_token": 2, "num_shared_experts": 2, "num_dense_layers": 1,
}  # fmt: skip
VISION = {"depth": 3, "mlp_width": 256, "pos_grid": 16}
VISION_WIDTH, VISION_HEADS = 128, 4
NUM_EXPERTS = 8


class Change(NamedTuple):
    """A value that shrinking changed, with its key as on the command line."""

    key: str
    old: Any
    new: Any


class Shrunk(NamedTuple):
    """The smaller config and its changes."""

    config: Config
    changes: tuple[Change, ...]


def shrink(config: Config, processes: int = 4, tokenizer_size: int | None = None) -> Shrunk:
    """Return a copy of `config` that runs in at most `processes` processes on a small machine.

    Args:
        config: config of any size.
        processes: most processes of the new layout; a layout within this limit is kept.
        tokenizer_size: ids of the run's tokenizer, which the vocabulary must hold; None keeps the
            vocabulary.

    Raises:
        ConfigError: the smaller config is invalid, which is a bug in these rules.
    """
    before = config.model_dump(mode="json")
    after = config.model_dump(mode="json")
    after["layout"] |= _layout(config.layout, processes)
    after["layout"]["stages"] = None  # it lists layers, and the number of layers shrinks
    layout = LayoutConfig(**after["layout"] | {"overlap_experts": False})
    can_overlap = layout.ep > 1 and (layout.pp == 1 or layout.vpp > 1)
    after["layout"]["overlap_experts"] &= can_overlap
    after["model"]["language"] |= _language(config, layout, tokenizer_size)
    after["model"]["vision"] |= _vision(config)
    after["model"]["vision"]["out_width"] = after["model"]["language"]["hidden_size"]
    after["train"] |= _train(config)
    after["data"] |= _data(config, layout, after["train"]["rows_per_microbatch"])
    after["dep"] |= _dep(config, layout, after["data"]["limits"], after["model"]["vision"]["heads"])
    smaller = parse_config(after, where="shrunk configuration")
    shown = dict(_leaves(smaller.model_dump(mode="json")))
    changes = [Change(key, old, shown[key]) for key, old in _leaves(before)]
    return Shrunk(smaller, tuple(change for change in changes if change.old != change.new))


def _layout(layout: LayoutConfig, processes: int) -> dict[str, int]:
    """Reduce each axis to 2, in order, while there are processes left."""
    if layout.world_size() <= processes:
        return {"vpp": min(layout.vpp, 2)}
    sizes, left = {}, processes
    for axis in ("pp", "dp", "cp", "tp"):
        sizes[axis] = min(getattr(layout, axis), 2, max(1, left))
        left //= sizes[axis]
    sizes["ep"] = math.gcd(min(layout.ep, 2), sizes["dp"] * sizes["cp"] * sizes["tp"])
    sizes["vpp"] = min(layout.vpp, 2) if sizes["pp"] > 1 else 1
    return sizes


def _language(config: Config, layout: LayoutConfig, tokenizer_size: int | None) -> dict[str, Any]:
    language, chunks = config.model.language, layout.pp * layout.vpp
    values: dict[str, Any] = {}
    for name, limit in LANGUAGE.items():
        old = getattr(language, name)
        values[name] = None if old is None else min(old, limit)
    for name in ("hidden_size", "num_heads", "dense_ffn_size", "expert_ffn_size"):
        values[name] = _multiple(values[name], layout.tp)
    values["num_layers"] = _multiple(min(language.num_layers, LAYERS), chunks)
    values["num_experts"] = _multiple(min(language.num_experts, NUM_EXPERTS), layout.ep)
    if tokenizer_size is not None:
        needed = _multiple(tokenizer_size, math.lcm(128, layout.tp))
        values["vocab_size"] = min(language.vocab_size, needed)
    return values


def _vision(config: Config) -> dict[str, int]:
    vision = config.model.vision
    values = {name: min(getattr(vision, name), limit) for name, limit in VISION.items()}
    if vision.width > VISION_WIDTH:  # a smaller width already fits its number of heads
        values |= {"width": VISION_WIDTH, "heads": VISION_HEADS}
    width = values.get("width", vision.width)
    return values | {"projector_width": min(vision.projector_width, 4 * width)}


def _train(config: Config) -> dict[str, Any]:
    train = config.train
    return {
        "rows_per_microbatch": min(train.rows_per_microbatch, 2),
        "dtype": "float64" if train.dtype == "float64" else "float32",
        "attention": "auto",  # selects the portable kernel in these dtypes
        "fp8_storage": False,  # an encoder's rounding moves FP8 codes, and gradients by percents
        "vision_weights": None,  # they have the original sizes
        "vision_part": None,
        "start_from": None,
        "start_optimizer": "fresh",
    }


def _data(config: Config, layout: LayoutConfig, per_microbatch: int) -> dict[str, Any]:
    data = config.data
    microbatches = 2 * layout.pp
    if layout.vpp == 1:
        microbatches = min(microbatches, config.num_microbatches())
    seq_len = _multiple(min(data.seq_len, SEQ_LEN), 2 * layout.cp * layout.tp)
    limits = data.limits
    return {
        "seq_len": seq_len,
        "rows_per_step": microbatches * layout.dp * per_microbatch,
        "pack_window": min(data.pack_window, 1024),
        # The largest image takes about a quarter of a row, a video chunk a sixteenth.
        "limits": {
            "image": min(limits.image, seq_len),
            "frame": min(limits.frame, seq_len // 4),
            "side": min(limits.side, SIDE),
        },
        "cache": None,
        # Smaller images have fewer tokens, so a ratio may be unreachable; weights always work.
        "vision_token_ratio": None,
        "schedule": [stage.model_dump() | {"vision_token_ratio": None} for stage in data.schedule],
    }


def _dep(
    config: Config, layout: LayoutConfig, limits: dict[str, int], heads: int
) -> dict[str, Any]:
    dep = config.dep
    image, frame = (_padded(limits[kind], limits["side"]) for kind in ("image", "frame"))
    chunk = max(image, 4 * frame)  # any item fits, and a rank has several chunks per step
    ranks = 2 ** int(math.log2(layout.world_size()))
    return {
        "max_patches_per_chunk": min(dep.max_patches_per_chunk, chunk),
        "scope": math.gcd(dep.scope, layout.dp) if isinstance(dep.scope, int) else dep.scope,
        "max_split": math.gcd(min(dep.max_split, ranks), heads),
        "exchange_dtype": "model",
        "exchange_budget_mib": 1,
    }


def _padded(patches: int, side: int) -> int:
    """Return the most patches that an item within both limits has after padding to tokens."""
    return patches + 2 * (side + -(-patches // side)) + 4  # thinnest item, a patch on every side


def _multiple(number: int, of: int) -> int:
    """Return the smallest multiple of `of` that is at least `number`."""
    return -(-number // of) * of


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) pairs; sections are expanded, tables with user-defined names are not."""
    for key, value in values.items():
        if isinstance(value, dict) and key in _SECTIONS:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


_SECTIONS = ("model", "vision", "language", "layout", "data", "limits", "optim", "dep", "train")
