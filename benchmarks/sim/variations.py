"""Runs of the simulation: the main grid, and variations of one quantity at a time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.sim.assumptions import Assumptions
from benchmarks.sim.backbone import text_seconds
from benchmarks.sim.study import CHUNKS16, Case, config_of

VISION = (0.1, 0.3, 0.5)
# Steps for each number of ranks. Few ranks have few items in a step, so their steps differ more.
STEPS = {8: 400, 64: 150, 256: 60, 1024: 24, 4096: 8}
QUICK_STEPS = {8: 4, 64: 2, 256: 1}

AROUND, VARIED_STEPS = 1024, 4  # ranks and steps of the varied case
EARLIER = 2048  # ranks of the earlier simulation


@dataclass(frozen=True)
class Variation:
    """One case off the main grid.

    Attributes:
        group: the varied quantity, in words.
        label: its value.
        case: case with this value.
        schemes: simulated schemes.
    """

    group: str
    label: str
    case: Case
    schemes: tuple[str, ...] = ("world", "split")


def grid(quick: bool) -> Iterator[Case]:
    """Yield the cases of the main table."""
    for ranks, count in (QUICK_STEPS if quick else STEPS).items():
        for vision in VISION:
            yield Case(ranks, vision, count)


def variations(quick: bool) -> list[Variation]:
    """Return the variations, one quantity at a time, at 10% and 30% vision tokens.

    The comparison with an earlier simulation also covers 50%. The quick form has the last value of
    each group, at 256 ranks and 10%.
    """
    found: list[Variation] = []
    for vision in VISION[: 1 if quick else 2]:
        around = Case(256, vision, 1) if quick else Case(AROUND, vision, VARIED_STEPS)
        for family in (_speeds, _rows, _splits, _limits, _scopes, _kept, _knowledge):
            found += family(around)
    for vision in VISION[:1] if quick else VISION:
        around = Case(256, vision, 1) if quick else Case(EARLIER, vision, VARIED_STEPS)
        found += _modelling(around)
    return list({v.group: v for v in found}.values()) if quick else found


def _speeds(around: Case) -> Iterator[Variation]:
    for part in (0.1, 0.2, 0.3, 0.4):
        case = replace(around, assumed=Assumptions(encoder_efficiency=part))
        yield Variation("encoder, part of the peak", f"{part:.1f}", case)
    for part in (0.3, 0.4, 0.5):
        case = replace(around, assumed=Assumptions(backbone_efficiency=part))
        yield Variation("language model, part of the peak", f"{part:.1f}", case)
    for gbits in (100, 200, 400):
        case = replace(around, assumed=Assumptions(network=0.8 * gbits / 8 * 1e9))
        yield Variation("network of a rank, Gb/s", str(gbits), case)


def _rows(around: Case) -> Iterator[Variation]:
    for rows in (1, 2, 4, 8, 16):
        case = replace(around, rows_per_rank=rows, num_steps=_fewer(around.num_steps, rows))
        yield Variation("rows per rank (microbatches)", f"{rows} ({rows * 16})", case)
    for layout in ({"vpp": 1, "stages": CHUNKS16}, {}):
        case = replace(around, layout=layout)
        seconds = text_seconds(config_of(case), case.assumed)
        label = f"{layout.get('vpp', 2)} (text alone: {seconds:.2f} s)"
        yield Variation("virtual stages", label, case)


def _fewer(steps: int, rows: int) -> int:
    return max(1, steps * 4 // rows) if rows > 4 else steps


def _splits(around: Case) -> Iterator[Variation]:
    for most in (1, 2, 4, 8, 16):
        case = replace(around, dep={"max_split": most})
        yield Variation("max_split", str(most), case, ("world",))
    wide = replace(around, dep={"max_split": 16, "ranks_per_node": 16})
    yield Variation("max_split", "16, nodes of 16 ranks", wide, ("world",))
    for left in (0.6, 0.7, 0.8, 0.85, 0.9, 1.0):
        case = replace(around, dep={"split_efficiency": left})
        yield Variation("split_efficiency", f"{left:.2f}", case, ("split",))
    hoped = replace(around, assumed=Assumptions(split_efficiency=0.6))
    yield Variation("split_efficiency", "0.85 believed, 0.60 true", hoped, ("split",))


def _limits(around: Case) -> Iterator[Variation]:
    for image, frame in (
        (16384, 4096), (12544, 4096), (4096, 4096), (16384, 1024), (12544, 1024), (4096, 1024),
    ):  # fmt: skip
        case = replace(around, limits={"image": image, "frame": frame})
        label = f"{image:,} an image, {frame:,} a frame"
        yield Variation("patch limits", label, case, ("round_robin", "world", "split"))


def _scopes(around: Case) -> Iterator[Variation]:
    for scope in ("replica", 2, 4, 8, 16, 32, "world"):
        label = str(scope) if isinstance(scope, str) else f"{scope} replicas"
        yield Variation("scope", label, replace(around, dep={"scope": scope}))


def _kept(around: Case) -> Iterator[Variation]:
    fine: dict[str, Any] = {"max_patches_per_chunk": 17_408}
    yield Variation("keep_activations, GiB", "none", replace(around, dep=fine))
    for gib in (20, 24, 32, 40, 48, 64):
        kept = fine | {"keep_activations": "auto", "memory_limit_gib": gib}
        yield Variation("keep_activations, GiB", str(gib), replace(around, dep=kept))


def _knowledge(around: Case) -> Iterator[Variation]:
    group = "what the plan knows of an item's cost"
    yield Variation(group, "operations, as they are", around)
    for label, terms in (
        ("patches alone", {"per_patch": 1e-5, "per_patch_squared": 0, "per_item": 0}),
        ("that it is one", {"per_patch": 0, "per_patch_squared": 0, "per_item": 1e-2}),
    ):
        cost: Mapping[str, Any] = {"cost": terms}
        yield Variation(group, label, replace(around, dep=cost))
    for scatter in (0.1, 0.3):
        off = replace(around, assumed=Assumptions(cost_scatter=scatter))
        yield Variation(group, f"operations, true cost scatters by {scatter:.0%}", off)


def _modelling(around: Case) -> Iterator[Variation]:
    """Yield the modelling choices of an earlier simulation, one at a time and together."""
    both = Assumptions(attention_backward=2.5, equal_chunks=True)
    for label, assumed in (
        ("as everywhere here", Assumptions()),
        ("attention's backward costs 2.5 forwards", Assumptions(attention_backward=2.5)),
        ("the pipeline's chunks cost the same", Assumptions(equal_chunks=True)),
        ("both", both),
    ):
        case = replace(around, assumed=assumed)
        yield Variation("modelling", label, case, ("round_robin", "copy", "world", "split"))
    dealt = replace(around, assumed=both, dep={"scope": "replica"})
    yield Variation("modelling", "both, dealt out inside a replica", dealt, ("round_robin",))
