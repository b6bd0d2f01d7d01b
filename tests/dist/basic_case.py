"""Basic actions of worker.py: losses, gradients, planted faults, layers."""

import torch

from kimi_pretrain.dep.config import CostConfig
from kimi_pretrain.telemetry.losses import merged
from tests.dist.deepseek import deepseek_v3


def losses(run) -> list[dict]:
    """Return loss, norm and counts of each step, and all ranks' losses by source and position.

    Runs with validation also return the held-out losses before the steps.
    """
    held_out = [_held_out(run)] if run.validation is not None else []
    reports = [run.train_step.run(next(run.loader)) for _ in range(run.config.train.steps)]
    return held_out + [line_of(run, report) for report in reports]


def line_of(run, report) -> dict:
    """Return loss, norm and counts of a step, and all ranks' losses by source and position."""
    names, seq_len = run.config.data.source_names, run.config.data.seq_len
    return {
        "loss": report.loss,
        "grad_norm": report.update.grad_norm,
        "max_logit": report.update.max_logit,
        "clipped_heads": report.update.clipped_heads,
        "vision_tokens": report.vision_tokens,
        "loss_tokens": report.loss_tokens,
        "skipped_samples": len(report.skipped),
        "items": report.items,
        "table": merged(run.mesh.all_gather_object(report.losses), names, seq_len).as_line(),
    }


def own_lists(run) -> list:
    """Return the tombstones of every rank and its validation; each rank has a different list."""
    from kimi_pretrain.run import Run

    data = run.config.data
    own = data.replace(tombstones=data.tombstones.replace(".jsonl", f"_{run.mesh.rank}.jsonl"))
    other = Run(run.config.model_copy(update={"data": own}), run.mesh)
    try:
        planners = other.loader.planner, other.validation._planner
        return run.mesh.all_gather_object([one.tombstones.listed.tolist() for one in planners])
    finally:
        other.close()


def _held_out(run) -> dict:
    """Return the line of a validation without its seconds."""
    return {**run.validation.run().line(0), "seconds": None}


def validated(run) -> dict:
    """Return held-out losses before the first and after the last step, and the rows with samples.

    "stopped" says whether a validation ends without a result if the last rank receives a request
    to stop before its last batch, and lists the batches done until then.
    """
    batches = list[object]()
    asked = iter([*([None] * (len(run.validation.plans) - 1)), "told"])
    last = run.mesh.rank == run.mesh.world_size - 1
    stopped = run.validation.run(batches.append, lambda: next(asked) if last else None)
    lines = [run.validation.run(stop=lambda: None).line(0)]
    for _ in range(run.config.train.steps):
        run.train_step.run(next(run.loader))
    lines.append(run.validation.run().line(run.config.train.steps))
    rows = [sorted(set(plan.samples.row.tolist())) for plan in run.validation.plans]
    return {"lines": lines, "rows": rows, "stopped": (stopped is None, batches)}


def validated_once(run) -> dict:
    """Return only the held-out losses before the first step."""
    return {"lines": [run.validation.run().line(0)]}


def dep_gradients(run) -> dict[str, torch.Tensor]:
    """Take one step through DEP; return every parameter's divided gradient by name."""
    return gradients_of(run, run.train_step.run(next(run.loader)))


def gradients_of(run, report) -> dict[str, torch.Tensor]:
    """Return every parameter's divided gradient after a step, by name."""
    return _gather(run, _owned_gradients(run, report.loss_tokens))


# Settings that change how the encoder's work is done, but not its result.
DEP_VARIANTS = {
    "plain": {},
    "co-located": {"placement": "colocated"},
    "kept": {"keep_activations": "auto", "memory_limit_gib": 1.0, "check_recompute": True},
    "offloaded": {"offload_outputs": True},
    "small chunks": {"max_patches_per_chunk": 300},
    "dealt out": {"assign": "round_robin"},
    "owners only": {"assign": "owner"},
    "own replica": {"scope": "replica"},
    # With a quadratic cost the largest item dominates, so it is shared.
    "shared by two": {
        "max_split": 2, "split_efficiency": 1.0, "check_recompute": True,
        "cost": CostConfig(per_patch=0.0, per_patch_squared=1.0, per_item=0.0),
    },
}  # fmt: skip


# Frozen parts; the others are trained.
FROZEN = {
    "tower": {"frozen": ["vision_tower"], "check_recompute": True},
    "projector": {"frozen": ["projector"]},
    "encoder": {"frozen": ["vision_tower", "projector"]},
    "language model": {"frozen": ["language_model"]},
    "all but the projector": {"frozen": ["vision_tower", "language_model"]},
}


