"""Rules of plans, fetching and states that only show with rare samples: shrunk, lost, unusable."""

import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from data_pipeline.access import register, shard_versions
from data_pipeline.augment.config import AugmentConfig, CropConfig
from data_pipeline.augment.pixels import apply
from data_pipeline.cache.cached_store import CacheConfig, CachedStore
from data_pipeline.config import DataConfig
from data_pipeline.fetch import Fetcher, everything, resolve
from data_pipeline.index.reads import READS
from data_pipeline.plan.layout import limits_at
from data_pipeline.plan.planner import Planner
from data_pipeline.plan.source import Source
from data_pipeline.store.open import FolderStore
from moonvit3d.geometry import KIND_IMAGE, PatchLimits
from moonvit3d.media import read_image
from moonvit3d.preprocess import image_patches
from tests.unit.data_pipeline.every_kind import CONFIG, build
from tests.unit.data_pipeline.plain import made_index, part_of

REGION = re.compile(r"fox\[(\d{3}),(\d{3}),(\d{3}),(\d{3})\]")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("every kind")
    tokenizer, indices = build(FolderStore(folder))
    return CONFIG.replace(root=str(folder), rows_per_step=60), tokenizer, indices


def fetched_steps(corpus, steps, store=None, indices=None, **changes):
    """Yield (planner, plan, request, fetched) of the first steps under a changed config."""
    config, tokenizer, built = corpus
    planner = Planner(indices or built, config.replace(**changes))
    fetcher = Fetcher(store or FolderStore(config.root), tokenizer, 2)
    state = planner.state_dict()
    for _ in range(steps):
        plan, state = planner.plan(state)
        request = resolve(planner, plan, everything(plan))
        yield planner, plan, request, fetcher(request)
    fetcher.close()


def file_of(root, index, line):
    """Return the bytes of a media file, given its row in the index."""
    sample = int(np.searchsorted(index.item_ptr, line, side="right")) - 1
    shard = index.shards[index.shard[sample]].key
    return FolderStore(root).get(shard, int(index.item_offset[line]), int(index.item_length[line]))


def expected_patches(config, planner, plan, item):
    """Return an image's patches by the written rules: file, draw, limits at the shrink level."""
    sample, line = int(plan.items.sample[item]), int(plan.items.index_line[item])
    source = planner.sources[plan.samples.source[sample]]
    chosen = np.array([sample])
    [detail] = source.variation.details(
        plan.samples.index[chosen], plan.samples.epoch[chosen], plan.samples.varied[chosen]
    )
    pixels = read_image(file_of(config.root, source.index, line))
    draw = detail.draws.get(int(plan.items.media[item]))
    if draw is not None:
        pixels = apply(draw, pixels)
    level = int(source.level_of(plan.samples.index[[sample]])[0])
    return image_patches(pixels, limits_at(config.limits, level))[0], level, draw


def test_every_picture_is_its_own_file_draw_and_level(corpus):
    """Samples with several images and samples shrunk to fit a row are included."""
    config, seen = corpus[0], {"shrunk": 0, "second": 0, "plain": 0}
    for planner, plan, _, fetched in fetched_steps(corpus, 4):
        assert not fetched.bad
        for item in np.flatnonzero(plan.items.kind == KIND_IMAGE).tolist():
            patches, level, draw = expected_patches(config, planner, plan, item)
            assert plan.items.level[item] == level
            assert np.array_equal(fetched.media[item], patches), item
            seen["shrunk"] += level > 0
            seen["second"] += draw is not None and plan.items.media[item] > 0
            seen["plain"] += draw is None
    assert min(seen.values()) > 5, seen


def test_a_shrunk_picture_without_augmentation_is_the_picture_at_its_level(corpus):
    config, shrunk = corpus[0], 0
    for planner, plan, _, fetched in fetched_steps(corpus, 3, augment={}):
        for item in np.flatnonzero(plan.items.level > 0).tolist():
            index = planner.indices[plan.samples.source[plan.items.sample[item]]]
            file = file_of(config.root, index, int(plan.items.index_line[item]))
            at = limits_at(config.limits, int(plan.items.level[item]))
            expected, grid = image_patches(read_image(file), at)
            whole = image_patches(read_image(file), config.limits)[1]
            assert tuple(grid) != tuple(whole)
            assert np.array_equal(fetched.media[item], expected)
            shrunk += 1
    assert shrunk > 3


def plain_box(config, index, sample):
    """Return the numbers of the box from its document and file, in thousandths."""
    shard = index.shards[index.shard[sample]].key
    body = FolderStore(config.root).get(
        shard, int(index.json_offset[sample]), int(index.json_length[sample])
    )
    [region] = [s for s in json.loads(body)["segments"] if s["kind"] == "region"]
    file = file_of(config.root, index, int(index.item_ptr[sample]))
    size = Image.open(io.BytesIO(file)).size
    return [min(999, int(1000 * p[i] / size[i])) for p in region["points"] for i in range(2)]


LOSING = AugmentConfig(flip=1.0, crop=CropConfig(area=(0.1, 0.3)), min_visible=1.0)


