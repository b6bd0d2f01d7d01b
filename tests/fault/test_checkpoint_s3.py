"""Checkpoints on a real S3 server over a network that fails during writes."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from data_pipeline.store import multipart
from data_pipeline.store.multipart import md5_of
from data_pipeline.store.open import StoreUnavailable, open_store
from kimi_pretrain.checkpoint.errors import CheckpointError, CheckpointUnavailable
from kimi_pretrain.checkpoint.find import find
from kimi_pretrain.checkpoint.saver import CheckpointSaver
from kimi_pretrain.checkpoint.storage_read import open_place
from kimi_pretrain.checkpoint.storage_write import ProtectedSteps, open_storage_writer
from tests.fault.fault_proxy import Fault
from tests.unit.kimi_pretrain.checkpoint import ranks

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

LARGE = 100_000  # 23 MB, uploaded in parts


@pytest.fixture
def place(s3_environment, proxy, monkeypatch, request):
    """A separate checkpoint place, reached through the proxy by this process and the writers."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    name = request.node.name.split("[")[0]
    found = open_place(f"s3://{s3_environment.bucket}/{name}")
    yield found
    found.close()


def save(place, step: int, size: int = 64, *overrides: str) -> CheckpointSaver:
    saver = CheckpointSaver(place, ranks.config(*overrides), ranks.alone())
    saver.begin(ranks.tensors(step, size), ranks.state(step, step))
    return saver


def save_two(place) -> None:
    """Save checkpoints of steps 1 and 2."""
    saver = save(place, 1)
    saver.finish()
    saver.begin(ranks.tensors(2), ranks.state(2, 2))
    saver.finish()
    saver.close()


def uploads(place) -> list[str]:
    """Return the keys of multipart uploads that were never completed."""
    reply = place.store._request("list_multipart_uploads", "", {"Prefix": ""})
    prefix = place.uri.split("/", 3)[-1]
    return [u["Key"] for u in reply.get("Uploads", ()) if u["Key"].startswith(f"{prefix}/")]


def test_saved_found_and_loaded(place):
    """Two ranks save; old checkpoints are removed; a checkpoint exists only with its manifest."""
    config = ranks.config("checkpoint.keep_last=2")

    def work(mesh):
        saver = CheckpointSaver(place, config, mesh)
        for step in (1, 2, 3):
            saver.begin(ranks.tensors(step), ranks.state(step, step))
            uri = saver.finish()
        saver.close()
        return uri

    uris = ranks.on_ranks(2, work)
    assert uris == [f"{place.uri}/step_00000003"] * 2
    assert place.steps() == [2, 3]
    assert not place.store.list("step_00000001")
    found = find("latest", place, config, None)
    assert found.manifest().state == ranks.state(3, 3)
    for name, tensor in ranks.tensors(3).items():
        assert torch.equal(found.tensor(name), tensor), name
    place.store.delete("step_00000003/manifest.json")
    assert open_place(place.uri).steps() == [2]


def test_a_damaged_object_is_named(place):
    saver = save(place, 1, LARGE)
    saver.finish()
    saver.close()
    file = "step_00000001/rank_00000_000.safetensors"
    other = open_store(place.uri)
    data = bytearray(other.get(file))
    data[len(data) // 2] ^= 1
    other.put(file, bytes(data))
    with pytest.raises(CheckpointError, match=f"{file}: sha256 .*, expected"):
        find("latest", open_place(place.uri), ranks.config(), None)
    other.put(file, bytes(data[:-1]))
    with pytest.raises(CheckpointError, match=f"{file}: .* bytes, expected .* bytes"):
        find("latest", open_place(place.uri), ranks.config(), None)
    other.delete(file)
    with pytest.raises(CheckpointError, match=f"{file}: missing"):
        find("latest", open_place(place.uri), ranks.config(), None)
    other.close()


def test_what_a_killed_writer_has_uploaded_is_taken_back(place, proxy):
    saver = save(place, 1)
    saver.finish()
    proxy.faults.append(Fault("late", method="PUT", path="partNumber=2", delay=30.0))
    saver.begin(ranks.tensors(2, LARGE), ranks.state(2, 2))
    while not any("partNumber=2" in request.path for request in proxy.requests):
        assert saver.progress(0.05).phase == "writing"
    os.kill(saver._writer.pid, signal.SIGKILL)
    with pytest.raises(CheckpointError, match="killed by signal 9"):
        saver.finish()
    assert uploads(place)  # no other listing shows them, but they cost storage
    saver.begin(ranks.tensors(3), ranks.state(3, 3))
    saver.finish()
    saver.close()
    assert not uploads(place)
    assert place.steps() == [1, 3]
    assert not place.store.list("step_00000002")


def test_tidying_up_leaves_alone_what_is_being_uploaded(place):
    """Rank 0 tidies while other ranks may be writing, so it must keep their uploads."""
    store, prefix = place.store, place.uri.split("/", 3)[-1]
    for name in ("step_00000001/old", "step_00000002/of_another_rank"):
        store._request("create_multipart_upload", name, {"Key": f"{prefix}/{name}"})
    assert len(uploads(place)) == 2
    steps = ProtectedSteps()
    steps.protect(2)
    open_storage_writer(place).tidy(steps)
    assert uploads(place) == [f"{prefix}/step_00000002/of_another_rank"]
    store.remove_uploads("step_", but=lambda key: False)
    assert uploads(place) == []


def test_a_short_outage_shows_only_in_the_time(place, proxy):
    proxy.faults += [
        Fault("refuse", method="", times=None, seconds=1.0, path="rank_"),
        Fault("refuse", method="PUT", path="manifest.json"),
        # The server rejects a part that changed in transit, and the writer sends it again.
        Fault("error", method="PUT", path="partNumber=1", status=400, code="BadDigest"),
    ]
    saver = save(place, 1, LARGE)
    assert saver.finish() == f"{place.uri}/step_00000001"
    saver.close()
    assert proxy.count("error") == 1
    assert proxy.count("refuse") > 1
    assert find("latest", place, ranks.config(), None).step == 1


def test_the_server_refuses_a_part_that_arrives_otherwise(place, monkeypatch, tmp_path):
    """Every part carries its MD5, which the server verifies."""
    monkeypatch.setattr(multipart, "md5_of", lambda body: md5_of(body + b"."))
    store = open_store(place.uri, attempts=2)
    (tmp_path / "file").write_bytes(bytes(20 << 20))
    with pytest.raises(StoreUnavailable, match="BadDigest"):
        store.put_file("file", tmp_path / "file")
    store.close()
    assert not uploads(place)


def test_a_store_that_is_gone_before_a_run_is_told_to_all_ranks(place, proxy):
    proxy.faults.append(Fault("refuse", method="", times=None))
    impatient, config = open_place(place.uri, patience=0.5), ranks.config()
    with pytest.raises(CheckpointUnavailable, match="gave up after"):
        ranks.on_ranks(2, lambda mesh: find("latest", impatient, config, mesh))


def test_a_store_that_is_gone_fails_the_save_and_training_goes_on(place, proxy, caplog):
    """All ranks fail alike; the next save after the outage is complete."""

    def work(mesh):
        saver = CheckpointSaver(open_place(place.uri, patience=1.0), ranks.config(), mesh)
        saver.begin(ranks.tensors(1), ranks.state(1, 1))
        saver.finish()
        mesh.all_gather_object(proxy.faults.append(gone) if mesh.rank == 0 else None)
        saver.begin(ranks.tensors(2), ranks.state(2, 2))
        # The error type selects the exit code that allows a restart.
        with pytest.raises(CheckpointUnavailable, match="step 2 could not .*: .*gave up") as told:
            saver.finish()
        mesh.all_gather_object(proxy.faults.remove(gone) if mesh.rank == 0 else None)
        saver.begin(ranks.tensors(3), ranks.state(3, 3))
        saver.finish()
        saver.close()
        return str(told.value)

    gone = Fault("refuse", method="", times=None)
    first, second = ranks.on_ranks(2, work)
    assert first == second
    assert "training goes on" in caplog.text
    assert place.steps() == [1, 3]


def test_secrets_are_nowhere(place, s3_environment, capfd):
    saver = save(place, 1)
    saver.finish()
    secret = s3_environment.environment()["AWS_SECRET_ACCESS_KEY"].encode()
    assert secret not in Path(f"/proc/{saver._writer.pid}/cmdline").read_bytes()
    saver.close()
    for key in place.store.list():
        assert secret not in place.store.get(key)
    assert secret.decode() not in "".join(capfd.readouterr())
    assert json.loads(place.read_text("step_00000001/manifest.json"))["schema"] == 3


def pages_of(store, size: int) -> None:
    """Limit the entries per answer, because there are too few keys for real paging."""
    event = "before-parameter-build.s3.ListObjectsV2"
    store._client.meta.events.register(event, lambda params, **_: params.update(MaxKeys=size))


def test_folders_are_listed_in_pages_and_without_their_files(place, proxy):
    store = place.store
    steps = list(range(1, 8))
    for step in steps:
        for name in ("manifest.json", "a.safetensors", "b.safetensors", "index.json")[step % 2 :]:
            store.put(f"step_{step:08d}/{name}", b"")
    store.put("step_00000009", b"")
    store.put("other/deeper/x", b"")
    pages_of(store, 3)
    seen = len(proxy.requests)
    assert place.folders() == [f"step_{step:08d}" for step in steps]
    # Listing all 25 keys would take 9 pages.
    assert 1 < len(proxy.requests[seen:]) <= 4
    assert all("delimiter=%2F" in request.path for request in proxy.requests[seen:])
    assert store.list_folders() == ["other", *(f"step_{step:08d}" for step in steps)]
    assert store.list_folders("other/") == ["other/deeper"]
    assert store.list_folders("nothing") == []
    seen = len(proxy.requests)
    assert place.steps() == [2, 4, 6]
    asked = proxy.requests[seen:]
    assert all("delimiter=%2F" in request.path for request in asked if "list-type" in request.path)
    # Each refused HEAD is followed by a request for the reason.
    heads = [request for request in asked if request.method == "HEAD"]
    assert sum("manifest.json" in request.path for request in heads) == len(steps)


def test_what_the_server_refuses_ends_a_run_for_good(place, s3_environment, monkeypatch):
    """All ranks get a permanent error, and no older checkpoint is loaded instead."""
    save_two(place)
    config = ranks.config("resume.fallback=true")

    def told(where) -> str:
        def work(mesh):
            with pytest.raises(CheckpointError) as error:
                find("latest", where, config, mesh)
            assert type(error.value) is CheckpointError
            return str(error.value)

        first, second = ranks.on_ranks(2, work)
        assert first == second
        return first

    assert "no bucket 'nowhere-at-all'" in told(open_place("s3://nowhere-at-all/x"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "this-is-the-WRONG-secret-0123456789")
    refused = told(open_place(place.uri))
    assert place.uri in refused
    assert "access denied" in refused
    assert "WRONG" not in refused


def test_a_store_that_goes_while_files_are_compared_is_no_damage(place, proxy):
    save_two(place)
    config = ranks.config("resume.fallback=true")
    proxy.faults.append(Fault("refuse", method="", path="step_00000002/rank_", times=None))

    def work(mesh):
        with pytest.raises(CheckpointUnavailable, match="step_00000002/rank_.*gave up after"):
            find("latest", open_place(place.uri, patience=0.5), config, mesh)

    ranks.on_ranks(2, work)
    assert place.steps() == [1, 2]
