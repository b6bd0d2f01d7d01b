"""What the data pipeline is asked to do: which sources, in which shares, packed how.

Values live in YAML; this dataclass only checks them where they enter.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from data_pipeline.augment.config import AugmentConfig
from data_pipeline.cache.cached_store import CacheConfig
from data_pipeline.names import did_you_mean, listed
from data_pipeline.store.addresses import check_endpoint, split_place
from moonvit3d.geometry import PatchLimits

# Row starts and lengths are int32 columns of the plan.
MAX_SEQ_LEN = 2**31 - 1
# Steps that may be planned ahead of the one in use; what is learnt in a step (a sample that turned
# out unusable) changes plans only beyond that, or the order would depend on the prefetch depth.
MAX_PREFETCH = 64


@dataclass(frozen=True)
class BlendStage:
    """Other shares from some point of training on.

    Attributes:
        after_tokens: expected tokens of the stream before it; it begins with the next window.
        sources: name -> token share, as `DataConfig.sources`; a source left out is not drawn, a
            new one may come in.
        vision_token_ratio: another one for this stage; None keeps `DataConfig`'s.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    after_tokens: int
    sources: dict[str, float]
    vision_token_ratio: float | None = None

    def __post_init__(self) -> None:
        _check_int("schedule.after_tokens", self.after_tokens, 1, 2**62)
        _check_shares("schedule.sources", self.sources)
        _check_ratio("schedule.vision_token_ratio", self.vision_token_ratio)


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
        schedule: other shares later in training, in the order of their `after_tokens`.
        max_epochs: source -> how often it may be gone through at most; then the others share.
        augment: source -> what may be done to its pictures and captions.
        split_text: texts longer than a row are split; otherwise they are refused.
        shrink_media: pictures that leave no room in a row are scaled down; otherwise refused.
        restart_positions: position ids begin at 0 in every document; otherwise in every row.
        seed: of the order and of augmentation.
        limits: how far images and frames are scaled down, which fixes their token counts.
        tokenizer: key of the tiktoken rank file under `root`, or its own URI.
        pack_window: samples packed together. More fill rows better and cost more to resume.
        shard_window: shards whose samples are mixed. More mix better and read shorter ranges.
        endpoint: URL of the object store; None takes AWS_ENDPOINT_URL or the provider's own.
        requests_per_second: of this node to the store, all processes together; None is no limit.
        patience: seconds without progress before a read from the store is given up.
        cache: memory and disk of the node in front of the store; None reads from it directly.
        workers: processes that fetch and decode; 0 does it in a thread of this one.
        fetch_threads: threads for requests and decoding, each, in every worker.
        prefetch_steps: steps fetched ahead of the consumer; 0 fetches when asked.
        prefetch_bytes: most bytes held by steps fetched ahead (one step is always fetched).
        same_decoders: a state is refused where other versions of the decoders are installed.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    root: str
    sources: dict[str, float]
    seq_len: int
    rows_per_step: int
    vision_token_ratio: float | None = None
    schedule: list[BlendStage] = field(default_factory=list)
    max_epochs: dict[str, float] = field(default_factory=dict)
    augment: dict[str, AugmentConfig] = field(default_factory=dict)
    split_text: bool = True
    shrink_media: bool = True
    restart_positions: bool = True
    seed: int = 0
    limits: PatchLimits = field(default_factory=PatchLimits)
    tokenizer: str = "tokenizer/tokenizer.tiktoken"
    pack_window: int = 16384
    shard_window: int = 8
    endpoint: str | None = None
    requests_per_second: float | None = None
    patience: float = 120.0
    cache: CacheConfig | None = None
    workers: int = 0
    fetch_threads: int = 8
    prefetch_steps: int = 2
    prefetch_bytes: int = 4 << 30
    same_decoders: bool = True

    def __post_init__(self) -> None:
        if not self.root:
            raise ValueError("root is empty; give 's3://bucket/prefix' or a folder")
        check_endpoint("endpoint", self.endpoint)
        for name in ("root", "tokenizer"):
            split_place(name, getattr(self, name))
        _check_shares("sources", self.sources)
        _check_ratio("vision_token_ratio", self.vision_token_ratio)
        self._check_names()
        _check_int("seq_len", self.seq_len, 3, MAX_SEQ_LEN)
        _check_int("rows_per_step", self.rows_per_step, 1, MAX_SEQ_LEN)
        _check_int("pack_window", self.pack_window, 1, 2**24)
        _check_int("shard_window", self.shard_window, 1, 2**31)
        _check_int("seed", self.seed, 0, 2**63 - 1)
        _check_int("prefetch_steps", self.prefetch_steps, 0, MAX_PREFETCH)
        _check_int("prefetch_bytes", self.prefetch_bytes, 1, 2**62)
        _check_int("fetch_threads", self.fetch_threads, 1, 256)
        _check_int("workers", self.workers, 0, 256)
        if self.workers and not self.prefetch_steps:
            raise ValueError("workers fetch ahead: prefetch_steps must be 1 or more for them")
        _check_positive("patience", self.patience)
        if self.requests_per_second is not None:
            _check_positive("requests_per_second", self.requests_per_second)
        for name, epochs in self.max_epochs.items():
            _check_positive(f"max_epochs[{name!r}]", epochs)

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of all stages in the order that numbers sources everywhere: sorted."""
        return tuple(sorted(set(self.sources).union(*(stage.sources for stage in self.schedule))))

    def _check_names(self) -> None:
        """Limits and augmentation must be of sources that are drawn at some time."""
        for where, names in (("max_epochs", self.max_epochs), ("augment", self.augment)):
            if unknown := sorted(set(names) - set(self.source_names)):
                raise ValueError(
                    f"{where} names {listed(unknown)}, which no source is called; "
                    f"{did_you_mean(unknown[0], self.source_names)}"
                )
        starts = [stage.after_tokens for stage in self.schedule]
        if starts != sorted(set(starts)):
            raise ValueError(f"schedule: after_tokens are {listed(starts)}; they must increase")


def _check_shares(where: str, shares: Mapping[str, float]) -> None:
    if not shares:
        raise ValueError(f"{where} is empty; name at least one source and its token share")
    for name, share in shares.items():
        number = isinstance(share, int | float) and not isinstance(share, bool)
        if not number or not math.isfinite(share) or share <= 0:
            raise ValueError(
                f"{where}[{name!r}] is {share!r}; allowed: a finite share above 0 "
                "(leave a source out instead of giving it 0)"
            )


def _check_ratio(where: str, ratio: float | None) -> None:
    if ratio is not None and not 0 < ratio < 1:
        raise ValueError(
            f"{where} is {ratio!r}; allowed: between 0 and 1 (both excluded), "
            "or null to take the sources' shares as they are"
        )


def _check_positive(where: str, value: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{where} is {value!r}; allowed: a number above 0")


def _check_int(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}; allowed: an integer from {low} to {high}")
