"""Predicts the encoder's work in a run's first steps, before anything is built. Pure.

Plans the steps as training does, from the index and the config only, and uses the same vision
planner; one process can plan any number of ranks. For comparison, it plans all three values of
`dep.assign` besides the config's own assignment.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from data_pipeline.plan.budget import budget_end, budget_notices
from data_pipeline.plan.planner import GlobalPlan, Planner
from kimi_pretrain.config import GIB, ITEMSIZE, MIB, Config
from kimi_pretrain.dep.places import Moved, seconds_of_part
from kimi_pretrain.dep.planner import VisionPlanner
from kimi_pretrain.dep.vision_plan import Ints, VisionPlan
from kimi_pretrain.reliability.preflight import check_start

ASSIGNS = ("owner", "round_robin", "balanced")  # the values of dep.assign
BINDS = 1.02  # ratio slowest / mean above which the largest item is reported

Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class Load:
    """Predicted seconds of the encoder on the ranks of a step."""

    mean: float
    slowest: float

    @property
    def max_over_mean(self) -> float:
        """Slowest rank over the mean of ranks, 1.0 for perfect balance or no load."""
        return self.slowest / self.mean if self.mean else 1.0


@dataclass(frozen=True)
class Prediction:
    """Prediction of one step.

    Attributes:
        step: its number in the run, from 1.
        items, patches: counts of the global batch.
        tokens, vision_tokens: tokens of samples, and media tokens among them.
        loads: `dep.assign` -> load of the ranks.
        own: the load under this config's assignment.
        largest_patches: patches of the item with the largest cost per rank, under this config's
            assignment.
        largest_seconds: seconds that this item costs one rank; several ranks may share the item.
        split: number of items that several ranks share.
        moved: media tokens by the distance that they move in the hand-over.
        exchange_bytes: the most that one rank sends or receives, in one direction.
        memory_bytes: the most that the media use on one rank, activations and embeddings.
        memory_rank: the rank of `memory_bytes`.
    """

    step: int
    items: int
    patches: int
    tokens: int
    vision_tokens: int
    loads: dict[str, Load]
    own: Load
    largest_patches: int
    largest_seconds: float
    split: int
    moved: Moved
    exchange_bytes: int
    memory_bytes: int
    memory_rank: int

    @property
    def largest_binds(self) -> bool:
        """True if the slowest rank only does its share of one large item."""
        alone = self.own.slowest <= self.largest_seconds * (1 + 1e-9)
        return alone and self.own.max_over_mean > BINDS


@dataclass(frozen=True)
class Predictions:
    """The first steps of a run, at least one.

    Attributes:
        notices: samples that do not fit, by source, and the ends of budgets.
    """

    config: Config
    steps: tuple[Prediction, ...]
    notices: tuple[str, ...] = ()


def predict(
    config: Config, num_steps: int, progress: Progress = lambda share, what: None
) -> Predictions:
    """Plan the first steps of a run of `config` from its index under `data.root`.

    Args:
        progress: called with the finished share and the name of the current task.

    Raises:
        ValueError: the config's data or layout cannot be planned.
        StoreError: data.root cannot be read.
    """
    progress(0.0, "reading the index")
    indices = check_start(config, steps=0, data_alone=True).indices
    planner = Planner(indices, config.data)
    # The prediction reports a step over the limit instead of refusing it. Without a limit,
    # activations cannot be kept up to it.
    own = _with_dep(config, memory_limit_gib=None, keep_activations="none")
    plain = {"placement": "decoupled", "memory_limit_gib": None, "bubbles": "none"}
    ways = {assign: VisionPlanner(_with_dep(config, assign=assign, **plain)) for assign in ASSIGNS}
    state, vision, steps = planner.state_dict(), VisionPlanner(own), list[Prediction]()
    for number in range(1, num_steps + 1):
        progress((number - 1) / num_steps, f"step {number}")
        plan, state = planner.plan(state)
        steps.append(predict_step(plan, vision, ways))
    ends = budget_notices(budget_end(planner), config.train.steps)
    return Predictions(config, tuple(steps), (*planner.notices(), *ends))


def predict_step(
    plan: GlobalPlan, own: VisionPlanner, ways: dict[str, VisionPlanner]
) -> Prediction:
    """Return the prediction of a planned step.

    Args:
        own: the planner of the run, without a memory limit.
        ways: `dep.assign` -> planner.
    """
    vision = own.plan(plan)
    seconds = seconds_of_part(vision.costs, vision.parts, vision.split_efficiency)
    largest = int(seconds.argmax()) if len(seconds) else None
    memory = own.memory(plan, vision)
    return Prediction(
        step=plan.step + 1,
        items=len(vision.tokens),
        patches=int(vision.patches.sum()),
        tokens=plan.num_tokens,
        vision_tokens=plan.vision_tokens,
        loads={assign: _load(way.plan(plan)) for assign, way in ways.items()},
        own=_load(vision),
        largest_patches=0 if largest is None else int(vision.patches[largest]),
        largest_seconds=0.0 if largest is None else float(seconds[largest]),
        split=int((vision.parts > 1).sum()),
        moved=travel(vision, own.ranks.node),
        exchange_bytes=busiest_rank_tokens(vision) * token_bytes(own.config),
        memory_bytes=int(memory.max()),
        memory_rank=int(memory.argmax()),
    )


def travel(vision: VisionPlan, node: Ints) -> Moved:
    """Return the media tokens of a step by the distance to the ranks that need them.

    Args:
        node: node of each rank, [ranks].
    """
    spans = vision.spans
    stay = spans.source == spans.dest
    near = (node[spans.source] == node[spans.dest]) & ~stay
    return Moved(*(int(spans.count[chosen].sum()) for chosen in (stay, near, ~(stay | near))))


def busiest_rank_tokens(vision: VisionPlan) -> int:
    """Return the most media tokens that any rank sends or receives."""
    return max(int(tokens.max()) for tokens in vision.tokens_away())


def token_bytes(config: Config) -> int:
    """Return the bytes of one media token's embedding in the exchange."""
    kind = config.dep.exchange_dtype
    size = ITEMSIZE[config.train.dtype if kind == "model" else kind]
    return size * config.model.vision.out_width


