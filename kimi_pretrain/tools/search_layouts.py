"""Searches for the fastest layouts of a run's ranks that fit into memory: `plan --step --search`.

Every layout that passes the configuration's checks is predicted over the same planned steps, like
the run's own layout in `plan --step`. Layouts vary in pipeline (`layout.pp`, `vpp`, equal chunks),
in the ranks that share rows (`cp`, `tp`) and in the ranks of an expert group (`ep`). The memory
plan decides which memory settings a layout needs, and which of the run's own settings it can drop;
the fastest sufficient combination is used. Settings that change results are only tried if no other
settings suffice.

A lower bound on each layout's step, its passes without bubbles, needs no timeline. Layouts are
predicted in the order of this bound until no other layout can be among the best. The result lists
the fastest layout for each (pp, vpp, cp, tp). Layouts left out are counted by kind of reason, with
the first layout of each kind.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
from pydantic import ValidationError

from kimi_pretrain.config import GIB, ITEMSIZE, Config
from kimi_pretrain.dep.cost import FORWARDS_PER_STEP, CostModel
from kimi_pretrain.dep.pass_costs import update_seconds
from kimi_pretrain.memory.search import Combination, Layout, Levels
from kimi_pretrain.memory.states import Sizes, divide_config
from kimi_pretrain.memory.switches import Change, changed, released
from kimi_pretrain.parallel.layout import even_stages
from kimi_pretrain.tools.optimizer_division import Division
from kimi_pretrain.tools.predict import Progress
from kimi_pretrain.tools.predict_step import (
    PlannedSteps,
    StepPredictions,
    Visions,
    assumed_passes,
    assumed_traffic,
    plan_steps,
    predict_planned,
)
from kimi_pretrain.tools.step_parts import backbone_sum_seconds
from kimi_pretrain.tools.step_storage import FOREVER
from kimi_pretrain.tools.text_passes import Traffic, text_pipeline
from typed_config.section import problems

BEST = 10
CHUNKS = (1, 2, 4, 8)  # on a rank
# Memory switches that change results: the balance loss of routers, the gradients of experts.
CHANGING = {"rows_per_microbatch", "fp8_storage"}


@dataclass(frozen=True)
class Found:
    """A layout that fits: its predicted steps and its memory settings."""

    predicted: StepPredictions
    fits: Combination


@dataclass
class Reason:
    """A kind of reason to leave layouts out: its first layout and the number of layouts."""

    layout: str
    reason: str
    count: int = 0


@dataclass
class LeftOut:
    """Layouts left out, grouped by the text of the reason with its numbers replaced."""

    reasons: dict[str, Reason] = field(default_factory=dict)

    def add(self, layout: str, reason: str | ValueError) -> None:
        """Count a layout under its reason."""
        if isinstance(reason, ValidationError):
            reason = "; ".join(problems(reason))
        text = " ".join(str(reason).split())
        kind = re.sub(r"[\d.]+", "#", text)
        self.reasons.setdefault(kind, Reason(layout, text)).count += 1


@dataclass(frozen=True)
class LayoutSearch:
    """Result of a search.

    Attributes:
        own: the run's layout.
        priced: number of layouts that can run.
        best: fastest first.
        left_out: layouts that cannot run or do not fit into memory. Layouts whose bound is too slow
            are not checked for memory.
    """

    own: StepPredictions
    priced: int
    best: tuple[Found, ...]
    left_out: tuple[Reason, ...]


def search_layouts(
    config: Config, num_steps: int, traffic: Traffic, progress: Progress = lambda share, what: None
) -> LayoutSearch:
    """Search for the fastest layouts of the run's ranks under `train.memory_limit_gib`.

    Args:
        num_steps: number of first steps of the run that are predicted for each layout.
        traffic: between ranks, and with storage.

    Raises:
        ValueError: there is no memory limit, no layout fits, or the steps cannot be planned.
        StoreError: data.root cannot be read.
    """
    if config.train.memory_limit_gib is None:
        raise ValueError(
            "plan --search with train.memory_limit_gib=null: which layouts fit is not known; set "
            "it to the memory of a rank, less a few GiB for CUDA and NCCL"
        )
    limit = int(config.train.memory_limit_gib * GIB)
    # The checks refuse a run over its limit, but here such a run is a reason to search.
    config = config.replace(train=config.train.replace(memory_limit_gib=None))
    planned = plan_steps(config, num_steps, progress)
    search = _Search(config, planned, traffic, limit, LeftOut())
    own, free = search.price(config), released(config)
    waiting = list[tuple[float, int, tuple[Change, ...], Config]]()
    for number, changes in enumerate(layouts(config, search.left_out)):
        changes = (*changes, *free)
        try:
            other = changed(config, changes)
            waiting.append((search.bound(other), number, changes, other))
        except ValueError as error:  # it cannot run
            search.left_out.add(_named(config, changes), error)
    waiting.sort(key=lambda one: one[:2])
    best = dict[tuple[int, ...], Found]()
    for number, (bound, _, changes, other) in enumerate(waiting):
        progress(number / len(waiting), f"layout {number + 1} of {len(waiting)}")
        seconds = sorted(one.predicted.mean.total for one in best.values())
        if len(seconds) >= BEST and bound >= seconds[BEST - 1]:
            break
        layout = other.layout
        kind = layout.pp, layout.vpp, layout.cp, layout.tp
        if kind in best and bound >= best[kind].predicted.mean.total:
            continue
        found = search.fastest(other, changes)
        if found is not None and (
            kind not in best or found.predicted.mean.total < best[kind].predicted.mean.total
        ):
            best[kind] = found
    if not best:
        raise ValueError(
            f"plan --search: none of {len(waiting)} layouts of {config.layout.world_size()} ranks "
            f"fits train.memory_limit_gib={limit / GIB:g}; raise it, or use more "
            "ranks: `kimi-pretrain plan --memory` says what holds the most"
        )
    ordered = sorted(best.values(), key=lambda one: one.predicted.mean.total)
    reasons = tuple(search.left_out.reasons.values())
    return LayoutSearch(own, len(waiting), tuple(ordered[:BEST]), reasons)


def sums_and_update(config: Config, traffic: Traffic) -> float:
    """Return the seconds after the pipeline that every step has: gradient sums and the update."""
    return float(backbone_sum_seconds(config, traffic).max()) + update_seconds(config)


@dataclass(frozen=True)
class _Search:
    """Predicts layouts and fits them into memory."""

    config: Config
    planned: PlannedSteps
    traffic: Traffic
    limit: int
    left_out: LeftOut

    @cached_property
    def visions(self) -> Visions:
        """Vision plans of the steps, shared by the layouts."""
        return Visions(self.planned.plans)

    def bound(self, config: Config) -> float:
        """Return a lower bound on the seconds of a layout's step, for any memory switches.

        Switches add compute, but may also cut microbatches or shorten waits for offload; the bound
        allows for both.
        """
        pipeline = text_pipeline(config, replace(self.traffic, host=FOREVER))
        least = pipeline.least(config.train.rows_per_microbatch)
        return least + sums_and_update(config, self.traffic) + self.least_media(config)

    def price(self, config: Config, division: Division | None = None) -> StepPredictions:
        """Predict the planned steps, as `plan --step` does.

        Reads are only counted if their bandwidth or request rate is known.
        """
        known = self.traffic.storage is not None or config.data.requests_per_second is not None
        plans, indices = self.planned.plans, self.planned.indices if known else ()
        return predict_planned(config, plans, self.traffic, indices, self.visions, division)

    def least_media(self, config: Config) -> float:
        """Return a lower bound on encoder seconds outside of bubbles: its work spread evenly."""
        if config.in_bubbles():
            return 0.0
        passes = FORWARDS_PER_STEP - (config.dep.keep_activations == "auto")
        passes = 1.0 if "vision_tower" in config.train.frozen else passes
        return self._forward * passes / config.layout.world_size()

    @cached_property
    def _forward(self) -> float:
        """Mean seconds per step of the forward pass of all media, summed over the ranks."""
        model = CostModel.configured(self.config)
        costs = [model.seconds(plan.items.patches).sum() for plan in self.planned.plans]
        return float(np.mean(costs)) / FORWARDS_PER_STEP

    def fastest(self, config: Config, changes: tuple[Change, ...]) -> Found | None:
        """Return a layout with its fastest memory settings; None if no settings fit.

        Settings that change results are only tried if no others fit.
        """
        layout, sizes = Layout.of(config, changes), Sizes.of(config)
        for changing in (False, True) if max(_lasting(config, sizes)) <= self.limit else ():
            # A cheap filter by the mean optimizer state comes first; the fullest rank has more.
            fits = [
                taken
                for taken in _combinations(layout, changing=changing)
                if self._fitting(layout, taken, None, sizes)
            ]
            try:
                found = self._fastest_of(layout, fits, sizes) if fits else None
            except ValueError as error:
                self.left_out.add(_named(config, changes), error)
                return None
            if found is not None:
                return replace(found, fits=replace(found.fits, settings=_settings(found.fits)))
        reason = f"fits train.memory_limit_gib={self.limit / GIB:g} with no settings"
        self.left_out.add(_named(config, changes), reason)
        return None

    def _fitting(
        self, layout: Layout, taken: Levels, division: Division | None, sizes: Sizes
    ) -> Combination | None:
        planned = layout.plan(taken, division, sizes)
        return None if planned is None or planned.fullest.peak > self.limit else planned

    def _tried(self, layout: Layout, taken: Levels) -> "_Tried":
        config = layout.with_levels(taken)
        pipeline = text_pipeline(config, self.traffic).line().total
        rest = sums_and_update(config, self.traffic) + self.least_media(config)
        return _Tried(taken, config, pipeline, pipeline + rest)

    def _fastest_of(self, layout: Layout, taken: Sequence[Levels], sizes: Sizes) -> Found | None:
        """Return the fastest combination that fits; None if none does.

        If two combinations have equal pass times and one has all switches of the other, the one
        with more switches cannot be faster and is skipped.

        Raises:
            ValueError: the combinations that fit cannot be planned.
        """
        division, best, priced = divide_config(layout.config), None, list[_Tried]()
        refused: ValueError | None = None
        for one in sorted((self._tried(layout, each) for each in taken), key=lambda one: one.order):
            if best is not None and one.bound >= best.predicted.mean.total:
                break
            if any(one.pipeline == other.pipeline and other.is_part_of(one) for other in priced):
                continue
            fits = self._fitting(layout, one.taken, division, sizes)
            if fits is None:
                continue
            try:
                predicted = self.price(one.config, division)
            except ValueError as error:  # media over dep.memory_limit_gib: smaller chunks may fit
                refused = error
                continue
            priced.append(one)
            if best is None or predicted.mean.total < best.predicted.mean.total:
                best = Found(predicted, fits)
        if best is None and refused is not None:
            raise refused
        return best


@dataclass(frozen=True)
class _Tried:
    """A combination of switches.

    Attributes:
        pipeline: seconds of the passes with text only.
        bound: lower bound on the seconds of a step.
    """

    taken: Levels
    config: Config
    pipeline: float
    bound: float

    @property
    def order(self) -> tuple[float, int, Levels]:
        """Sort key: lower bound first, then fewer and milder switches."""
        return self.bound, sum(self.taken), self.taken

    def is_part_of(self, other: "_Tried") -> bool:
        """Return whether the other combination has all switches of this one."""
        return all(a <= b for a, b in zip(self.taken, other.taken, strict=True))


def _lasting(config: Config, sizes: Sizes) -> Iterator[int]:
    """Yield, for each stage, a lower bound on a rank's bytes in every phase, for any switches."""
    item, trained = ITEMSIZE[config.train.dtype], "language_model" not in config.train.frozen
    for stage, state in zip(sizes.stages, sizes.state, strict=True):
        weights, (encoder, trained_encoder) = sum(stage), sizes.encoder
        gradients = max(4, item) * (weights * trained + trained_encoder)
        yield item * (weights + encoder) + gradients + state


