import json
import os
import pickle
import tarfile
import threading
import time
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import webdataset as wds

from benchmarks.synthetic_index import synthetic_index
from data_pipeline.index.columns import ShardInfo
from data_pipeline.index.manifest import IndexMismatch, read_index, write_index
from data_pipeline.index.shards import ShardBuilder, sample_json
from data_pipeline.plan.blend import UNITS, append_segment, blend
from data_pipeline.plan.order import ShardOrder
from data_pipeline.store.objects import Span
from data_pipeline.store.open import FolderStore, MissingKey, StoreError
from data_pipeline.stream import extents
from data_pipeline.stream import stream as stream_module
from data_pipeline.stream.batches import member_name
from data_pipeline.stream.extents import StoreExtents, ranges
from data_pipeline.stream.stream import SampleStream, StreamConfig
from data_pipeline.stream.stretch import Stretch
from moonvit3d.geometry import KIND_IMAGE, KIND_VIDEO
from tests.resume import assert_resumes_anywhere, fingerprint

CONFIG = StreamConfig(batch_size=6, seed=5, shard_window=2)


class Remote:
    """A non-folder store that records the reads of an inner store."""

    def __init__(self, inner):
        self.uri, self._inner = "remote", inner
        self.reads = []
        self._lock = threading.Lock()

    def get(self, key, offset=0, length=None, *, etag=None):
        with self._lock:
            self.reads.append(Span(key, offset, length))
        return self._inner.get(key, offset, length)


