"""Settings that lower a rank's memory without more ranks, in the order of their cost. Pure.

Smaller chunks of media and recompute, including the encoder's, are bit-exact and cost little time.
Offload uses the bus to the host. Single rows change the routers' balance loss, and FP8 storage
changes the gradients of experts. Without overlap, passes wait for the expert exchange.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kimi_pretrain.config import Config
from moonvit3d.memory import most_patches

EVERYTHING = ["norms", "swiglu", "mla_up"]


@dataclass(frozen=True)
class Change:
    """A new value for one configuration key."""

    section: str
    key: str
    value: bool | int | str | tuple[str, ...] | None

    def __str__(self) -> str:
        """Return the change as a command-line override."""
        value = self.value
        if isinstance(value, tuple):
            text = f"[{','.join(value)}]"
        else:
            text = "null" if value is None else str(value)
        return f"{self.section}.{self.key}={text.lower() if isinstance(value, bool) else text}"


def changed(config: Config, changes: Sequence[Change]) -> Config:
    """Return the configuration with some keys changed, checked as a whole.

    Raises:
        ValueError: the configuration cannot run.
    """
    sections: dict[str, dict[str, object]] = {}
    for one in changes:
        value = list(one.value) if isinstance(one.value, tuple) else one.value
        sections.setdefault(one.section, {})[one.key] = value
    return config.replace(
        **{name: getattr(config, name).replace(**keys) for name, keys in sections.items()}
    )


def released(config: Config) -> tuple[Change, ...]:
    """Return the changes that release the run's switches which only cost time.

    Partial recompute is not released: it is unknown whether the other kinds would suffice instead.
    """
    train, dep = config.train, config.dep
    found = list[Change]()
    if set(train.recompute) == set(EVERYTHING):
        found.append(Change("train", "recompute", ()))
    if dep.offload_outputs:
        found.append(Change("dep", "offload_outputs", False))
    if train.offload:
        found.append(Change("train", "offload", False))
    return tuple(found)


def switches(config: Config) -> Iterator[list[Change]]:
    """Yield the switches that are still off, the least costly first. Each switch is a list of
    levels, mildest first, of which at most one applies.
    """
    train, dep, limits = config.train, config.dep, config.data.limits
    # Repeated halving, down to the smallest chunk that holds any medium.
    chunk, halves = dep.max_patches_per_chunk, list[Change]()
    least = -(-most_patches(limits) // 64) * 64
    while chunk > least:
        chunk = max(chunk // 2, least)
        halves.append(Change("dep", "max_patches_per_chunk", chunk))
    if halves:
        yield halves
    if set(train.recompute) != set(EVERYTHING):
        yield [Change("train", "recompute", tuple(EVERYTHING))]
    if dep.keep_activations == "auto":
        yield [Change("dep", "keep_activations", "none")]
    if not dep.offload_outputs and dep.bubbles == "none":  # the two exclude each other
        yield [Change("dep", "offload_outputs", True)]
    if not train.offload:
        yield [Change("train", "offload", True)]
    if train.rows_per_microbatch > 1:
        yield [Change("train", "rows_per_microbatch", 1)]
    if not train.fp8_storage and train.dtype != "float64":
        yield [Change("train", "fp8_storage", True)]
    if config.layout.overlap_experts:
        yield [Change("layout", "overlap_experts", False)]
