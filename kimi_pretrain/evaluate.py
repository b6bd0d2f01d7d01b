"""Does the model read the image? Per-token accuracy on a held-out source, right and swapped images.

Teacher forcing: at every position whose next token is one of the wanted characters, is the most
probable token the right one? With the images of the samples swapped around, text and questions stay
the same, so what remains is guessing. A gap between the two numbers can only come through encoder,
projector and hand-over.

Runs in one process from a checkpoint of any layout.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_pipeline.access import open_data
from data_pipeline.collate import SampleLayout, laid_out
from data_pipeline.decode import decode_item
from data_pipeline.index.columns import SourceIndex
from data_pipeline.index.manifest import read_index
from data_pipeline.store.open import Span, Store, get_many
from data_pipeline.text import Tokenizer
from kimi_pretrain.checkpoint.find import verified
from kimi_pretrain.checkpoint.load import load
from kimi_pretrain.checkpoint.place import Checkpoint, open_checkpoint
from kimi_pretrain.config import Config, parse_config
from kimi_pretrain.dep.encoder import Grid
from kimi_pretrain.engine import mesh as engine_mesh
from kimi_pretrain.engine.attention import PackedRows
from kimi_pretrain.engine.backbone import Microbatch
from kimi_pretrain.engine.mesh import Mesh
from kimi_pretrain.model import Model
from kimi_pretrain.train import load_tokenizer
from moonvit3d.geometry import grids, num_tokens

log = logging.getLogger("kimi_pretrain.evaluate")


@dataclass(frozen=True)
class Example:
    """One held-out sample with one image: its document, and the image's patches and grid."""

    segments: list[dict[str, Any]]
    patches: np.ndarray
    grid: Grid


def evaluate(
    config: Config,
    checkpoint: str | Path,
    source: str,
    *,
    characters: str = "0123456789",
    limit: int | None = None,
) -> dict[str, Any]:
    """Return the accuracies on a held-out source; see the module.

    Args:
        config: of the run that wrote the checkpoint; its layout is set aside.
        checkpoint: folder or URI of a complete checkpoint; with weights alone, too.
        source: name of an ingested source whose samples have one image each.
        characters: what counts: tokens that are exactly one of these.
        limit: look at the first so many samples.

    Returns:
        {"accuracy", "accuracy_swapped", "tokens", "samples", "step"}.
    """
    values = config.model_dump(mode="json") | {"layout": {}}
    config = parse_config(values, "evaluation")
    found = verified(open_checkpoint(checkpoint), config)
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    store = open_data(config.data)
    tokenizer = load_tokenizer(config, store)
    examples = read_examples(store, read_index(store, source), config, limit)
    mesh = engine_mesh.start(config.layout)
    try:
        reader = _Reader(config, mesh, found)
        wanted = {tokenizer.encode(character)[0] for character in characters}
        right, total = reader.count_right(examples, tokenizer, wanted)
        swapped, _ = reader.count_right(swap_images(examples), tokenizer, wanted)
        return {
            "accuracy": right / max(1, total),
            "accuracy_swapped": swapped / max(1, total),
            "tokens": total,
            "samples": len(examples),
            "step": reader.step,
        }
    finally:
        engine_mesh.stop()


def read_examples(
    store: Store, index: SourceIndex, config: Config, limit: int | None
) -> list[Example]:
    """Read the samples of a source, in their order.

    Raises:
        ValueError: a sample has not exactly one image.
    """
    count = min(limit or index.num_samples, index.num_samples)
    if not np.array_equal(index.item_ptr[: count + 1], np.arange(count + 1)):
        raise ValueError(f"source {index.name!r}: evaluation needs one image in every sample")
    keys = [index.shards[shard].key for shard in index.shard[:count]]
    texts = [
        Span(key, int(offset), int(length))
        for key, offset, length in zip(keys, index.json_offset, index.json_length)
    ]
    images = [
        Span(key, int(offset), int(length))
        for key, offset, length in zip(keys, index.item_offset, index.item_length)
    ]
    bodies = get_many(store, texts + images)
    table = grids(
        index.item_kind[:count],
        index.item_frames[:count],
        index.item_height[:count],
        index.item_width[:count],
        config.data.limits,
    )
    examples = []
    for sample in range(count):
        grid: Grid = tuple(int(side) for side in table[sample])  # type: ignore[assignment]
        kind = int(index.item_kind[sample])
        patches = decode_item(bodies[count + sample], kind, 0, config.data.limits, grid)
        examples.append(Example(json.loads(bodies[sample])["segments"], patches, grid))
    return examples


def swap_images(examples: list[Example]) -> list[Example]:
    """Give each sample the image of the next one."""
    return [
        Example(example.segments, other.patches, other.grid)
        for example, other in zip(examples, examples[1:] + examples[:1], strict=True)
    ]


class _Reader:
    """The model of a checkpoint in one process, and how much it reads."""

    def __init__(self, config: Config, mesh: Mesh, found: Checkpoint):
        self.config, self.mesh = config, mesh
        model = Model.build(config, mesh)
        self.encoder, self.backbone = model.encoder, model.backbone
        self.step = load(found, model.tensors()).step

    def count_right(
        self, examples: list[Example], tokenizer: Tokenizer, wanted: set[int]
    ) -> tuple[int, int]:
        """Return (right predictions, predictions) over the wanted tokens of all examples."""
        length = self.config.train.rows_per_microbatch * self.config.data.seq_len
        right = total = 0
        for run in _runs(examples, tokenizer, length):
            tokens = np.full(length, tokenizer.pad, dtype=np.int64)
            labels = np.full(length, -1, dtype=np.int64)
            borders, positions = [0], []
            for example, (ids, loss, starts) in run:
                begin, end = borders[-1], borders[-1] + len(ids)
                tokens[begin:end] = ids
                labels[begin : end - 1] = np.where(loss[1:], ids[1:], -1)
                positions += range(begin + starts[0], begin + starts[0] + _tokens(example))
                borders.append(end)
            documents = [True] * (len(borders) - 1)
            if borders[-1] < length:
                borders.append(length)
                documents.append(False)
            device = self.mesh.device
            with torch.no_grad():
                embedded = self.encoder.encode(
                    [example.patches for example, _ in run], [example.grid for example, _ in run]
                )
            padding = torch.from_numpy(tokens == tokenizer.pad)[None].to(device)
            microbatch = Microbatch(
                PackedRows.of(borders, documents, device),
                padding,
                tokens=torch.from_numpy(tokens)[None].to(device),
                leaf=embedded,
                leaf_positions=torch.tensor(positions, device=device),
            )
            (best,) = self.backbone.evaluate([microbatch], lambda x: x.argmax(-1)).outputs
            counted = np.isin(labels, sorted(wanted))
            right += int((best.cpu().numpy().reshape(-1)[counted] == labels[counted]).sum())
            total += int(counted.sum())
        return right, total


def _tokens(example: Example) -> int:
    return int(num_tokens(*example.grid))


def _runs(examples: list[Example], tokenizer: Tokenizer, length: int):
    """Yield runs of (example, its layout) that fit one microbatch, in order."""
    run, filled = [], 0
    for example in examples:
        layout = laid_out(example.segments, tokenizer, SampleLayout(0, (_tokens(example),)))
        size = len(layout[0])
        if run and filled + size > length:
            yield run
            run, filled = [], 0
        run.append((example, layout))
        filled += size
    if run:
        yield run