def dep_variants(run) -> dict[str, dict]:
    """Return the gradients of one batch under every setting above; see `DEP_VARIANTS`."""
    found = {}
    for name, changed in {**DEP_VARIANTS, **FROZEN, "no balance loss": {}}.items():
        dep = run.config.dep.model_copy(update={k: v for k, v in changed.items() if k != "frozen"})
        train = run.config.train.model_copy(update={"frozen": changed.get("frozen", [])})
        config = run.config.model_copy(update={"dep": dep, "train": train})
        if name == "no balance loss":
            config = config.replace(
                model=config.model.replace(
                    language=config.model.language.replace(aux_loss_coeff=0.0)
                )
            )
        other = type(run)(config, run.mesh)
        held_out = _held_out_and_shared(other) if name in DEP_VARIANTS else None
        report = other.train_step.run(next(other.loader))
        gradients = _owned_gradients(other, report.loss_tokens)
        found[name] = {
            "loss": report.loss,
            "held out": held_out,
            "shared": int((report.vision.parts > 1).sum()),
            "kept": sum(run.mesh.all_gather_object(report.kept_patches)),
            "patches": int(report.vision.patches.sum()),
            "gradients": _gather(run, gradients),
            "phases": sorted(report.spans),
            "clipped": report.update.clipped_heads,
        }
        other.close()
    return found


def _held_out_and_shared(run) -> tuple[dict, int]:
    """Return the line of a validation, and how many of its items several ranks encode."""
    plans = [run.validation._step.planner.plan(plan) for plan in run.validation.plans]
    return _held_out(run), sum(int((plan.parts > 1).sum()) for plan in plans)


def colocated_gradients(run) -> dict[str, torch.Tensor]:
    """Train on the same batch with the encoder in the graph: no DEP, no schedule, no reduction."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from kimi_pretrain.dep.vision_plan import grids_of
    from kimi_pretrain.engine.microbatch import build_microbatches

    batch = next(run.loader)
    plan, items = batch.plan, batch.plan.items
    grids = [tuple(int(x) for x in grid) for grid in grids_of(plan)]
    none = torch.zeros(0, dtype=torch.int64).numpy()
    microbatches = build_microbatches(batch, run.mesh, 1, none)
    loss_tokens = sum(int(m.loss_mask.sum()) for m in microbatches)
    scale = torch.tensor([loss_tokens / plan.num_tokens], dtype=torch.float64)
    MoEAuxLossAutoScaler.set_loss_scale(
        scale.to(run.backbone.grad_of(next(run.backbone.views())).dtype)
    )
    (chunk,) = run.backbone.chunks
    run.encoder.sums.zero()
    run.backbone.models[0].zero_grad_buffer()
    for row, microbatch in enumerate(microbatches):
        mine = [item for item in range(len(items)) if items.row[item] == row]
        if mine:
            packed = torch.cat([torch.from_numpy(batch.media[item]) for item in mine])
            microbatch.leaf = run.encoder.module(packed, [grids[item] for item in mine])
            microbatch.leaf_positions = torch.cat(
                [int(items.start[i]) + torch.arange(int(items.tokens[i])) for i in mine]
            )
        out = run.backbone.forward(microbatch, chunk, microbatch.labels)
        (out * microbatch.loss_mask).sum().backward()
    return {t.name: t.grad().clone() / loss_tokens for t in run.update.named}


def planted_infinity(run) -> dict[str, bool]:
    """Take a good step, then one with an inf gradient on one rank; return what changed."""
    from kimi_pretrain.checkpoint.hashes import hash_tensors
    from kimi_pretrain.dep.encoder import EncoderPass

    def hashes():
        return hash_tensors(run.tensors(), run.mesh)

    start = hashes()
    run.train_step.run(next(run.loader))
    good = hashes()
    backward = EncoderPass.backward

    def poisoned(self, gradients):
        if run.mesh.rank == run.mesh.world_size - 1:
            gradients[0] = float("inf")
        backward(self, gradients)

    EncoderPass.backward = poisoned
    try:
        report = run.train_step.run(next(run.loader))
    finally:
        EncoderPass.backward = backward  # restored for other jobs of this process
    return {
        "finite step": good != start,
        "infinite step": hashes() != good,
        "applied": report.update.applied,
    }


def skipped_mask(run) -> dict[str, bool | int]:
    """Skip the two longest samples of a step; return whether exactly their losses disappear."""
    from kimi_pretrain.engine.microbatch import build_microbatches

    batch = next(run.loader)
    samples, rows = batch.plan.samples, run.config.train.rows_per_microbatch
    longest = samples.length.argsort()[-2:]

    def mask(skipped):
        found = build_microbatches(batch, run.mesh, rows, skipped)
        return torch.cat([m.loss_mask.flatten() for m in found]).view(-1, batch.plan.seq_len)

    wanted, found = mask(longest[:0]), mask(longest)
    before = int(wanted.sum())
    for sample in longest:
        start = samples.start[sample]
        wanted[samples.row[sample], start : start + samples.length[sample]] = False
    return {"equal": torch.equal(found, wanted), "lost": before - int(found.sum())}


def planted_replica(run) -> str:
    """Return the error when one rank's copy of the encoder differs at the start."""
    run.update.check_replicas()  # the unmodified copies must pass
    if run.mesh.rank == 1:
        next(run.encoder.module.parameters()).data.view(-1)[0] += 1e-3
    try:
        run.update.check_replicas()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def planted_bit(run) -> dict[str, object]:
    """Return the replica check's messages of steps, the second with one wrong bit on one rank.

    The bit is in the copy checked in that step, of a tensor that the other rank owns, so the update
    repairs it.
    """
    from kimi_pretrain.reliability.replica_check import check_copies, hash_bits

    def told(step: int, copies) -> str:
        try:
            check_copies(step, run.mesh.all_gather_object(copies))
        except RuntimeError as error:
            return str(error)
        return ""

    def trained() -> str:
        copies = run.train_step.run(next(run.loader)).update.copies
        run.step += 1
        return told(run.step, copies)

    turns = max(len(held) for _, held in run.replicas._kinds)
    sound = [told(step, run.replicas.hashes(step)) for step in range(1, turns + 1)]
    first = trained()
    names = [copy.name for copy in run.replicas.hashes(2)]
    owned = run.mesh.all_gather_object([run.update.optimizer.owns(name) for name in names])
    name = names[owned[1].index(False)]
    if run.mesh.rank == 1:
        run.model.tensors()[name].view(-1)[:1].view(torch.uint8)[0] ^= 1
    second, after = trained(), run.mesh.all_gather_object(int(hash_bits(run.model.tensors()[name])))
    found = {"name": name, "sound": "".join(sound), "told": [first, second, trained()]}
    return found | {"equal again": after[0] == after[1]}


