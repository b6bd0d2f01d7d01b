"""Evaluates a checkpoint on a held-out source by teacher forcing, with one of two metrics.

Accuracy tests whether the model reads the image. Of the positions whose next token is one of the
chosen characters, it is the share at which the most probable token is right. It is computed again
with the images swapped between samples: text and questions stay the same, so the model can only
guess. A gap between the two numbers can only come through encoder, projector and hand-over.

Loss tests how well the model knows the texts: mean loss and perplexity over all loss tokens of
whole texts. Texts longer than a row are split as in training (`data.split_text`): a part has no
context from the parts before it, and every token is counted once.

Runs in one process from a checkpoint of any layout. Bytes that do not match the index end the
evaluation, because a result over fewer samples would not be comparable.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from data_pipeline.access import check_tokenizer, open_data
from data_pipeline.index.manifest import read_index
from data_pipeline.text import Tokenizer
from kimi_pretrain.checkpoint.find import verified
from kimi_pretrain.checkpoint.load import load
from kimi_pretrain.checkpoint.storage_read import Checkpoint, open_checkpoint
from kimi_pretrain.config import Config, parse_config
from kimi_pretrain.engine import mesh as engine_mesh
from kimi_pretrain.engine.mesh import Mesh
from kimi_pretrain.engine.microbatch import Microbatch
from kimi_pretrain.engine.packed_attention import PackedRows
from kimi_pretrain.model import Model
from kimi_pretrain.reliability.preflight import load_tokenizer, read_heldout, read_sources
from kimi_pretrain.reliability.run_history import latest_in
from kimi_pretrain.tools.held_out import (
    Document,
    Example,
    choose,
    nothing_counts,
    read_examples,
    read_texts,
    room_of,
    swap_images,
)
from kimi_pretrain.tools.validation import Validation

# math.exp overflows above this.
_LARGEST_EXPONENT = 700.0


def evaluate(
    config: Config,
    checkpoint: str | Path,
    source: str,
    *,
    texts: bool = False,
    characters: str = "0123456789",
    limit: int | None = None,
) -> dict[str, Any]:
    """Evaluate a checkpoint on a held-out source; see the module.

    Args:
        config: of the run that wrote the checkpoint; its layout is ignored.
        checkpoint: folder or URI of a complete checkpoint, which may hold weights only; or of a
            run, whose newest checkpoint is used.
        source: name of an ingested source.
        texts: evaluate the samples without media, as whole texts; always on for a source without
            media.
        characters: for samples with a medium, count only tokens that are exactly one of these.
        limit: use only the first `limit` samples.

    Returns:
        "source", "metric" and "counted" (in words), the number of counted "samples" and "tokens",
        "left_out" (reason -> samples; these and "samples" add up to the source), "step" of the
        checkpoint. For samples with a medium also "accuracy" and "accuracy_swapped" (null if no
        other medium fits); for texts "loss" (nats per token) and "perplexity" (null if they are not
        finite) and "split", the number of texts that are longer than a row.

    Raises:
        ValueError: no sample of the source counts.
        IndexMismatch: the source was made with another tokenizer, or its bytes do not match its
            index.
    """
    values = config.model_dump(mode="json") | {"layout": {}}
    config = parse_config(values, "evaluation")
    found = open_checkpoint(latest_in(checkpoint))
    store = open_data(config.data)
    tokenizer = load_tokenizer(config, store)
    index = read_index(store, source)
    check_tokenizer(index, tokenizer)
    pictures = index.num_items > 0 and not texts
    samples, left_out = choose(index, config, limit, pictures=pictures)
    verified(found, config)
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    examples: list[Example] = []
    wanted = _Wanted(characters, tokenizer)
    if pictures:
        examples = read_examples(store, index, config, samples)
        examples = wanted.keep(examples, index.name, left_out)
    mesh = engine_mesh.start(config.layout)
    try:
        reader = _Reader(config, mesh, found, tokenizer)
        if pictures:
            result = reader.read(examples, wanted)
        else:
            result = reader.know(read_texts(store, index, config, tokenizer, samples))
        return {"source": source, **result, "left_out": left_out, "step": reader.step}
    finally:
        engine_mesh.stop()


def heldout(config: Config, checkpoint: str | Path) -> dict[str, Any]:
    """Return the held-out loss of a checkpoint: the line that a validation of the run writes.

    Runs in one process over the same samples as a validation during training, independent of the
    run's layout. docs/METRICS.md explains the names.

    Args:
        config: of the run, with `data.heldout`; its layout is ignored.
        checkpoint: as in `evaluate`.

    Raises:
        ValueError: there are no held-out sources, or the run also trains on one of them.
        IndexMismatch: they were made with another tokenizer, or are damaged.
    """
    if not config.data.heldout:
        raise ValueError("data.heldout names no source; give some, as data.heldout={name: 1}")
    values = config.model_dump(mode="json") | {"layout": {}}
    config = parse_config(values, "evaluation")
    found = open_checkpoint(latest_in(checkpoint))
    store = open_data(config.data)
    tokenizer, trained_on = read_sources(config, store)
    indices = read_heldout(config, store, tokenizer, trained_on)
    verified(found, config)
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    mesh = engine_mesh.start(config.layout)
    try:
        model = Model.build(config, mesh)
        step = load(found, model.tensors()).step
        found = Validation(config, mesh, model, store, tokenizer, indices).run()
        assert found is not None  # None only follows a request to stop
        return found.line(step)
    finally:
        engine_mesh.stop()


class _Wanted:
    """The tokens that count in samples with a medium."""

    def __init__(self, characters: str, tokenizer: Tokenizer):
        self.characters, self.tokenizer = characters, tokenizer
        self.ids = sorted({tokenizer.encode(character)[0] for character in characters})

    def keep(self, examples: list[Example], source: str, left_out: dict[str, int]) -> list[Example]:
        """Return the examples with at least one such token; count the rest in `left_out`.

        Raises:
            ValueError: no example has one.
        """
        kept = [example for example in examples if self._has(example.document(self.tokenizer))]
        if without := len(examples) - len(kept):
            reason = f"without a token of {self.characters!r} that the model is trained to write"
            left_out[reason] = without
        if not kept:
            advice = "give a source whose samples have some, or --texts for those without media"
            raise nothing_counts(source, left_out, advice)
        return kept

    def _has(self, document: Document) -> bool:
        return bool(np.isin(document.tokens[1:][document.loss[1:]], self.ids).any())


class _Reader:
    """The model of a checkpoint in one process, with the evaluations over documents."""

    def __init__(self, config: Config, mesh: Mesh, found: Checkpoint, tokenizer: Tokenizer):
        self.mesh, self.tokenizer, self.room = mesh, tokenizer, room_of(config)
        model = Model.build(config, mesh)
        self.encoder, self.backbone = model.encoder, model.backbone
        self.step = load(found, model.tensors()).step

    def read(self, examples: list[Example], wanted: _Wanted) -> dict[str, Any]:
        """Return the accuracies on samples with a medium."""
        right, total = self._count_right(examples, wanted)
        swapped, others = self._count_right(swap_images(examples, self.room), wanted)
        return {
            "metric": "accuracy: share of the tokens for which the right one is the most probable; "
            "swapped: with another sample's image",
            "counted": f"tokens that are one of the characters {wanted.characters} and that the "
            "model is trained to write, of samples with one image",
            "samples": len(examples),
            "tokens": total,
            "accuracy": right / total,
            "accuracy_swapped": swapped / others if others else None,
        }

    def know(self, texts: Iterable[list[Document]]) -> dict[str, Any]:
        """Return loss and perplexity over whole texts."""
        samples = tokens = split = 0

        def parts() -> Iterator[Document]:
            nonlocal samples, tokens, split
            for documents in texts:
                samples += 1
                split += len(documents) > 1
                tokens += sum(int(document.loss[1:].sum()) for document in documents)
                yield from documents

        total = sum(float(losses) for losses in self._forward(parts(), _sum_losses))
        loss = total / tokens  # not 0: each text has at least its end token
        return {
            "metric": "mean loss (nats a token) and perplexity; texts longer than a row are split "
            "as in training",
            "counted": "tokens that the model is trained to write, of samples without media",
            "samples": samples,
            "tokens": tokens,
            "split": split,
            "loss": loss if math.isfinite(loss) else None,
            "perplexity": math.exp(loss) if loss < _LARGEST_EXPONENT else None,
        }

    def _count_right(self, examples: list[Example], wanted: _Wanted) -> tuple[int, int]:
        """Return (right predictions, predictions) over the counted tokens of all examples."""

        def count(logits: Tensor, labels: Tensor) -> tuple[int, int]:
            counted = torch.isin(labels, torch.tensor(wanted.ids, device=labels.device))
            right = (logits.argmax(-1) == labels) & counted
            return int(right.sum()), int(counted.sum())

        documents = (example.document(self.tokenizer) for example in examples)
        counts = list(self._forward(documents, count))
        return sum(right for right, _ in counts), sum(total for _, total in counts)

    def _forward(
        self, documents: Iterable[Document], collect: Callable[[Tensor, Tensor], Any]
    ) -> Iterator[Any]:
        """Yield `collect(logits [T, vocab], labels [T])` for each microbatch; -1 means no label."""
        for run in _runs(documents, self.room):
            microbatch = self._microbatch(run)
            labels = microbatch.labels
            assert labels is not None
            yield from self.backbone.evaluate(
                [microbatch], lambda logits, labels=labels: collect(logits[0], labels[0])
            ).outputs

    def _microbatch(self, run: list[Document]) -> Microbatch:
        device = self.mesh.device
        tokens = np.full(self.room, self.tokenizer.pad, dtype=np.int64)
        labels = np.full(self.room, -1, dtype=np.int64)
        borders, positions, shown = [0], list[int](), list[Example]()
        for document in run:
            begin, end = borders[-1], borders[-1] + len(document.tokens)
            tokens[begin:end] = document.tokens
            labels[begin : end - 1] = np.where(document.loss[1:], document.tokens[1:], -1)
            borders.append(end)
            if document.example is not None:
                first = begin + document.start
                positions += range(first, first + document.example.pads)
                shown.append(document.example)
        padding = np.arange(self.room) >= borders[-1]
        documents = [True] * len(run)
        if padding.any():
            borders.append(self.room)
            documents.append(False)
        microbatch = Microbatch(
            PackedRows.of(borders, documents, device),
            torch.from_numpy(padding)[None].to(device),
            tokens=torch.from_numpy(tokens)[None].to(device),
            labels=torch.from_numpy(labels)[None].to(device),
        )
        if shown:
            with torch.no_grad():
                microbatch.leaf = self.encoder.encode(
                    [example.patches for example in shown], [example.grid for example in shown]
                )
            microbatch.leaf_positions = torch.tensor(positions, device=device)
        return microbatch


def _sum_losses(logits: Tensor, labels: Tensor) -> Tensor:
    counted = labels >= 0
    chosen = logits[counted]
    chosen = chosen.to(torch.promote_types(chosen.dtype, torch.float32))
    return F.cross_entropy(chosen, labels[counted], reduction="none").double().sum()


def _runs(documents: Iterable[Document], length: int) -> Iterator[list[Document]]:
    """Yield consecutive documents in runs that fit one microbatch."""
    run, filled = list[Document](), 0
    for document in documents:
        size = len(document.tokens)
        if run and filled + size > length:
            yield run
            run, filled = [], 0
        run.append(document)
        filled += size
    if run:
        yield run
