"""Cases of the simulation: layouts, schemes, and the quantities that vary."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks.sim.assumptions import Assumptions
from benchmarks.sim.backbone import text_seconds
from benchmarks.sim.corpus import Library
from benchmarks.sim.phases import StepTime, colocated, decoupled, true_costs, true_plan
from kimi_pretrain.config import Config, load_config
from kimi_pretrain.dep.cost import FORWARDS_PER_STEP

PRESET = "kimi_k25_1t"
ROWS_PER_RANK = 4  # PP16 with 64 microbatches of one row
PUBLISHED_LIMITS = {"image": 16384, "frame": 4096}

# 16 chunks, on 8 or 16 ranks. They hold 61 layers; the last chunk has one layer and the head, which
# costs 2.2 layers.
CHUNKS16 = "Etttt|(tttt|)*14tL"


@dataclass(frozen=True)
class Scheme:
    """One way to do the vision work of a step, as keys of the `dep` section."""

    title: str
    dep: Mapping[str, Any] = field(default_factory=dict)


# Defaults of schemes and cases, stated here so that results do not depend on the preset.
DEP = {
    "placement": "decoupled",
    "assign": "balanced",
    "scope": "world",
    "ranks_per_node": 8,
    "max_patches_per_chunk": 65_536,
    "cost": None,
    "max_split": 1,
    "split_efficiency": 0.85,
    "keep_activations": "none",
    "memory_limit_gib": None,
}
SPLIT = {"max_split": 8}  # only ranks of one node share an item
SCHEMES = {
    "colocated": Scheme("inside the first stage, no DEP", {"placement": "colocated"}),
    "owner": Scheme("DEP, first stages encode all", {"assign": "owner"}),
    "round_robin": Scheme("DEP unbalanced, dealt out by count", {"assign": "round_robin"}),
    "replica": Scheme("DEP balanced inside each replica", {"scope": "replica"}),
    "copy": Scheme("DEP balanced over the 16 replicas of a copy of the model", {"scope": 16}),
    "world": Scheme("DEP balanced over the global batch"),
    "split": Scheme("the same, large items split", SPLIT),
}
MAIN = tuple(SCHEMES)


@dataclass(frozen=True)
class Case:
    """One layout, one mix, one set of assumptions.

    Attributes:
        ranks: number of GPUs.
        vision: share of media tokens.
        num_steps: steps to simulate.
        rows_per_rank: rows of 4,096 tokens per step and rank.
        limits: patch limits of an image and of a frame.
        assumed: machine speeds.
        layout: keys of the `layout` section, which override `layout_of`.
        dep: keys of the `dep` section for all schemes; the scheme's own keys override them.
        seed: seed of the sample order.
    """

    ranks: int
    vision: float
    num_steps: int
    rows_per_rank: int = ROWS_PER_RANK
    limits: Mapping[str, int] = field(default_factory=lambda: dict(PUBLISHED_LIMITS))
    assumed: Assumptions = Assumptions()
    layout: Mapping[str, Any] = field(default_factory=dict)
    dep: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


def layout_of(ranks: int) -> dict[str, Any]:
    """Return the layout for a number of ranks: 16 stages, experts over up to 16 replicas.

    Eight ranks form one pipeline of 8 stages.

    Raises:
        ValueError: the ranks do not form whole replicas.
    """
    if ranks == 8:
        return {"pp": 8, "vpp": 2, "dp": 1, "ep": 1, "stages": CHUNKS16}
    replicas, left = divmod(ranks, 16)
    if left or not replicas:
        raise ValueError(f"{ranks} ranks: expected 8 or a multiple of 16 (PP16)")
    return {"dp": replicas, "ep": min(16, replicas)}


def config_of(case: Case, scheme: Scheme | None = None) -> Config:
    """Return the project's configuration of a case."""
    layout = layout_of(case.ranks) | dict(case.layout)
    values: dict[str, Any] = {f"layout.{key}": value for key, value in layout.items()}
    values |= {f"data.limits.{key}": value for key, value in case.limits.items()}
    values |= {
        "layout.overlap_experts": layout["ep"] > 1 and layout.get("vpp", 2) > 1,
        "data.rows_per_step": case.rows_per_rank * case.ranks,
        "data.vision_token_ratio": case.vision,
        "data.seed": case.seed,
        "dep.flops_per_second": case.assumed.encoder_flops,
    }
    dep = DEP | dict(case.dep) | dict(scheme.dep if scheme else {})
    if dep.get("scope") == 16 and layout["dp"] < 16:
        dep["scope"] = "world"
    values |= {f"dep.{key}": value for key, value in dep.items()}
    return load_config(PRESET, [f"{key}={_yaml(value)}" for key, value in values.items()])


def _yaml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_yaml(v)}" for k, v in value.items()) + "}"
    if value is None:
        return "null"
    return f'"{value}"' if isinstance(value, str) else repr(value)


@dataclass(frozen=True)
class Found:
    """Results of a scheme in a case, over all its steps.

    Attributes:
        efficiency: mean step time with text only over mean step time with media.
        error: standard error of the efficiency, from the spread over steps.
        slowest: efficiency at the 99th percentile of step time.
        parts: mean seconds of the parts of a step, see `StepTime`.
    """

    efficiency: float
    error: float
    slowest: float
    parts: dict[str, float]


def run(case: Case, schemes: Sequence[str], library: Library) -> dict[str, Found]:
    """Simulate a case; return the results of each scheme and of two bounds.

    The bound "perfect" is perfect balance without losses, exchanges or waits, and with everything
    encoded twice. The bound "once" is the same with nothing encoded twice.
    """
    configs = {name: config_of(case, SCHEMES[name]) for name in schemes}
    plain = config_of(case)
    text = text_seconds(plain, case.assumed)
    model = true_costs(plain, case.assumed)
    times: dict[str, list[StepTime]] = {name: [] for name in [*schemes, "perfect", "once"]}
    for plan in library.steps(plain.data, case.num_steps):
        mean = float(model.seconds(plan.items.patches).sum()) / case.ranks
        for name, share in (("perfect", 1.0), ("once", 1 - 1 / FORWARDS_PER_STEP)):
            load = share * mean
            times[name].append(StepTime(text, load, 0.0, 0.0, 0.0, text + load))
        for name, config in configs.items():
            if config.dep.placement == "colocated":
                times[name].append(colocated(plan, config, case.assumed, text))
            else:
                vision = true_plan(plan, config, case.assumed)
                times[name].append(decoupled(vision, plan, config, case.assumed, text))
    return {name: _summary(found) for name, found in times.items()}


def _summary(times: Sequence[StepTime]) -> Found:
    total = np.array([time.total for time in times])
    text, mean = times[0].text, float(total.mean())
    spread = float(total.std(ddof=1)) if len(times) > 1 else 0.0
    parts = {key: float(np.mean([asdict(time)[key] for time in times])) for key in asdict(times[0])}
    return Found(
        efficiency=text / mean,
        error=text / mean * spread / mean / np.sqrt(len(times)),
        slowest=text / float(np.percentile(total, 99)),
        parts=parts,
    )