def layers_against_twins(run) -> dict[str, float]:
    """Return the largest errors, fp32."""
    from kimi_pretrain.engine import experts

    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    tokens = torch.tensor([3, 0, 9, 4])
    x = random(16, 12).requires_grad_()
    weight = random(4, 20, 12).requires_grad_()
    gradient = random(16, 20)
    results = []
    for linear in (experts.grouped_linear, experts.grouped_linear_reference):
        y = linear(x, weight, tokens)
        results.append((y, *torch.autograd.grad(y, (x, weight), gradient)))
    fast, plain = results
    none = experts.grouped_linear(x[:0], weight, torch.zeros(4, dtype=torch.int64))
    return {
        "experts": float((fast[0] - plain[0]).abs().max()),
        "experts_grad": max(
            float((a - b).abs().max()) for a, b in zip(fast[1:], plain[1:], strict=True)
        ),
        "no_tokens": float(none.numel()),
    }


def language_model(run) -> dict:
    """Return logits of three packed documents, weights by name, and transformers' configuration."""
    from kimi_pretrain.engine.microbatch import Microbatch
    from kimi_pretrain.engine.packed_attention import PackedRows

    language = run.config.model.language
    generator = torch.Generator().manual_seed(2)
    length, borders = run.config.data.seq_len, [0, 60, 61, 128]
    assert borders[-1] == length
    for view in run.backbone.views(buffers=True):  # enlarges the initial weights
        if view.name.endswith("e_score_correction_bias"):
            view.data.copy_(torch.rand(view.data.shape, generator=generator))
        elif view.data.ndim > 1:
            view.data.mul_(3.0)
    tokens = torch.randint(0, language.vocab_size, (1, length), generator=generator)
    rows = PackedRows.of(borders, [True] * 3, torch.device("cpu"))
    assert rows.max_seqlen_q == rows.max_seqlen_kv == length  # one sequence
    padding = torch.zeros(1, length, dtype=torch.bool)
    (logits,) = run.backbone.evaluate(
        [Microbatch(rows, padding, tokens)], lambda x: x.clone()
    ).outputs
    weights = {view.name: view.data.clone() for view in run.backbone.views(buffers=True)}
    return {
        "logits": logits,
        "weights": weights,
        "tokens": tokens,
        "borders": borders,
        "config": deepseek_v3(language, length),
    }


def _owned_gradients(run, loss_tokens: int) -> dict[str, torch.Tensor]:
    """Return the gradient sums, which only the owners of the tensors hold."""
    named = [t for t in run.update.named if run.update.optimizer.leads(t.name)]
    return {t.name: t.grad() / loss_tokens for t in named}


def _gather(run, mine: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    everything: dict[str, torch.Tensor] = {}
    for part in run.mesh.all_gather_object({name: grad.clone() for name, grad in mine.items()}):
        everything.update(part)
    return everything


ACTIONS = {
    "losses": losses,
    "validated": validated,
    "validated_once": validated_once,
    "own_lists": own_lists,
    "dep_gradients": dep_gradients,
    "colocated_gradients": colocated_gradients,
    "dep_variants": dep_variants,
    "planted_infinity": planted_infinity,
    "planted_replica": planted_replica,
    "planted_bit": planted_bit,
    "skipped_mask": skipped_mask,
    "layers_against_twins": layers_against_twins,
    "language_model": language_model,
}
