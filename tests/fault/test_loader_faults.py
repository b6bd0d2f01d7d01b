"""Rows read from a real S3 server with broken answers: the same stream, or one clear error.

Each fault runs without and with the node's cache, which must not keep broken data.
"""

import time

import pytest

from data_pipeline.access import open_data, open_tokenizer
from data_pipeline.cache.cached_store import CacheConfig
from data_pipeline.index.manifest import read_index
from data_pipeline.loader import Loader, LoaderError
from data_pipeline.store.open import AccessDenied, FolderStore, MissingKey, StoreError, open_store
from launch.local.user_errors import user_message
from tests.fault.fault_proxy import Fault
from tests.resume import fingerprint
from tests.unit.data_pipeline.every_kind import CONFIG, build

pytestmark = pytest.mark.fault
STEPS = 5


@pytest.fixture(scope="module")
def corpus(s3_server, tmp_path_factory):
    """The corpus in a bucket, its copy in a folder, and the expected stream."""
    folder = FolderStore(tmp_path_factory.mktemp("copy"))
    tokenizer, indices = build(folder)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_server.environment().items():
            patch.setenv(name, value)
        root = f"s3://{s3_server.bucket}/loader"
        remote = open_store(root, endpoint=s3_server.endpoint)
        for key in folder.list():
            remote.put(key, folder.get(key))
    with Loader(CONFIG.replace(root=folder.uri), folder, indices, tokenizer) as loader:
        expected = [digest(next(loader)) for _ in range(STEPS)]
    return root, folder, expected


def digest(batch):
    assert not batch.bad
    return fingerprint([batch.plan, batch.rows, batch.media])


@pytest.fixture(params=["plain", "cached"])
def config(request, corpus, s3_environment, proxy, tmp_path):
    cache = None
    if request.param == "cached":
        cache = CacheConfig(
            folder=str(tmp_path / "cache"), memory_bytes=0, block_bytes=8 << 10, wait_s=60
        )
    return CONFIG.replace(
        root=corpus[0],
        endpoint=proxy.endpoint,
        cache=cache,
        patience=60.0,
        requests_per_second=2000.0,
        prefetch_steps=2,
    )


@pytest.fixture
def loader(config):
    store = open_data(config)
    indices = [read_index(store, name) for name in config.source_names]
    loader = Loader(config, store, indices, open_tokenizer(config, store))
    yield loader
    loader.close()
    store.close()


def stream(loader, steps=STEPS):
    return [digest(next(loader)) for _ in range(steps)]


PASSING = {
    "no fault": [],
    "503 to every fifth": [Fault("slowdown", times=None, p=0.2)],
    "503 to every second": [Fault("slowdown", times=None, p=0.5)],
    "503 to all for a while": [Fault("slowdown", times=None, seconds=2.0)],
    "resets before the answer": [Fault("refuse", times=6)],
    "resets inside bodies": [Fault("reset", path="tar", after=700, times=6)],
    "truncated bodies": [Fault("truncate", path="tar", after=900, times=6)],
    "corrupted bodies": [Fault("corrupt", path="tar", after=300, times=2)],
    "slow bodies": [Fault("slow", path="tar", rate=150_000, times=4)],
    "late answers": [Fault("late", delay=0.4, times=5)],
    "credentials that had expired": [Fault("expired", times=1)],
}


@pytest.mark.parametrize("name", PASSING)
def test_the_stream_is_the_same(corpus, loader, proxy, name):
    faults = [replace_fault(fault) for fault in PASSING[name]]
    proxy.faults += faults
    assert stream(loader) == corpus[2]
    if faults:
        assert sum(fault.taken for fault in faults) > 0, "the fault never struck"


def replace_fault(fault):
    """Return a fresh copy of a fault, because faults count their requests."""
    return Fault(
        fault.kind, path=fault.path, after=fault.after, delay=fault.delay, p=fault.p,
        times=fault.times, seconds=fault.seconds, rate=fault.rate,
    )  # fmt: skip


def one_line(error):
    """Return the error as the user sees it."""
    line = user_message(error)
    assert line is not None
    assert "\n" not in line
    return line


def until_error(loader):
    def take():
        for _ in range(60):
            next(loader)

    with pytest.raises(LoaderError) as caught:
        take()
    return caught.value


@pytest.fixture
def copy(corpus, s3_environment, proxy, request, config):
    """A damaged copy of the corpus under a separate prefix."""
    _, folder, _ = corpus
    root = f"s3://{s3_environment.bucket}/damaged-{time.monotonic_ns()}"
    remote = open_store(root, endpoint=s3_environment.endpoint)
    for key in folder.list():
        remote.put(key, folder.get(key))
    config = config.replace(root=root, patience=2.0)
    store = open_data(config)
    indices = [read_index(store, name) for name in config.source_names]
    loader = Loader(config, store, indices, open_tokenizer(config, store))
    yield remote, loader
    loader.close()
    store.close()


def test_a_shard_that_is_deleted_stops_with_its_name(copy, s3_environment):
    remote, loader = copy
    next(loader)
    for key in remote.list("web/"):
        if key.endswith(".tar"):
            remote._client.delete_object(Bucket=remote.bucket, Key=f"{remote._prefix}/{key}")
    error = until_error(loader)
    assert isinstance(error.__cause__, MissingKey)
    assert "web/0000" in one_line(error)


def test_a_shard_that_is_overwritten_is_never_read_as_the_old_one(copy):
    """Changed bytes are detected: an error, or a sample that is skipped and reported."""
    remote, loader = copy
    next(loader)
    for key in remote.list("web/"):
        if key.endswith(".tar"):
            data = bytearray(remote.get(key))
            data[1::97] = bytes(byte ^ 1 for byte in data[1::97])
            remote.put(key, bytes(data))
    told = []
    for _ in range(12):
        try:
            batch = next(loader)
        except LoaderError as error:
            told.append(one_line(error))
            told += [] if isinstance(error.__cause__, StoreError) else ["not of the store"]
            break
        told += [bad.reason for bad in batch.bad]
    assert any("web/0000" in line for line in told)
    assert "not of the store" not in told


def test_credentials_that_stay_expired_stop_with_one_sentence(loader, proxy):
    next(loader)
    proxy.faults.append(Fault("expired", method="", times=None))
    error = until_error(loader)
    assert isinstance(error.__cause__, AccessDenied)
    assert "expired" in one_line(error).lower()


def test_a_server_that_stays_away_stops_with_one_sentence(corpus, config, proxy):
    config = config.replace(patience=1.5)
    store = open_data(config)
    indices = [read_index(store, name) for name in config.source_names]
    with Loader(config, store, indices, open_tokenizer(config, store)) as loader:
        proxy.faults.append(Fault("refuse", method="", times=None))
        begin = time.monotonic()
        error = until_error(loader)
        assert time.monotonic() - begin < 50  # the other tests have a patience of 60 s
    assert "gave up" in one_line(error) or "waited" in one_line(error)
    store.close()
