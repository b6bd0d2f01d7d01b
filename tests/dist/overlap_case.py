"""Actions of worker.py on overlapped experts: the same steps with and without them."""

import gc
import re
from typing import Any

import numpy as np
import torch

from kimi_pretrain.parallel.sequence import SequenceParts

STEPS = 2
STRIDE = 7  # every seventh position of a row has a planted vision embedding
EXPERT = re.compile(r"(?<=\.experts\.)\d+")


class Recorded:
    """A reduction that sums nothing and records the order in which gradients complete."""

    def __init__(self):
        self.order: list[str] = []

    def ready(self, name: str) -> None:
        self.order.append(EXPERT.sub("#", name))

    def launch_rest(self) -> None:
        self.order.append("the rest")

    def finish(self) -> None:
        pass


def overlap(run) -> dict[str, Any]:
    """Compare two steps and an evaluation with and without overlapped experts, bit for bit.

    Returns "differs", the names that differ on any rank; "compared", the number of tensors by kind;
    "padding", the padding tokens; "masks", the routers that still hold a mask after a step;
    "accepted", the settings that our check wrongly accepts; "held", the tensors left in a graph
    beyond a plain step's (Megatron-Core's dispatchers keep the last probabilities); "complete",
    whether the same gradients were reported complete; "orders", the number of distinct orders among
    a stage's ranks.
    """
    batches = [next(run.loader) for _ in range(STEPS)]
    plain, found = (_steps(run, batches, overlapped) for overlapped in (False, True))
    stages = run.mesh.all_gather_object((run.mesh.stage, found["order"]))
    return {
        "differs": _differs(run, plain, found),
        "compared": {kind: len(tensors) for kind, tensors in plain["tensors"].items()},
        "padding": sum(run.mesh.all_gather_object(found["padding"])),
        "masks": sum(run.mesh.all_gather_object(found["masks"])),
        "accepted": _accepted(run),
        "held": max(run.mesh.all_gather_object(found["held"] - plain["held"])),
        "complete": all(
            run.mesh.all_gather_object(sorted(found["order"]) == sorted(plain["order"]))
        ),
        "orders": len({tuple(order) for stage, order in stages if stage == run.mesh.stage}),
    }


def _accepted(run) -> list[str]:
    """Return the settings unsupported by the combined schedule that our check accepts."""
    from kimi_pretrain.engine.model_builder import check_overlap, engine_config

    layout = run.config.layout.model_copy(update={"overlap_experts": True})
    config = run.config.model_copy(update={"layout": layout})
    wrong = {
        "expert_model_parallel_size": 1, "moe_token_dispatcher_type": "allgather",
        "recompute_granularity": "full", "moe_shared_expert_overlap": True, "mtp_num_layers": 2,
        "delay_wgrad_compute": True,
    }  # fmt: skip
    if layout.pp > 1:
        wrong["virtual_pipeline_model_parallel_size"] = None
    accepted = []
    for name, value in wrong.items():
        engine = engine_config(config, "portable")  # must itself pass the check
        setattr(engine, name, value)
        try:
            check_overlap(engine)
        except AssertionError:
            continue
        accepted.append(name)
    return accepted


def overlap_uncured(run) -> list[str]:
    """Return the differences when the combined schedule's routers get no padding mask."""
    from megatron.core.models.gpt import GPTModel

    from kimi_pretrain.engine.language_model import LanguageModel

    batches = [next(run.loader)]
    plain, cure = _steps(run, batches, False), LanguageModel.build_schedule_plan
    LanguageModel.build_schedule_plan = GPTModel.build_schedule_plan
    try:
        return _differs(run, plain, _steps(run, batches, True))
    finally:
        LanguageModel.build_schedule_plan = cure  # restored for other jobs of this process


def _differs(run, plain: dict, found: dict) -> list[str]:
    """Return the sorted "kind name" of tensors that differ on any rank."""
    mine = []
    for kind, tensors in plain["tensors"].items():
        others = found["tensors"][kind]
        assert tensors.keys() == others.keys()
        mine += [f"{kind} {name}" for name in tensors if not tensors[name].equal(others[name])]
    return sorted({name for names in run.mesh.all_gather_object(mine) for name in names})


def _steps(run, batches, overlapped: bool) -> dict[str, Any]:
    """Take steps from the initial weights, then evaluate; return all results."""
    from kimi_pretrain.engine.backbone import build_backbone

    layout = run.config.layout.model_copy(update={"overlap_experts": overlapped})
    config = run.config.model_copy(update={"layout": layout})
    backbone = build_backbone(config, run.mesh)
    backbone.reduction = reduction = Recorded()
    kinds = ("loss", "leaf", "gradient", "bias", "largest logit", "evaluation")
    tensors: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in kinds}
    padding = held = masks = 0
    for step, batch in enumerate(batches):
        microbatches = _microbatches(config, run.mesh, batch)
        padding += sum(int(microbatch.padding.sum()) for microbatch in microbatches)
        tensors["loss"][f"{step}"] = backbone.train_step(microbatches, 0.7).loss_sum
        held = max(held, _graphs())
        masks += sum(router.padding_of_plan is not None for _, router in backbone.routers())
        leaves = [m.leaf.grad for m in microbatches if m.leaf is not None]
        tensors["leaf"] |= {f"{step} {number}": grad for number, grad in enumerate(leaves)}
        for view in backbone.views() if backbone.trainable else ():
            tensors["gradient"][f"{step} {view.name}"] = backbone.grad_of(view).clone()
        for view in backbone.views(buffers=True):
            if view.name.endswith("e_score_correction_bias"):
                tensors["bias"][f"{step} {view.name}"] = view.data.clone()
        for layer, largest in backbone.take_max_logits().items():
            tensors["largest logit"][f"{step} {layer}"] = largest
    microbatches = _microbatches(config, run.mesh, batches[0])
    for number, logits in enumerate(backbone.evaluate(microbatches, torch.clone).outputs):
        tensors["evaluation"][f"{number}"] = logits
    counts = {"held": held, "padding": padding, "masks": masks}
    return {"tensors": tensors, "order": reduction.order, **counts}


def _graphs() -> int:
    """Count the tensors that are attached to a graph."""
    gc.collect()
    return sum(type(x) is torch.Tensor and x.grad_fn is not None for x in gc.get_objects())


def _microbatches(config, mesh, batch) -> list:
    """Return this rank's microbatches with planted embeddings.

    Of three microbatches, one has them as a leaf, one computes them inside the graph, one has none.
    """
    from kimi_pretrain.engine.microbatch import build_microbatches
    from kimi_pretrain.engine.model_builder import DTYPES

    rows, hidden = config.train.rows_per_microbatch, config.model.language.hidden_size
    found = build_microbatches(batch, mesh, rows, np.zeros(0, np.int64))
    shared = SequenceParts(rows * batch.plan.seq_len, mesh.num_cp, mesh.num_tp)
    places = shared.positions(mesh.part)
    taken = np.flatnonzero(places % STRIDE == 0)
    for number, microbatch in enumerate(found if mesh.is_first_stage else ()):
        if number % 3 == 2:
            continue
        generator = torch.Generator().manual_seed(mesh.replica * len(found) + number)
        row = torch.randn(shared.tokens, hidden, generator=generator) * 0.02
        leaf = row[places[taken]].to(DTYPES[config.train.dtype]).requires_grad_()
        microbatch.leaf, microbatch.leaf_positions = leaf, torch.from_numpy(taken)
        if number % 3 == 1:
            microbatch.media = leaf.sin
    return found


ACTIONS = {"overlap": overlap, "overlap_uncured": overlap_uncured}
