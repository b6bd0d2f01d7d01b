import json
import tarfile
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from data_pipeline.collate import SampleLayout, laid_out
from data_pipeline.config import DataConfig
from data_pipeline.decode import decode_item
from data_pipeline.index.columns import SourceIndex
from data_pipeline.index.manifest import IndexMismatch
from data_pipeline.ingest.ingest import CrudeSample, TextSegment, ingest
from data_pipeline.loader import Loader, LoaderError, Needs, everything
from data_pipeline.store.open import FolderStore, StoreUnavailable
from data_pipeline.text import Tokenizer, train_ranks
from moonvit3d.geometry import PatchLimits
from tests.resume import assert_resumes_anywhere, fingerprint
from tests.unit.data_pipeline.every_kind import WORDS, filmed, picture, sentence

CONFIG = DataConfig(
    root="a folder",
    sources={"web": 1.0, "shots": 1.0, "clips": 1.0},
    seq_len=96,
    rows_per_step=6,
    pack_window=24,
    shard_window=2,
    seed=3,
    limits=PatchLimits(image=64, frame=16, side=512),
    prefetch_steps=2,
    fetch_threads=2,
)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(train_ranks([WORDS * 3], 300), "test")


@pytest.fixture(scope="module")
def built(tmp_path_factory, tokenizer):
    """Build a folder with three sources of a few shards each; return their indices."""
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("data")
    store = FolderStore(folder)

    def text(loss=True):
        return TextSegment(sentence(rng), loss)

    web = [CrudeSample(f"w{i}", [text(), text(False)]) for i in range(40)]
    shots = [CrudeSample(f"s{i}", [text(), picture(rng, "png"), text()]) for i in range(20)]
    clips = [
        CrudeSample(f"c{i}", [filmed(rng, n), text()]) for i, n in enumerate(rng.integers(1, 24, 8))
    ]
    indices = [
        ingest(samples, store, name, tokenizer, shard_bytes=shard_bytes)
        for name, samples, shard_bytes in [
            ("web", web, 12_000),
            ("shots", shots, 60_000),
            ("clips", clips, 60_000),
        ]
    ]
    assert all(len(index.shards) > 1 for index in indices)
    return folder, indices


@pytest.fixture
def make(built, tokenizer):
    """Return a function that builds loaders over the sources; close them at the end."""
    loaders = []

    def build(config=CONFIG, needs=everything, store=None, indices=None):
        loader = Loader(
            config, store or FolderStore(built[0]), indices or built[1], tokenizer, needs
        )
        loaders.append(loader)
        return loader

    yield build
    for loader in loaders:
        loader.close()


def step_digest(batch):
    return fingerprint([batch.plan, batch.rows, batch.row_ids, batch.media, batch.bad])


class Recording:
    """A store that records reads and can fail or delay them on request."""

    def __init__(self, folder):
        self.inner = FolderStore(folder)
        self.reads = []
        self.faults = []
        self.gate = None

    @property
    def stats(self):
        return self.inner.stats

    def get(self, key, offset=0, length=None, *, etag=None):
        self.reads.append((key, offset, length))
        if self.gate is not None:
            self.gate.wait(60)
        if self.faults:
            raise self.faults.pop()
        return self.inner.get(key, offset, length, etag=etag)


def members(folder, index):
    """Return the files of the source's tars by member name, read with Python's tarfile."""
    found = {}
    for shard in index.shards:
        with tarfile.open(folder / shard.key) as tar:
            found |= {m.name: tar.extractfile(m).read() for m in tar.getmembers()}
    return found


