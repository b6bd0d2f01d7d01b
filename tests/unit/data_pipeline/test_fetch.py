"""The fetcher: coordinates follow the pixels, variants are applied, damaged reads are repeated."""

import re
from dataclasses import replace

import numpy as np
import pytest

import data_pipeline.fetch as fetching
from data_pipeline.access import open_fetcher, shard_versions
from data_pipeline.fetch import Fetcher, everything, resolve
from data_pipeline.index.manifest import IndexMismatch
from data_pipeline.plan.planner import Planner
from data_pipeline.store.open import FolderStore
from moonvit3d.geometry import PATCH, resized
from moonvit3d.media import MediaError
from tests.unit.data_pipeline.every_kind import CONFIG, build
from tests.unit.data_pipeline.plain import part_of

REGION = re.compile(r"fox\[(\d{3}),(\d{3}),(\d{3}),(\d{3})\]")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("every kind")
    tokenizer, indices = build(FolderStore(folder))
    config = CONFIG.replace(root=str(folder), rows_per_step=120)
    return config, tokenizer, indices


def picture_of(patches, grid):
    """Convert the patches [L, 3, 14, 14] of one frame back to pixels [H, W, 3]."""
    _, h, w = grid
    pixels = patches.reshape(h, w, 3, PATCH, PATCH).transpose(0, 3, 1, 4, 2)
    return pixels.reshape(h * PATCH, w * PATCH, 3)


def test_written_boxes_are_where_the_pixels_are(corpus):
    """The white block of an image, located in the patches, is where the tokens say."""
    config, tokenizer, indices = corpus
    planner = Planner(indices, config)
    fetcher = Fetcher(FolderStore(config.root), tokenizer, 2)
    state, checked, moved, worst = planner.state_dict(), 0, 0, 0.0
    boxes = [index.name for index in planner.indices].index("boxes")
    for _ in range(4):
        plan, state = planner.plan(state)
        request = resolve(planner, plan, everything(plan))
        fetched = fetcher(request)
        draws = {file.items[0]: file.draw for file in request.files}
        for item in np.flatnonzero(plan.samples.source[plan.items.sample] == boxes).tolist():
            sample = int(plan.items.sample[item])
            ids = fetched.rows.tokens[plan.samples.row[sample]][part_of(plan, sample)]
            text = tokenizer.decode([i for i in ids.tolist() if i != tokenizer.media_pad])
            numbers = REGION.search(text)
            assert numbers, text
            draw = draws[item]
            line = plan.items.index_line[item]
            index = planner.indices[boxes]
            size = (index.item_width[line], index.item_height[line])
            if draw is not None:
                size, moved = (draw.out_width, draw.out_height), moved + 1
            width, height = resized(*map(int, size), config.limits.image, config.limits.side)
            grid = (1, int(plan.items.grid_h[item]), int(plan.items.grid_w[item]))
            pixels = picture_of(fetched.media[item], grid)[:height, :width].astype(float)
            # Edges of the block, in edge coordinates; a half-covered pixel counts as white.
            white = (pixels.mean(axis=2) > 150).nonzero()
            found = np.array(
                [white[1].min(), white[0].min(), white[1].max() + 1, white[0].max() + 1]
            )
            wanted = np.array([int(n) for n in numbers.groups()]) / 1000
            wanted = wanted * [width, height, width, height]
            # Errors: a pixel of the shrunk image, half a source pixel, the cut to thousandths.
            worst = max(worst, float(np.abs(found - wanted).max()))
            checked += 1
    fetcher.close()
    assert checked > 100
    assert moved > 50
    assert worst < 1.6, worst


def test_a_caption_is_one_of_its_variants_and_all_are_seen(corpus):
    config, tokenizer, indices = corpus
    planner = Planner(indices, config)
    captions = [index.name for index in planner.indices].index("captions")
    fetcher = Fetcher(FolderStore(config.root), tokenizer, 2)
    state, chosen = planner.state_dict(), []
    for _ in range(3):
        plan, state = planner.plan(state)
        request = resolve(planner, plan, everything(plan))
        fetched = fetcher(request)
        assert not fetched.bad
        for read in request.texts:
            if plan.samples.source[read.sample] == captions:
                chosen.append(read.layout.variants[1])
                ids = fetched.rows.tokens[plan.samples.row[read.sample]]
                ids = ids[part_of(plan, read.sample)]
                assert ids[0] == tokenizer.bos
                assert ids[-1] == tokenizer.eos
    fetcher.close()
    assert set(chosen) == {0, 1, 2}