def write_source(store, name, shards, kinds=(KIND_IMAGE,), body=None):
    """Write `shards` samples in each shard; sample i has i % (len(kinds) + 1) media of `kinds`.

    A video counts three chunks, although its bytes may be no video.
    """
    offsets, crcs, lengths, items, pointer, places, infos = [], [], [], [], [0], [], []
    number = 0
    for place, count in enumerate(shards):
        builder = ShardBuilder()
        for _ in range(count):
            media = [
                (f"{k}.bin", kind) for k, kind in enumerate(kinds[: number % (len(kinds) + 1)])
            ]
            files = [
                (n, body(number) if body else f"{name} {number} {n}".encode() * 9) for n, _ in media
            ]
            document = sample_json([{"kind": "text", "text": f"{name} {number}", "loss": True}], {})
            members = builder.add(f"{name}-{number:03d}", document, files)
            offsets.append(members[0].offset)
            lengths.append(members[0].length)
            crcs.append(members[0].crc)
            places.append(place)
            for medium, (member, (_, kind)) in enumerate(zip(members[1:], media)):
                for chunk in range(3 if kind == KIND_VIDEO else 1):
                    items.append((kind, medium, chunk, member.offset, member.length, member.crc))
            pointer.append(len(items))
            number += 1
        shard = builder.finish()
        key = f"{name}/{place:06d}.tar"
        store.put(key, shard.data)
        infos.append((key, len(shard.data), shard.sha256, shard.samples))
    columns = np.array(items, np.int64).reshape(-1, 6).T
    names = ("kind", "media", "chunk", "offset", "length", "crc")
    index = synthetic_index(
        name, np.ones(number), key=[f"{name}-{i:03d}" for i in range(number)],
        shards=[ShardInfo(*info) for info in infos], item_ptr=pointer, shard=places,
        json_offset=offsets, json_length=lengths, json_crc=crcs,
        **{f"item_{n}": column for n, column in zip(names, columns)},
    )  # fmt: skip
    write_index(store, index)
    return read_index(store, name)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build a folder with three sources: images, text only, and a video with an image."""
    store = FolderStore(tmp_path_factory.mktemp("stream"))
    return store, [
        write_source(store, "pics", [7, 5, 0, 9, 6]),
        write_source(store, "words", [11, 4], kinds=()),
        write_source(store, "clips", [3, 8, 2], kinds=(KIND_VIDEO, KIND_IMAGE)),
    ]


def plain(batch):
    """Return the content of a batch as comparable values."""
    columns = (batch.source, batch.key, batch.document, batch.media, batch.index, batch.epoch)
    return [(*sample, int(index), int(epoch)) for *sample, index, epoch in zip(*columns)]


def taken(stream, steps):
    with stream:
        return [plain(batch) for batch in islice(stream.batches(), steps)]


class Stepping:
    """Gives a stream the `next` that the shared resume test needs, by batches or samples."""

    def __init__(self, stream, taken=SampleStream.batches):
        self.stream, self._taken, self._running = stream, taken, None

    def __next__(self):
        self._running = self._running or self._taken(self.stream)
        return next(self._running)

    def state_dict(self):
        return self.stream.state_dict()

    def load_state_dict(self, state):
        self.stream.load_state_dict(state)
        self._running = None

    def close(self):
        self.stream.close()


def slowly(store, indices, shares, config, positions):
    """Return the same samples one at a time, by the definition of the order and with tarfile."""
    indices = sorted(indices, key=lambda index: index.name)
    files = {}
    for index in indices:
        for shard in index.shards:
            with tarfile.open(store.root / shard.key) as tar:
                files |= {(index.name, m.name): tar.extractfile(m).read() for m in tar}
    whole = sum(shares[index.name] for index in indices)
    weights = [shares[index.name] * UNITS // whole for index in indices]
    assert sum(weights) == UNITS, "shares for a test divide UNITS"
    segments = append_segment((), 0, weights)
    for position in positions:
        source, draw = (int(found[0]) for found in blend([position], segments))
        index = indices[source]
        sizes = [shard.samples for shard in index.shards]
        order = ShardOrder(sizes, config.shard_window, config.seed, index.name)
        number, epoch = (int(found[0]) for found in order.samples([draw]))
        key = f"{index.name}-{number:03d}"
        media = []
        while (index.name, f"{key}.{len(media)}.bin") in files:
            media.append(files[index.name, f"{key}.{len(media)}.bin"])
        yield index.name, key, files[index.name, f"{key}.json"], tuple(media), number, epoch


SHARES = {"pics": 2, "words": 1, "clips": 1}
BLENDED = replace(CONFIG, shares=SHARES)


def test_the_samples_are_those_of_blend_and_order(built):
    store, indices = built
    found = sum(taken(SampleStream(store, indices, BLENDED), 40), [])
    assert found == list(slowly(store, indices, SHARES, BLENDED, range(240)))
    assert {sample[0] for sample in found} == set(SHARES)
    assert max(len(sample[3]) for sample in found) == 2


def test_an_epoch_of_one_source_has_every_sample_once(built):
    store, indices = built
    config = replace(CONFIG, num_samples=27)
    found = taken(SampleStream(store, indices[:1], config), 100)
    assert [len(step) for step in found] == [6, 6, 6, 6, 3]
    assert sorted(sample[1] for step in found for sample in step) == indices[0].key.to_pylist()
    slow = slowly(store, indices[:1], {"pics": 1}, config, range(27))
    assert sum(found, []) == list(slow)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_the_ranks_together_hold_the_same_ordered_steps(built, world_size):
    store, indices = built
    config = replace(BLENDED, num_samples=64)
    alone = taken(SampleStream(store, indices, config), 99)
    ranks = [
        taken(SampleStream(store, indices, config, rank, world_size), 99)
        for rank in range(world_size)
    ]
    assert [sum(step, []) for step in zip(*ranks, strict=True)] == alone
    assert len(alone[-1]) == 4, "the last step is a short one"


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("memory_bytes", [1 << 30, 40_000])
@pytest.mark.parametrize("remote", [False, True])
def test_nothing_changes_the_samples(built, workers, memory_bytes, remote):
    store, indices = built
    config = replace(BLENDED, workers=workers, memory_bytes=memory_bytes, threads=2)
    source = Remote(store) if remote else store
    found = taken(SampleStream(source, indices, config), 40)
    assert found == taken(SampleStream(store, indices, BLENDED), 40)


@pytest.mark.parametrize("workers", [0, 2])
def test_it_resumes_anywhere(built, workers):
    store, indices = built
    config = replace(BLENDED, workers=workers)
    assert_resumes_anywhere(
        lambda: Stepping(SampleStream(store, indices, config)),
        12,
        lambda batch: fingerprint(plain(batch)),
    )


def test_it_goes_on_with_another_world_size_batch_and_blend_of_the_state(built):
    store, indices = built
    whole = sum(taken(SampleStream(store, indices, BLENDED), 40), [])
    stream = SampleStream(store, indices, BLENDED, 1, 2)
    list(islice(stream.batches(), 9))
    state = json.loads(json.dumps(stream.state_dict()))
    other = replace(CONFIG, batch_size=10, shares=None)
    ranks = []
    for rank in range(3):
        again = SampleStream(store, indices, other, rank, 3)
        again.load_state_dict(state)
        ranks.append(taken(again, 18))
    assert sum((sum(step, []) for step in zip(*ranks)), []) == whole[54:234]


def test_the_state_is_small_and_the_same_on_all_ranks(built):
    store, indices = built
    states = []
    for rank in range(2):
        stream = SampleStream(store, indices, BLENDED, rank, 2)
        for share in (3, 5, 9, 17):
            next(stream.batches())
            stream.reweigh(SHARES | {"pics": share})
        states.append(json.dumps(stream.state_dict()))
    assert states[0] == states[1]
    assert len(states[0]) < 1024


def test_a_new_blend_holds_from_the_next_step_on(built):
    store, indices = built
    before = sum(taken(SampleStream(store, indices, BLENDED), 10), [])
    stream = SampleStream(store, indices, BLENDED)
    found = [plain(batch) for batch in islice(stream.batches(), 10)]
    stream.reweigh({"pics": 1, "words": 98, "clips": 1})
    found += [plain(batch) for batch in islice(stream.batches(), 30)]
    assert sum(found[:10], []) == before
    after = sum(found[10:], [])
    assert 0.95 < np.mean([sample[0] == "words" for sample in after]) <= 0.99
    # Each source continues where it was: no sample of its epoch is missing or repeated.
    words = [sample for sample in sum(found, []) if sample[0] == "words"]
    alone = replace(CONFIG, num_samples=len(words))
    assert words == sum(taken(SampleStream(store, indices[1:2], alone), 999), [])

    other = SampleStream(store, indices, BLENDED)
    other.load_state_dict(stream.state_dict())
    assert plain(next(other.batches())) == plain(next(stream.batches()))


def test_a_new_blend_before_the_first_step_takes_the_place_of_the_first_one(built):
    store, indices = built
    stream = SampleStream(store, indices, replace(BLENDED, shares=None))
    stream.reweigh(SHARES)
    assert taken(stream, 9) == taken(SampleStream(store, indices, BLENDED), 9)


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("schema", 99, "schema"),
        ("manifest", "0" * 64, "manifest"),
        ("seed", 6, "seed"),
        ("shard_window", 3, "shard_window"),
        ("position", -1, "position"),
        ("position", True, "position"),
        ("position", "7", "position"),
    ],
)
def test_a_state_of_another_stream_is_refused(built, field, value, complaint):
    store, indices = built
    with SampleStream(store, indices, BLENDED) as stream:
        state = stream.state_dict() | {field: value}
        with pytest.raises(ValueError, match=f"'{complaint}'"):
            stream.load_state_dict(state)


def test_other_data_is_another_stream(built, tmp_path):
    store, indices = built
    other = FolderStore(tmp_path)
    changed = write_source(other, "pics", [7, 5, 0, 9, 7])
    with SampleStream(store, indices[:1], CONFIG) as one:
        state = one.state_dict()
    with SampleStream(other, [changed], CONFIG) as two, pytest.raises(ValueError, match="manifest"):
        two.load_state_dict(state)


def test_an_epoch_asks_once_for_every_shard(built):
    store, indices = built
    remote = Remote(store)
    config = replace(CONFIG, num_samples=27)
    taken(SampleStream(remote, indices[:1], config), 99)
    whole = [Span(shard.key, 0, shard.size) for shard in indices[0].shards if shard.samples]
    assert sorted(remote.reads) == whole


def test_shards_are_asked_for_in_the_order_of_their_first_use(built):
    store, indices = built
    remote = Remote(store)
    config = replace(CONFIG, shard_window=4, batch_size=27, num_samples=27, threads=1)
    with SampleStream(remote, indices[:1], config) as stream:
        used = indices[0].shard[next(stream.batches()).index].tolist()
    first_uses = [indices[0].shards[number].key for number in dict.fromkeys(used)]
    assert [span.key for span in remote.reads] == first_uses
    assert first_uses != sorted(first_uses)


def test_where_a_window_does_not_fit_only_what_is_needed_is_read(built):
    store, indices = built
    remote = Remote(store)
    config = replace(BLENDED, memory_bytes=40_000, num_samples=60)
    taken(SampleStream(remote, indices, config), 99)
    sizes = {shard.key: shard.size for index in indices for shard in index.shards}
    assert all(span.length < sizes[span.key] for span in remote.reads)
    assert len(remote.reads) < 60, "neighbours share a read"


def test_with_little_memory_not_much_is_kept(built):
    store, indices = built
    largest = max(shard.size for shard in indices[0].shards)
    config = replace(CONFIG, shard_window=1, memory_bytes=2 * largest)
    stream = SampleStream(Remote(store), indices[:1], config)
    for _ in islice(stream.batches(), 30):
        kept = stream._extents._kept.values()
        assert sum(size for _, size in kept) <= largest or len(kept) == 1
    stream.close()


@pytest.mark.parametrize("remote", [False, True])
def test_damage_is_one_clear_error_and_moves_nothing(tmp_path, remote):
    store = FolderStore(tmp_path)
    index = write_source(store, "pics", [6, 6])
    config = replace(CONFIG, shard_window=1, num_samples=12)
    stream = SampleStream(Remote(store) if remote else store, [index], config)
    first = plain(next(stream.batches()))
    second_shard = index.shards[1 - index.shard[int(first[0][-2])]]
    good = store.get(second_shard.key)
    spoilt = next(s for s in range(12) if index.shard[s] != index.shard[first[0][-2]] and s % 2)
    at = int(index.item_offset[index.item_ptr[spoilt]]) + 3
    store.put(second_shard.key, good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    state = stream.state_dict()
    fresh = SampleStream(store, [index], config)
    fresh.load_state_dict(state)
    where = rf"'pics', sample 'pics-{spoilt:03d}' in .*media file 0"
    with pytest.raises(IndexMismatch, match=where):
        next(fresh.batches())
    assert fresh.state_dict() == state
    store.put(second_shard.key, good)
    fresh.close()
    fresh = SampleStream(store, [index], config)
    fresh.load_state_dict(state)
    assert plain(next(fresh.batches())) == plain(next(stream.batches()))


def test_without_the_check_damage_goes_unseen(tmp_path):
    store = FolderStore(tmp_path)
    index = write_source(store, "pics", [6])
    good = store.get(index.shards[0].key)
    at = int(index.json_offset[0])
    store.put(index.shards[0].key, good[:at] + b"[" + good[at + 1 :])
    with (
        SampleStream(store, [index], CONFIG) as stream,
        pytest.raises(IndexMismatch, match="CRC-32"),
    ):
        next(stream.batches())
    found = taken(SampleStream(store, [index], replace(CONFIG, check=False)), 1)
    assert sum(sample[2].startswith(b"[") for sample in found[0]) == 1


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_lost_or_short_shard_is_one_clear_error(tmp_path, remote, workers):
    store = FolderStore(tmp_path)
    index = write_source(store, "pics", [6])
    key = index.shards[0].key
    source = Remote(store) if remote else store
    good = store.get(key)
    stream = SampleStream(source, [index], replace(CONFIG, workers=workers))
    (tmp_path / key).write_bytes(good[: len(good) // 2])
    with pytest.raises(StoreError, match=key):
        next(stream.batches())
    (tmp_path / key).unlink()
    (tmp_path / key).with_suffix(".old").write_bytes(good)
    stream.close()
    stream = SampleStream(source, [index], replace(CONFIG, workers=workers))
    with pytest.raises(MissingKey, match=key):
        next(stream.batches())
    (tmp_path / key).write_bytes(good)
    assert len(next(stream.batches())) == 6, "once the shard is back, the same step is tried again"
    stream.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_transform_is_handed_every_batch(built, workers):
    store, indices = built
    config = replace(BLENDED, workers=workers)
    with SampleStream(store, indices, config, transform=lambda b: (b.position, b.key)) as stream:
        found = list(islice(stream.batches(), 9))
    whole = taken(SampleStream(store, indices, BLENDED), 9)
    assert found == [(6 * i, [sample[1] for sample in step]) for i, step in enumerate(whole)]


def test_closing_ends_the_threads(built):
    store, indices = built
    before = set(threading.enumerate())
    with SampleStream(Remote(store), indices, replace(BLENDED, workers=2)) as stream:
        next(stream.batches())
        assert set(threading.enumerate()) - before
    assert not set(threading.enumerate()) - before


# As the source of a webdataset pipeline -----------------------------------------------------------


def by_webdataset(store, indices):
    """Return (url, key) -> sample from webdataset's own reader, without the local path."""
    urls = [f"{store.uri}/{shard.key}" for index in indices for shard in index.shards]
    found = wds.WebDataset(urls, shardshuffle=False, empty_check=False)
    samples = [{k: v for k, v in sample.items() if k != "__local_path__"} for sample in found]
    return {(sample["__url__"], sample["__key__"]): sample for sample in samples}


