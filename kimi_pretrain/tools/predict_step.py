"""Predicts the duration of a run's first steps from index and layout: `plan --step`. Pure.

    vision forward | hand-over | pipeline | hand-back | recompute, backward | sums | update

Pipeline passes cost what `plan --calibrate` measured (`dep.pass_cost`), or else the counted
operations over `dep.flops_per_second` (`dep.pass_costs`). They run on the timeline that also plans
vision work in bubbles; the exchange of experts between nodes is added. Media cost what the vision
plan predicts (`step_parts`). Storage adds the stalls of checkpoints and the waits for the loader
(`step_storage`). If `dep.update_cost` is not given, the update is left out and the output says so.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from data_pipeline.index.columns import SourceIndex
from data_pipeline.plan.planner import GlobalPlan, Planner
from kimi_pretrain.config import GIB, Config
from kimi_pretrain.dep.planner import VisionPlanner
from kimi_pretrain.dep.vision_plan import VisionPlan, grids_of
from kimi_pretrain.reliability.preflight import check_start
from kimi_pretrain.tools.optimizer_division import Division
from kimi_pretrain.tools.predict import Progress
from kimi_pretrain.tools.step_parts import StepSeconds, step_seconds
from kimi_pretrain.tools.step_storage import Reading, Save, StepReads, loader_wait, plan_save
from kimi_pretrain.tools.text_passes import Traffic, text_pipeline

DAY = 24 * 3600
SHARE = 0.05  # of the step, from which a part is reported


@dataclass(frozen=True)
class PlannedSteps:
    """Plans of a run's first steps, and the indices of the sources, as the plans number them.

    They are the same for all layouts with the same number of rows per step.
    """

    plans: tuple[GlobalPlan, ...]
    indices: tuple[SourceIndex, ...]


@dataclass(frozen=True)
class StepPredictions:
    """The first steps of a run.

    Attributes:
        tokens: tokens of samples in each step, without padding.
        reads: of each step; empty if the indices are not known.
        save: one checkpoint; None if the run writes no periodic checkpoints.
    """

    config: Config
    traffic: Traffic
    steps: tuple[StepSeconds, ...]
    tokens: tuple[int, ...]
    reads: tuple[StepReads, ...]
    save: Save | None

    @property
    def mean(self) -> StepSeconds:
        """Mean of each part over the steps."""
        names = [field.name for field in fields(StepSeconds)]
        each = [[getattr(step, name) for step in self.steps] for name in names]
        return StepSeconds(*(float(np.mean(values)) for values in each))

    @property
    def tokens_per_day(self) -> float:
        """Tokens of samples that the run trains on per day."""
        return DAY * sum(self.tokens) / sum(step.total for step in self.steps)


def plan_steps(config: Config, num_steps: int, progress: Progress) -> PlannedSteps:
    """Plan a run's first steps.

    Args:
        progress: called with the finished share and the name of the current task.

    Raises:
        ValueError: the config's data cannot be planned, or its encoder runs inside the graph of the
            first stage.
        StoreError: data.root cannot be read.
    """
    if config.dep.placement == "colocated":
        raise ValueError(
            "plan --step with dep.placement=colocated: the encoder runs inside the graph of the "
            "first stage, whose passes are not predicted; set dep.placement=decoupled"
        )
    progress(0.0, "reading the index")
    planner = Planner(check_start(config, steps=0, data_alone=True).indices, config.data)
    state, plans = planner.state_dict(), list[GlobalPlan]()
    for number in range(1, num_steps + 1):
        progress((number - 1) / num_steps, f"step {number}")
        plan, state = planner.plan(state)
        plans.append(plan)
    return PlannedSteps(tuple(plans), planner.indices)


class Visions:
    """Cache of the vision plans of some steps, shared by layouts that lead to the same plans."""

    def __init__(self, plans: Sequence[GlobalPlan]):
        self.plans = plans
        self._found = dict[str, tuple[VisionPlan, ...]]()

    def of(self, config: Config) -> tuple[VisionPlan, ...]:
        """Return the vision plans of all steps under a configuration.

        Raises:
            ValueError: the layout or a step cannot be planned.
        """
        key = _vision_key(config)
        if key not in self._found:
            planner = VisionPlanner(config)
            self._found[key] = tuple(planner.plan(plan) for plan in self.plans)
        return self._found[key]


def _vision_key(config: Config) -> str:
    """Return a key of all settings that a search changes and the vision plan depends on."""
    layout, dep = config.layout, config.dep
    parts: list[object] = [layout.dp, layout.pp, layout.cp, layout.tp]
    parts.append(config.train.rows_per_microbatch)
    if config.in_bubbles():
        parts += [layout.vpp, layout.stages, dep.keep_activations]
    if dep.memory_limit_gib is not None:  # the plan refuses chunks over the limit
        parts.append(dep.max_patches_per_chunk)
    return repr(parts)


def predict_planned(
    config: Config,
    plans: Sequence[GlobalPlan],
    traffic: Traffic,
    indices: Sequence[SourceIndex] = (),
    visions: Visions | None = None,
    division: Division | None = None,
) -> StepPredictions:
    """Predict planned steps.

    Args:
        traffic: between ranks, and with storage.
        indices: of the plans' sources; without them, reads of the loader are not predicted.
        visions: of the plans; pass it to share vision plans between layouts.
        division: of the optimizer's state, if it is known.

    Raises:
        ValueError: the layout or the encoder's work cannot be planned.
    """
    line, every = text_pipeline(config, traffic).line(), (visions or Visions(plans)).of(config)
    save = plan_save(config, traffic.host, traffic.storage, traffic.save_stall, division)
    reading = Reading(config, indices) if indices else None
    steps, reads = list[StepSeconds](), list[StepReads]()
    for plan, vision in zip(plans, every, strict=True):
        if reading is not None:
            reads.append(reading.of(plan, vision))
        step = step_seconds(config, line, vision, grids_of(plan), traffic)
        steps.append(_with_storage(config, step, save, reads[-1:], traffic))
    tokens = tuple(plan.num_tokens for plan in plans)
    return StepPredictions(config, traffic, tuple(steps), tokens, tuple(reads), save)


def _with_storage(
    config: Config,
    step: StepSeconds,
    save: Save | None,
    reads: Sequence[StepReads],
    traffic: Traffic,
) -> StepSeconds:
    """Return a step with its waits for storage; `reads`: of this step, if they are known."""
    if save is not None:
        assert config.checkpoint.every is not None
        stall = save.stall(step.total, step.total - step.update)
        step = replace(step, checkpoint=stall / config.checkpoint.every)
    late = [loader_wait(config, one.seconds(config, traffic.storage), step.total) for one in reads]
    return replace(step, loader=sum(late))


def binding(step: StepSeconds) -> list[tuple[str, float]]:
    """Return (part, share of the step) for all parts but the passes, largest first; parts below
    `SHARE` are left out.
    """
    names = [field.name for field in fields(StepSeconds) if field.name != "passes"]
    shares = {name: getattr(step, name) / step.total for name in names}
    ordered = sorted(names, key=lambda name: -shares[name])
    return [(name, shares[name]) for name in ordered if shares[name] >= SHARE]


def advice(found: StepPredictions) -> Iterator[str]:
    """Yield the bottlenecks, largest first, with their remedies."""
    config = found.config
    layout = config.layout
    no_more = config.in_bubbles() or layout.pp == 1  # bubbles are used, or there are none
    mends = {
        "imbalance": "layout.stages can give the slowest stage fewer layers",
        "bubble": "more microbatches (data.rows_per_step), or a larger layout.vpp, shorten it",
        "vision": "`kimi-pretrain plan` shows what its slowest rank does"
        if no_more
        else "dep.bubbles=all puts it into the pipeline's bubbles",
        "exchange": "a smaller dep.scope keeps media nearer",
        "gradient_sum": "it is the same for any number of rows: more rows a step make it smaller",
        "update": "it is the same for any number of rows: more rows a step make it smaller",
        "checkpoint": "a larger checkpoint.every makes it smaller"
        + ("" if config.checkpoint.asynchronous else ", as does checkpoint.asynchronous=true"),
        "loader": "storage does not keep up: data.cache reads once for all ranks of a node, a "
        "smaller data.shard_window longer ranges",
    }
    for name, share in binding(found.mean):
        yield f"{name.replace('_', ' ')}: {share:.0%} of the step; {mends[name]}"


def lines(found: StepPredictions) -> Iterator[str]:
    """Yield the table and the bottlenecks as text, for the terminal."""
    config, dep = found.config, found.config.dep
    layout = config.layout
    yield (
        f"{layout.world_size()} ranks: pp {layout.pp} x vpp {layout.vpp}, dp {layout.dp}, "
        f"ep {layout.ep}, cp {layout.cp}, tp {layout.tp}; {config.num_microbatches()} "
        f"microbatches; dep.bubbles {dep.bubbles}"
    )
    names = [field.name for field in fields(StepSeconds)]
    yield " step   seconds | " + " ".join(f"{name.replace('_', ' '):>12s}" for name in names)
    for number, step in enumerate(found.steps, start=1):
        yield _row(str(number), step, names)
    yield _row("mean", found.mean, names)
    yield f"{found.tokens_per_day:,.0f} tokens a day"
    yield from _storage_lines(found)
    yield from advice(found)
    update = "" if dep.update_cost is not None else "; left out: update (give dep.update_cost)"
    yield f"assumed: {assumed_passes(config)}, {assumed_traffic(found.traffic)}{update}"


def _loader_line(found: StepPredictions) -> str:
    config, storage = found.config, found.traffic.storage
    sizes = [(one.bytes.sum(), one.bytes.max()) for one in found.reads]
    counts = [(one.requests.sum(), one.requests.max()) for one in found.reads]
    (size, most), (requests, asked) = (np.mean(each, axis=0) for each in (sizes, counts))
    seconds = float(np.mean([one.seconds(config, storage) for one in found.reads]))
    if storage is None and config.data.requests_per_second is None:
        told = "whether storage keeps up is not known, give --storage"
    else:
        keeps = "does not keep up" if found.mean.loader else "keeps up"
        told = f"the slowest reads for {seconds:.3g} s, storage {keeps}"
    return (
        f"loader: {size / GIB:.3g} GiB in {requests:,.0f} requests a step, at most "
        f"{most / GIB:.3g} GiB, and {asked:,.0f}, of one node; {told}"
    )


def _storage_lines(found: StepPredictions) -> Iterator[str]:
    """Yield reads and writes as text, and whether storage keeps up."""
    config, save = found.config, found.save
    if found.reads:
        yield _loader_line(found)
    if save is None:
        yield "checkpoint: none is written on its own, checkpoint.every=null"
        return
    writes = "" if save.writing is None else f", written in {save.writing:.3g} s"
    every = config.checkpoint.every or 1
    yield (
        f"checkpoint: every {every} steps {save.bytes.sum() / GIB:.3g} GiB, of rank "
        f"{int(save.bytes.argmax())} the most, {save.bytes.max() / GIB:.3g}, copied in "
        f"{save.copying:.3g} s{writes}; a save stalls {found.mean.checkpoint * every:.3g} s"
    )


def assumed_traffic(traffic: Traffic) -> str:
    """Return the assumptions on traffic, in words."""
    return (
        f"--network {traffic.network:.3g} bytes/s, --latency {traffic.latency:.3g} s, "
        f"--expert-imbalance {traffic.expert_imbalance:.3g}, --node-network {traffic.node:.3g} "
        f"bytes/s, --device-memory {traffic.memory:.3g} bytes/s, --host {traffic.host:.3g} bytes/s"
        + ("" if traffic.storage is None else f", --storage {traffic.storage:.3g} bytes/s")
        + ("" if traffic.save_stall is None else f", --save-stall {traffic.save_stall:.3g} s")
    )


def assumed_passes(config: Config) -> str:
    """Return the source of the seconds of passes, in words."""
    if config.dep.pass_cost is not None:
        return "passes as measured, dep.pass_cost"
    return f"passes at dep.flops_per_second={config.dep.flops_per_second:.3g}"


def _row(name: str, step: StepSeconds, names: Sequence[str]) -> str:
    parts = " ".join(f"{getattr(step, one):12.4g}" for one in names)
    return f"{name:>5s} {step.total:9.4g} | {parts}"


def as_json(found: StepPredictions) -> dict[str, Any]:
    """Return the result as plain values."""
    rows = zip(found.steps, found.tokens, strict=True)
    return {
        "world_size": found.config.layout.world_size(),
        "steps": [{**asdict(step), "total": step.total, "tokens": n} for step, n in rows],
        "mean": {**asdict(found.mean), "total": found.mean.total},
        "tokens_per_day": found.tokens_per_day,
        "loader": [
            {
                "bytes": int(one.bytes.sum()),
                "requests": int(one.requests.sum()),
                "node_bytes": int(one.bytes.max()),
                "node_requests": int(one.requests.max()),
                "seconds": one.seconds(found.config, found.traffic.storage),
            }
            for one in found.reads
        ],
        "checkpoint": None
        if found.save is None
        else {
            "bytes": int(found.save.bytes.sum()),
            "rank_bytes": int(found.save.bytes.max()),
            "copying": found.save.copying,
            "writing": found.save.writing,
        },
        "advice": list(advice(found)),
    }