def advice(found: Predictions) -> Iterator[str]:
    """Yield advice on the bottlenecks of the steps; nothing if there are none."""
    dep, limits = found.config.dep, found.config.data.limits
    binding = [step for step in found.steps if step.largest_binds]
    if binding:
        worst = max(binding, key=lambda step: step.largest_seconds)
        most = min(dep.ranks_per_node, found.config.layout.world_size())
        heads = found.config.model.vision.heads  # divided among the ranks of an item
        split = max(p for p in (1, 2, 4, 8, 16) if p <= most and heads % p == 0)
        mend = [f"dep.max_split={split}"] if split > dep.max_split else []
        mend += [f"lower data.limits (image {limits.image}, frame {limits.frame})"]
        yield (
            f"in {len(binding)} of {len(found.steps)} steps one item is all that the slowest rank "
            f"does, as in step {worst.step}, {worst.largest_patches:,} patches: no assignment can "
            f"do better; try {', '.join(mend)}, or more rows a step"
        )
    worst = max(found.steps, key=lambda step: step.memory_bytes)
    limit = dep.memory_limit_gib
    if limit is not None and worst.memory_bytes > limit * GIB:
        over = sum(step.memory_bytes > limit * GIB for step in found.steps)
        yield (
            f"in {over} of {len(found.steps)} steps the media of a rank are over "
            f"dep.memory_limit_gib={limit:g}, at most {worst.memory_bytes / GIB:.3g} GiB on rank "
            f"{worst.memory_rank} in step {worst.step}: the run would stop there; lower "
            f"dep.max_patches_per_chunk (now {dep.max_patches_per_chunk}) or data.limits, or "
            "raise the limit"
        )
    budget = dep.max_patches_per_chunk
    largest = max(found.steps, key=lambda step: step.largest_patches)
    if largest.largest_patches > budget:
        yield (
            f"step {largest.step} has an item of {largest.largest_patches:,} patches, over "
            f"dep.max_patches_per_chunk={budget}: the run would not start; raise it, or lower "
            "data.limits"
        )
    if dep.cost is None:
        yield (
            f"seconds are FLOPs over dep.flops_per_second={dep.flops_per_second:.3g}; "
            "`kimi-pretrain plan --calibrate` measures a machine"
        )


