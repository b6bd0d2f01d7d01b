"""Faults that the comparison must find, planted from outside into one run's objects.

Each is of a kind that has happened to systems of this sort without a word: the step runs on, and
most of them leave the loss as it is. Nothing in the code that trains knows of them: a method of the
run's exchange, encoder or backbone is replaced for one step, on this object alone.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kimi_pretrain.dep.vision_plan import Ints, Spans, VisionPlan
from kimi_pretrain.verify.replaced import replaced

if TYPE_CHECKING:  # who asks for the faults' names alone need not load the engine
    from kimi_pretrain.dep.encoder import EncoderPass
    from kimi_pretrain.engine.backbone import BackboneResult
    from kimi_pretrain.engine.microbatch import Microbatch
    from kimi_pretrain.run import Run

Obstacle = Callable[["Run", VisionPlan], str | None]
Plant = Callable[["Run", VisionPlan], AbstractContextManager[None]]


@dataclass(frozen=True)
class Fault:
    """A fault that can be planted.

    Attributes:
        what: goes wrong, in a sentence.
        obstacle: (run, plan of the step) -> why this step or layout cannot have it, or None. The
            same on every rank.
        planted: (run, plan) -> context in which steps have the fault; entered on every rank.
        routes: it is in the choice of experts, so the reference is asked whether to follow it.
    """

    what: str
    obstacle: Obstacle
    planted: Plant
    routes: bool = False


@contextmanager
def _doubled_gradient(run: "Run", vision: VisionPlan) -> Iterator[None]:
    begin, rank = run.encoder.begin, int(vision.shares.rank.min())

    def begin_doubling(*args: Any, **options: Any) -> "EncoderPass":
        work = begin(*args, **options)
        backward = work.backward

        def twice(gradients: Tensor) -> None:
            factors = torch.ones(len(gradients), 1).to(gradients)
            factors[: work.runs[0].tokens] = 2.0
            backward(gradients * factors)  # linear: the chunk's gradients count twice

        if run.mesh.rank == rank:
            work.backward = twice
        return work

    with replaced(run.encoder, "begin", begin_doubling):
        yield


@contextmanager
def _lost_item(run: "Run", vision: VisionPlan) -> Iterator[None]:
    exchange, item = run.train_step.exchange, _smallest(vision)
    hand_over = exchange.hand_over

    def losing(embeddings: Tensor, plan: VisionPlan, rank: int) -> Tensor:
        return _without(hand_over(embeddings, plan, rank), plan.received_by(rank), item)

    with replaced(exchange, "hand_over", losing):
        yield


@contextmanager
def _lost_gradient(run: "Run", vision: VisionPlan) -> Iterator[None]:
    exchange, item = run.train_step.exchange, _smallest(vision)
    hand_back = exchange.hand_back

    def losing(gradients: Tensor, plan: VisionPlan, rank: int) -> Tensor:
        return hand_back(_without(gradients, plan.received_by(rank), item), plan, rank)

    with replaced(exchange, "hand_back", losing):
        yield


@contextmanager
def _swapped_items(run: "Run", vision: VisionPlan) -> Iterator[None]:
    """Swap both ways, so that the gradients fit what was seen: only the pictures are wrong."""
    exchange, pair = run.train_step.exchange, _neighbours(vision)
    assert pair is not None
    where, order = pair
    hand_over, hand_back = exchange.hand_over, exchange.hand_back

    def over(embeddings: Tensor, plan: VisionPlan, rank: int) -> Tensor:
        received = hand_over(embeddings, plan, rank)
        return received[torch.from_numpy(order)] if rank == where else received

    def back(gradients: Tensor, plan: VisionPlan, rank: int) -> Tensor:
        undone = gradients[torch.from_numpy(np.argsort(order))] if rank == where else gradients
        return hand_back(undone, plan, rank)

    with replaced(exchange, "hand_over", over), replaced(exchange, "hand_back", back):
        yield


@contextmanager
def _wrong_divisor(run: "Run", vision: VisionPlan) -> Iterator[None]:
    """Weigh the loss of the last replica by (all loss tokens / its own); the loss told is right."""
    mesh, train_step = run.mesh, run.backbone.train_step

    def weighing(microbatches: "list[Microbatch]", aux_scale: float) -> "BackboneResult":
        masks = [m.loss_mask for m in microbatches if m.loss_mask is not None]
        mine = sum(int(mask.sum()) for mask in masks) if mesh.counts_loss else 0
        told: list[Any] = mesh.gather((mesh.replica, mine))
        own = sum(count for replica, count in told if replica == mesh.num_replicas - 1)
        factor = sum(count for _, count in told) / max(1, own)
        if mesh.replica != mesh.num_replicas - 1:
            return train_step(microbatches, aux_scale)
        dtype = torch.float64 if run.encoder.dtype == torch.float64 else torch.float32
        heavy = [
            m if m.loss_mask is None else replace(m, loss_mask=m.loss_mask.to(dtype) * factor)
            for m in microbatches
        ]
        result = train_step(heavy, aux_scale)
        return replace(result, loss_sum=result.loss_sum / factor)

    with replaced(run.backbone, "train_step", weighing):
        yield


@contextmanager
def _unequal_sums(run: "Run", vision: VisionPlan) -> Iterator[None]:
    sums, last = run.encoder.sums, run.mesh.world_size - 1
    finish = sums.finish

    def finish_elsewhere() -> None:
        finish()
        if run.mesh.rank == last:
            sums.buffer.mul_(1.5)

    with replaced(sums, "finish", finish_elsewhere):
        yield


class _NextBest:
    """Stands in Megatron-Core's router for its top-k: one token in 16 takes the expert after it."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any = None, group_topk: Any = None,
        default_compute_topk: Any = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        chosen = default_compute_topk(scores, topk, num_groups, group_topk)[1].clone()
        chosen[::16] = scores[::16].topk(topk + 1, dim=1).indices[:, [*range(topk - 1), topk]]
        return scores.gather(1, chosen), chosen


