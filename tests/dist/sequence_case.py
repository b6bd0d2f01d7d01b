"""Actions of worker.py on rows that several ranks share."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from kimi_pretrain.parallel.sequence import SequenceParts

STRIDE = 7  # every seventh position of a row has a planted vision embedding


def leaf_gradients(run) -> dict:
    """Plant vision embeddings in the rows, run the backbone, and return their gradients.

    Of three microbatches, one has none, and one has them only in the first quarter of its rows,
    which some ranks do not hold. Returns "gradients" [microbatches, tokens, hidden] by position in
    the row, whether the routing biases moved, and how many parameters have a gradient buffer.
    """
    from kimi_pretrain.engine.microbatch import build_microbatches

    config, mesh = run.config, run.mesh
    batch, rows = next(run.loader), config.train.rows_per_microbatch
    microbatches = build_microbatches(batch, mesh, rows, np.zeros(0, np.int64))
    shared = SequenceParts(rows * batch.plan.seq_len, mesh.num_cp, mesh.num_tp)
    places = shared.positions(mesh.part)
    first, hidden = mesh.replica * len(microbatches), config.model.language.hidden_size
    planted = {}
    for number, microbatch in enumerate(microbatches if mesh.is_first_stage else (), start=first):
        if number % 3 == 2:
            continue
        generator = torch.Generator().manual_seed(number)
        row = torch.randn(shared.tokens, hidden, generator=generator) * 0.02
        end = shared.tokens // 4 if number % 3 == 1 else shared.tokens
        taken = np.flatnonzero((places % STRIDE == 0) & (places < end))
        if not len(taken):
            continue
        microbatch.leaf = row[places[taken]].requires_grad_()
        microbatch.leaf_positions = torch.from_numpy(taken)
        planted[number] = (microbatch, places[taken])
    before = [bias.clone() for bias in run.backbone._routing_biases()]
    run.backbone.train_step(microbatches, 1.0)
    moved = [
        not torch.equal(old, new)
        for old, new in zip(before, run.backbone._routing_biases(), strict=True)
    ]
    mine = {number: (at, one.leaf.grad) for number, (one, at) in planted.items()}
    gradients = torch.zeros(batch.plan.num_rows // rows, shared.tokens, hidden)
    for part in mesh.all_gather_object(mine):
        for number, (at, gradient) in part.items():
            gradients[number, at] += gradient
    buffers = sum(hasattr(view.param, "main_grad") for view in run.backbone.views())
    return {"gradients": gradients, "moved": any(moved), "buffers": buffers}


def shared_rows(run) -> dict:
    """Run planted embeddings, then training steps, then hash the checkpoint tensors.

    Returns "leaves" (see `leaf_gradients`), "steps" as in the action `losses`, and the "shapes" of
    all tensors by name.
    """
    from kimi_pretrain.checkpoint.hashes import hash_tensors
    from tests.dist.basic_case import losses

    leaves = leaf_gradients(run)
    run.backbone.undo_routing_biases()
    steps = losses(run)
    hash_tensors(run.tensors(), run.mesh)  # raises unless copies are bit-identical
    shapes: dict[str, tuple[int, ...]] = {}
    mine = {name: tuple(tensor.shape) for name, tensor in run.tensors().items()}
    for part in run.mesh.all_gather_object(mine):
        shapes.update(part)
    return {"leaves": leaves, "steps": steps, "shapes": shapes}


def shared_gradients(run) -> dict:
    """Take one step; return its line, "gradients", "maxima" and communicated bytes.

    The line is that of the action `losses`. "gradients" are every parameter's divided gradients by
    name, "maxima" those of all heads by layer. Bytes are those "gathered" and "summed" by a rank
    over its context-parallel group.
    """
    from tests.dist.basic_case import gradients_of, line_of

    taken, take = {}, run.backbone.take_max_logits

    def watch():
        taken.update(take())
        return taken

    run.backbone.take_max_logits = watch
    with _moved_bytes() as moved:
        report = run.train_step.run(next(run.loader))
    del run.backbone.take_max_logits
    maxima: dict[int, torch.Tensor] = {}
    for part in run.mesh.all_gather_object(taken):
        for layer, max_N in part.items():
            maxima[layer] = torch.maximum(max_N, maxima.get(layer, max_N))
    found = {"line": line_of(run, report), "gradients": gradients_of(run, report)}
    return {**found, "maxima": maxima, **moved}


@contextmanager
def _moved_bytes() -> Iterator[Counter[str]]:
    """Count the bytes that are "gathered" and "summed" over the context-parallel group."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import mappings

    cp_group, moved = parallel_state.get_context_parallel_group(), Counter()
    plain = mappings.dist_all_gather_func, mappings.dist_reduce_scatter_func

    def gather(output, part, group):
        moved["gathered"] += output.nbytes * (group is cp_group)
        return plain[0](output, part, group=group)

    def scatter(output, whole, group):
        moved["summed"] += whole.nbytes * (group is cp_group)
        return plain[1](output, whole, group=group)

    mappings.dist_all_gather_func, mappings.dist_reduce_scatter_func = gather, scatter
    try:
        yield moved
    finally:
        mappings.dist_all_gather_func, mappings.dist_reduce_scatter_func = plain


