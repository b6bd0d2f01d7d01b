"""Which layouts of a run's ranks are fastest and fit into memory: `plan --step --search`.

Every pipeline (`layout.pp`, `vpp`, equal chunks) with every number of ranks for the experts is
priced with the same planned steps, as `plan --step` prices the run's own. The fastest come first;
each is then asked for the least costly switches of memory with which it fits: what these cost in
time is not priced. Of a pipeline the fastest that fits is listed. What is left out is counted, with
the first reason of each kind.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import ValidationError

from kimi_pretrain.config import GIB, Config
from kimi_pretrain.memory.search import Combination, Layout, cheapest
from kimi_pretrain.memory.switches import Change, changed
from kimi_pretrain.parallel.layout import even_stages
from kimi_pretrain.tools.predict import Progress
from kimi_pretrain.tools.predict_step import (
    StepPredictions,
    assumed_passes,
    assumed_traffic,
    plan_steps,
    predict_planned,
)
from kimi_pretrain.tools.text_passes import Traffic
from typed_config.section import problems

BEST = 10
CHUNKS = (1, 2, 4, 8)  # on a rank


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
        left_out: those that cannot run, or do not fit into memory; once `BEST` are found no others
            are asked for their memory.
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
    plans = plan_steps(config, num_steps, progress)
    own = predict_planned(config, plans.plans, traffic, plans.indices)
    priced, left_out = list[tuple[StepPredictions, tuple[Change, ...]]](), LeftOut()
    for changes in layouts(config, left_out):
        try:
            other = changed(config, changes)
            found = predict_planned(other, plans.plans, traffic, plans.indices)
            priced.append((found, changes))
        except ValueError as error:  # it cannot run
            left_out.add(_named(config, changes), error)
    priced.sort(key=lambda one: one[0].mean.total)  # stable: as `layouts` has them
    best = dict[tuple[int, int], Found]()
    for number, (predicted, changes) in enumerate(priced):
        progress(number / len(priced), f"memory of layout {number + 1}")
        pipeline = predicted.config.layout.pp, predicted.config.layout.vpp
        if pipeline in best:
            continue
        _, _, fits = cheapest(Layout.of(predicted.config, changes), limit, None)
        if fits is None:
            reason = f"fits train.memory_limit_gib={limit / GIB:g} with no settings"
            left_out.add(_named(config, changes), reason)
        else:
            best[pipeline] = Found(predicted, fits)
        if len(best) == BEST:
            break
    if not best:
        raise ValueError(
            f"plan --search: none of {len(priced)} layouts of {config.layout.world_size()} ranks "
            f"fits train.memory_limit_gib={limit / GIB:g}; raise it, or use more "
            "ranks: `kimi-pretrain plan --memory` says what holds the most"
        )
    reasons = tuple(left_out.reasons.values())
    return LayoutSearch(own, len(priced), tuple(best.values()), reasons)


def _named(config: Config, changes: tuple[Change, ...]) -> str:
    """Return a layout in words."""
    layout = config.layout
    values = {key: getattr(layout, key) for key in ("pp", "vpp", "dp", "ep")}
    values |= {one.key: one.value for one in changes if one.key in values}
    return ", ".join(f"{key} {value}" for key, value in values.items())


def layouts(config: Config, left_out: LeftOut) -> Iterator[tuple[Change, ...]]:
    """Yield what makes each layout of as many ranks of the run's own: pipelines, then experts.

    Other pipelines than the run's have a power of two of stages and equal chunks; experts are on a
    power of two of ranks, the fewest first.

    Args:
        left_out: counts pipelines with more chunks than there are layers for.
    """
    layout = config.layout
    ranks = layout.pp * layout.dp
    pipelines = [(layout.pp, layout.vpp)]
    for pp in (2**power for power in range(ranks.bit_length())):
        pipelines += [(pp, vpp) for vpp in (CHUNKS if pp > 1 else (1,)) if ranks % pp == 0]
    for pp, vpp in dict.fromkeys(pipelines):
        dp, stages = ranks // pp, layout.stages
        if (pp, vpp) != (layout.pp, layout.vpp):
            try:
                stages = even_stages(config.model.language.num_layers, pp * vpp)
            except ValueError as error:
                left_out.add(f"pp {pp}, vpp {vpp}", error)
                continue
        most = dp * layout.cp * layout.tp
        for ep in (2**power for power in range(most.bit_length())):
            values = {"pp": pp, "vpp": vpp, "dp": dp, "ep": ep, "stages": stages}
            yield tuple(
                Change("layout", key, value)
                for key, value in values.items()
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
    yield (
        f"assumed: {assumed_passes(config)}, {assumed_traffic(found.own.traffic)}; what the "
        "settings of memory cost is not priced"
    )


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
