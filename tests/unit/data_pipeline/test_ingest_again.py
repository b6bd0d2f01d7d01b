"""Ingest by workers and ingest resumed after a stop write the same bytes."""

import os
import threading
import traceback

import pytest

from data_pipeline.index.manifest import read_index
from data_pipeline.ingest.ingest import CrudeSample, IngestPolicy, Listed, TooManyRejected, ingest
from data_pipeline.ingest.ordered import ordered_map
from data_pipeline.ingest.reindex import reindex
from data_pipeline.store.open import FolderStore, MemoryStore
from data_pipeline.text import Tokenizer, train_ranks
from data_pipeline.workers.workers import WorkerDied
from tests.unit.data_pipeline.media import samples, watch_puts

# Workers -----------------------------------------------------------------------------------------


class Strange:
    """A sample whose read fails for a reason outside the sample."""

    key, size = "strange", 0

    def load(self, policy):
        raise MemoryError("of the host")


class Deadly(Strange):
    def load(self, policy):
        os._exit(1)


def _objects(store) -> dict[str, bytes]:
    return {key: store.get(key) for key in store.list()}


def test_workers_give_the_same_bytes_and_errors_come_through(tmp_path, tokenizer):
    given, found = samples(40), []
    given[7:7] = [CrudeSample("bad", []), given[3]]
    for workers in (0, 2):
        store = FolderStore(tmp_path / f"{workers}")
        told = []
        ingest(given, store, "src", tokenizer, 30_000, workers=workers, rejected=told.append)
        assert [rejection.key for rejection in told] == ["bad", "s-0003"]
        found.append(_objects(store))
    assert found[0] == found[1]
    with pytest.raises(MemoryError, match="of the host") as caught:
        ingest([*given, Strange()], store, "a", tokenizer, workers=1)
    assert "while preparing sample 'strange'" in "".join(traceback.format_exception(caught.value))
    with pytest.raises(WorkerDied, match="use fewer workers"):
        ingest([Deadly()], store, "b", tokenizer, workers=1)
    with pytest.raises(ValueError, match="num_workers is -1"):
        ingest(given, store, "c", tokenizer, workers=-1)


def test_work_runs_ahead_only_a_little():
    taken = []

    def tasks():
        for number in range(100):
            taken.append(number)
            yield number

    results = ordered_map(_identity, tasks(), 1)
    for number in range(20):
        assert next(results) == number
        assert len(taken) <= number + 5
    results.close()


def test_tasks_are_read_in_the_thread_of_who_reads_the_results():
    """A generator over an SQLite cursor may run in one thread only."""
    threads = []

    def tasks():
        for number in range(30):
            threads.append(threading.get_ident())
            yield number

    assert list(ordered_map(_identity, tasks(), 2)) == list(range(30))
    assert set(threads) == {threading.get_ident()}


def _identity():
    return int


# Resuming a killed ingest ------------------------------------------------------------------------


class Killed(Exception):
    pass


def _listed(count: int = 12, stop: int | None = None) -> Listed:
    def given():
        for number, sample in enumerate(samples(count)):
            if number == stop:
                raise Killed
            # An unusable sample, and a sample with a key that was used long before.
            yield {4: CrudeSample("no", []), 8: samples(2)[1]}.get(number, sample)

    return Listed(given(), identity={"count": count})