def test_the_samples_are_those_of_webdatasets_reader_in_our_order(built):
    store, indices = built
    expected = by_webdataset(store, indices)
    with SampleStream(store, indices, BLENDED) as stream:
        found = list(islice(stream, 240))
    for sample in found:
        own = expected[sample["__url__"], sample["__key__"]]
        assert sample == own
        assert list(sample) == list(own)
    assert [s["__key__"] for s in found] == [
        sample[1] for step in taken(SampleStream(store, indices, BLENDED), 40) for sample in step
    ]
    assert {len(sample) for sample in found} == {3, 4, 5}


@pytest.mark.parametrize("memory_bytes", [1 << 30, 40_000])
@pytest.mark.parametrize("workers", [0, 2])
def test_samples_are_the_same_from_whole_shards_and_from_ranges(built, workers, memory_bytes):
    store, indices = built
    config = replace(BLENDED, memory_bytes=memory_bytes, workers=workers)
    remote = Remote(store)
    remote.uri = store.uri
    with SampleStream(remote, indices, config) as one, SampleStream(store, indices, BLENDED) as two:
        assert list(islice(one, 240)) == list(islice(two, 240))


def test_it_stands_first_in_a_pipeline(built):
    store, indices = built
    stages = wds.decode("pil"), wds.to_tuple("__key__", "json"), wds.batched(6)
    with SampleStream(store, indices, replace(BLENDED, num_samples=27)) as stream:
        found = list(wds.DataPipeline(stream, *stages))
        assert list(wds.DataPipeline(stream, *stages)) == [], "it goes on where it was"
    assert [len(keys) for keys, _ in found] == [6, 6, 6, 6, 3]
    for keys, documents in found:
        texts = [document["segments"][0]["text"] for document in documents]
        assert texts == [f"{key[:-4]} {int(key[-3:])}" for key in keys]


