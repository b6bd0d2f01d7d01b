"""How long a run's first steps take, predicted from index and layout: `plan --step`. Pure.

    vision forward | hand-over | pipeline | hand-back | recompute, backward | sums | update

Passes of the pipeline cost what `plan --calibrate` measured (`dep.pass_cost`), or else counted
operations over `dep.flops_per_second` (`dep.pass_costs`), on the timeline that plans work in
bubbles, too; the exchange of experts between nodes is added. Media cost what the plan of the
encoder says; a phase takes as long as its slowest rank. No gradient sum is taken to be hidden
behind the last backward pass. Left out, and told so: stalls of checkpoints and of the loader, and
the update where `dep.update_cost` is not given.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from data_pipeline.plan.planner import GlobalPlan, Planner
from kimi_pretrain.config import ITEMSIZE, Config
from kimi_pretrain.dep.cost import FORWARDS_PER_STEP
from kimi_pretrain.dep.pass_costs import Floats, sharing_ranks, stage_parameters, update_seconds
from kimi_pretrain.dep.planner import VisionPlanner
from kimi_pretrain.dep.timeline import Timeline
from kimi_pretrain.dep.vision_plan import VisionPlan
from kimi_pretrain.reliability.preflight import check_start
from kimi_pretrain.tools.predict import Progress, busiest_rank_tokens, token_bytes
from kimi_pretrain.tools.text_passes import Traffic, text_pipeline

DAY = 24 * 3600
SHARE = 0.05  # of the step from which on a part is worth a word


@dataclass(frozen=True)
class StepSeconds:
    """Predicted seconds of a step, in parts that add up to it.

    Attributes:
        passes: of the pipeline, mean of the stages.
        imbalance: how much longer the passes of the slowest stage take.
        bubble: of the slowest stage: the pipeline is longer than its passes by that.
        vision: of the slowest rank before and behind the pipeline; what runs in bubbles is not
            counted.
        exchange: hand-over and hand-back before and behind the pipeline.
        gradient_sum: of the encoder over all ranks, and of the stage whose sums take longest; and
            the updated weights on their way back.
        update: of the busiest rank; 0 where `dep.update_cost` is not given.
    """

    passes: float
    imbalance: float
    bubble: float
    vision: float
    exchange: float
    gradient_sum: float
    update: float

    @property
    def total(self) -> float:
        """The whole step."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class StepPredictions:
    """The first steps of a run; `tokens`: of samples in each, padding left out."""

    config: Config
    traffic: Traffic
    steps: tuple[StepSeconds, ...]
    tokens: tuple[int, ...]

    @property
    def mean(self) -> StepSeconds:
        """The mean of each part over the steps."""
        names = [field.name for field in fields(StepSeconds)]
        each = [[getattr(step, name) for step in self.steps] for name in names]
        return StepSeconds(*(float(np.mean(values)) for values in each))

    @property
    def tokens_per_day(self) -> float:
        """Tokens of samples that a day's steps train on."""
        return DAY * sum(self.tokens) / sum(step.total for step in self.steps)


def plan_steps(config: Config, num_steps: int, progress: Progress) -> list[GlobalPlan]:
    """Return the plans of a run's first steps: the same for all layouts of as many rows a step.

    Args:
        progress: told the share done and what is being done.

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
    return plans


def predict_planned(
    config: Config, plans: Sequence[GlobalPlan], traffic: Traffic
) -> StepPredictions:
    """Predict steps that are planned.

    Args:
        traffic: between ranks.

    Raises:
        ValueError: the layout or the encoder's work cannot be planned.
    """
    line, network = text_pipeline(config, traffic).line(), traffic.network
    planner = VisionPlanner(config)
    steps = tuple(step_seconds(config, line, planner.plan(plan), network) for plan in plans)
    return StepPredictions(config, traffic, steps, tuple(plan.num_tokens for plan in plans))


def step_seconds(config: Config, line: Timeline, vision: VisionPlan, network: float) -> StepSeconds:
    """Return the parts of one step.

    Args:
        line: of the pipeline with text alone.
        vision: who encodes what, and in which bubbles.
        network: bytes a second that a rank sends, and receives.
    """
    passes = (line.end - line.start).sum(axis=1)
    inside, outside = vision.bubbles, outside_bubbles(vision)
    forward, later = vision_phases(config, outside)
    seconds = float((forward + later).max(initial=0.0))
    if inside is not None:
        seconds += inside.plan.upfront + inside.plan.after
    return StepSeconds(
        passes=float(passes.mean()),
        imbalance=float(passes.max() - passes.mean()),
        bubble=line.total - float(passes.max()),
        vision=seconds,
        exchange=sum(exchange_seconds(config, outside, network)),
        gradient_sum=float(backbone_sum_seconds(config, network).max())
        + encoder_sum_seconds(config, vision, network),
        update=update_seconds(config),
    )


def outside_bubbles(vision: VisionPlan) -> VisionPlan:
    """Return the plan of the items that are encoded before and behind the pipeline."""
    return vision if vision.bubbles is None else vision.together()


def vision_phases(config: Config, vision: VisionPlan) -> tuple[Floats, Floats]:
    """Return the seconds of each rank in the encoder's forward phase, and in the later one.

    Each rank's later phase costs a fixed multiple of its forward phase, so one rank is the slowest
    of both. Activations that `dep.keep_activations` keeps are counted as computed again.

    Returns:
        float64 [ranks] each.
    """
    seconds = vision.predicted_seconds()
    if config.dep.cost is not None:
        chunks = np.ceil(vision.patches_per_rank() / config.dep.max_patches_per_chunk)
        seconds = seconds + config.dep.cost.per_chunk * chunks
    forward = seconds / FORWARDS_PER_STEP
    forward_alone = "vision_tower" in config.train.frozen
    return forward, 0.0 * seconds if forward_alone else seconds - forward


def exchange_seconds(config: Config, vision: VisionPlan, network: float) -> tuple[float, float]:
    """Return the seconds of hand-over and hand-back; a frozen encoder has no hand-back."""
    if not len(vision.tokens):
        return 0.0, 0.0
    over = busiest_rank_tokens(vision) * token_bytes(config) / network
    return over, over * (encoder_weights(config) > 0)


def encoder_sum_seconds(config: Config, vision: VisionPlan, network: float) -> float:
    """Return the seconds of the sum of the encoder's gradients; 0 in a step without media."""
    return ring_seconds(config, network) if len(vision.tokens) else 0.0


