"""A small corpus on disk with every kind of sample, and a config that uses every data feature."""

import numpy as np
from PIL import Image, ImageDraw

from data_pipeline.augment.config import (
    AffineConfig,
    AugmentConfig,
    ColourConfig,
    CropConfig,
    JpegConfig,
)
from data_pipeline.config import BlendStage, DataConfig
from data_pipeline.ingest.ingest import ingest
from data_pipeline.ingest.samples import (
    CrudeSample,
    ImageSegment,
    RegionSegment,
    TextSegment,
    VideoSegment,
)
from data_pipeline.text import Tokenizer, train_ranks
from moonvit3d.geometry import PatchLimits
from tests.unit.data_pipeline.media import encoded, video

WORDS = "the quick brown fox jumps over a lazy dog near 12 rivers, 345 boats and one image video"
TOKENIZER_KEY = "tokenizer/words.tiktoken"
CONFIG = DataConfig(
    root="a folder",
    sources={"boxes": 2.0, "captions": 1.0, "clips": 1.0, "web": 1.0},
    seq_len=96,
    rows_per_step=12,
    vision_token_ratio=0.25,
    schedule=[
        BlendStage(
            after_tokens=6_000,
            sources={"boxes": 1.0, "captions": 2.0, "web": 1.0},
            vision_token_ratio=0.2,
        )
    ],
    max_epochs={"clips": 6.0},
    augment={
        "boxes": AugmentConfig(
            flip=0.5,
            turn=0.3,
            affine=AffineConfig(probability=0.3, degrees=10, scale=(0.9, 1.1)),
            crop=CropConfig(probability=0.5, area=(0.5, 1.0), rescale=(0.6, 1.0)),
        ),
        "captions": AugmentConfig(
            flip=0.5,
            colour=ColourConfig(brightness=0.2, contrast=0.2),
            jpeg=JpegConfig(quality=(40, 90), probability=0.5),
            variants=True,
        ),
    },
    pack_window=48,
    shard_window=2,
    seed=3,
    limits=PatchLimits(image=100, frame=16, side=512),
    tokenizer=TOKENIZER_KEY,
    prefetch_steps=2,
    fetch_threads=2,
)


def sentence(rng, most=14):
    return " ".join(rng.choice(WORDS.split(), rng.integers(1, most)))


def pixels(rng, height, width):
    return rng.integers(0, 255, (height, width, 3), np.uint8)


def picture(rng, suffix):
    kind = {"png": "PNG", "jpg": "JPEG"}[suffix]
    return ImageSegment(encoded(pixels(rng, *rng.integers(20, 160, 2)), kind), suffix)


def filmed(rng, frames):
    return VideoSegment(video([pixels(rng, 48, 48) for _ in range(frames)], 4))


def album(rng, key):
    """Return a sample whose three images fill a row unless they are shrunk."""
    shots = [
        ImageSegment(encoded(pixels(rng, *size)), "png") for size in rng.integers(140, 200, (3, 2))
    ]
    # The first image decides the shrink level: a longer one would leave no draw that fits.
    texts = sorted((sentence(rng, 9) for _ in range(3)), key=len, reverse=True)
    return CrudeSample(key, [shots[0], TextSegment(texts=texts), *shots[1:]])


def marked(rng, key):
    """Return a white block on a dark ground and the region that marks it."""
    height, width = (int(n) for n in rng.integers(90, 220, 2))
    image = Image.new("RGB", (width, height), (30, 40, 60))
    x, y = int(rng.integers(8, width - 45)), int(rng.integers(8, height - 45))
    w, h = (int(n) for n in rng.integers(18, 36, 2))
    ImageDraw.Draw(image).rectangle([x, y, x + w - 1, y + h - 1], fill=(255, 255, 255))
    return CrudeSample(
        key,
        [
            TextSegment("boats: ", loss=False),
            ImageSegment(encoded(image), "png"),
            RegionSegment("box", [[x, y], [x + w, y + h]], label="fox"),
        ],
    )


def samples(seed=0, scale=1):
    """Return source -> (category, samples)."""
    rng = np.random.default_rng(seed)
    web = [
        CrudeSample(
            f"w{i}", [TextSegment(sentence(rng, 60 if i % 9 else 300)), TextSegment("", False)]
        )
        for i in range(60 * scale)
    ]
    captions = [
        CrudeSample(
            f"s{i}",
            [
                picture(rng, "jpg" if i % 2 else "png"),
                TextSegment(texts=[sentence(rng), sentence(rng), sentence(rng)]),
            ],
        )
        for i in range(40 * scale)
    ]
    clips = [
        CrudeSample(f"c{i}", [filmed(rng, n), TextSegment(sentence(rng))])
        for i, n in enumerate(rng.integers(1, 24, 8 * scale))
    ]
    boxes = [marked(rng, f"b{i}") for i in range(40 * scale)]
    captions += [album(rng, f"t{i}") for i in range(4 * scale)]
    return {
        "boxes": ("grounding", boxes),
        "captions": ("caption", captions),
        "clips": ("video", clips),
        "web": ("text", web),
    }


def build(store, seed=0, scale=1):
    """Write the corpus; return (tokenizer, indices)."""
    ranks = train_ranks([WORDS * 3], 300)
    store.put(TOKENIZER_KEY, ranks)
    tokenizer = Tokenizer(ranks, "words")
    sizes = {"boxes": 40_000, "captions": 400_000, "clips": 60_000, "web": 12_000}
    return tokenizer, [
        ingest(part, store, name, tokenizer, sizes[name], category=category)
        for name, (category, part) in samples(seed, scale).items()
    ]