_HEAD = (
    "                          vision |          seconds, slowest rank   |    slowest / mean     |"
    "       | tokens              |  most of a rank",
    " step   items    patches   share |    mean   owner   robin balanced | owner  robin balanced |"
    " split | stay   node    far  | sends MiB mem. GiB",
)


def lines(found: Predictions) -> Iterator[str]:
    """Yield the table and the advice as text, for the terminal."""
    config, dep = found.config, found.config.dep
    yield (
        f"{config.layout.world_size()} ranks on nodes of {dep.ranks_per_node}; as configured: "
        f"placement {dep.placement}, assign {dep.assign}, scope {dep.scope}, max_split "
        f"{dep.max_split}"
    )
    yield from _HEAD
    for step in found.steps:
        yield _line(str(step.step), step)
    yield _line("all", total(found.steps))
    yield (
        "split, tokens (that stay on their rank, move inside a node, move between nodes), sends "
        "(or receives, one way) and memory (activations and embeddings): as configured; all: "
        "seconds added up"
    )
    yield from found.notices
    yield from advice(found)


def total(steps: Sequence[Prediction]) -> Prediction:
    """Return all steps as one prediction: sums of counts and seconds, maxima of sizes."""
    first = steps[0]
    summed = ("items", "patches", "tokens", "vision_tokens", "split")
    values: dict[str, Any] = {name: sum(getattr(step, name) for step in steps) for name in summed}
    values["moved"] = Moved(*(sum(parts) for parts in zip(*(step.moved for step in steps))))
    values["exchange_bytes"] = max(step.exchange_bytes for step in steps)
    worst = max(steps, key=lambda step: step.memory_bytes)
    largest = max(steps, key=lambda step: step.largest_seconds)
    return Prediction(
        **values,
        step=first.step,
        loads={way: _sum([step.loads[way] for step in steps]) for way in first.loads},
        own=_sum([step.own for step in steps]),
        largest_patches=largest.largest_patches,
        largest_seconds=largest.largest_seconds,
        memory_bytes=worst.memory_bytes,
        memory_rank=worst.memory_rank,
    )


def as_json(found: Predictions) -> dict[str, Any]:
    """Return the result as plain values."""
    return {
        "world_size": found.config.layout.world_size(),
        "steps": [_plain(step) for step in found.steps],
        "total": _plain(total(found.steps)),
        "notices": list(found.notices),
        "advice": list(advice(found)),
    }


def _plain(step: Prediction) -> dict[str, Any]:
    return {**asdict(step), "moved": step.moved._asdict()}


def _line(name: str, step: Prediction) -> str:
    loads = [step.loads[way] for way in ASSIGNS]
    moved = [100 * part / max(1, step.vision_tokens) for part in step.moved]
    return (
        f"{name:>5s} {step.items:7,d} {step.patches:10,d} "
        f"{step.vision_tokens / max(1, step.tokens):7.1%} | {loads[0].mean:7.3g} "
        + " ".join(f"{load.slowest:7.3g}" for load in loads)
        + "  | "
        + "  ".join(f"{load.max_over_mean:5.2f}" for load in loads)
        + f"    | {step.split:5d} | "
        + "  ".join(f"{part:4.0f}%" for part in moved)
        + f" | {step.exchange_bytes / MIB:9.3g} {step.memory_bytes / GIB:8.3g}"
    )


def _with_dep(config: Config, **changes: Any) -> Config:
    return config.replace(dep=config.dep.replace(**changes))


def _load(vision: VisionPlan) -> Load:
    seconds = vision.predicted_seconds()
    return Load(float(seconds.mean()), float(seconds.max()))


def _sum(loads: Sequence[Load]) -> Load:
    return Load(sum(load.mean for load in loads), sum(load.slowest for load in loads))