def ring_seconds(config: Config, network: float) -> float:
    """Return the seconds of a ring that sums the encoder's gradients over all ranks, in float32.

    None of it is taken to be hidden behind the last chunk's backward pass.
    """
    ranks = config.layout.world_size()
    return 2 * 4.0 * encoder_weights(config) * (ranks - 1) / ranks / network


def backbone_sum_seconds(config: Config, network: float) -> Floats:
    """Return the seconds in which each stage sums its gradients, and gets weights back, [stages].

    Gradients go in float32 to the ranks that update them, and the updated weights to all others.
    """
    moved = np.zeros(config.layout.pp)
    if "language_model" in config.train.frozen:
        return moved
    for parameters, ranks in zip(stage_parameters(config), sharing_ranks(config), strict=True):
        moved = moved + parameters * (ranks - 1) / ranks
    size = ITEMSIZE[config.train.dtype]
    return moved * (max(4, size) + size) / network


def encoder_weights(config: Config) -> int:
    """Return the trained weights of tower and projector, biases and norms left out (0.2%)."""
    vision, frozen = config.model.vision, config.train.frozen
    width, joined = vision.width, 4 * vision.width
    block = 4 * width * width + 2 * width * vision.mlp_width
    tower = vision.depth * block + 3 * 14 * 14 * width + vision.pos_grid**2 * width
    projector = joined * vision.projector_width + vision.projector_width * vision.out_width
    return tower * ("vision_tower" not in frozen) + projector * ("projector" not in frozen)


def binding(step: StepSeconds) -> list[tuple[str, float]]:
    """Return the parts that are no computing of the language model, largest first, each with its
    share of the step; those below `SHARE` are left out.
    """
    names = [field.name for field in fields(StepSeconds) if field.name != "passes"]
    shares = {name: getattr(step, name) / step.total for name in names}
    ordered = sorted(names, key=lambda name: -shares[name])
    return [(name, shares[name]) for name in ordered if shares[name] >= SHARE]


def advice(found: StepPredictions) -> Iterator[str]:
    """Yield what binds, largest first, and what to change."""
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
    }
    for name, share in binding(found.mean):
        yield f"{name.replace('_', ' ')}: {share:.0%} of the step; {mends[name]}"


def lines(found: StepPredictions) -> Iterator[str]:
    """Yield the table and what binds as text, for the terminal."""
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
    yield from advice(found)
    traffic = found.traffic
    update = "" if dep.update_cost is not None else "update (give dep.update_cost), "
    yield (
        f"assumed: {assumed_passes(config)}, {assumed_traffic(traffic)}; left out: "
        f"{update}checkpoints, loader"
    )


def assumed_traffic(traffic: Traffic) -> str:
    """Return in words what is told of the traffic."""
    return (
        f"--network {traffic.network:.3g} bytes/s, --latency {traffic.latency:.3g} s, "
        f"--expert-imbalance {traffic.expert_imbalance:.3g}"
    )


def assumed_passes(config: Config) -> str:
    """Return in words what the seconds of passes rest on."""
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
        "advice": list(advice(found)),
    }
