"""Corpus with every kind of content that the web pages show, including hostile texts."""

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from data_pipeline.ingest.ingest import ingest
from data_pipeline.ingest.samples import (
    CrudeSample,
    ImageSegment,
    Listed,
    RegionSegment,
    TextSegment,
    VideoSegment,
)
from data_pipeline.store.open import FolderStore
from data_pipeline.text import Tokenizer
from kimi_pretrain.config import dump_config, load_config
from tests.unit.data_pipeline.media import video
from tests.unit.launch.inspected import TOKENIZER_KEY, build

# Each payload sets window.evil or loads a resource of another site if a page treats it as more
# than text. Sample keys may contain only letters, digits, "_", "-" and "/".
PAYLOADS = (
    "<script>window.evil=1</script>",
    "<img src=x onerror=window.evil=2>",
    '"><svg onload=window.evil=3>',
    "' onmouseover='window.evil=4' x='",
    "</script><script>window.evil=5</script>",
    '<a href="javascript:window.evil=6">click</a>',
    '<div hx-get="/logout" hx-trigger="load">',
    "<style>body{background:url(http://evil.example/7)}</style>",
    '<iframe srcdoc="<script>parent.evil=8</script>"></iframe>',
    "{{ 7 * 7 }} {% raw %} ${window.evil=9}",
    "<math><mtext><table><mglyph><style><img src=x onerror=window.evil=10>",
    "<link rel=stylesheet href=//evil.example/11.css>",
    "<base href=http://evil.example/><meta http-equiv=refresh content=0;url=//evil.example/12>",
    "<button hx-on:click=window.evil=13 autofocus onfocus=window.evil=13>",
)
SIDES = (200, 100)
BOX, POINT = ((20.0, 10.0), (80.0, 60.0)), (150.0, 50.0)
POLYGON = ((100.0, 10.0), (190.0, 20.0), (140.0, 90.0))


class Quiet:
    """Progress display that prints nothing."""

    def __enter__(self):
        return lambda done, total: None

    def __exit__(self, *_):
        return None


def turned_jpeg() -> bytes:
    """Return a JPEG whose EXIF asks for a quarter turn; its stored top left corner is red."""
    image = Image.new("RGB", SIDES, (0, 0, 255))
    image.paste((255, 0, 0), (0, 0, 20, 20))
    exif, out = Image.Exif(), io.BytesIO()
    exif[274] = 6
    image.save(out, "JPEG", exif=exif, quality=95)
    return out.getvalue()


def film() -> bytes:
    """Return a video of 15 s that gets brighter, in a codec that browsers play."""
    frames = [np.full((96, 128, 3), 4 * i, np.uint8) for i in range(60)]
    return video(frames, 4, "libx264")


def hostile() -> Iterator[CrudeSample]:
    """Yield every payload as caption, label and metadata of a rotated image with regions.

    A film and samples that ingest rejects follow.
    """
    picture = ImageSegment(turned_jpeg(), "jpg")
    for number, payload in enumerate(PAYLOADS):
        yield CrudeSample(
            f"evil/{number:02d}",
            [
                TextSegment(payload),
                picture,
                RegionSegment("box", [list(pair) for pair in BOX], payload),
                RegionSegment("point", [list(POINT)], payload),
                RegionSegment("polygon", [list(pair) for pair in POLYGON], payload),
            ],
            {"from": payload, payload: payload},
        )
    yield CrudeSample("film", [TextSegment("A film:"), VideoSegment(film())])
    yield CrudeSample("bad", [RegionSegment("box", [[5, 5], [1, 1]], PAYLOADS[0]), picture])
    for number, payload in enumerate(PAYLOADS):
        yield CrudeSample(f"{payload}{number}", [TextSegment("a key that no source may have")])
    yield CrudeSample(
        "worse", [TextSegment("no picture:"), ImageSegment(PAYLOADS[1].encode(), "png")]
    )


def build_served(root: Path) -> FolderStore:
    """Write the sources digits, mixed, prose and hostile; hostile has rejected samples."""
    store = build(root)
    tokenizer = Tokenizer(store.get(TOKENIZER_KEY), "tiny")
    given = Listed(hostile(), identity={"file": PAYLOADS[0]})
    ingest(given, store, "hostile", tokenizer, 1 << 16, category="grounding")
    return store


def config_file(root: Path, file: Path, **more: str) -> Path:
    """Write a configuration that trains on the corpus with augmentation; `more` sets data keys."""
    settings = {
        "root": str(root),
        "tokenizer": TOKENIZER_KEY,
        "vision_token_ratio": "null",
        "sources": "{digits: 1.0, mixed: 1.0, prose: 1.0, hostile: 0.5}",
        "pack_window": "64",
        "schedule": "[]",
        "max_epochs": "{}",
        "heldout": "{}",
        "augment": "{hostile: {turn: 1.0, crop: {area: [0.6, 1.0]}}, mixed: {variants: true}}",
    }
    given = [f"data.{key}={value}" for key, value in (settings | more).items()]
    file.write_text(dump_config(load_config("tiny_cpu", [*given, "train.validate_every=null"])))
    return file
