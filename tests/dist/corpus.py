"""A small training corpus for tests: noise pictures with heavy-tailed sizes, and words."""

import io
from pathlib import Path

import numpy as np
import tokenizers
from PIL import Image
from tokenizers import models, normalizers, pre_tokenizers, processors

from data_pipeline.ingest.ingest import CrudeSample, ImageSegment, TextSegment, VideoSegment, ingest
from data_pipeline.store.open import open_store
from data_pipeline.text import Tokenizer, train_ranks

SENTENCE = "the cat sat on a mat and saw 42 red kites over the old mill while it rained"
WORDS = SENTENCE.split()


def build(root: Path) -> None:
    """Write sources `pictures` and `words`, a tokenizer and held-out sources under `root`.

    One file of `pictures_heldout` is damaged, so that its sample is unusable.
    """
    generator = np.random.Generator(np.random.Philox(key=7))
    store = open_store(str(root))
    texts = [" ".join(generator.choice(WORDS, size=40)) for _ in range(200)]
    ranks = train_ranks(texts, 290)
    store.put("tokenizer.tiktoken", ranks)
    store.put("text_tokenizer.json", text_tokenizer().to_str().encode())
    tokenizer = Tokenizer.from_store(store, "tokenizer.tiktoken")
    ingest(
        (CrudeSample(f"w{i:04d}", [TextSegment(text)], {}) for i, text in enumerate(texts)),
        store, "words", tokenizer, shard_bytes=50_000,
    )  # fmt: skip
    ingest(
        (_picture(i, generator) for i in range(150)),
        store, "pictures", tokenizer, shard_bytes=50_000,
    )  # fmt: skip

    generator = np.random.Generator(np.random.Philox(key=8))
    held = [_picture(i, generator) for i in range(8)]
    ingest(held, store, "pictures_heldout", tokenizer, shard_bytes=500_000)
    texts = [" ".join(generator.choice(WORDS, size=int(n))) for n in (10, 60, 300)]
    ingest(
        (CrudeSample(f"h{i:04d}", [TextSegment(text)], {}) for i, text in enumerate(texts)),
        store, "words_heldout", tokenizer, shard_bytes=50_000,
    )  # fmt: skip
    shard = min((root / "pictures_heldout").rglob("*.tar"))
    body = bytearray(shard.read_bytes())
    body[body.index(b"IDAT") + 20] ^= 255
    shard.write_bytes(body)


def text_tokenizer() -> tokenizers.Tokenizer:
    """Return a tokenizer for SigLIP's text tower: a unigram model whose end token also pads."""
    letters = sorted(set(SENTENCE) - {" "})
    pieces = ["<unk>", "</s>", *letters, *sorted({f"▁{word}" for word in WORDS}), "▁"]
    made = tokenizers.Tokenizer(
        models.Unigram([(piece, -float(place)) for place, piece in enumerate(pieces)], unk_id=0)
    )
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return made


def _picture(number: int, generator: np.random.Generator) -> CrudeSample:
    size = min(28 * int(1 + generator.pareto(0.9)), 280)
    other = min(28 * int(1 + generator.pareto(0.9)), 280)
    text = TextSegment(" ".join(generator.choice(WORDS, size=int(generator.integers(1, 5)))))
    if number % 10 == 3:
        frames = generator.integers(0, 255, (3, 56, 56, 3), dtype=np.uint8)
        return CrudeSample(f"p{number:04d}", [VideoSegment(_mp4(frames), "mp4"), text], {})
    pixels = generator.integers(0, 255, (size, other, 3), dtype=np.uint8)
    return CrudeSample(f"p{number:04d}", [ImageSegment(_png(pixels), "png"), text], {})


def _png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def _mp4(frames: np.ndarray) -> bytes:
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=2)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()
