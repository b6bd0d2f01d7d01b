"""Memory plan as text and as plain values, for `kimi-pretrain plan --memory` and the dry run."""

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from kimi_pretrain.config import GIB, Config
from kimi_pretrain.memory.plan import MemoryPlan, StageMemory, media_share, plan_memory
from kimi_pretrain.memory.search import Combination, Search, search
from kimi_pretrain.memory.states import divide_config
from kimi_pretrain.tools.optimizer_division import Division
from kimi_pretrain.tools.optimizer_report import runs

# Memory of common GPUs according to their data sheets, in GB of 10^9 bytes.
CARDS = {"H100, H800 (80 GB)": 80e9, "H200 (141 GB)": 141e9}


@dataclass(frozen=True)
class MemoryReport:
    """The memory plan of a run, and settings that bring it under each limit that it exceeds.

    Attributes:
        searches: keyed by the name of the limit: `train.memory_limit_gib` or a GPU.
        media: the assumed share of media tokens; None: none is given.
    """

    plan: MemoryPlan
    searches: dict[str, Search]
    media: float | None


def report(config: Config, division: Division | None = None) -> MemoryReport:
    """Plan the memory of a run; search settings for its own limit and the GPUs that it exceeds.

    Args:
        division: of the optimizer's state, if it is known.
    """
    division = division or divide_config(config)
    plan, limits = plan_memory(config, division), dict[str, float](CARDS)
    if (own := config.train.memory_limit_gib) is not None:
        limits = {f"train.memory_limit_gib={own:g}": own * GIB}
    over = {name: int(size) for name, size in limits.items() if plan.fullest.peak > size}
    searches = {name: search(config, over[name], division) for name in over}
    return MemoryReport(plan, searches, media_share(config))


def lines(found: MemoryReport) -> Iterator[str]:
    """Yield the report as text, for the terminal."""
    yield from _table(found.plan)
    yield from _fullest(found.plan.fullest)
    if found.media is None:
        yield (
            "  not counted: vision embeddings, of which data.vision_token_ratio=null says nothing; "
            "`plan --memory` with a ratio shows them"
        )
    for name, size in CARDS.items():
        fits = found.plan.fullest.peak <= size
        yield f"  {name}: {'fits' if fits else 'does not fit'}"
    for switch in found.plan.switches:
        yield f"  with {switch.setting}: {switch.peak / GIB:.1f} GiB"
    for name, one in found.searches.items():
        yield from search_lines(name, one)


def search_lines(name: str, found: Search) -> Iterator[str]:
    """Yield the combinations that fit under a limit, as text.

    Args:
        name: of the limit.
    """
    yield ""
    yield (
        f"under {name}, {found.limit / GIB:.1f} GiB: what fits, of {found.tried} combinations, "
        "fewest ranks first, then least costly"
    )
    yield " ranks    GiB  fullest rank, phase  with"
    if not found.fits or found.fits[0].ranks > found.least.ranks:
        yield _row(found.least) + "  (the least there is: does not fit)"
    yield from map(_row, found.fits)
    yield "not counted: CUDA and NCCL (1 to 3 GiB), fragmentation, uneven loads of experts"


def _row(one: Combination) -> str:
    where = f"{one.fullest.rank}, {one.fullest.fullest_phase}"
    settings = " ".join(map(shlex.quote, one.settings))
    return f"{one.ranks:6d} {one.fullest.peak / GIB:6.1f}  {where:19s}  {settings}"


def _table(plan: MemoryPlan) -> Iterator[str]:
    yield ""
    yield "memory of the fullest rank of each stage, GiB (docs/MEMORY.md says what is not in it)"
    yield (
        "stage   rank  layers        weights  gradients  optimizer  activations   media  passing"
        "  encoder  exchange  update    peak  in"
    )
    for one in plan.stages:
        waiting = one.embeddings + one.waiting
        numbers = (waiting, one.passing, one.encoder, one.exchange, one.update, one.peak)
        media, passing, encoder, exchange, update, peak = (size / GIB for size in numbers)
        yield (
            f"{one.stage:5d} {one.rank:6d}  {runs(one.layers):12s} {one.weights / GIB:8.1f} "
            f"{one.gradients / GIB:10.1f} {one.optimizer / GIB:10.1f} "
            f"{one.activations.total() / GIB:12.1f} {media:7.1f} {passing:8.1f} {encoder:8.1f} "
            f"{exchange:9.1f} {update:7.1f} {peak:7.1f}  {one.fullest_phase}"
        )


def _fullest(most: StageMemory) -> Iterator[str]:
    held = " + ".join(map(str, most.in_flight))
    yield (
        f"the fullest is rank {most.rank}: {most.peak / GIB:.1f} GiB ({most.peak / 1e9:.1f} GB), "
        f"activations of {held} microbatches of its chunks in flight:"
    )
    kinds = sorted(most.activations.items(), key=lambda item: (-item[1], item[0]))
    yield "  " + ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in kinds if size > GIB / 20)
    if most.host:
        yield f"  in host memory: {most.host / GIB:.1f} GiB"


def as_json(found: MemoryReport) -> dict[str, Any]:
    """Return the report as plain values, sizes in bytes."""
    return {
        "stages": [_stage(one) for one in found.plan.stages],
        "switches": [asdict(switch) for switch in found.plan.switches],
        "searches": {
            name: {
                "limit": one.limit,
                "tried": one.tried,
                "least": _combination(one.least),
                "fits": [_combination(fit) for fit in one.fits],
            }
            for name, one in found.searches.items()
        },
    }


def _stage(one: StageMemory) -> dict[str, Any]:
    more = {"activations": dict(one.activations), "peak": one.peak, "phase": one.fullest_phase}
    return vars(one) | more


def _combination(one: Combination) -> dict[str, Any]:
    return {"settings": one.settings, "ranks": one.ranks, "fullest": _stage(one.fullest)}
