"""Faults that `verify dep` must find, planted in one run's objects for one step.

Each kind of fault has occurred silently in systems of this sort: the step continues, and most
faults leave the loss unchanged.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kimi_pretrain.dep.vision_plan import Ints, VisionPlan, runs
from kimi_pretrain.verify.fault import Fault, Replaced, register
from kimi_pretrain.verify.routes import Replay, TopK

if TYPE_CHECKING:  # listing the names of the faults must not load the engine
    from kimi_pretrain.engine.backbone import BackboneResult
    from kimi_pretrain.engine.microbatch import Microbatch
    from kimi_pretrain.run import Run

_Change = Callable[[Tensor, Tensor], Tensor]
FAULTS: "dict[str, Fault[Run, VisionPlan]]" = {}
_fault = partial(register, FAULTS)


def _next_best(
    scores_TE: Tensor, k: int, groups: Any, take: Any, topk: TopK
) -> tuple[Tensor, Tensor]:
    """Choose as the router does; one token in 16 takes the next best expert as its last."""
    chosen_TK = topk(scores_TE, k, groups, take)[1].clone()
    chosen_TK[::16] = scores_TE[::16].topk(k + 1, dim=1).indices[:, [*range(k - 1), k]]
    return scores_TE.gather(1, chosen_TK), chosen_TK


def _with_routers(run: "Run") -> list[int]:
    """Return the ranks that hold routers; collective."""
    held: list[Any] = run.mesh.all_gather_object(any(True for _ in run.backbone.routers()))
    return [rank for rank, holds in enumerate(held) if holds]


def _smallest(vision: VisionPlan) -> int:
    """Return the item with the fewest tokens, whose loss is the hardest to detect."""
    return int(vision.tokens.argmin())


def _places(vision: VisionPlan, rank: int, microbatch: int, item: int) -> Ints:
    """Return the positions of an item's tokens in a microbatch of a first-stage rank."""
    spans = vision.received_by(rank)
    spans = spans[(spans.item == item) & (spans.microbatch == microbatch)]
    return runs(spans.position, spans.count)


def _neighbours(vision: VisionPlan) -> tuple[int, int, list[int]] | None:
    """Return a rank, one of its microbatches, and two adjacent items in it, or None."""
    for rank in range(vision.num_ranks):
        spans = vision.received_by(rank)
        spans = spans[np.lexsort((spans.position, spans.microbatch))]
        both = (np.diff(spans.item) != 0) & (np.diff(spans.microbatch) == 0)
        for number in np.flatnonzero(both).tolist():
            return rank, int(spans.microbatch[number]), spans.item[number : number + 2].tolist()
    return None


def _arriving(
    replaced: Replaced, run: "Run", places: Callable[[int], Ints], change: "_Change"
) -> None:
    """Change received embeddings inside the graph, between a microbatch's leaf and the backbone.

    Every configuration that does not encode in the graph has embeddings at this point, whether they
    arrive by the exchange or one by one while the pipeline runs.

    Args:
        places: maps the number of a microbatch to the positions to change on this rank.
        change: maps embeddings [tokens, hidden] and the rows of these positions, in order, to
            changed embeddings.
    """
    train_step = run.backbone.train_step

    def changing(microbatches: "list[Microbatch]", aux_scale: float) -> "BackboneResult":
        for number, microbatch in enumerate(microbatches):
            if len(there := places(number)):
                # The leaf may not exist before the microbatch is due.
                microbatch.media = partial(changed, microbatch, there)
        return train_step(microbatches, aux_scale)

    def changed(microbatch: "Microbatch", there: Ints) -> Tensor:
        assert microbatch.leaf is not None
        assert microbatch.leaf_positions is not None
        at = {place: row for row, place in enumerate(microbatch.leaf_positions.tolist())}
        rows = [at[place] for place in np.sort(there).tolist()]
        return change(microbatch.leaf, torch.tensor(rows, device=microbatch.leaf.device))

    replaced.put(run.backbone, "train_step", changing)


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


