"""Which layouts of a run's ranks are fastest and fit into memory: `plan --step --search`.

Every layout that the configuration's checks accept is priced with the same planned steps, as
`plan --step` prices the run's own: pipelines (`layout.pp`, `vpp`, equal chunks), ranks that share
rows (`cp`, `tp`), ranks that experts are on. Which settings of memory a layout needs, the plan of
memory says, also which of the run's own it does not; of those that suffice the fastest are taken.
Settings that change results are left alone where others suffice.

No layout is faster than its passes without bubbles between them: so much is known of each without a
timeline. They are looked at in that order, until no other can be among the best. Of a pipeline with
its ranks for rows the fastest is listed. What is left out is counted, with the first reason of each
kind.
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
# Switches of memory that change results: the balance loss of routers, gradients of experts.
CHANGING = {"rows_per_microbatch", "fp8_storage"}


@dataclass(frozen=True)
class Found:
    """A layout that fits: its steps, and with which settings it fits."""

    predicted: StepPredictions
    fits: Combination


@dataclass
class Reason:
    """Why layouts were left out: the first of this kind, and how many."""

    layout: str
    reason: str
    count: int = 0


@dataclass
class LeftOut:
    """Layouts that were left out, by the kind of reason: its words without the numbers in them."""

    reasons: dict[str, Reason] = field(default_factory=dict)

    def add(self, layout: str, reason: str | ValueError) -> None:
        """Count a layout."""
        if isinstance(reason, ValidationError):
            reason = "; ".join(problems(reason))
        text = " ".join(str(reason).split())
        kind = re.sub(r"[\d.]+", "#", text)
        self.reasons.setdefault(kind, Reason(layout, text)).count += 1


@dataclass(frozen=True)
class LayoutSearch:
    """What was found.

    Attributes:
        own: the run's layout.
        priced: how many layouts can run.
        best: fastest first.
        left_out: those that cannot run, or do not fit into memory; of those that are too slow
            anyway none is asked for its memory.
    """

    own: StepPredictions
    priced: int
    best: tuple[Found, ...]
    left_out: tuple[Reason, ...]


def search_layouts(
    config: Config, num_steps: int, traffic: Traffic, progress: Progress = lambda share, what: None
) -> LayoutSearch:
    """Look for the fastest layouts of as many ranks, under `train.memory_limit_gib`.

    Args:
        num_steps: first steps of the run that each is priced with.
        traffic: between ranks.

    Raises:
        ValueError: there is no limit of memory, no layout fits, or the steps cannot be planned.
        StoreError: data.root cannot be read.
    """
    if config.train.memory_limit_gib is None:
        raise ValueError(
            "plan --search with train.memory_limit_gib=null: which layouts fit is not known; set "
            "it to the memory of a rank, less a few GiB for CUDA and NCCL"
        )
    limit = int(config.train.memory_limit_gib * GIB)
    # A run over its limit is refused where it starts; here it is what the search is for.
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
    """Return the seconds behind the pipeline that any step has."""
    return float(backbone_sum_seconds(config, traffic).max()) + update_seconds(config)


@dataclass(frozen=True)
class _Search:
    """Prices layouts, and fits them into memory."""

    config: Config
    planned: PlannedSteps
    traffic: Traffic
    limit: int
    left_out: LeftOut

    @cached_property
    def visions(self) -> Visions:
        """Plans of the encoder's work."""
        return Visions(self.planned.plans)

    def bound(self, config: Config) -> float:
        """Return seconds that a step of a layout takes at least, whatever of memory is switched.

        Switches make computing longer, but may lessen what waits for the host, and cut
        microbatches.
        """
        pipeline = text_pipeline(config, replace(self.traffic, host=FOREVER))
        least = pipeline.least(config.train.rows_per_microbatch)
        return least + sums_and_update(config, self.traffic) + self.least_media(config)

    def price(self, config: Config, division: Division | None = None) -> StepPredictions:
        """Predict the planned steps, as `plan --step` does.

        Reads are counted only where something is known of how fast they are.
        """
        known = self.traffic.storage is not None or config.data.requests_per_second is not None
        plans, indices = self.planned.plans, self.planned.indices if known else ()
        return predict_planned(config, plans, self.traffic, indices, self.visions, division)

    def least_media(self, config: Config) -> float:
        """Return the seconds of the encoder at least, evenly on all ranks, outside of bubbles."""
        if config.in_bubbles():
            return 0.0
        passes = FORWARDS_PER_STEP - (config.dep.keep_activations == "auto")
        passes = 1.0 if "vision_tower" in config.train.frozen else passes
        return self._forward * passes / config.layout.world_size()

    @cached_property
    def _forward(self) -> float:
        """The seconds of a forward pass of all media of a step, on the mean."""
        model = CostModel.configured(self.config)
        costs = [model.seconds(plan.items.patches).sum() for plan in self.planned.plans]
        return float(np.mean(costs)) / FORWARDS_PER_STEP

    def fastest(self, config: Config, changes: tuple[Change, ...]) -> Found | None:
        """Return a layout with the settings of memory with which it is fastest; None: none fits.

        Settings that change results are tried only where no others fit.
        """
        layout, sizes = Layout.of(config, changes), Sizes.of(config)
        for changing in (False, True) if max(_lasting(config, sizes)) <= self.limit else ():
            # By the mean of the optimizer's state first: the fullest rank has more.
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
        """Return the fastest combination that fits; None: none does.

        Of two whose passes take as long one that only has more switches is not faster.

        Raises:
            ValueError: what fits cannot be planned.
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
        pipeline: seconds of the passes with text alone.
        bound: seconds that a step takes at least.
    """

    taken: Levels
    config: Config
    pipeline: float
    bound: float

    @property
    def order(self) -> tuple[float, int, Levels]:
        """The fastest first; of equal ones that with fewer switches, and milder ones."""
        return self.bound, sum(self.taken), self.taken

    def is_part_of(self, other: "_Tried") -> bool:
        """Whether the other has all its switches."""
        return all(a <= b for a, b in zip(self.taken, other.taken, strict=True))


def _lasting(config: Config, sizes: Sizes) -> Iterator[int]:
    """Yield what a rank of each stage holds in every phase at least, whatever is switched."""
    item, trained = ITEMSIZE[config.train.dtype], "language_model" not in config.train.frozen
    for stage, state in zip(sizes.stages, sizes.state, strict=True):
        weights, (encoder, trained_encoder) = sum(stage), sizes.encoder
        gradients = max(4, item) * (weights * trained + trained_encoder)
        yield item * (weights + encoder) + gradients + state


def _combinations(layout: Layout, *, changing: bool) -> Iterator[Levels]:
    """Yield the levels of switches; `changing`: those alone with switches of `CHANGING`.

    Passes that were measured with another number of rows cannot be told for single ones.
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
    """Return the overrides that say what is not as the run has it: a switch of the run's that was
    taken back and thrown again is there twice.
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
    """Yield what makes each layout of as many ranks of the run's own.

    Other pipelines than the run's have a power of two of stages and equal chunks; rows are shared
    by powers of two of ranks, and experts are on one, the fewest first.

    Args:
        left_out: counts pipelines with more chunks than there are layers for.
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
                # Only chunks that take turns overlap, and only what is sent.
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
