"""The plan of memory as text and as plain values (`kimi-pretrain plan --memory`, the dry run)."""

from collections.abc import Iterator
from typing import Any

from kimi_pretrain.config import GIB
from kimi_pretrain.memory.plan import MemoryPlan, StageMemory
from kimi_pretrain.tools.optimizer_report import runs

# Memory of common cards as their data sheets give it, in GB of 10^9 bytes.
CARDS = {"H100, H800 (80 GB)": 80e9, "H200 (141 GB)": 141e9}


def lines(plan: MemoryPlan) -> Iterator[str]:
    """Yield the plan as text, for the terminal."""
    yield ""
    yield "memory of the fullest rank of each stage, GiB (docs/MEMORY.md says what is not in it)"
    yield (
        "stage   rank  layers        weights  gradients  optimizer  activations   media  passing"
        "  encoder  update    peak"
    )
    for one in plan.stages:
        sizes = (one.embeddings, one.passing, one.encoder, one.update, one.peak)
        media, passing, encoder, update, peak = (size / GIB for size in sizes)
        yield (
            f"{one.stage:5d} {one.rank:6d}  {runs(one.layers):12s} {one.weights / GIB:8.1f} "
            f"{one.gradients / GIB:10.1f} {one.optimizer / GIB:10.1f} "
            f"{one.activations.total() / GIB:12.1f} {media:7.1f} {passing:8.1f} {encoder:8.1f} "
            f"{update:7.1f} {peak:7.1f}"
        )
    yield from _fullest(plan.fullest)
    for name, size in CARDS.items():
        yield f"  {name}: {_verdict(plan, size)}"
    for switch in plan.switches:
        yield f"  with {switch.setting}: {switch.peak / GIB:.1f} GiB"


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


def _verdict(plan: MemoryPlan, size: float) -> str:
    if plan.fullest.peak <= size:
        return "fits"
    enough = [switch.setting for switch in plan.switches if switch.peak <= size]
    if enough:
        return f"does not fit; with {enough[0]} alone it does"
    least = max(stage.lasting for stage in plan.stages)
    what = f"weights, gradients and optimizer state take {least / 1e9:.1f} GB"
    return f"does not fit, and no single switch suffices; {what}"


def as_json(plan: MemoryPlan) -> dict[str, Any]:
    """Return the plan as plain values, sizes in bytes."""
    stages = [
        vars(one) | {"activations": dict(one.activations), "peak": one.peak} for one in plan.stages
    ]
    return {"stages": stages, "switches": [vars(switch) for switch in plan.switches]}
