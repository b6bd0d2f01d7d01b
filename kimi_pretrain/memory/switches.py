"""Settings that lower a rank's memory without more ranks, and what they cost. Pure.

From the least costly to the most: smaller chunks of media and recompute, the encoder's too, change
no bit and cost little time; what waits in host memory goes over the bus; single rows change the
routers' balance loss, FP8 storage the gradients of experts; without overlap the experts' exchange
is waited for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kimi_pretrain.config import Config
from moonvit3d.memory import most_patches

EVERYTHING = ["norms", "swiglu", "mla_up"]


@dataclass(frozen=True)
class Change:
    """One key with another value."""

    section: str
    key: str
    value: bool | int | str | tuple[str, ...] | None

    def __str__(self) -> str:
        """Return it as an override of the command line."""
        value = self.value
        if isinstance(value, tuple):
            text = f"[{','.join(value)}]"
        else:
            text = "null" if value is None else str(value)
        return f"{self.section}.{self.key}={text.lower() if isinstance(value, bool) else text}"


def changed(config: Config, changes: Sequence[Change]) -> Config:
    """Return the configuration with some keys changed, checked as a whole.

    Raises:
        ValueError: the configuration is not one that can run.
    """
    sections: dict[str, dict[str, object]] = {}
    for one in changes:
        value = list(one.value) if isinstance(one.value, tuple) else one.value
        sections.setdefault(one.section, {})[one.key] = value
    return config.replace(
        **{name: getattr(config, name).replace(**keys) for name, keys in sections.items()}
    )


def released(config: Config) -> tuple[Change, ...]:
    """Return what takes back the switches that cost time alone, where a run has thrown them.

    Of a run that computes a part again it is not known whether the rest would do instead.
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
    """Yield the switches that are not yet thrown, the least costly first; each has its levels, of
    which one at most is taken, from the mildest.
    """
    train, dep, limits = config.train, config.dep, config.data.limits
    # Halves, down to the least that holds any medium.
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
    if not dep.offload_outputs and dep.bubbles == "none":  # one refuses the other
        yield [Change("dep", "offload_outputs", True)]
    if not train.offload:
        yield [Change("train", "offload", True)]
    if train.rows_per_microbatch > 1:
        yield [Change("train", "rows_per_microbatch", 1)]
    if not train.fp8_storage and train.dtype != "float64":
        yield [Change("train", "fp8_storage", True)]
    if config.layout.overlap_experts:
        yield [Change("layout", "overlap_experts", False)]
