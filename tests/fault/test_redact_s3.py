"""Redaction in a bucket that keeps old versions, and in one that locks some objects."""

import time
from contextlib import nullcontext

import boto3
import pytest

from data_pipeline.govern.holds import end_hold, lock, put_hold
from data_pipeline.govern.redact import carry_out
from data_pipeline.index.manifest import read_index
from data_pipeline.index.reads import check_shards
from data_pipeline.ingest.ingest import ingest
from data_pipeline.ingest.samples import CrudeSample, TextSegment
from data_pipeline.store.open import StoreUnavailable, open_store
from data_pipeline.text import Tokenizer, train_ranks
from moonvit3d.geometry import PatchLimits
from tests.fault.fault_proxy import Fault

SECRET = "the tide table of a harbour that nobody may know of"


@pytest.fixture
def bucket(s3_environment, request):
    """A separate bucket that keeps versions, with object lock if the test requests it."""
    client = boto3.client("s3", endpoint_url=s3_environment.endpoint, region_name="us-east-1")
    name, lock = request.param
    client.create_bucket(Bucket=name, ObjectLockEnabledForBucket=lock)
    if not lock:
        client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    store = open_store(f"s3://{name}/corpus", endpoint=s3_environment.endpoint)
    ranks = train_ranks(["the tide and the harbour " * 9], 270)
    texts = [
        CrudeSample(f"t{i}", [TextSegment(f"{SECRET if i == 3 else 'x'} {i}")]) for i in range(9)
    ]
    ingest(texts, store, "notes", Tokenizer(ranks, "t"))
    yield client, name, store
    store.close()


def versions(client, name):
    """Yield (key, version, bytes) of every object version in a bucket."""
    page = client.list_object_versions(Bucket=name)
    for one in page.get("Versions", ()):
        key, version = one["Key"], one["VersionId"]
        body = client.get_object(Bucket=name, Key=key, VersionId=version)["Body"].read()
        yield key, version, body


@pytest.mark.parametrize("bucket", [("redacted", False)], indirect=True)
def test_old_versions_go_too(bucket):
    client, name, store = bucket
    shard = read_index(store, "notes").shards[0].key
    store.put(shard, store.get(shard))  # the rewrite creates a hidden version
    # One of a killed ingest, and one of another program.
    uploads = ("corpus/notes/000007.tar", "corpus/notes/x.bin")
    for key in uploads:
        client.create_multipart_upload(Bucket=name, Key=key)
    assert sum(SECRET.encode() in body for *_, body in versions(client, name)) == 2
    done = carry_out(store, {"notes": ["t3"]})
    assert done.removed == [shard]
    assert not done.kept
    left = client.list_multipart_uploads(Bucket=name)["Uploads"]
    assert [one["Key"] for one in left] == ["corpus/notes/x.bin"]
    assert not [key for key, _, body in versions(client, name) if SECRET.encode() in body]
    index = read_index(store, "notes")
    assert [index.key_of(n) for n in index.redacted] == ["t3"]
    check_shards(store, index)


@pytest.mark.parametrize(
    ("bucket", "told"),
    [
        (("locked", True), "legal hold set on 1 shards; it is enforced"),
        (("unlocked", False), "the store does not enforce legal holds"),
    ],
    indirect=["bucket"],
)
def test_a_legal_hold_is_believed_after_a_probe(bucket, told):
    client, name, store = bucket
    hold = put_hold(store, "notes", "case-9")
    assert lock(store, hold, on=True).startswith(told)
    assert not [key for key, *_ in versions(client, name) if "probe" in key]
    with pytest.raises(ValueError, match="under hold 'case-9'"):
        carry_out(store, {"notes": ["t3"]})
    end_hold(store, "notes", "case-9")
    done = carry_out(store, {"notes": ["t3"]})
    assert bool(done.kept) == (name == "locked")
    lock(store, hold, on=False)
    done = carry_out(store, {"notes": ["t3"]})
    assert not done.kept
    assert not [key for key, _, body in versions(client, name) if SECRET.encode() in body]


@pytest.mark.parametrize("bucket", [("held", True)], indirect=True)
def test_what_the_bucket_holds_is_told_and_removed_later(bucket):
    client, name, store = bucket
    shard = read_index(store, "notes").shards[0].key
    for status in ("ON", "OFF"):
        client.put_object_legal_hold(
            Bucket=name, Key=f"corpus/{shard}", LegalHold={"Status": status}
        )
        done = carry_out(store, {"notes": ["t3"]})
        left = [key for key, _, body in versions(client, name) if SECRET.encode() in body]
        if status == "ON":
            assert done.samples == {"notes": 1}
            [(key, reason)] = done.kept
            assert key == shard
            assert "access denied" in reason
            assert left == [f"corpus/{shard}"]
            check_shards(store, read_index(store, "notes"))
    assert done.removed == [shard]
    assert not left


@pytest.mark.parametrize("bucket", [("watched", False)], indirect=True)
def test_a_page_that_is_served_meanwhile_has_it_no_more(bucket, proxy, tmp_path, monkeypatch):
    """A reader of the page also does not wait long for a store that is down."""
    pytest.importorskip("starlette", reason="the extra platform is not installed")
    from launch.web import corpus as module
    from launch.web.corpus import PATIENCE_S, Corpus, NotHere

    assert PATIENCE_S <= 10
    monkeypatch.setattr(module, "PATIENCE_S", 0.5)
    _, _, store = bucket
    mine = open_store(store.uri, endpoint=proxy.endpoint, patience=0.5)
    about = (proxy.endpoint, ["notes"], PatchLimits(), tmp_path)
    corpus = Corpus(mine, *about, lambda _: nullcontext(lambda done, total: None))
    assert SECRET in corpus.source("notes").document(3)["segments"][0]["text"]
    carry_out(store, {"notes": ["t3"]})
    with pytest.raises(NotHere, match="it was redacted"):
        corpus.source("notes").document(3)
    shown = corpus.source("notes")
    assert shown.document(4)["segments"][0]["text"] == "x 4"
    proxy.faults.append(Fault("refuse", method="", times=None))
    begun = time.monotonic()
    for read in (lambda: shown.document(5), lambda: corpus.source("notes")):
        with pytest.raises(StoreUnavailable):
            read()
    assert time.monotonic() - begun < 110  # less than two minutes each
    mine.close()