class Flipping:
    """A store whose first reads of a shard have one inverted byte."""

    def __init__(self, folder, times):
        self.inner, self.left, self.asked = FolderStore(folder), times, []

    @property
    def stats(self):
        return self.inner.stats

    def get(self, key, offset=0, length=None, *, etag=None):
        data = bytearray(self.inner.get(key, offset, length, etag=etag))
        self.asked.append((key, offset, length))
        if self.left > 0 and len(data) > 2:
            data[len(data) // 2] ^= 0x40
            self.left -= 1
        return bytes(data)


def test_bytes_damaged_on_the_way_are_read_again(corpus):
    config, tokenizer, indices = corpus
    planner = Planner(indices, config)
    plan, _ = planner.plan(planner.state_dict())
    request = resolve(planner, plan, everything(plan))
    fetchers = [Fetcher(store, tokenizer, 1) for store in
                (FolderStore(config.root), Flipping(config.root, 3))]  # fmt: skip
    clean, mended = (fetcher(request) for fetcher in fetchers)
    assert clean.reread == 0
    assert 1 <= mended.reread <= 3  # a damaged byte between two spans has no effect
    assert not mended.bad
    assert np.array_equal(clean.rows.tokens, mended.rows.tokens)
    assert all(np.array_equal(clean.media[item], mended.media[item]) for item in clean.media)
    for fetcher in fetchers:
        fetcher.close()


def test_a_request_says_how_large_its_result_is(corpus):
    config, tokenizer, indices = corpus
    planner = Planner(indices, config)
    plan, _ = planner.plan(planner.state_dict())
    request = resolve(planner, plan, everything(plan))
    fetcher = Fetcher(FolderStore(config.root), tokenizer, 1)
    fetched = fetcher(request)
    fetcher.close()
    rows = sum(a.nbytes for a in vars(fetched.rows).values())
    patches = sum(patches.nbytes for patches in fetched.media.values())
    assert request.num_bytes == rows + patches + fetched.bytes


def test_a_split_text_is_encoded_once(corpus, monkeypatch):
    config, tokenizer, indices = corpus
    planner = Planner(indices, config)
    plan, _ = planner.plan(planner.state_dict())
    request = resolve(planner, plan, everything(plan))
    parts = [read for read in request.texts if read.layout.part is not None]
    assert len(parts) > len({read.span for read in parts})
    encoded = []
    encode = type(tokenizer).encode
    monkeypatch.setattr(
        type(tokenizer), "encode", lambda self, text: encoded.append(text) or encode(self, text)
    )
    fetcher = Fetcher(FolderStore(config.root), tokenizer, 1)
    fetcher(replace(request, texts=tuple(parts), files=()))
    fetcher.close()
    long = [text for text in encoded if len(text) > 200]
    assert len(long) == len({read.span for read in parts})


def test_a_worker_does_not_take_another_tokenizer(corpus):
    config, tokenizer, indices = corpus
    open_fetcher(config, shard_versions(indices), tokenizer.hash).close()
    with pytest.raises(IndexMismatch, match="this run began with 0123"):
        open_fetcher(config, shard_versions(indices), "0123")


def test_a_bug_while_a_row_is_laid_out_is_not_taken_for_another_tokenizer(corpus, monkeypatch):
    config, tokenizer, indices = corpus
    planner = Planner(indices, config)
    plan, _ = planner.plan(planner.state_dict())
    request = resolve(planner, plan, everything(plan))
    fetcher = Fetcher(FolderStore(config.root), tokenizer, 1)

    def broken(text):
        return {}[text]

    monkeypatch.setattr(tokenizer, "encode", broken)
    with pytest.raises(KeyError):
        fetcher(request)
    fetcher.close()


def test_a_file_that_is_tried_chunk_by_chunk_is_drawn_as_it_was(corpus, monkeypatch):
    """An image is needed twice in one read: the retry must decode it with its draw."""
    config, tokenizer, indices = corpus
    planner = Planner(indices, config)
    plan, _ = planner.plan(planner.state_dict())
    request = resolve(planner, plan, everything(plan))
    file = next(file for file in request.files if file.draw is not None)
    twice = replace(
        file, items=(*file.items, -1), chunks=file.chunks * 2, grids=file.grids * 2
    )  # fmt: skip
    decode = fetching.decode_items

    def bad_together(data, kind, chunks, *more):
        if len(chunks) > 1:
            raise MediaError("one of them is bad")
        return decode(data, kind, chunks, *more)

    fetcher = Fetcher(FolderStore(config.root), tokenizer, 1)
    expected = fetcher(request).media[file.items[0]]
    monkeypatch.setattr(fetching, "decode_items", bad_together)
    media = fetcher(replace(request, files=(twice,))).media
    fetcher.close()
    assert np.array_equal(media[file.items[0]], expected)
    assert np.array_equal(media[-1], expected)