def test_steps_equal_reading_the_tar_files(make, built, tokenizer):
    loader = make()
    files = [members(built[0], index) for index in loader.indices]
    chunks = images = 0
    for _ in range(4):
        batch = next(loader)
        samples, items = batch.plan.samples, batch.plan.items
        assert batch.row_ids.tolist() == list(range(6))
        assert not batch.bad
        assert sorted(batch.media) == list(batch.media) == list(range(len(items)))
        expected = np.full((6, 96), tokenizer.pad)
        for s in range(samples.index.size):
            source, key = (
                samples.source[s],
                loader.indices[samples.source[s]].key_of(samples.index[s]),
            )
            document = json.loads(files[source][f"{key}.json"])
            mine = np.flatnonzero(items.sample == s)
            pads = SampleLayout(0, tuple(items.tokens[mine].tolist()))
            tokens, _, _ = laid_out(document["segments"], tokenizer, pads)
            expected[samples.row[s], samples.start[s] : samples.start[s] + tokens.size] = tokens
            media = [p for p in document["segments"] if p["kind"] != "text"]
            for i in mine:
                data = files[source][f"{key}.{media[items.media[i]]['file']}"]
                grid = (items.frames[i], items.grid_h[i], items.grid_w[i])
                alone = decode_item(data, items.kind[i], items.chunk[i], CONFIG.limits, grid)
                assert np.array_equal(batch.media[i], alone)
                assert batch.media[i].shape == (items.patches[i], 3, 14, 14)
                chunks, images = chunks + (items.chunk[i] > 0), images + (items.kind[i] == 0)
        assert np.array_equal(batch.rows.tokens, expected)
    assert chunks > 2
    assert images > 5


@pytest.mark.parametrize("prefetch", [0, 1, 5])
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_i1_rows_are_the_same_for_every_world_thread_count_and_depth(
    make, prefetch, threads, world
):
    """The ranks of a world together hold the step, for every thread count and prefetch depth."""
    config = CONFIG.replace(prefetch_steps=prefetch, fetch_threads=threads)

    def needs(rank):
        # rows by replica; media by a rule unrelated to the rows
        return lambda plan: Needs(
            np.arange(plan.num_rows)[rank::world],
            np.flatnonzero(plan.items.tokens % world == rank),
        )

    loaders = [make(config, needs(rank)) for rank in range(world)]
    stream = []
    for _ in range(5):
        batches = [next(loader) for loader in loaders]
        assert len({batch.plan.content_hash() for batch in batches}) == 1
        tokens, labels, mask, media = {}, {}, {}, {}
        for batch in batches:
            for place, row in enumerate(batch.row_ids.tolist()):
                tokens[row] = batch.rows.tokens[place]
                labels[row] = batch.rows.labels[place]
                mask[row] = batch.rows.loss_mask[place]
            assert not set(media) & set(batch.media)
            media |= batch.media
        whole = [[part[row] for row in range(6)] for part in (tokens, labels, mask)]
        stream.append(fingerprint([whole, [media[i] for i in range(len(media))]]))
    assert stream == STREAM.setdefault("hashes", stream)


STREAM: dict[str, list[str]] = {}


@pytest.mark.parametrize("prefetch", [0, 3])
def test_resumes_anywhere(make, prefetch):
    config = CONFIG.replace(prefetch_steps=prefetch)
    assert_resumes_anywhere(lambda: make(config), 5, step_digest)


def test_state_is_what_was_handed_out_and_small(make):
    loader = make(CONFIG.replace(prefetch_steps=6))
    start = loader.state_dict()
    for step in range(3):
        assert loader.state_dict()["step"] == step
        next(loader)
    deadline = time.monotonic() + 10
    while loader.stats.bytes == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    state = loader.state_dict()
    assert state["step"] == 3
    assert state == loader.planner.state_at(3)
    assert len(json.dumps(state)) < 1024
    loader.load_state_dict(start)
    assert next(loader).plan.step == 0


def test_never_more_steps_ahead_than_asked_for(make):
    planned = []

    def needs(plan):
        planned.append(plan.step)
        return everything(plan)

    loader = make(CONFIG.replace(prefetch_steps=2), needs)
    for step in range(4):
        next(loader)
        deadline = time.monotonic() + 50
        while len(planned) < step + 3 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.03)  # long enough for one more plan, if the limit allowed it
        assert planned == list(range(step + 3))