def _combinations(layout: Layout, *, changing: bool) -> Iterator[Levels]:
    """Yield combinations of switch levels; `changing`: only those with a switch of `CHANGING`.

    Measured passes without a recorded number of rows cannot be rescaled to single rows.
    """
    cost = layout.config.dep.pass_cost
    known = cost is None or cost.rows is not None
    keys = [levels[0].key for levels in layout.levels]
    ranges: list[range] = []
    for key, levels in zip(keys, layout.levels, strict=True):
        taken = (changing or key not in CHANGING) and (known or key != "rows_per_microbatch")
        ranges.append(range(len(levels) + 1 if taken else 1))
    for taken in product(*ranges):
        if changing == any(n and key in CHANGING for n, key in zip(taken, keys, strict=True)):
            yield taken


def _settings(fits: Combination) -> tuple[str, ...]:
    """Return the overrides that differ from the run's config. A key that occurs twice is dropped: a
    switch of the run was released and then applied again.
    """
    keys = [text.partition("=")[0] for text in fits.settings]
    return tuple(text for text, key in zip(fits.settings, keys) if keys.count(key) == 1)


def _named(config: Config, changes: tuple[Change, ...]) -> str:
    """Return a layout in words."""
    layout = config.layout
    values = {key: getattr(layout, key) for key in ("pp", "vpp", "dp", "cp", "tp", "ep")}
    values |= {one.key: one.value for one in changes if one.key in values}
    return ", ".join(f"{key} {value}" for key, value in values.items())


