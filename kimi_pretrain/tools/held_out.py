"""Held-out samples for an evaluation: selects them and lays them out as attention documents."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from data_pipeline.collate import SampleLayout, laid_out, sample_tokens
from data_pipeline.decode import decode_item
from data_pipeline.index.columns import SourceIndex
from data_pipeline.index.reads import document_of, medium_of, read_checked, read_samples
from data_pipeline.plan.layout import lay_out
from data_pipeline.store.json_objects import parse_json
from data_pipeline.store.open import Store
from data_pipeline.text import Tokenizer
from kimi_pretrain.config import Config
from kimi_pretrain.dep.encoder import Grid
from kimi_pretrain.reliability.preflight import check_item_sizes
from moonvit3d.geometry import num_tokens

# Number of texts that are read together.
_READ_AT_ONCE = 256


@dataclass(frozen=True)
class Example:
    """One held-out sample with one medium.

    Attributes:
        around: tokens of the sample without those of the medium.
    """

    segments: list[dict[str, Any]]
    patches: np.ndarray
    grid: Grid
    around: int

    @property
    def pads(self) -> int:
        """Number of tokens of the medium."""
        return int(num_tokens(*self.grid))

    def document(self, tokenizer: Tokenizer) -> "Document":
        """Return the sample laid out as a document."""
        layout = SampleLayout(self.around + self.pads, (self.pads,))
        tokens, loss, starts = laid_out(self.segments, tokenizer, layout)
        return Document(tokens, loss, self, starts[0])


@dataclass(frozen=True)
class Document:
    """One attention document: a sample, or a part of a long text.

    Attributes:
        tokens: int64 [n].
        loss: bool [n], True for tokens that the model is trained to write.
        example: the sample whose medium it contains; None: text only.
        start: position of the medium's first pad token.
    """

    tokens: np.ndarray
    loss: np.ndarray
    example: Example | None = None
    start: int = 0


def choose(
    index: SourceIndex, config: Config, limit: int | None, *, pictures: bool
) -> tuple[np.ndarray, dict[str, int]]:
    """Return the samples to evaluate, int64 [n], and the number of left-out samples by reason.

    Raises:
        ValueError: no sample is left.
        ConfigError: a selected medium is larger than any chunk.
    """
    every = np.arange(index.num_samples)
    media = np.diff(index.item_ptr)
    reasons = {} if limit is None else {f"after the first {limit} (--limit)": every >= limit}
    if pictures:
        check_item_sizes(config, [index], every=True)
        room = room_of(config)
        length = lay_out(index, config.data.limits, every, np.zeros_like(every)).length
        reasons |= {
            "without media": media == 0,
            "with several media": media > 1,
            "with written coordinates": np.diff(index.region_ptr) > 0,
            f"longer than a microbatch of {room} tokens": length > room,
        }
        advice = "give a source with one image in a sample, or --texts for those without media"
    else:
        reasons |= {"with media": media > 0}
        advice = "leave out --texts, or give a source that has samples without media"
    left, left_out = np.ones(index.num_samples, np.bool_), {}
    for reason, said in reasons.items():
        if number := int((left & said).sum()):
            left_out[reason] = number
        left &= ~said
    if not left.any():
        raise nothing_counts(index.name, left_out, advice)
    return np.flatnonzero(left), left_out


def nothing_counts(source: str, left_out: dict[str, int], advice: str) -> ValueError:
    """Return the error that no sample of a source counts, with the reasons and the remedy."""
    why = ", ".join(f"{number} {reason}" for reason, number in left_out.items()) or "it has none"
    return ValueError(f"source {source!r}: no sample counts ({why}); {advice}")


def room_of(config: Config) -> int:
    """Return the number of tokens in a microbatch."""
    return config.train.rows_per_microbatch * config.data.seq_len


def read_examples(
    store: Store, index: SourceIndex, config: Config, samples: Sequence[int] | np.ndarray
) -> list[Example]:
    """Read samples with one medium each, in the given order.

    Raises:
        IndexMismatch: the bytes of the source do not match its index.
    """
    samples = np.asarray(samples)
    items = index.item_ptr[samples]
    texts = [document_of(index, sample) for sample in samples]
    bodies = read_checked(store, texts + [medium_of(index, item) for item in items])
    layout = lay_out(index, config.data.limits, samples, np.zeros_like(samples))
    examples = []
    for place, item in enumerate(items):
        grid: Grid = tuple(layout.grid[place].tolist())
        body, kind = bodies[len(samples) + place], int(index.item_kind[item])
        patches = decode_item(body, kind, 0, config.data.limits, grid)
        segments = parse_json(bodies[place], "the JSON of a sample")["segments"]
        around = int(layout.length[place] - layout.vision[place])
        examples.append(Example(segments, patches, grid, around))
    return examples


def swap_images(examples: list[Example], room: int) -> list[Example]:
    """Give each sample the medium of the next sample with which it fits into `room` tokens.

    A sample that fits with no other medium is left out.
    """
    swapped = []
    for place, example in enumerate(examples):
        for step in range(1, len(examples)):
            other = examples[(place + step) % len(examples)]
            if example.around + other.pads <= room:
                swapped.append(replace(example, patches=other.patches, grid=other.grid))
                break
    return swapped


def read_texts(
    store: Store, index: SourceIndex, config: Config, tokenizer: Tokenizer, samples: np.ndarray
) -> Iterator[list[Document]]:
    """Yield each sample's text, in parts if it is longer than a row; uses the first wording.

    Raises:
        IndexMismatch: the bytes of the source do not match its index.
    """
    seq_len = config.data.seq_len
    for first in range(0, len(samples), _READ_AT_ONCE):
        for content in read_samples(store, index, samples[first : first + _READ_AT_ONCE].tolist()):
            whole = laid_out(content["segments"], tokenizer, SampleLayout(0))
            size = whole[0].size
            if size <= seq_len:
                yield [Document(*whole[:2])]
                continue
            lengths = [min(left, seq_len) for left in range(size, 2, 2 - seq_len)]
            layouts = [SampleLayout(n, part=part) for part, n in enumerate(lengths)]
            yield [Document(*sample_tokens(whole, layout, seq_len)) for layout in layouts]
