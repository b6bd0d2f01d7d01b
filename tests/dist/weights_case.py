"""Actions of worker.py on initial weights: logits, and the ranks' tensors after a start."""

from pathlib import Path

import torch
from safetensors import safe_open

BORDERS = (0, 60, 61, 128)
GRID = (1, 6, 4)  # of the image in the last document
IMAGE_AT = 70
VISION_TOKENS = GRID[1] * GRID[2] // 4


def scramble(tensors: dict[str, torch.Tensor]) -> None:
    """Move every weight far from its initial value, so that weights cannot be confused."""
    generator = torch.Generator().manual_seed(2)
    for name, tensor in sorted(tensors.items()):
        noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(noise.abs())
        elif tensor.ndim == 1:
            tensor.add_(0.2 * noise)
        else:
            tensor.mul_(3.0)


def inputs(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return tokens [1, 128] with media pads, patches [24, 3, 14, 14] uint8, and the pad id."""
    generator = torch.Generator().manual_seed(3)
    pad = vocab_size - 256 + 21
    tokens = torch.randint(0, vocab_size - 256, (1, BORDERS[-1]), generator=generator)
    tokens[0, IMAGE_AT : IMAGE_AT + VISION_TOKENS] = pad
    patches = torch.randint(0, 256, (24, 3, 14, 14), dtype=torch.uint8, generator=generator)
    return tokens, patches, pad


def weights_logits(run) -> dict:
    """Return logits [1, 128, vocab] of three documents, one with an image.

    A run that starts from its seed is scrambled first, and saved to `checkpoint.place`.
    """
    from kimi_pretrain.engine.microbatch import Microbatch
    from kimi_pretrain.engine.packed_attention import PackedRows

    if run.config.train.start_from is None:
        scramble(run.model.tensors())
        run.save(run.config.checkpoint.place)
    tokens, patches, _ = inputs(run.config.model.language.vocab_size)
    rows = PackedRows.of(list(BORDERS), [True] * 3, torch.device("cpu"))
    with torch.no_grad():
        embedded = run.encoder.encode([patches.numpy()], [GRID])
    microbatch = Microbatch(
        rows,
        torch.zeros(1, BORDERS[-1], dtype=torch.bool),
        tokens,
        leaf=embedded,
        leaf_positions=torch.arange(IMAGE_AT, IMAGE_AT + VISION_TOKENS),
    )
    (logits,) = run.backbone.evaluate([microbatch], lambda x: x.clone()).outputs
    shapes = {name: list(tensor.shape) for name, tensor in run.model.tensors().items()}
    dtypes = {name: str(tensor.dtype) for name, tensor in run.model.tensors().items()}
    return {"logits": logits, "shapes": shapes, "dtypes": dtypes}


def weights_trained(run) -> str:
    """Take two steps and save a checkpoint."""
    for _ in range(2):
        run.train_step.run(next(run.loader))
        run.step += 1
    return run.save(run.config.checkpoint.place)


def weights_started(run) -> dict:
    """Return how a run's tensors differ from the folder it started from.

    The folder is read with the safetensors library, by name. A master copy is the folder's own, or
    the widened weight. A weight that gets wider here comes from the folder's master copy.
    """
    folder = Path(run.config.train.start_from)
    files = {f.name: safe_open(f, framework="pt") for f in folder.glob("*.safetensors")}
    places = {name: file for file, held in files.items() for name in held.keys()}  # noqa: SIM118

    def stored(name: str) -> torch.Tensor | None:
        name = name if name in places else name.removeprefix("language_model.")
        return files[places[name]].get_tensor(name) if name in places else None

    wrong, masters, moments = [], 0, 0
    for name, tensor in run.tensors().items():
        if name.startswith("optim.master."):
            masters += 1
            weight = stored(name.removeprefix("optim.master."))
            kept = stored(name)
            wanted = weight if kept is None else kept
        elif name.startswith("optim."):
            moments += bool(tensor.any())  # all zeros if fresh
            continue
        else:
            wanted, kept = stored(name), stored(f"optim.master.{name}")
            if kept is not None and wanted is not None and tensor.dtype.itemsize > 2:
                wanted = kept if wanted.dtype == torch.bfloat16 else wanted
        if wanted is None or not torch.equal(wanted.to(tensor.dtype), tensor):
            wrong.append(name)
    mine = {"wrong": wrong, "masters": masters, "moments": moments, "tensors": len(run.tensors())}
    return {
        "ranks": run.mesh.all_gather_object(mine),
        "steps": (run.step, run.update.optimizer.steps, run.loader.state_dict()["step"]),
    }


ACTIONS = {
    "weights_logits": weights_logits,
    "weights_trained": weights_trained,
    "weights_started": weights_started,
}