def layouts(config: Config, left_out: LeftOut) -> Iterator[tuple[Change, ...]]:
    """Yield the changes that turn the run's layout into each candidate with as many ranks.

    Pipelines other than the run's have a power of two of stages and equal chunks. cp, tp and ep are
    powers of two, with ep ascending.

    Args:
        left_out: counts pipelines with more chunks than layers.
    """
    layout, ranks = config.layout, config.layout.world_size()
    powers = [2**power for power in range(ranks.bit_length())]
    pipelines = [(layout.pp, layout.vpp)]
    for pp in powers:
        pipelines += [(pp, vpp) for vpp in (CHUNKS if pp > 1 else (1,)) if ranks % pp == 0]
    shared = dict.fromkeys([(layout.cp, layout.tp), *product(powers, powers)])
    for pp, vpp in dict.fromkeys(pipelines):
        stages = layout.stages
        if (pp, vpp) != (layout.pp, layout.vpp):
            try:
                stages = even_stages(config.model.language.num_layers, pp * vpp)
            except ValueError as error:
                left_out.add(f"pp {pp}, vpp {vpp}", error)
                continue
        for cp, tp in shared:
            if ranks % (pp * cp * tp):
                continue
            values = {"pp": pp, "vpp": vpp, "dp": ranks // (pp * cp * tp), "cp": cp, "tp": tp}
            for ep in powers:
                if ep > ranks // pp:
                    break
                # Overlap needs virtual stages, and an exchange between ranks.
                overlap = layout.overlap_experts and vpp > 1 and ep > 1
                every = {**values, "ep": ep, "stages": stages, "overlap_experts": overlap}
                yield tuple(
                    Change("layout", key, value)
                    for key, value in every.items()
                    if value != getattr(layout, key)
                )


def lines(found: LayoutSearch) -> Iterator[str]:
    """Yield the table as text, for the terminal."""
    config = found.own.config
    yield (
        f"{config.layout.world_size()} ranks, {found.priced} layouts; as configured "
        f"{found.own.mean.total:.4g} s a step, {found.own.tokens_per_day:,.0f} tokens a day"
    )
    yield " s/step    tokens/day     GiB  with"
    for one in found.best:
        settings = " ".join(map(shlex.quote, one.fits.settings))
        yield (
            f"{one.predicted.mean.total:7.4g} {one.predicted.tokens_per_day:13,.0f} "
            f"{one.fits.fullest.peak / GIB:7.1f}  {settings}"
        )
    if found.left_out:
        yield f"left out: {sum(one.count for one in found.left_out)} layouts"
    for one in found.left_out:
        yield f"{one.count:4d} such as {one.layout}: {one.reason}"
    yield f"assumed: {assumed_passes(config)}, {assumed_traffic(found.own.traffic)}"


def as_json(found: LayoutSearch) -> dict[str, Any]:
    """Return the result as plain values."""
    return {
        "priced": found.priced,
        "own_seconds": found.own.mean.total,
        "left_out": [asdict(one) for one in found.left_out],
        "best": [
            {
                "seconds": one.predicted.mean.total,
                "tokens_per_day": one.predicted.tokens_per_day,
                "bytes": one.fits.fullest.peak,
                "settings": list(one.fits.settings),
            }
            for one in found.best
        ],
    }
