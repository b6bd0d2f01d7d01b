"""Faults that `verify dep` must find, planted in one run's objects for one step.

Each is of a kind that has happened to systems of this sort silently: the step runs on, and most of
them leave the loss as it is.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kimi_pretrain.dep.vision_plan import Ints, Spans, VisionPlan
from kimi_pretrain.verify.fault import Fault, Replaced, register
from kimi_pretrain.verify.routes import Replay, TopK

if TYPE_CHECKING:  # listing the faults' names does not load the engine
    from kimi_pretrain.dep.encoder import EncoderPass
    from kimi_pretrain.engine.backbone import BackboneResult
    from kimi_pretrain.engine.microbatch import Microbatch
    from kimi_pretrain.run import Run

FAULTS: "dict[str, Fault[Run, VisionPlan]]" = {}
_fault = partial(register, FAULTS)


def _next_best(
    scores_TE: Tensor, k: int, groups: Any, take: Any, topk: TopK
) -> tuple[Tensor, Tensor]:
    """Choose experts as the router does; one token in 16 takes the next best for its last."""
    chosen_TK = topk(scores_TE, k, groups, take)[1].clone()
    chosen_TK[::16] = scores_TE[::16].topk(k + 1, dim=1).indices[:, [*range(k - 1), k]]
    return scores_TE.gather(1, chosen_TK), chosen_TK


def _with_routers(run: "Run") -> list[int]:
    """Return the ranks that hold routers; a collective call."""
    held: list[Any] = run.mesh.all_gather_object(any(True for _ in run.backbone.routers()))
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


def _on_its_way(run: "Run", vision: VisionPlan) -> str | None:
    """Whether the fault is of the exchange or of chunks, which items in bubbles do not meet."""
    if vision.bubbles is not None:
        return f"dep.bubbles={run.config.dep.bubbles}: planted with dep.bubbles=none alone"
    return _no_media(run, vision)


def _on_its_way_back(run: "Run", vision: VisionPlan) -> str | None:
    return _not_trained(run, vision) or _on_its_way(run, vision)


def _alone(run: "Run", vision: VisionPlan) -> str | None:
    if run.mesh.world_size == 1:
        return "there is one process: nothing is summed over ranks"
    return _not_trained(run, vision)


def _one_replica(run: "Run", vision: VisionPlan) -> str | None:
    alone = run.mesh.num_replicas == 1
    return "layout.dp=1: the only replica's tokens are all tokens" if alone else None


def _no_choice(run: "Run", vision: VisionPlan) -> str | None:
    language = run.config.model.language
    if language.experts_per_token == language.num_experts:
        return f"every token goes to all {language.num_experts} experts"
    return None if _with_routers(run) else "no layer has experts"


@_fault("the encoder gradients of one chunk of one rank are counted twice", _on_its_way_back)
def _doubled_gradient(replaced: Replaced, run: "Run", vision: VisionPlan) -> None:
    begin, rank = run.encoder.begin, int(vision.shares.rank.min())

    def begin_doubling(*args: Any, **options: Any) -> "EncoderPass":
        work = begin(*args, **options)
        backward = work.backward

        def twice(gradients: Tensor) -> None:
            factors = torch.ones(len(gradients), 1).to(gradients)
            factors[: work.chunks[0].tokens] = 2.0
            backward(gradients * factors)  # linear: the chunk's gradients count twice

        if run.mesh.rank == rank:
            work.backward = twice
        return work

    replaced.put(run.encoder, "begin", begin_doubling)


@_fault("the embeddings of the smallest item arrive as zeros", _on_its_way)
def _lost_item(replaced: Replaced, run: "Run", vision: VisionPlan) -> None:
    exchange, item = run.train_step.exchange, _smallest(vision)
    hand_over = exchange.hand_over

    def losing(embeddings: Tensor, plan: VisionPlan, rank: int) -> Tensor:
        return _without(hand_over(embeddings, plan, rank), plan.received_by(rank), item)

    replaced.put(exchange, "hand_over", losing)


@_fault("the gradient of the smallest item does not come back", _on_its_way_back)
def _lost_gradient(replaced: Replaced, run: "Run", vision: VisionPlan) -> None:
    exchange, item = run.train_step.exchange, _smallest(vision)
    hand_back = exchange.hand_back

    def losing(gradients: Tensor, plan: VisionPlan, rank: int) -> Tensor:
        return hand_back(_without(gradients, plan.received_by(rank), item), plan, rank)

    replaced.put(exchange, "hand_back", losing)


@_fault(
    "two items arrive in each other's place, and so do their gradients",
    lambda run, plan: (
        _on_its_way(run, plan)
        or (None if _neighbours(plan) else "no rank receives two items in this step")
    ),
)
def _swapped_items(replaced: Replaced, run: "Run", vision: VisionPlan) -> None:
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

    replaced.put(exchange, "hand_over", over)
    replaced.put(exchange, "hand_back", back)


@_fault("the loss of one replica is divided by its own tokens instead of everyone's", _one_replica)
def _wrong_divisor(replaced: Replaced, run: "Run", vision: VisionPlan) -> None:
    """Weight the last replica's loss by (all loss tokens / its own); the reported loss is right."""
    mesh, train_step = run.mesh, run.backbone.train_step

    def weighing(microbatches: "list[Microbatch]", aux_scale: float) -> "BackboneResult":
        masks = [m.loss_mask for m in microbatches if m.loss_mask is not None]
        mine = sum(int(mask.sum()) for mask in masks) if mesh.counts_loss else 0
        counts: list[Any] = mesh.all_gather_object((mesh.replica, mine))
        own = sum(count for replica, count in counts if replica == mesh.num_replicas - 1)
        factor = sum(count for _, count in counts) / max(1, own)
        if mesh.replica != mesh.num_replicas - 1:
            return train_step(microbatches, aux_scale)
        dtype = torch.float64 if run.encoder.dtype == torch.float64 else torch.float32
        heavy = [
            m if m.loss_mask is None else replace(m, loss_mask=m.loss_mask.to(dtype) * factor)
            for m in microbatches
        ]
        result = train_step(heavy, aux_scale)
        return replace(result, loss_sum=result.loss_sum / factor)

    replaced.put(run.backbone, "train_step", weighing)


@_fault("the sums of the encoder's gradients are wrong on one rank", _alone)
def _unequal_sums(replaced: Replaced, run: "Run", vision: VisionPlan) -> None:
    sums, last = run.encoder.sums, run.mesh.world_size - 1
    finish = sums.finish

    def finish_elsewhere() -> None:
        finish()
        if run.mesh.rank == last:
            sums.buffer.mul_(1.5)

    replaced.put(sums, "finish", finish_elsewhere)


@_fault(
    "one token in 16 of one rank's last router goes to the expert after the best ones",
    _no_choice,
    own_reference=True,  # it must not follow the wrong choice
)
def _wrong_expert(replaced: Replaced, run: "Run", vision: VisionPlan) -> None:
    routers = [router for _, router in run.backbone.routers()]
    if run.mesh.rank == max(_with_routers(run)):
        replaced.put(routers[-1], "router_replay", Replay(_next_best))