def bfloat16_gradients(run) -> dict[str, Any]:
    """Return the relative distance of bfloat16 gradients from float64's with the same weights.

    The distances are over all layers and ranks together: "latents" of keys and values; "below", the
    weights that produce them; "all weights". Also returns the bytes "gathered" and "summed" in
    bfloat16. Every token goes to every expert, so that rounding cannot change routes.
    """
    from kimi_pretrain.engine.backbone import build_backbone
    from kimi_pretrain.engine.microbatch import build_microbatches
    from tests.dist.overlap_case import Recorded

    batch, rows = next(run.loader), run.config.train.rows_per_microbatch

    def gradients(dtype: str) -> dict[str, torch.Tensor]:
        train = run.config.train.model_copy(update={"dtype": dtype})
        backbone = build_backbone(run.config.model_copy(update={"train": train}), run.mesh)
        backbone.reduction = Recorded()
        with torch.no_grad():
            for view in backbone.views():
                view.data.copy_(view.data.to(torch.bfloat16))
        latents = []

        def watch(module, inputs, latent):
            latent.register_hook(lambda gradient: latents.append(gradient.double().flatten()))

        for layer in backbone.chunks[0].decoder.layers:
            layer.self_attention.kv_layernorm.register_forward_hook(watch)
        microbatches = build_microbatches(batch, run.mesh, rows, np.zeros(0, np.int64))
        backbone.train_step(microbatches, 1.0)
        assert len(latents) == len(microbatches) * run.config.model.language.num_layers
        weights = {view.name: backbone.grad_of(view).double() for view in backbone.views()}
        for gradient in weights.values():
            run.mesh.sum_(gradient)
        below = [gradient for name, gradient in weights.items() if "kv_a_" in name]
        return {
            "latents": torch.cat(latents),
            "below": torch.cat([one.flatten() for one in below]),
            "all weights": torch.cat([one.flatten() for one in weights.values()]),
        }

    wanted = gradients("float64")
    with _moved_bytes() as moved:
        found = gradients("bfloat16")
    errors = {}
    for what, gradient in wanted.items():
        far, size = run.mesh.sum(
            [float((found[what] - gradient).square().sum()), float(gradient.square().sum())]
        )
        errors[what] = (far / size) ** 0.5
    return {"errors": errors, **moved}


ACTIONS = {
    "bfloat16_gradients": bfloat16_gradients,
    "leaf_gradients": leaf_gradients,
    "shared_rows": shared_rows,
    "shared_gradients": shared_gradients,
}