@pytest.mark.parametrize("stops", [[5], [0, 1, 11], [9, 9, 12]])
def test_an_ingest_goes_on_where_it_stopped(tmp_path, tokenizer, stops):
    whole, store = FolderStore(tmp_path / "whole"), FolderStore(tmp_path / "cut")
    ingest(_listed(), whole, "src", tokenizer, 16_384)
    done = set()
    for stop in stops:
        with pytest.raises(Killed):
            ingest(_listed(stop=stop if stop < 12 else 11), store, "src", tokenizer, 16_384)
        assert "src/manifest.json" not in store.list()
        assert done <= set(store.list())
        done = set(store.list())
    counts = []
    watch_puts(store, lambda key, data: counts.append(key))
    progress = []
    index = ingest(_listed(), store, "src", tokenizer, 16_384, progress=progress.append)
    finished = {key.replace(".tar", "") for key in done if key.endswith(".tar")}
    parts = {key.replace("src/.ingest", "src")[:-4] for key in done if key.endswith(".npz")}
    assert finished == parts
    # Finished shards are neither written nor counted again.
    assert not {key[:-4] for key in counts if key.endswith(".tar")} & parts
    assert progress[0].shards == len(parts)
    assert progress[-1].samples == index.num_samples == 10
    assert progress[-1].rejected == 2
    assert _objects(store) == _objects(whole)


@pytest.mark.parametrize("total", [None, 12, 13])
def test_a_sample_that_is_neither_written_nor_rejected_is_an_error(
    store, tokenizer, monkeypatch, total
):
    def listed():
        return Listed(samples(12), identity={"count": 12}, total=total)

    def losing(make, batches, workers):
        yield from list(ordered_map(make, batches, workers))[:-1]

    if total != 13:  # more than the input holds
        monkeypatch.setattr("data_pipeline.ingest.ingest.ordered_map", losing)
    counts = "13 samples are in the input, 12 were read, and 12 were" if total == 13 else (
        "12 samples are in the input, 12 were read, and 11 were"
    )  # fmt: skip
    with pytest.raises(RuntimeError, match=f"'src': {counts} written or rejected"):
        ingest(listed(), store, "src", tokenizer, 16_384)
    assert "src/manifest.json" not in store.list()
    monkeypatch.undo()
    store.delete("src/.ingest/request.json")
    assert ingest(samples(12), store, "whole", tokenizer, 16_384).num_samples == 12


def test_another_request_does_not_go_on(tmp_path, store, tokenizer):
    with pytest.raises(Killed):
        ingest(_listed(stop=9), store, "src", tokenizer, 16_384)
    other = Tokenizer(train_ranks(["other words 1 2 3"] * 9, 257), "other")
    for differing, request in {
        "input": lambda: ingest(_listed(13), store, "src", tokenizer, 16_384),
        "tokenizer": lambda: ingest(_listed(), store, "src", other, 16_384),
        "shard bytes": lambda: ingest(_listed(), store, "src", tokenizer, 16_385),
        "category": lambda: ingest(_listed(), store, "src", tokenizer, 16_384, category="code"),
        "policy": lambda: ingest(
            _listed(), store, "src", tokenizer, 16_384, policy=IngestPolicy(max_items=9)
        ),
    }.items():
        with pytest.raises(ValueError, match=rf"src/\.ingest.* begun with another {differing} \("):
            request()
    with pytest.raises(ValueError, match="an unfinished ingest of this name lies here"):
        ingest(samples(3), store, "src", tokenizer, 16_384)
    assert ingest(_listed(), store, "src", tokenizer, 16_384).num_samples == 10


def test_a_shard_that_someone_deleted_is_made_again(tmp_path, store, tokenizer):
    whole = FolderStore(tmp_path / "whole")
    ingest(_listed(), whole, "src", tokenizer, 16_384)
    with pytest.raises(Killed):
        ingest(_listed(stop=11), store, "src", tokenizer, 16_384)
    (store.root / "src" / "000001.tar").unlink()
    ingest(_listed(), store, "src", tokenizer, 16_384)
    assert _objects(store) == _objects(whole)


def test_a_request_of_which_nothing_is_done_binds_nobody(store, tokenizer):
    with pytest.raises(Killed):
        ingest(_listed(stop=0), store, "src", tokenizer, 16_384)
    assert ingest(_listed(13), store, "src", tokenizer, 16_384).num_samples == 11
    with pytest.raises(ValueError, match="no sample left"):
        ingest(Listed([CrudeSample("a", [])], identity={}), store, "two", tokenizer)
    assert ingest(samples(2), store, "two", tokenizer).num_samples == 2
    assert not [key for key in store.list() if ".ingest" in key]


