"""Host time that the saved-tensor policy takes per tensor, excluding the work itself.

A graph of one node saves many small tensors and runs backward: with the policy, without it, and the
work only (recompute of an output, FP8 codes and back, a copy to the host and back). The difference
is the policy's own time for hooks, records and look-ups; on a GPU the host spends it while the
device works. A recomputed tensor also keeps an input, and FP8 keeps two parts. These kept tensors
are counted separately and subtracted. Times are processor times, the minimum of many rounds.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.memory.layer_bytes import RECOMPUTE, build, config_of, microbatch_of, with_policy
from kimi_pretrain.engine.mesh import Mesh
from kimi_pretrain.memory.fp8_tiles import from_fp8, to_fp8
from kimi_pretrain.memory.host_memory import HostMemory
from kimi_pretrain.memory.saved import Output, Policy, Remade, Saved, apply, mark_weights

AT_MOST_US = 10.0
SHAPE = (4, 256)  # small, so that the work takes little of the time
KINDS = ("kept", "weights", "made again", "FP8", "host")
WITHIN = {"made again": 1, "FP8": 2}  # kept tensors per tensor of a kind


def measure(mesh: Mesh, quick: bool) -> dict[str, Any]:
    """Return microseconds per saved tensor, and the number of saved tensors per layer, by kind."""
    count, rounds = (10, 2) if quick else (100, 200)
    kinds = {kind: timed(kind, count, rounds) for kind in KINDS}
    for kind, one in kinds.items():
        within = WITHIN.get(kind, 0) * kinds["kept"]["added"]
        one["own"] = one["added"] - one["work"] - within
    return {"tensors": count, "rounds": rounds, "kinds": kinds, "layer": kinds_of_layer(mesh)}


# Time ---------------------------------------------------------------------------------------------


class _Save(torch.autograd.Function):
    """Autograd function that saves tensors and reads each of them in its backward pass."""

    @staticmethod
    def forward(ctx: Any, lead: Tensor, *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        ctx.count = len(saved)
        return lead.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        assert len(ctx.saved_tensors) == ctx.count
        return grad, *[None] * ctx.count


@dataclass(frozen=True)
class _Case:
    """Setup that saves one kind of tensor.

    Attributes:
        policy: policy under which the tensors are of this kind.
        make: returns the saved tensor for a policy and an input.
        before, after: work of the policy in the forward and in the backward pass.
    """

    policy: Policy
    make: Callable[[Policy, Tensor], Tensor]
    before: Callable[[Tensor], Any] | None = None
    after: Callable[[Any], Tensor] | None = None


def _double(x: Tensor) -> Tensor:
    return x * 2


def _copied(x: Tensor) -> Tensor:
    return torch.empty_like(x).copy_(x)


def _case(kind: str) -> _Case:
    def plain(policy: Policy, x: Tensor) -> Tensor:
        return x.clone()

    def remade(policy: Policy, x: Tensor) -> Tensor:
        return policy.remade("norms", _double, x)

    def squeezed(policy: Policy, x: Tensor) -> Tensor:
        return policy.squeezed(x.clone())

    if kind == "weights":
        return _Case(Policy(["norms"]), lambda policy, x: x)
    if kind == "made again":
        return _Case(Policy(["norms"]), remade, lambda x: x, _double)
    if kind == "FP8":
        return _Case(Policy(fp8=True), squeezed, to_fp8, lambda x: from_fp8(*x, torch.float32))
    if kind == "host":
        return _Case(Policy(host=HostMemory(torch.device("cpu"), 0)), plain, _copied, _copied)
    return _Case(Policy(["norms"]), plain)


def timed(kind: str, count: int, rounds: int) -> dict[str, float]:
    """Return microseconds per saved tensor: the time added by the policy, and the work in it."""
    case, none = _case(kind), Policy()
    inputs = [torch.randn(SHAPE) for _ in range(count)]
    lead = torch.zeros((), requires_grad=True)
    if kind == "weights":
        mark_weights(inputs)

    def step(policy: Policy) -> None:
        policy.begin_step()
        policy.open_group()
        with policy.saving():
            _Save.apply(lead, *[case.make(policy, x) for x in inputs]).backward()

    def work() -> None:
        if case.before is not None and case.after is not None:
            waiting = [case.before(x) for x in inputs]
            _ = [case.after(x) for x in waiting]

    calls = {"with": lambda: step(case.policy), "without": lambda: step(none), "work": work}
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.process_time()
            call()
            least[name] = min(least[name], time.process_time() - begin)
    added = (least["with"] - least["without"]) / count * 1e6
    return {"added": added, "work": least["work"] / count * 1e6}


# Numbers of a layer -------------------------------------------------------------------------------


class _Counting(Policy):
    """Policy that counts the treatments of saved tensors."""

    def __init__(self, policy: Policy):
        super().__init__(policy.recompute, fp8=policy.fp8, host=policy.host)
        self.counts: Counter[str] = Counter()

    def keep(self, tensor: Tensor) -> Saved:
        saved = super().keep(tensor)
        if isinstance(saved, Remade):
            treatment = getattr(tensor.untyped_storage(), "treatment", None)
            assert isinstance(treatment, Output)
            squeezed = treatment.recipe._make is from_fp8
            self.counts["FP8" if squeezed else "made again"] += 1
        else:
            kind = getattr(saved, "kind", "host")
            self.counts[kind] += 1
        return saved


def kinds_of_layer(mesh: Mesh) -> dict[str, int]:
    """Return the number of tensors that autograd saves for one layer, by kind, with all treatments.

    The same policy keeps the inputs of recomputed tensors and the FP8 codes, so they count too.
    """
    found = []
    for num_layers in (1, 2):
        config = config_of(num_layers, quick=True)
        backbone = build(config, mesh)
        changes = RECOMPUTE | {"fp8_storage": True, "offload": True, "offload_min_mib": 1e-3}
        backbone.config = with_policy(config, changes)
        backbone.apply_memory_policy()
        policy = _Counting(backbone.policy)
        for chunk in backbone.chunks:
            apply(policy, chunk.modules(), chunk.parameters())
        microbatch = microbatch_of(config, 0)
        policy.begin_step()
        backbone.forward(microbatch, backbone.chunks[0], microbatch.labels)
        found.append(policy.counts)
    one, two = found
    return {kind: two[kind] - one[kind] for kind in KINDS}


# Results ------------------------------------------------------------------------------------------


def mean_own(found: dict[str, Any]) -> float:
    """Return the policy's own microseconds per saved tensor, averaged over a layer."""
    total = sum(count * found["kinds"][kind]["own"] for kind, count in found["layer"].items())
    return total / sum(found["layer"].values())


def targets(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the targets of the mean and of each kind, with the measured values."""
    names = {"over a layer's": mean_own(found)}
    names |= {kind: one["own"] for kind, one in found["kinds"].items()}
    return [
        {"target": f"the policy's own host time, {name}: at most {AT_MOST_US:.0f} us a tensor",
         "found": f"{value:.1f}", "met": value <= AT_MOST_US, "exact": False}
        for name, value in names.items()
    ]  # fmt: skip