@pytest.mark.parametrize("losing", [False, True], ids=["no augmentation", "draws that lose it"])
def test_regions_of_a_picture_left_alone_are_written_as_they_are(corpus, losing):
    config, tokenizer, _ = corpus
    augment = {"boxes": LOSING} if losing else {}
    plain, moved = 0, 0
    for planner, plan, _, fetched in fetched_steps(corpus, 3, augment=augment):
        boxes = [index.name for index in planner.indices].index("boxes")
        assert not fetched.bad
        for sample in np.flatnonzero(plan.samples.source == boxes).tolist():
            ids = fetched.rows.tokens[plan.samples.row[sample]][part_of(plan, sample)].tolist()
            text = tokenizer.decode([i for i in ids if i != tokenizer.media_pad])
            numbers = [int(n) for n in REGION.search(text).groups()]
            index = planner.indices[boxes]
            expected = plain_box(config, index, int(plan.samples.index[sample]))
            if plan.samples.varied[sample]:
                moved += numbers != expected
                continue
            plain += 1
            assert numbers == expected, text
            [item] = np.flatnonzero(plan.items.sample == sample)
            file = file_of(config.root, index, int(plan.items.index_line[item]))
            whole = image_patches(read_image(file), config.limits)[0]
            assert np.array_equal(fetched.media[item], whole)
    assert plain > 10
    assert (moved > 3) == losing


def test_a_picture_of_another_size_than_in_the_index_is_a_bad_sample(corpus):
    config, _, built = corpus
    names = [index.name for index in built]
    captions = built[names.index("captions")]
    taller = replace(captions, item_height=captions.item_height + 1)
    indices = [taller if index is captions else index for index in built]
    [(planner, plan, request, fetched)] = fetched_steps(corpus, 1, indices=indices)
    varied = {item for file in request.files if file.draw is not None for item in file.items}
    owner = plan.samples.source[plan.items.sample]
    wrong = {item for item in varied if planner.indices[owner[item]].name == "captions"}
    reasons = {bad.item: bad.reason for bad in fetched.bad}
    assert len(wrong) > 5
    for item in wrong:
        line = int(plan.items.index_line[item])
        size = f"{captions.item_width[line]} x {captions.item_height[line]}"
        other = f"{captions.item_width[line]} x {captions.item_height[line] + 1}"
        assert f"decodes to {size} pixels, the index promises {other}" in reasons[item]
        assert item not in fetched.media


def test_parts_of_a_split_text_are_never_varied():
    index = made_index("mixed", [40, 30], 1, text=(3, 400), media=0.5, video=0.0, side=100)
    config = DataConfig(
        root="unused",
        sources={"mixed": 1.0},
        seq_len=120,
        rows_per_step=50,
        pack_window=64,
        augment={"mixed": AugmentConfig(flip=1.0)},
        limits=PatchLimits(image=64, frame=64, side=512),
    )
    source = Source(index, config)
    assert source.variation.active
    drawn = source.draw(np.arange(2 * source.num_units))
    split = np.array([source.is_split(sample) for sample in drawn.sample.tolist()])
    assert split.sum() > 50
    assert not drawn.varied[split].any()
    assert drawn.varied[~split].all()
    plan, _ = Planner([index], config).plan(Planner([index], config).state_dict())
    split = np.array([source.is_split(sample) for sample in plan.samples.index.tolist()])
    assert split.any()
    assert np.array_equal(plan.samples.varied, ~split)


# Bytes damaged in transit -----------------------------------------------------------------------


class Wrong:
    """A store whose first few reads of one byte of one object are wrong."""

    def __init__(self, folder, key, byte, times):
        self.inner, self.key, self.byte, self.left = FolderStore(folder), key, byte, times
        self.uri = self.inner.uri

    @property
    def stats(self):
        return self.inner.stats

    def get(self, key, offset=0, length=None, *, etag=None):
        data = bytearray(self.inner.get(key, offset, length, etag=etag))
        if key == self.key and self.left and offset <= self.byte < offset + len(data):
            data[self.byte - offset] ^= 0x40
            self.left -= 1
        return bytes(data)

    def close(self):
        """Do nothing: no file is open."""


@pytest.mark.parametrize("what", ["texts", "files"])
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("times", range(READS + 1))
def test_bytes_wrong_on_the_way_are_read_again(corpus, tmp_path, what, cached, times):
    """There are READS reads in all; a cache must not answer a retry with the damaged bytes."""
    config, tokenizer, indices = corpus
    planner = Planner(indices, config.replace(rows_per_step=4))
    plan, _ = planner.plan(planner.state_dict())
    request = resolve(planner, plan, everything(plan))
    struck = getattr(request, what)[0]
    key, offset, length = struck.span
    store = Wrong(config.root, key, offset + length // 2, times)
    if cached:
        # Blocks of 1 KB, so that almost no other read includes the damaged byte.
        cache = CacheConfig(folder=str(tmp_path / "cache"), block_bytes=1024)
        store = CachedStore(store, cache)
        register(store, shard_versions(indices))
    fetcher = Fetcher(store, tokenizer, 1)
    fetched = fetcher(request)
    fetcher.close()
    store.close()
    assert fetched.reread == min(times, READS - 1)
    if times < READS:
        assert not fetched.bad
    else:
        assert {bad.sample for bad in fetched.bad} == {struck.sample}
        assert all(f"(read {READS} times)" in bad.reason for bad in fetched.bad)
