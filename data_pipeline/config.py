"""Configuration of the data pipeline: sources, their shares, packing, fetching and caching."""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from data_pipeline.augment.config import AugmentConfig
from data_pipeline.cache.cached_store import CacheConfig
from data_pipeline.names import did_you_mean, listed
from data_pipeline.store.addresses import check_endpoint, split_place
from moonvit3d.geometry import PatchLimits
from typed_config.section import Finite, Section

# Row starts and lengths are int32 columns of the plan.
MAX_SEQ_LEN = 2**31 - 1
# Steps that may be planned ahead of the current step. An unusable sample found in a step changes
# plans only beyond this limit; otherwise the order would depend on the prefetch depth.
MAX_PREFETCH = 64


class ChosenSource(Section):
    """A source with samples selected by length."""

    share: float
    """Token share of the source, like a plain number. [-; data_pipeline/plan/mixture.py]"""
    min_tokens: int | None = Field(default=None, ge=1, le=2**62)
    """Samples with fewer tokens are left out. Tokens are counted as in `data stats`: for the sample
    as stored, with its media under data.limits, before it is split, shrunk or augmented.
    [tokens; data_pipeline/plan/source.py]"""
    max_tokens: int | None = Field(default=None, ge=1, le=2**62)
    """Samples with more tokens are left out. [tokens; data_pipeline/plan/source.py]"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.min_tokens or 1) > (self.max_tokens or math.inf):
            raise ValueError(f"{self.bounds}: no length is in between")
        return self

    @property
    def bounds(self) -> str:
        """Bounds in the form "min_tokens=8192 max_tokens=65536"; "" without bounds."""
        keys = ("min_tokens", "max_tokens")
        found = {key: getattr(self, key) for key in keys}
        return " ".join(f"{key}={n}" for key, n in found.items() if n is not None)


# The two forms of a share. Error paths omit names in <>, because they are not config keys.
_NUMBER, _CHOSEN = "<share>", "<section>"


def _form_of(share: Any) -> str:
    return _CHOSEN if isinstance(share, Mapping | ChosenSource) else _NUMBER


Share = Annotated[
    Annotated[float, Tag(_NUMBER)] | Annotated[ChosenSource, Tag(_CHOSEN)],
    Discriminator(_form_of),
]


def share_of(share: float | ChosenSource) -> float:
    """Return a source's token share."""
    return share.share if isinstance(share, ChosenSource) else share


def _check_shares(
    shares: dict[str, float | ChosenSource],
) -> dict[str, float | ChosenSource]:
    if not shares:
        raise ValueError("empty; name at least one source and its token share")
    for name, given in shares.items():
        share = share_of(given)
        if not math.isfinite(share) or share <= 0:
            raise ValueError(
                f"{name!r} is {share!r}; allowed: a finite share above 0 "
                "(leave a source out instead of giving it 0)"
            )
    return shares


def _check_ratio(ratio: float | None) -> float | None:
    if ratio is not None and not 0 < ratio < 1:
        raise ValueError(
            "allowed: between 0 and 1 (both excluded), "
            "or null to take the sources' shares as they are"
        )
    return ratio


Shares = Annotated[dict[str, Share], AfterValidator(_check_shares)]
HeldOut = Annotated[
    dict[str, Share], AfterValidator(lambda found: _check_shares(found) if found else found)
]
Ratio = Annotated[float | None, AfterValidator(_check_ratio)]
Positive = Annotated[Finite, Field(gt=0)]


class BlendStage(Section):
    """Shares that apply from a given point of training."""

    after_tokens: int | None = Field(default=None, ge=1, le=2**62)
    """Expected sample tokens (without padding) before this stage. The stage begins with the next
    window. [tokens; data_pipeline/plan/mixture.py]"""
    after_share: float | None = Field(default=None, gt=0, lt=1)
    """Start of the stage as a share of data.budget, instead of after_tokens.
    [-; data_pipeline/plan/mixture.py]"""
    sources: Shares
    """Source -> token share, as in `data.sources`. Sources that are left out are not drawn; new
    sources are allowed.
    [-; data_pipeline/plan/mixture.py]"""
    vision_token_ratio: Ratio = None
    """Ratio for this stage; null keeps the ratio of `data`. [-; data_pipeline/plan/mixture.py]"""


