"""Garbage collection in a bucket that keeps versions, and in one that locks some objects."""

import json
from datetime import UTC, datetime, timedelta
from itertools import count

import boto3
import pytest

from data_pipeline.govern.collect import apply, propose
from data_pipeline.govern.collect_plan import Plan, Retired
from data_pipeline.index.manifest import read_index, read_manifest
from data_pipeline.index.reads import check_shards
from data_pipeline.ingest.ingest import ingest
from data_pipeline.ingest.samples import CrudeSample, Listed, TextSegment
from data_pipeline.store.open import open_store
from data_pipeline.text import Tokenizer, train_ranks

NOW = datetime.now(UTC)
NUMBER = count()


class Archived:
    """`Records` with one archived source and no users."""

    def __init__(self, store, name):
        self.store, self.name, self.gone, self.notes = store, name, {}, []

    def look_again(self):
        pass

    def retired(self):
        if self.gone:
            return {}
        content = read_manifest(self.store, self.name)["content_hash"]
        return {self.name: Retired(f"{self.name}@1", content, "archived")}

    def user(self, name, contents):
        return None

    def has_facts(self, content):
        return True

    def taken(self, plan):
        return self.gone

    def take(self, plan, thing):
        self.gone[thing.name] = thing.content

    def note(self, plan, thing, kept):
        self.notes.append((thing.kind, thing.name, thing.size, list(kept)))


def versions(client, name, prefix):
    page = client.list_object_versions(Bucket=name, Prefix=f"corpus/{prefix}")
    return [(one["Key"], one["VersionId"]) for one in page.get("Versions", ())]


@pytest.fixture
def bucket(s3_environment, monkeypatch):
    """A bucket with object lock: two sources, one an extension of the other, and open uploads."""
    client = boto3.client("s3", endpoint_url=s3_environment.endpoint, region_name="us-east-1")
    monkeypatch.setattr("data_pipeline.ingest.claim._SETTLE_S", 0.05)
    name = f"collected-{next(NUMBER)}"
    client.create_bucket(Bucket=name, ObjectLockEnabledForBucket=True)
    store = open_store(f"s3://{name}/corpus", endpoint=s3_environment.endpoint)
    tokenizer = Tokenizer(train_ranks(["the tide and the harbour " * 9], 270), "t")

    def texts(prefix):
        crude = [CrudeSample(f"{prefix}{i}", [TextSegment(f"the tide {i}")]) for i in range(9)]
        return Listed(crude, identity={"prefix": prefix})  # makes ingest keep a journal

    ingest(texts("t"), store, "notes", tokenizer)
    ingest(texts("n"), store, "notes_2", tokenizer, append_to="notes")
    client.create_multipart_upload(Bucket=name, Key="corpus/notes/000007.tar")
    client.create_multipart_upload(Bucket=name, Key="corpus/elsewhere/000007.tar")
    yield client, name, store
    store.close()


def test_versions_go_too_and_what_is_locked_is_told(bucket):
    client, name, store = bucket
    shard, old = (
        read_index(store, "notes_2").shards[1].key,
        read_index(store, "notes").shards[0].key,
    )
    assert shard.startswith("notes_2/")
    store.put("notes_2/rejected.jsonl", b"once more")  # creates an older version
    assert len(versions(client, name, "notes_2/rejected")) > 1
    client.put_object_legal_hold(Bucket=name, Key=f"corpus/{shard}", LegalHold={"Status": "ON"})
    records = Archived(store, "notes_2")
    things, kept = propose(store, records)
    assert not kept
    assert [(one.kind, one.name) for one in things] == [
        ("upload", "notes"),
        ("versions", "notes"),  # versions of its journal, which ingest deleted at its end
        ("versions", "notes_2"),
        ("source", "notes_2"),
    ]
    assert len(things[-1].spots) == 5
    journals = {spot.key for thing in things[1:3] for spot in thing.spots}
    assert {key.partition("/")[2] for key in journals} == {
        ".ingest/request.json", ".ingest/000000.npz",
    }  # fmt: skip
    assert old not in json.dumps([thing.spots for thing in things])
    plan = Plan(store.uri, "", NOW.isoformat(), 7, "", {}, things, kept)
    done = apply(store, plan, records, NOW + timedelta(days=8))
    [(key, reason)] = done.kept
    assert key == shard
    assert "AccessDenied" in reason
    assert records.notes[-1][3] == done.kept
    assert [key for key, _ in versions(client, name, "notes_2/") if "lock" not in key] == [
        f"corpus/{shard}"
    ]
    client.put_object_legal_hold(Bucket=name, Key=f"corpus/{shard}", LegalHold={"Status": "OFF"})
    done = apply(store, plan, records, NOW + timedelta(days=8))
    assert not done.kept
    assert [key for key, _ in versions(client, name, "notes_2/") if "lock" not in key] == []
    assert check_shards(store, read_index(store, "notes")) == 1
    left = client.list_multipart_uploads(Bucket=name).get("Uploads", [])
    assert [one["Key"] for one in left] == ["corpus/elsewhere/000007.tar"]


def test_an_older_version_that_a_manifest_names_stays(bucket):
    """A shard was deleted by mistake, and only the older version can restore it."""
    client, name, store = bucket
    shard = read_index(store, "notes").shards[0].key
    data = store.get(shard)
    store.delete(shard)
    records = Archived(store, "none")
    records.retired = dict
    things, kept = propose(store, records)
    assert shard not in {spot.key for thing in things for spot in thing.spots}
    plan = Plan(store.uri, "", NOW.isoformat(), 0, "", {}, things, kept)
    before = versions(client, name, "notes/.ingest/0")
    assert before
    done = apply(store, plan, records, NOW)
    assert not done.kept
    assert versions(client, name, "notes/.ingest/0") == []
    assert [key for key, _ in versions(client, name, "notes/0")] == [f"corpus/{shard}"]
    store.put("notes/.ingest/000000.npz", b"of another ingest, since")
    store.put(shard, data)
    assert check_shards(store, read_index(store, "notes")) == 1