def test_only_what_is_needed_is_read(make, built):
    store = Recording(built[0])
    loader = make(
        CONFIG.replace(prefetch_steps=0),
        lambda plan: Needs(np.array([], int), np.array([], int)),
        store,
    )
    batch = next(loader)
    assert batch.rows is None
    assert not batch.media
    assert not store.reads
    one = next(make(CONFIG, lambda plan: Needs(np.array([4, 2]), np.array([], int)), store))
    both = next(make(CONFIG, everything, store))
    assert one.row_ids.tolist() == [4, 2]
    assert np.array_equal(one.rows.tokens, both.rows.tokens[[4, 2]])
    assert np.array_equal(one.rows.labels, both.rows.labels[[4, 2]])
    with pytest.raises(LoaderError, match=r"^step 1: .*needs name rows \[6\], step 1 has 6"):
        next(make(CONFIG, lambda plan: Needs(np.array([6]), np.array([], int))))


def test_chunks_of_a_video_share_one_read(make, built):
    clips = [index for index in built[1] if index.name == "clips"]
    config = CONFIG.replace(prefetch_steps=0, sources={"clips": 1.0})
    loader = make(config, indices=clips)
    batch = next(loader)
    samples, items, index = batch.plan.samples, batch.plan.items, loader.indices[0]
    assert items.chunk.max() > 0
    drawn = np.unique(samples.index)
    first_items = index.item_ptr[drawn]
    files = index.item_length[first_items].sum()
    assert loader.stats.bytes == index.json_length[drawn].sum() + files


