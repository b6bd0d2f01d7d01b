"""Builds the demo's corpus: real images, video and text from packages on PyPI, written as shards.

Sources: `digits` (pages of scanned digits), `where` (such pages with the boxes of their digits),
`charts`, `photos`, `clips`, `pages` (rendered text), `prose`, `code`, and `digits_heldout`, whose
scans appear on no training page. The tokenizer is trained on the text of the training sources and
stored next to them. The same seed and package versions give the same bytes.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from data_pipeline.index.columns import SourceIndex
from data_pipeline.ingest.ingest import ingest
from data_pipeline.ingest.samples import CrudeSample, Rejection
from data_pipeline.ingest.texts import sample_texts
from data_pipeline.plan.layout import lay_out
from data_pipeline.store.open import Store
from data_pipeline.text import Tokenizer, train_ranks
from launch.demo import digits, python_texts
from launch.demo.charts import charts
from launch.demo.clips import clips
from launch.demo.photos import photos
from launch.demo.rendered_text import rendered_pages
from moonvit3d.geometry import PatchLimits

# As in configs/tiny_cpu.yaml, so that every sample fits a row; the report counts patches with these
# limits.
LIMITS = PatchLimits(image=576, frame=256)
TOKENIZER_KEY = "tokenizer/demo.tiktoken"
VOCABULARY = 1500
# Two special tokens enclose a sample.
ROW_TOKENS = 256
MOST_TOKENS = 230
SHARD_BYTES = 1 << 20
CATEGORIES = {
    "digits": "ocr",
    "digits_heldout": "ocr",
    "where": "grounding",
    "charts": "knowledge",
    "photos": "caption",
    "clips": "video",
    "pages": "ocr",
    "prose": "text",
    "code": "code",
}
TAIL = 0.10

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class CorpusSize:
    """Amounts to build: numbers of samples, and bytes of text."""

    digits: int = 12_000
    digits_heldout: int = 512
    where: int = 600
    charts: int = 150
    per_photo: int = 6
    per_clip: int = 24
    pages: int = 150
    prose_bytes: int = 1_200_000
    code_bytes: int = 1_200_000


def media_sources(seed: int, size: CorpusSize) -> dict[str, Iterator[CrudeSample]]:
    """Return the samples of every source with media, in build order."""
    train, held_out = digits.split(digits.load_scans(), seed)
    return {
        "digits": digits.pages(train, seed, purpose="digits", count=size.digits, most=12),
        "digits_heldout": digits.pages(
            held_out, seed, purpose="digits_heldout", count=size.digits_heldout, most=4
        ),
        "where": digits.located(train, seed, count=size.where),
        "charts": charts(seed, count=size.charts),
        "photos": photos(seed, per_photo=size.per_photo),
        "clips": clips(seed, per_clip=size.per_clip),
        "pages": rendered_pages(seed, count=size.pages),
    }


def segment_texts(samples: list[CrudeSample]) -> Iterator[str]:
    """Yield all texts of all samples."""
    return chain.from_iterable(map(sample_texts, samples))


def tail_share(
    patches: np.ndarray, weights: np.ndarray | None = None, share: float = TAIL
) -> float:
    """Return the share of all patches in the largest items.

    Args:
        patches: [items] patches of every item.
        weights: [items] how often an item is drawn; equal if None.
        share: share of the draws that counts as the largest items.

    Returns:
        0 to 1; equals `share` if all items have the same size.
    """
    if len(patches) == 0:
        return 0.0
    weights = np.ones(len(patches)) if weights is None else np.asarray(weights, np.float64)
    order = np.argsort(-patches, kind="stable")
    taken = np.cumsum(weights[order]) / weights.sum()
    mass = np.cumsum(patches[order] * weights[order])
    # The item at the border counts in part, so that the result is continuous with few items.
    return float(np.interp(share, np.append(0, taken), np.append(0, mass)) / mass[-1])


def describe(index: SourceIndex, samples: list[CrudeSample], seconds: float) -> dict:
    """Return the report of one source as plain numbers."""
    everything = np.arange(index.num_samples)
    sizes = lay_out(index, LIMITS, everything, np.zeros_like(everything))
    patches = sizes.grid.prod(axis=1)
    longest = int(sizes.length.max())
    if longest > ROW_TOKENS:
        # Training would skip the sample silently.
        raise ValueError(
            f"source {index.name}: sample {index.key[int(sizes.length.argmax())]} has {longest} "
            f"tokens, a row of the tiny model {ROW_TOKENS}"
        )
    return {
        "samples": int(index.num_samples),
        "items": len(patches),
        "patches": int(patches.sum()),
        "text_bytes": sum(len(t.encode()) for t in segment_texts(samples)),
        "text_tokens": int(index.text_tokens.sum()),
        "longest": longest,
        "shards": len(index.shards),
        "tail_share": round(tail_share(patches), 4),
        "seconds": round(seconds, 2),
    }


def build_corpus(
    store: Store,
    *,
    seed: int = 0,
    size: CorpusSize | None = None,
    progress: Progress | None = None,
) -> dict[str, dict]:
    """Build all sources, train the tokenizer and write everything to `store`.

    Args:
        store: receives shards, indices and the tokenizer.
        seed: seed of all random choices in the corpus.
        size: amounts to build; None for the demo's own amounts.
        progress: called with (stage, done, total) during the build.

    Returns:
        {source: {samples, items, patches, text_bytes, text_tokens, longest (tokens of a sample),
        shards, tail_share, seconds}}.

    Raises:
        ValueError: a sample was rejected or does not fit a row.
    """
    size = size or CorpusSize()
    report = progress or (lambda stage, done, total: None)
    built: dict[str, list[CrudeSample]] = {}
    seconds: dict[str, float] = {}
    media = media_sources(seed, size)
    for done, (name, samples) in enumerate(media.items()):
        report(f"drawing {name}", done, len(media))
        start = time.perf_counter()
        built[name] = list(samples)
        seconds[name] = time.perf_counter() - start

    report("training the tokenizer", 0, 1)
    prose = list(python_texts.prose_texts(size.prose_bytes))
    code = list(python_texts.code_texts(size.code_bytes))
    trained_on = chain(
        prose, code, *(segment_texts(s) for name, s in built.items() if name != "digits_heldout")
    )
    ranks = train_ranks(trained_on, VOCABULARY)
    store.put(TOKENIZER_KEY, ranks)
    tokenizer = Tokenizer(ranks, "demo")
    for name, documents in (("prose", prose), ("code", code)):
        start = time.perf_counter()
        samples = python_texts.text_samples(name, documents, MOST_TOKENS, tokenizer.encode)
        built[name] = list(samples)
        seconds[name] = time.perf_counter() - start

    described = {}
    for done, (name, samples) in enumerate(built.items()):
        report(f"writing {name}", done, len(built))
        start = time.perf_counter()
        index = ingest(
            samples,
            store,
            name,
            tokenizer,
            SHARD_BYTES,
            category=CATEGORIES[name],
            rejected=_refuse,
        )
        seconds[name] += time.perf_counter() - start
        described[name] = describe(index, samples, seconds[name])
    report("corpus", 1, 1)
    return described


def _refuse(rejection: Rejection) -> None:
    # All samples are generated here: a rejected sample would silently shrink the corpus.
    raise ValueError(f"sample {rejection.key}: {rejection.reason}: {rejection.detail}")