@contextmanager
def _wrong_expert(run: "Run", vision: VisionPlan) -> Iterator[None]:
    routers = [router for _, router in run.backbone.routers()]
    if run.mesh.rank != max(_with_routers(run)):
        yield
        return
    with replaced(routers[-1], "router_replay", _NextBest()):
        yield


def _with_routers(run: "Run") -> list[int]:
    """Return the ranks that hold routers; asked by all ranks together."""
    held: list[Any] = run.mesh.gather(any(True for _ in run.backbone.routers()))
    return [rank for rank, holds in enumerate(held) if holds]


def _smallest(vision: VisionPlan) -> int:
    """Return the item of the fewest tokens: the hardest to miss."""
    return int(vision.tokens.argmin())


def _without(rows: Tensor, spans: Spans, item: int) -> Tensor:
    """Return rows in the order of spans, those of an item zeroed."""
    lost = torch.from_numpy(np.repeat(spans.item == item, spans.count)).to(rows.device)
    return rows.masked_fill(lost[:, None], 0.0)


def _neighbours(vision: VisionPlan) -> tuple[int, Ints] | None:
    """Return a rank that receives two items, and the order of its rows with those swapped."""
    for rank in range(vision.num_ranks):
        spans = vision.received_by(rank)
        for number in np.flatnonzero(spans.item[1:] != spans.item[:-1]).tolist():
            start = int(spans.count[:number].sum())
            first, second = spans.count[number : number + 2].tolist()
            order = np.arange(int(spans.count.sum()))
            both = order[start : start + first + second].copy()
            order[start : start + first + second] = np.roll(both, second)
            return rank, order
    return None


def _no_media(run: "Run", vision: VisionPlan) -> str | None:
    return None if len(vision.tokens) else "the step holds no media"


def _not_trained(run: "Run", vision: VisionPlan) -> str | None:
    if not run.encoder.trainable:
        return "train.frozen holds the whole encoder: it has no gradients"
    return _no_media(run, vision)


def _alone(run: "Run", vision: VisionPlan) -> str | None:
    if run.mesh.world_size == 1:
        return "there is one process: nothing is summed over ranks"
    return _not_trained(run, vision)


def _no_pair(run: "Run", vision: VisionPlan) -> str | None:
    return None if _neighbours(vision) else "no rank receives two items in this step"


def _one_replica(run: "Run", vision: VisionPlan) -> str | None:
    if run.mesh.num_replicas == 1:
        return "layout.dp=1: the only replica's tokens are all tokens"
    return None


def _no_choice(run: "Run", vision: VisionPlan) -> str | None:
    language = run.config.model.language
    if language.experts_per_token == language.num_experts:
        return f"every token goes to all {language.num_experts} experts"
    return None if _with_routers(run) else "no layer has experts"


FAULTS: dict[str, Fault] = {
    "doubled-gradient": Fault(
        "the encoder gradients of one chunk of one rank are counted twice",
        _not_trained,
        _doubled_gradient,
    ),
    "lost-item": Fault(
        "the embeddings of the smallest item arrive as zeros", _no_media, _lost_item
    ),
    "lost-gradient": Fault(
        "the gradient of the smallest item does not come back", _not_trained, _lost_gradient
    ),
    "swapped-items": Fault(
        "two items arrive in each other's place, and so do their gradients",
        _no_pair,
        _swapped_items,
    ),
    "wrong-divisor": Fault(
        "the loss of one replica is divided by its own tokens instead of everyone's",
        _one_replica,
        _wrong_divisor,
    ),
    "unequal-sums": Fault(
        "the sums of the encoder's gradients are wrong on one rank",
        _alone,
        _unequal_sums,
    ),
    "wrong-expert": Fault(
        "one token in 16 of one rank's last router goes to the expert after the best ones",
        _no_choice,
        _wrong_expert,
        routes=True,
    ),
}
