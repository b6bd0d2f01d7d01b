"""Which layouts of a run's ranks are fastest and fit into memory: `plan --step --search`.

Every pipeline (`layout.pp`, `vpp`, equal chunks) with every number of ranks for the experts is
priced with the same planned steps, as `plan --step` prices the run's own. The fastest come first;
each is then asked for the least costly switches of memory with which it fits: what these cost in
time is not priced. Of a pipeline the fastest that fits is listed.
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kimi_pretrain.config import GIB, Config
from kimi_pretrain.memory.search import Combination, Layout, cheapest
from kimi_pretrain.memory.switches import Change, changed
from kimi_pretrain.parallel.layout import even_stages
from kimi_pretrain.tools.predict import Progress
from kimi_pretrain.tools.predict_step import StepPredictions, plan_steps, predict_planned

BEST = 10
CHUNKS = (1, 2, 4, 8)  # on a rank


@dataclass(frozen=True)
class Found:
    """A layout that fits: its steps, and with which settings it fits."""

    predicted: StepPredictions
    fits: Combination


@dataclass(frozen=True)
class LayoutSearch:
    """The best layouts, fastest first; `own`: the run's; `priced`: how many can run."""

    own: StepPredictions
    priced: int
    best: tuple[Found, ...]


def search_layouts(
    config: Config, num_steps: int, network: float, progress: Progress = lambda share, what: None
) -> LayoutSearch:
    """Look for the fastest layouts of as many ranks, under `train.memory_limit_gib`.

    Args:
        num_steps: first steps of the run that each is priced with.
        network: bytes a second that a rank sends, and receives.

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
    own = predict_planned(config, plans, network)
    priced = list[tuple[StepPredictions, tuple[Change, ...]]]()
    for changes in layouts(config):
        try:
            other = changed(config, changes)
            priced.append((predict_planned(other, plans, network), changes))
        except ValueError:  # it cannot run
            continue
    priced.sort(key=lambda one: one[0].mean.total)  # stable: as `layouts` has them
    best = dict[tuple[int, int], Found]()
    for number, (predicted, changes) in enumerate(priced):
        progress(number / len(priced), f"memory of layout {number + 1}")
        pipeline = predicted.config.layout.pp, predicted.config.layout.vpp
        if pipeline in best:
            continue
        _, _, fits = cheapest(Layout.of(predicted.config, changes), limit, None)
        if fits is not None:
            best[pipeline] = Found(predicted, fits)
        if len(best) == BEST:
            break
    if not best:
        raise ValueError(
            f"plan --search: none of {len(priced)} layouts of {config.layout.world_size()} ranks "
            f"fits train.memory_limit_gib={limit / GIB:g}; raise it, or use more "
            "ranks: `kimi-pretrain plan --memory` says what holds the most"
        )
    return LayoutSearch(own, len(priced), tuple(best.values()))


def layouts(config: Config) -> Iterator[tuple[Change, ...]]:
    """Yield what makes each layout of as many ranks of the run's own: pipelines, then experts.

    Other pipelines than the run's have a power of two of stages and equal chunks; experts are on a
    power of two of ranks, the fewest first.
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
            except ValueError:  # more chunks than layers
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
    yield (
        f"assumed: passes at dep.flops_per_second={config.dep.flops_per_second:.3g}, --network "
        f"{found.own.network:.3g} bytes/s; what the settings of memory cost is not priced"
    )


def as_json(found: LayoutSearch) -> dict[str, Any]:
    """Return the result as plain values."""
    return {
        "priced": found.priced,
        "own_seconds": found.own.mean.total,
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