class TokenBudget(Section):
    """Sample tokens (without padding) after which a run ends; the first limit reached counts."""

    text: int | None = Field(default=None, ge=1, le=2**62)
    """Tokens other than media pads, including text in documents with media.
    [tokens; data_pipeline/plan/budget.py]"""
    vision: int | None = Field(default=None, ge=1, le=2**62)
    """Media-pad tokens. [tokens; data_pipeline/plan/budget.py]"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.text is None and self.vision is None:
            raise ValueError("give text, vision or both, in tokens; or leave the budget out")
        return self


class DataConfig(Section):
    """Data settings of a run. docs/DATA.md explains each key."""

    root: str
    """Location of the sources: "s3://bucket/prefix" or a folder. [-; data_pipeline/access.py]"""
    sources: Shares
    """Source -> token share inside its modality group (sources with media, text-only sources).
    Shares are relative and are divided by the sum of their group. Give {share, min_tokens,
    max_tokens} instead of a number to select samples by length.
    [-; data_pipeline/plan/mixture.py]"""
    seq_len: int = Field(ge=3, le=MAX_SEQ_LEN)
    """Length of a row. [tokens; data_pipeline/plan/pack.py]"""
    rows_per_step: int = Field(ge=1, le=MAX_SEQ_LEN)
    """Rows in a global batch. It may change between runs without changing the rows.
    [rows; data_pipeline/plan/planner.py]"""
    order_rows: Literal["as_drawn", "light_ends"] = "as_drawn"
    """Order of a replica's microbatches in a step. light_ends puts microbatches with little encoder
    work first and last. The rows of a step, of a replica and of a microbatch stay the same.
    [-; kimi_pretrain/dep/row_order.py]"""
    asked: dict[str, str] = Field(default_factory=dict)
    """Source -> the catalogue name it was requested by, such as captions@active. The start of a run
    fills this in if the configuration has such names. [-; data_pipeline/access.py]"""
    vision_token_ratio: Ratio = None
    """Media tokens over all tokens, held constant. With null, shares are token shares over all
    sources together.
    [-; data_pipeline/plan/mixture.py]"""
    schedule: list[BlendStage] = Field(default_factory=list)
    """Stages with other shares later in training, in order of their after_tokens.
    [-; data_pipeline/plan/mixture.py]"""
    past_sources: HeldOut = Field(default_factory=dict)
    """Sources that only earlier steps of the run drew from (train --change-data), as they were
    given in `sources`; their shares have no effect. Their indices are read at each start.
    [-; data_pipeline/plan/change.py]"""
    heldout: HeldOut = Field(default_factory=dict)
    """Source -> share, as in `sources`, of samples that are never trained on. They are used by
    train.validate_every and `kimi-pretrain eval --heldout`.
    [-; kimi_pretrain/tools/validation.py]"""
    heldout_tokens: int = Field(default=1 << 20, ge=1, le=2**40)
    """Maximum number of held-out tokens in a validation, over all sources. A source with fewer
    tokens is used once in full.
    [tokens; kimi_pretrain/tools/validation.py]"""
    budget: TokenBudget | None = None
    """Tokens after which the run ends, even before train.steps. With null, only train.steps counts.
    [-; data_pipeline/plan/budget.py]"""
    max_epochs: dict[str, Positive] = Field(default_factory=dict)
    """Source -> maximum number of epochs; afterwards the other sources take over its share.
    [epochs; data_pipeline/plan/mixture.py]"""
    augment: dict[str, AugmentConfig] = Field(default_factory=dict)
    """Source -> augmentation of its images and captions.
    [-; data_pipeline/plan/variation.py]"""
    split_text: bool = True
    """Split texts longer than a row; false leaves them out.
    [-; data_pipeline/plan/source.py]"""
    shrink_media: bool = True
    """Scale media down until their sample fits a row; false leaves such samples out.
    [-; data_pipeline/plan/source.py]"""
    restart_positions: bool = True
    """Position ids restart at 0 in every document; with false, only in every row.
    [-; kimi_pretrain/step.py]"""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Seed of the data order and of augmentation. [-; data_pipeline/plan/order.py]"""
    limits: PatchLimits = PatchLimits()
    """Size limits to which images and frames are scaled down. They fix the token counts.
    [-; data_pipeline/plan/source.py]"""
    tokenizer: str = "tokenizer/tokenizer.tiktoken"
    """Key of the tiktoken rank file under `root`, or a path or URI. [-; data_pipeline/access.py]"""
    pack_window: int = Field(default=16384, ge=1, le=2**24)
    """Samples packed together. A larger window fills rows better but costs more to resume.
    [samples; data_pipeline/plan/planner.py]"""
    shard_window: int = Field(default=8, ge=1, le=2**31)
    """Shards whose samples are shuffled together. A larger window shuffles better but reads shorter
    ranges. [shards; data_pipeline/plan/order.py]"""
    endpoint: str | None = None
    """URL of the object store. With null, it comes from AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, the
    AWS profile, or the provider's default.
    [-; data_pipeline/access.py]"""
    requests_per_second: Positive | None = None
    """Limit on this node's requests to the store, over all processes; null means no limit.
    [requests/s; data_pipeline/access.py]"""
    patience: Positive = 120.0
    """Time without progress after which a read from the store fails.
    [s; data_pipeline/access.py]"""
    cache: CacheConfig | None = None
    """Cache in the node's memory and on its disk; null reads directly from the store.
    [-; data_pipeline/access.py]"""
    workers: int = Field(default=0, ge=0, le=256)
    """Worker processes that fetch and decode; 0 uses a thread of the training process.
    [processes; data_pipeline/loader.py]"""
    fetch_threads: int = Field(default=8, ge=1, le=256)
    """Number of request threads and of decoding threads in every worker.
    [threads; data_pipeline/loader.py]"""
    prefetch_steps: int = Field(default=2, ge=0, le=MAX_PREFETCH)
    """Steps fetched ahead of the consumer; 0 fetches each step on demand.
    [steps; data_pipeline/loader.py]"""
    prefetch_bytes: int = Field(default=4 << 30, ge=1, le=2**62)
    """Maximum size of the prefetched steps; one step is always fetched.
    [bytes; data_pipeline/loader.py]"""
    max_quarantined: int = Field(default=1000, ge=0, le=2**20)
    """Maximum number of quarantined samples of a run, resumes included. One more ends the run.
    [samples; data_pipeline/plan/planner.py]"""
    tombstones: str | None = None
    """List of samples that are excluded from a given step on: a key under `root`, a path or a URI
    of JSON lines {source, key, from_step}. [-; data_pipeline/plan/tombstones.py]"""
    same_decoders: bool = True
    """Refuse a state if other decoder versions are installed.
    [-; data_pipeline/plan/state.py]"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.root:
            raise ValueError("root is empty; give 's3://bucket/prefix' or a folder")
        check_endpoint("endpoint", self.endpoint)
        for name in ("root", "tokenizer", *(("tombstones",) if self.tombstones else ())):
            split_place(name, getattr(self, name))
        for where, names in (("max_epochs", self.max_epochs), ("augment", self.augment)):
            if unknown := sorted(set(names) - set(self.source_names)):
                raise ValueError(
                    f"{where} names {listed(unknown)}, which no source is called; "
                    f"{did_you_mean(unknown[0], self.source_names)}"
                )
        if both := sorted({*self.heldout} & {*self.source_names}):
            raise ValueError(
                f"heldout names {listed(both)}, which training draws from: their loss would not be "
                "that of held-out data; leave them out of one"
            )
        drawn = {*self.sources}.union(*(stage.sources for stage in self.schedule))
        if both := sorted({*self.past_sources} & drawn):
            raise ValueError(
                f"past_sources names {listed(both)}, which is drawn from; leave it out of one"
            )
        self._check_schedule()
        for name in (*self.source_names, *self.heldout):
            if len(given := {chosen.bounds for chosen in self._choices(name)}) > 1:
                raise ValueError(
                    f"source {name!r} is chosen by {' and by '.join(sorted(given))}; a source is "
                    "the same samples in all stages: give it the same bounds, or ingest it under "
                    "another name, too (kimi-pretrain data reindex)"
                )
        if self.workers and not self.prefetch_steps:
            raise ValueError("workers fetch ahead: prefetch_steps must be 1 or more for them")
        return self

    def _check_schedule(self) -> None:
        keys = {
            key
            for stage in self.schedule
            for key in ("after_tokens", "after_share")
            if getattr(stage, key) is not None
        }
        given = [(stage.after_tokens, stage.after_share) for stage in self.schedule]
        if self.schedule and (len(keys) != 1 or any(one == (None, None) for one in given)):
            raise ValueError(
                "schedule: each stage wants after_tokens, or each after_share; they are "
                + ", ".join(f"(after_tokens={a}, after_share={b})" for a, b in given)
            )
        if "after_share" in keys and self.budget is None:
            raise ValueError("schedule: after_share is a share of data.budget, which is not given")
        for key in keys:
            starts = [getattr(stage, key) for stage in self.schedule]
            if starts != sorted(set(starts)):
                raise ValueError(f"schedule: {key} are {listed(starts)}; they must increase")

    def _choices(self, name: str) -> Iterator[ChosenSource]:
        """Yield each entry with bounds for a source; its plain shares use the same bounds."""
        stages = (self.sources, *(stage.sources for stage in self.schedule))
        for shares in (*stages, self.past_sources, self.heldout):
            if isinstance(found := shares.get(name), ChosenSource) and found.bounds:
                yield found

    def chosen(self, name: str) -> ChosenSource | None:
        """Return the length bounds of a source; None if all samples are used."""
        return next(self._choices(name), None)

    def of_heldout(self) -> "DataConfig":
        """Return the configuration that reads the held-out sources as stored.

        The measured samples must not depend on how a run or stage draws its training data, so seed
        and shard window have their defaults.
        """
        default = type(self).model_fields
        return self.replace(
            sources=self.heldout, heldout={}, vision_token_ratio=None, schedule=[], max_epochs={},
            augment={}, budget=None, tombstones=None, seed=default["seed"].default,
            shard_window=default["shard_window"].default,
        )  # fmt: skip

    @property
    def source_names(self) -> tuple[str, ...]:
        """Sorted names of all sources in all stages, past sources included; numbers sources."""
        stages = (stage.sources for stage in self.schedule)
        return tuple(sorted({*self.sources, *self.past_sources}.union(*stages)))