def test_the_journal_goes_with_the_manifest_and_only_then(store, tokenizer):
    left = {}

    def watched(key, data):
        left[key] = [name for name in store.list() if ".ingest" in name] if left else []

    watch_puts(store, watched)
    index = ingest(_listed(), store, "src", tokenizer, 16_384)
    # The lock, the request and the parts of the shards.
    assert len(left["src/manifest.json"]) == 2 + len(index.shards)
    assert not [name for name in os.listdir(store.root / "src") if name.startswith(".")]
    memory = MemoryStore("journal")
    memory.clear()
    ingest(_listed(), memory, "src", tokenizer, 16_384)
    assert _objects(memory) == _objects(store)


def test_what_was_killed_while_tidying_up_is_finished(store, tokenizer, monkeypatch):
    def refuse(*_):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(FolderStore, "delete", refuse)
        with pytest.raises(Killed):
            ingest(_listed(), store, "src", tokenizer, 16_384)
    (store.root / "src" / ".part-killed").write_bytes(b"half a shard")
    index = ingest(_listed(stop=0), store, "src", tokenizer, 16_384)
    assert index.content_hash == read_index(store, "src").content_hash
    assert not [name for name in os.listdir(store.root / "src") if name.startswith(".")]
    with pytest.raises(ValueError, match="a finished source of this name exists"):
        ingest(_listed(), store, "src", tokenizer, 16_384)


# A second ingest of the same name -----------------------------------------------------------------


def test_a_second_ingest_of_the_name_is_refused_while_one_is_under_way(store, tokenizer):
    refused = []

    def meanwhile():
        yield from samples(3)
        for begin in (
            lambda: ingest(samples(4), store, "src", tokenizer),
            lambda: reindex(store, "old", "src", tokenizer),
        ):
            with pytest.raises(ValueError, match=rf"by another process: {os.getpid()} on") as error:
                begin()
            refused.append(error.value)
        yield from samples(6)[3:]

    ingest(samples(2), store, "old", tokenizer)
    assert ingest(meanwhile(), store, "src", tokenizer).num_samples == 6
    assert len(refused) == 2
    assert not [key for key in store.list() if ".ingest" in key]


def test_a_manifest_that_is_there_by_then_is_not_replaced(store, tokenizer):
    def meanwhile():
        yield from samples(3)
        store.put("src/manifest.json", b"of another writer")

    with pytest.raises(ValueError, match="a finished source of this name exists"):
        ingest(meanwhile(), store, "src", tokenizer)
    assert store.get("src/manifest.json") == b"of another writer"
    assert "src/index.parquet" not in store.list()


# Too many rejected samples -----------------------------------------------------------------------


@pytest.mark.parametrize("total", [None, 12])
def test_too_many_rejections_end_the_ingest_and_a_higher_limit_goes_on(tmp_path, tokenizer, total):
    """Two of twelve samples are unusable."""
    whole, store = FolderStore(tmp_path / "whole"), FolderStore(tmp_path / "cut")
    ingest(_listed(), whole, "src", tokenizer, 16_384)
    given = _listed()
    given.total = total
    with pytest.raises(TooManyRejected, match="2 of 12 samples rejected, .* 0.16: empty 1, key tw"):
        ingest(given, store, "src", tokenizer, 16_384, max_rejected=0.16)
    assert "src/manifest.json" not in store.list()
    done = [key for key in store.list() if key.endswith(".npz")]
    assert done
    counts = []
    watch_puts(store, lambda key, data: counts.append(key))
    ingest(_listed(), store, "src", tokenizer, 16_384, max_rejected=0.17)
    assert not {key.replace(".ingest/", "")[:-4] for key in done} & {key[:-4] for key in counts}
    assert _objects(store) == _objects(whole)