def _one_replica(run: "Run", vision: VisionPlan) -> str | None:
    alone = run.mesh.num_replicas == 1
    return "layout.dp=1: the only replica's tokens are all tokens" if alone else None


def _no_choice(run: "Run", vision: VisionPlan) -> str | None:
    language = run.config.model.language
    if language.experts_per_token == language.num_experts:
        return f"every token goes to all {language.num_experts} experts"
    return None if _with_routers(run) else "no layer has experts"


@_fault("the encoder gradients of one chunk of one rank are counted twice", _not_trained)
def _doubled_gradient(replaced: Replaced, run: "Run", vision: VisionPlan) -> None:
    """Double the gradient of the encoder's first output with a graph; in bubbles, of one unit."""
    projector, rank = run.encoder.module.mm_projector, int(vision.shares.rank.min())
    project, doubled = projector.forward, list[bool]()

    def doubling(*args: Any) -> Tensor:
        output = project(*args)
        if output.requires_grad and not doubled:
            doubled.append(True)
            output.register_hook(lambda gradient: 2.0 * gradient)  # linear: doubles all of them
        return output

    if run.mesh.rank == rank:
        replaced.put(projector, "forward", doubling)


@_fault("the embeddings of the smallest item arrive as zeros", _no_media)
def _lost_item(replaced: Replaced, run: "Run", vision: VisionPlan) -> None:
    def lose(embeddings: Tensor, rows: Tensor) -> Tensor:
        lost = embeddings[rows]
        return embeddings.index_copy(0, rows, lost - lost.detach())  # the gradient still returns

    _arriving(replaced, run, partial(_places, vision, run.mesh.rank, item=_smallest(vision)), lose)


@_fault("the gradient of the smallest item does not come back", _not_trained)
def _lost_gradient(replaced: Replaced, run: "Run", vision: VisionPlan) -> None:
    def lose(embeddings: Tensor, rows: Tensor) -> Tensor:
        return embeddings.index_copy(0, rows, embeddings[rows].detach())

    _arriving(replaced, run, partial(_places, vision, run.mesh.rank, item=_smallest(vision)), lose)


@_fault(
    "two items arrive in each other's place, and so do their gradients",
    lambda run, plan: (
        _no_media(run, plan)
        or (None if _neighbours(plan) else "no microbatch has two items on a rank in this step")
    ),
)
def _swapped_items(replaced: Replaced, run: "Run", vision: VisionPlan) -> None:
    """Swap in both directions, so that gradients match the swapped input: only images are wrong."""
    pair = _neighbours(vision)
    assert pair is not None
    where, which, items = pair
    sizes = [len(_places(vision, where, which, item)) for item in items]

    def places(microbatch: int) -> Ints:
        if (run.mesh.rank, microbatch) != (where, which):
            return np.zeros(0, np.int64)
        return np.concatenate([_places(vision, where, which, item) for item in items])

    def swap(embeddings: Tensor, rows: Tensor) -> Tensor:
        return embeddings.index_copy(0, rows, embeddings[rows.roll(sizes[1])])

    _arriving(replaced, run, places, swap)


@_fault("the loss of one replica is divided by its own tokens instead of everyone's", _one_replica)
def _wrong_divisor(replaced: Replaced, run: "Run", vision: VisionPlan) -> None:
    """Scale the last replica's loss by (all loss tokens / its own); the reported loss is right."""
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
        for m in microbatches:  # modified in place: these objects receive their media later
            if m.loss_mask is not None:
                m.loss_mask = m.loss_mask.to(dtype) * factor
        result = train_step(microbatches, aux_scale)
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
    own_reference=True,  # the reference must not follow the wrong choice
)
def _wrong_expert(replaced: Replaced, run: "Run", vision: VisionPlan) -> None:
    routers = [router for _, router in run.backbone.routers()]
    if run.mesh.rank == max(_with_routers(run)):
        replaced.put(routers[-1], "router_replay", Replay(_next_best))
