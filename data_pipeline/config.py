"""What the data pipeline is asked to do: which sources, in which shares, packed how.

Values live in YAML; this dataclass only checks them where they enter.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar

from moonvit3d.geometry import PatchLimits

# Row starts and lengths are int32 columns of the plan.
MAX_SEQ_LEN = 2**31 - 1


@dataclass(frozen=True)
class DataConfig:
    """The data side of a run.

    Attributes:
        root: where the sources lie, "s3://bucket/prefix" or a folder.
        sources: name -> token share inside its modality group (sources with media, sources of
            text only). Shares are relative: they are divided by the sum of their group.
        seq_len: tokens in a row.
        rows_per_step: rows in a global batch. May change between runs without changing the rows.
        vision_token_ratio: media tokens over all tokens, held constant; None takes the shares as
            token shares over all sources together.
        endpoint: URL of the object store; None takes AWS_ENDPOINT_URL or the provider's own.
        pack_window: samples packed together. More fill rows better and cost more to resume.
        shard_window: shards whose samples are mixed. More mix better and read shorter ranges.
        seed: of the order and the blend.
        limits: how far images and frames are scaled down, which fixes their token counts.
        tokenizer: key of the tiktoken rank file under `root`.
        prefetch_steps: steps fetched ahead of the consumer; 0 fetches when asked.
        fetch_threads: threads for requests and decoding, each.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    root: str
    sources: dict[str, float]
    seq_len: int
    rows_per_step: int
    vision_token_ratio: float | None = None
    endpoint: str | None = None
    pack_window: int = 16384
    shard_window: int = 8
    seed: int = 0
    limits: PatchLimits = field(default_factory=PatchLimits)
    tokenizer: str = "tokenizer/tokenizer.tiktoken"
    prefetch_steps: int = 2
    fetch_threads: int = 8

    def __post_init__(self) -> None:
        if not self.root:
            raise ValueError("root is empty; give 's3://bucket/prefix' or a folder")
        self._check_sources()
        ratio = self.vision_token_ratio
        if ratio is not None and not 0 < ratio < 1:
            raise ValueError(
                f"vision_token_ratio is {ratio!r}; allowed: between 0 and 1 (both excluded), "
                "or null to take the sources' shares as they are"
            )
        _check_int("seq_len", self.seq_len, 2, MAX_SEQ_LEN)
        _check_int("rows_per_step", self.rows_per_step, 1, MAX_SEQ_LEN)
        _check_int("pack_window", self.pack_window, 1, 2**24)
        _check_int("shard_window", self.shard_window, 1, 2**31)
        _check_int("seed", self.seed, 0, 2**63 - 1)
        _check_int("prefetch_steps", self.prefetch_steps, 0, 64)
        _check_int("fetch_threads", self.fetch_threads, 1, 256)

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names in the order that numbers sources everywhere: sorted, not as written."""
        return tuple(sorted(self.sources))

    def _check_sources(self) -> None:
        if not self.sources:
            raise ValueError("sources is empty; name at least one source and its token share")
        for name, share in self.sources.items():
            number = isinstance(share, int | float) and not isinstance(share, bool)
            if not number or not math.isfinite(share) or share <= 0:
                raise ValueError(
                    f"sources[{name!r}] is {share!r}; allowed: a finite share above 0 "
                    "(leave a source out instead of giving it 0)"
                )


def _check_int(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}; allowed: an integer from {low} to {high}")