def corrupt(folder, index, offset, shard, length):
    """Invert the middle byte of a range of a shard; return a function that repairs it."""
    path = folder / index.shards[shard].key
    good = path.read_bytes()
    bad = bytearray(good)
    bad[offset + length // 2] ^= 0xFF
    path.write_bytes(bytes(bad))
    return lambda: path.write_bytes(good)


def find(loader, name):
    """Find a sample of the source in the first step."""
    plan, _ = loader.planner.plan(loader.planner.state_dict())
    number = [index.name for index in loader.indices].index(name)
    sample = int(np.flatnonzero(plan.samples.source == number)[0])
    return plan, sample, loader.indices[number], int(plan.samples.index[sample])


def test_damaged_media_are_bad_items_and_the_rest_is_whole(make, built):
    clean = next(make())
    plan, sample, index, at = find(make(), "shots")
    line = index.item_ptr[at]
    repair = corrupt(
        built[0], index, index.item_offset[line], index.shard[at], index.item_length[line]
    )
    try:
        batch = next(make())
    finally:
        repair()
    same = [
        i
        for i in range(len(plan.items))
        if plan.items.index_line[i] == line
        and plan.samples.source[plan.items.sample[i]] == plan.samples.source[sample]
    ]
    assert [bad.item for bad in batch.bad] == same
    assert f"source 'shots', sample '{index.key_of(at)}', file 0 in" in batch.bad[0].reason
    assert sorted([*batch.media, *same]) == list(range(len(plan.items)))
    assert fingerprint(batch.rows) == fingerprint(clean.rows)
    for item, patches in batch.media.items():
        assert np.array_equal(patches, clean.media[item])


def test_media_of_another_size_are_bad_items(make, built):
    """The bytes are as ingested, but the index states other sizes: only decoding shows it."""
    indices = []
    for index in built[1]:
        if index.name == "clips":
            height = index.item_height.copy()
            height[index.item_chunk == 0] += 100
            index = replace(index, item_height=height)
        indices.append(index)
    loader = make(indices=indices)
    batch = next(loader)
    items = batch.plan.items
    wrong = np.flatnonzero((items.kind == 1) & (items.chunk == 0)).tolist()
    assert [bad.item for bad in batch.bad] == wrong
    assert wrong
    assert any(items.chunk[i] > 0 for i in batch.media)  # the other chunks of those files
    assert "index promises" in batch.bad[0].reason


@pytest.mark.parametrize("prefetch", [0, 2])
def test_damaged_text_is_a_bad_sample_and_the_rest_is_whole(make, built, tokenizer, prefetch):
    clean = next(make())
    config = CONFIG.replace(prefetch_steps=prefetch)
    plan, sample, index, at = find(make(), "web")
    repair = corrupt(built[0], index, index.json_offset[at], index.shard[at], index.json_length[at])
    try:
        batch = next(make(config))
    finally:
        repair()
    source = plan.samples.source[sample]
    same = (plan.samples.source == source) & (plan.samples.index == at)
    assert [bad.sample for bad in batch.bad] == np.flatnonzero(same).tolist()
    assert f"'web', sample '{index.key_of(at)}' in" in batch.bad[0].reason
    expected = clean.rows.tokens.copy()
    for bad in batch.bad:
        row, start = plan.samples.row[bad.sample], plan.samples.start[bad.sample]
        here = slice(start, start + plan.samples.length[bad.sample])
        expected[row, here] = tokenizer.pad
        assert not batch.rows.loss_mask[row, here].any()
    assert np.array_equal(batch.rows.tokens, expected)


def test_a_token_count_that_differs_names_source_and_sample(make, built):
    indices = []
    for index in built[1]:
        if index.name == "web":
            index = replace(index, piece_tokens=index.piece_tokens + np.int32(1))
        indices.append(index)
    with pytest.raises(
        LoaderError, match=r"step 1: .*source 'web', sample 'w\d+' in .*: \d+ tokens"
    ) as caught:
        next(make(indices=indices))
    assert isinstance(caught.value.__cause__, IndexMismatch)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_of_the_store_is_raised_in_its_step_and_the_order_goes_on(make, built, prefetch):
    expected = []
    clean = make()
    for _ in range(5):
        expected.append(step_digest(next(clean)))
    store = Recording(built[0])
    loader = make(CONFIG.replace(prefetch_steps=prefetch), store=store)
    got = [step_digest(next(loader)) for _ in range(2)]
    store.faults.append(StoreUnavailable("web/000000.tar: gone for a moment"))

    def take_three():
        for _ in range(3):  # prefetched steps delay the failure
            got.append(step_digest(next(loader)))

    with pytest.raises(LoaderError, match=r"step \d: .*web/000000.tar") as caught:
        take_three()
    assert isinstance(caught.value.__cause__, StoreUnavailable)
    assert caught.value.step - 1 == len(got) == loader.state_dict()["step"]
    while len(got) < 5:
        got.append(step_digest(next(loader)))
    assert got == expected


def test_close_ends_the_threads_even_in_the_middle_of_a_read(make, built):
    before = set(threading.enumerate())
    store = Recording(built[0])
    store.gate = threading.Event()
    loader = make(CONFIG.replace(prefetch_steps=3), store=store)
    taken = []
    consumer = threading.Thread(target=lambda: taken.append(next(loader)))
    consumer.start()
    while not store.reads:
        time.sleep(0.005)
    store.gate.set()
    consumer.join(20)
    assert taken[0].plan.step == 0
    store.gate.clear()
    closer = threading.Thread(target=loader.close)
    closer.start()
    closer.join(0.05)
    store.gate.set()
    closer.join(20)
    assert not closer.is_alive()
    assert set(threading.enumerate()) <= before


def test_another_tokenizer_or_state_is_refused(make, built, tokenizer):
    other = Tokenizer(train_ranks([WORDS[::-1] * 3], 290), "other")
    with pytest.raises(IndexMismatch, match="'clips' was made with tokenizer 'test'"):
        Loader(CONFIG, FolderStore(built[0]), built[1], other)
    loader = make()
    state = make(CONFIG.replace(seed=4)).state_dict()
    with pytest.raises(ValueError, match="state field 'seed' is 4, this run has 3"):
        loader.load_state_dict(state)
    assert next(loader).plan.step == 0


def test_waiting_is_measured(make, built):
    store = Recording(built[0])
    store.gate = threading.Event()
    loader = make(store=store)
    threading.Timer(1.0, store.gate.set).start()  # not before the loader waits for it
    next(loader)
    assert loader.stats.wait_s > 0.1
    assert loader.stats.steps == 1


def test_text_only_sources_make_steps_without_media(make, built):
    web = [index for index in built[1] if index.name == "web"]
    assert isinstance(web[0], SourceIndex)
    batch = next(make(CONFIG.replace(sources={"web": 1.0}), indices=web))
    assert len(batch.plan.items) == batch.plan.vision_tokens == 0
    assert not batch.media
    assert batch.rows.loss_mask.any()