def test_samples_resume_after_every_step_and_begin_a_step_again(built):
    store, indices = built
    with SampleStream(store, indices, BLENDED) as stream:
        whole = list(islice(stream, 60))
    for count in range(20):
        with SampleStream(store, indices, BLENDED) as stream:
            list(islice(stream, count))
            state = stream.state_dict()
            assert state["position"] == count // 6 * 6
        with SampleStream(store, indices, BLENDED) as other:
            other.load_state_dict(state)
            assert list(islice(other, 30)) == whole[count // 6 * 6 :][:30]


@pytest.mark.parametrize("num_samples", [None, 64, 60])
@pytest.mark.parametrize(("num_workers", "world_size"), [(1, 1), (2, 1), (3, 1), (3, 2), (5, 3)])
def test_workers_take_every_so_manieth_step(
    built, monkeypatch, num_workers, world_size, num_samples
):
    """The DataLoader reads batches from its workers in turn: together they keep the order."""
    store, indices = built
    config = replace(BLENDED, num_samples=num_samples)
    alone = taken(SampleStream(store, indices, config), 11)
    for first in (0, 2):
        ranks = []
        for rank in range(world_size):
            steps = {}
            for worker in range(num_workers):
                monkeypatch.setattr(
                    stream_module, "data_loader_worker", lambda w=worker: (w, num_workers)
                )
                with SampleStream(store, indices, config, rank, world_size) as stream:
                    stream.load_state_dict(stream.state_dict() | {"position": 6 * first})
                    found = [plain(batch) for batch in islice(stream.batches(), 11)]
                steps |= {first + worker + n * num_workers: step for n, step in enumerate(found)}
            ranks.append([steps[number] for number in sorted(steps)][: 11 - first])
        assert [sum(step, []) for step in zip(*ranks, strict=True)] == alone[first:]


class Loader:
    """Batches of samples as a DataLoader delivers them, some read ahead."""

    def __init__(self, stream, batch_size):
        self.batch_size, self._samples = batch_size, list(islice(pickled(stream), 90))

    def __iter__(self):
        for begin in range(0, len(self._samples), self.batch_size):
            yield self._samples[begin : begin + self.batch_size]


def pickled(stream):
    return pickle.loads(pickle.dumps(stream))


def test_a_loader_that_reads_ahead_is_followed(built):
    store, indices = built
    config = replace(BLENDED, num_samples=64)
    names = [index.name for index in indices]
    whole = list(SampleStream(store.uri, names, config))
    stream = SampleStream(store.uri, names, config)
    for number, batch in enumerate(stream.follow(Loader(stream, 6)), 1):
        state = stream.state_dict()
        assert state["position"] == min(6 * number, 64)
        assert batch == whole[6 * number - 6 : 6 * number]
        other = SampleStream(store.uri, names, config)
        other.load_state_dict(json.loads(json.dumps(state)))
        assert list(islice(other, 9)) == whole[6 * number :][:9]
    assert number == 11
    with pytest.raises(ValueError, match=r"batch_size is 4; rank 0 of 1 has 6 of the 6"):
        next(stream.follow(Loader(stream, 4)))


def test_a_last_step_with_fewer_samples_than_ranks_is_over_for_all(built):
    store, indices = built
    config = replace(BLENDED, num_samples=10, batch_size=4)
    names = [index.name for index in indices]
    for rank in range(4):
        stream = SampleStream(store.uri, names, config, rank, 4)
        followed = list(stream.follow(Loader(stream, 1)))
        assert len(followed) == (2 if rank in (0, 2) else 3)
        assert stream.state_dict()["position"] == 10


def test_a_worker_begins_though_its_parent_has_not_ended(built, monkeypatch):
    store, indices = built
    names = [index.name for index in indices]
    stream = SampleStream(store.uri, names, replace(BLENDED, num_samples=12))
    expected = list(islice(SampleStream(store.uri, names, stream.config), 6))
    state = stream.state_dict()
    assert next(iter(stream)) == expected[0]
    stream.load_state_dict(state)
    monkeypatch.setattr(stream_module, "data_loader_worker", lambda: (0, 2))
    assert list(pickled(stream)) == expected


def test_a_forked_copy_closes_nothing_of_its_parent(built, monkeypatch):
    """A parent lock that was held at the fork stays held in the child for ever."""
    store, indices = built
    names = [index.name for index in indices]
    with SampleStream(store.uri, names, replace(BLENDED, workers=1)) as stream:
        first = next(iter(stream))
        parent, ended = os.getpid(), []
        pool, store_of_parent = stream._pool, stream._store
        monkeypatch.setattr(pool, "shutdown", lambda **options: ended.append("pool"))
        monkeypatch.setattr(store_of_parent, "close", lambda: ended.append("store"))
        monkeypatch.setattr(stream_module.os, "getpid", lambda: parent + 1)
        stream.close()
        assert ended == []
        monkeypatch.undo()
        pool.shutdown()
        store_of_parent.close()
    assert first["__key__"]


def test_an_iterator_of_before_does_not_go_on_after_a_move(built):
    store, indices = built
    with SampleStream(store, indices, BLENDED) as stream:
        state = stream.state_dict()
        for running in (iter(stream), stream.batches(), stream.follow(Loader(stream, 6))):
            next(running)
            stream.load_state_dict(state)
            with pytest.raises(RuntimeError, match="moved or iterated anew"):
                list(islice(running, 6))
        first, second = stream.batches(), stream.batches()
        next(first), next(second)
        with pytest.raises(RuntimeError, match="moved or iterated anew"):
            next(first)


def test_a_worker_does_not_begin_again_in_the_middle(built, monkeypatch):
    store, indices = built
    monkeypatch.setattr(stream_module, "data_loader_worker", lambda: (1, 2))
    with SampleStream(store, indices, replace(BLENDED, num_samples=36)) as stream:
        assert len(list(stream)) == 18
        assert list(stream) == []
    with SampleStream(store, indices, BLENDED) as stream:
        list(islice(stream, 8))
        with pytest.raises(ValueError, match="persistent_workers=False"):
            next(iter(stream))


def test_another_process_opens_its_own_store(built):
    store, indices = built
    with SampleStream(store, indices, BLENDED) as stream:
        again = pickled(stream)
        assert again._store is None
        assert list(islice(again, 20)) == list(islice(stream, 20))
        stream._pid = 1  # as after a fork
        files = stream._extents
        next(stream.batches())
        assert stream._extents is not files
    remote = SampleStream(Remote(store), indices, BLENDED)
    remote._pid = 1
    with pytest.raises(ValueError, match="the root's URI"):
        next(remote.batches())


def test_a_closed_stream_is_opened_again(built, monkeypatch):
    store, indices = built
    names = [index.name for index in indices]
    whole = list(islice(SampleStream(store, indices, BLENDED), 20))
    closed = []
    monkeypatch.setattr(FolderStore, "close", lambda self: closed.append(self.uri))
    stream = SampleStream(store.uri, names, BLENDED)
    first = list(islice(stream, 12))
    stream.close()
    assert closed == [store.uri]
    assert first + list(islice(stream, 8)) == whole
    SampleStream(store, indices, BLENDED).close()
    assert len(closed) == 1, "a store of the caller's stays open"


def test_ranks_without_samples_are_refused(built):
    store, indices = built
    with (
        SampleStream(store, indices, BLENDED, 0, 8) as stream,
        pytest.raises(ValueError, match="batch_size is 6 for 8 ranks"),
    ):
        next(iter(stream))


def test_bytes_damaged_on_their_way_are_read_again(built):
    store, indices = built
    whole = taken(SampleStream(store, indices, BLENDED), 9)

    class Noisy(Remote):
        def get(self, key, offset=0, length=None, *, etag=None):
            data = super().get(key, offset, length)
            large = offset == 0 and length is not None and length > 5000
            return data[:520] + bytes([data[520] ^ 1]) + data[521:] if large else data

    noisy = Noisy(store)
    assert taken(SampleStream(noisy, indices, BLENDED), 9) == whole
    assert any(span.offset for span in noisy.reads), "some part was read alone"


def test_a_damaged_tar_header_is_one_clear_error(tmp_path):
    store = FolderStore(tmp_path)
    index = write_source(store, "pics", [2])
    good = store.get(index.shards[0].key)
    at = int(index.item_offset[0]) - 512 + len("pics-001.0.")
    assert good[at : at + 3] == b"bin"
    store.put(index.shards[0].key, good[:at] + b"t" + good[at + 1 :])
    stream = SampleStream(store, [index], replace(CONFIG, batch_size=2))
    with pytest.raises(IndexMismatch, match=r"'pics-001' in .*media file 0: its tar header"):
        next(iter(stream))


def test_names_are_those_of_headers():
    for length in (1, 50, 99):
        info = tarfile.TarInfo("k" * length)
        info.size, info.mode = 12345 * length, 0o444
        header = info.tobuf(tarfile.USTAR_FORMAT)
        assert member_name(header) == info.name
        for at in (0, 99, 130, 150, 300):
            assert member_name(header[:at] + b"\xff" + header[at + 1 :]) is None
        assert member_name(header[:-1]) is None


@pytest.mark.parametrize(
    "values",
    [
        {"batch_size": 0},
        {"batch_size": 2.5},
        {"batch_size": True},
        {"seed": -1},
        {"shard_window": 0},
        {"num_samples": -1},
        {"workers": -1},
        {"threads": 0},
        {"memory_bytes": 0},
    ],
)
def test_a_setting_out_of_range_is_refused(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        StreamConfig(**{"batch_size": 8, **values})


def test_sources_ranks_and_shares_are_checked(built):
    store, indices = built
    for wrong, complaint in (
        (lambda: SampleStream(store, [], CONFIG), "sources"),
        (lambda: SampleStream(store, [indices[0]] * 2, CONFIG), "sources"),
        (lambda: SampleStream(store, indices, CONFIG, 2, 2), "rank"),
        (lambda: SampleStream(store, indices, replace(CONFIG, shares={"pics": 1})), "shares"),
        (lambda: SampleStream(store, indices, replace(CONFIG, shares=SHARES | {"x": 1})), "shares"),
        (
            lambda: SampleStream(store, indices, replace(CONFIG, shares=SHARES | {"pics": 0})),
            "raise",
        ),
    ):
        with pytest.raises(ValueError, match=complaint):
            wrong()


@pytest.mark.parametrize("whole", [True, False])
def test_no_more_requests_at_once_than_threads(monkeypatch, whole):
    """The limit holds for any number of pieces per shard."""
    monkeypatch.setattr(extents, "MAX_PIECE", 1000)
    bodies = {f"{n}.tar": bytes([n]) * 7700 for n in range(6)}
    store = Counting(bodies)
    size = np.full(6, 7700 - extents.HEADER)
    stretch = Stretch(
        source=np.zeros(6, np.int16), sample=np.arange(6), epoch=np.zeros(6, np.int64),
        part_ptr=np.arange(7), slot=np.arange(6), offset=np.full(6, extents.HEADER), length=size,
        crc=np.zeros(6, np.uint32), shards=[ShardInfo(key, 7700, "", 1) for key in bodies],
    )  # fmt: skip
    fetched = StoreExtents(store, whole, 1 << 20, 3)
    try:
        parts = fetched.prepare(stretch).read(0, 6)
    finally:
        fetched.close()
    assert parts == [body[extents.HEADER :] for body in bodies.values()]
    assert store.most == 3
    assert store.count == 6 * 8


class Counting:
    """A store that counts requests in total and in flight; the first requests wait for a third."""

    uri = "counting"

    def __init__(self, bodies):
        self._bodies, self._lock = bodies, threading.Lock()
        self._three = threading.Barrier(3)
        self.now = self.most = self.count = 0

    def get(self, key, offset, length):
        with self._lock:
            self.now, self.count = self.now + 1, self.count + 1
            self.most = max(self.most, self.now)
        self._three.wait(30)  # 48 requests are sixteen times three
        time.sleep(0.001)  # a fourth concurrent request would arrive meanwhile
        with self._lock:
            self.now -= 1
        return self._bodies[key][offset : offset + length]


def test_spans_are_merged_into_ranges():
    rng = np.random.default_rng(0)
    for gap in (0, 5, 40):
        count = int(rng.integers(1, 60))
        shard, offset = rng.integers(0, 3, count), rng.integers(0, 500, count)
        length = rng.integers(1, 30, count)
        in_shard, begin, size, owner = ranges(shard, offset, length, gap)
        assert np.array_equal(in_shard[owner], shard)
        assert (begin[owner] <= offset).all()
        assert (offset + length <= (begin + size)[owner]).all()
        # Each range begins and ends with a span, and neighbours are further apart than the gap.
        for number in range(len(begin)):
            mine = owner == number
            assert offset[mine].min() == begin[number]
            assert (offset + length)[mine].max() == begin[number] + size[number]
        for one in range(len(begin)):
            for other in range(len(begin)):
                if one != other and in_shard[one] == in_shard[other]:
                    low, high = sorted((one, other), key=lambda r: begin[r])
                    assert begin[high] - begin[low] - size[low] > gap
        # The ranges come in the order of first use.
        first_uses = np.unique(owner, return_index=True)[1]
        assert np.array_equal(first_uses, np.sort(first_uses))
    none = np.zeros(0, np.int64)
    assert [found.size for found in ranges(none, none, none, 0)] == [0, 0, 0, 0]
