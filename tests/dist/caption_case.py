"""Actions of worker.py for the captioning stage: steps and their inputs."""

import numpy as np
import pytest
import torch

from tests.dist.basic_case import _gather, _owned_gradients


def caption_start(run) -> str:
    """Save weights in which no bias is zero and no gain is one."""
    generator = torch.Generator().manual_seed(2)
    for name, tensor in sorted(run.model.tensors().items()):
        if tensor.ndim == 1:
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.add_(0.1 * (noise.abs() if name.endswith("e_score_correction_bias") else noise))
    return run.save(run.config.checkpoint.place)


def caption_gradients(run) -> dict:
    """Return each document with its media, a step's loss, and the divided gradients by name."""
    batch = next(run.loader)
    samples, items = batch.plan.samples, batch.plan.items
    grids = np.stack([items.frames, items.grid_h, items.grid_w], axis=1).tolist()
    documents = []
    for number, (row, start) in enumerate(zip(samples.row, samples.start, strict=True)):
        place = row, slice(start, start + samples.length[number])
        mine = np.flatnonzero(items.sample == number).tolist()
        documents.append(
            {
                "tokens": batch.rows.tokens[place],
                "labels": np.where(batch.rows.loss_mask[place], batch.rows.labels[place], -100),
                "media": [(tuple(grids[item]), batch.media[item]) for item in mine],
            }
        )
    heads = {
        name: parameter.detach().clone()
        for name, parameter in run.encoder.module.named_parameters()
        if name.startswith("siglip.")
    }
    # Megatron-Core's router computes scores in float32 for any model dtype, which shifts float64
    # gradients by 4e-9. The patch removes this difference from the comparison.
    with pytest.MonkeyPatch.context() as patch:
        if run.config.train.dtype == "float64":
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        report = run.train_step.run(batch)
    return {
        "documents": documents,
        "heads": heads,
        "loss": report.loss,
        "siglip": report.siglip,
        "gradients": _gather(run, _owned_gradients(run, report.loss_tokens)),
    }


def siglip_step(run) -> dict:
    """Return losses and gradients of a step with pairs, and each rank's images and captions."""
    batch, seen = next(run.loader), list[int]()
    heads, pooled = run.encoder.heads, list[int]()
    images = heads.images

    def counted(x, lengths):
        pooled.append(len(lengths))
        return images(x, lengths)

    heads.images = counted
    captions = _captions(run, batch, np.zeros(0, np.int64))
    seen = run.mesh.all_gather_object(len(captions))
    report = run.train_step.run(batch)
    passes = 2  # forward and recompute
    first = int(batch.plan.items.sample[min(captions)]) if captions else 0
    return {
        "loss": report.loss,
        "siglip": report.siglip,
        "gradients": _gather(run, _owned_gradients(run, report.loss_tokens)),
        "counts": (run.mesh.all_gather_object(sum(pooled) // passes), seen),
        "captions": captions,
        "without the first": _captions(run, batch, np.array([first])),
    }


def _captions(run, batch, skipped) -> dict[int, str]:
    from kimi_pretrain.engine.microbatch import build_microbatches

    microbatches = build_microbatches(batch, run.mesh, 1, skipped)
    return run.train_step.captions(batch.plan, microbatches)


ACTIONS = {
    "caption_start": caption_start,
    "caption_gradients": caption_gradients,
    "siglip_step": siglip_step,
}
