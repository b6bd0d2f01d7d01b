"""Garbage collection in a bucket that keeps versions, and in one that will not let go of some."""

import json
from datetime import UTC, datetime, timedelta

import boto3
import pytest

from data_pipeline.govern.collect import Plan, Retired, apply, propose
from data_pipeline.index.manifest import read_index, read_manifest
from data_pipeline.index.reads import check_shards
from data_pipeline.ingest.ingest import ingest
from data_pipeline.ingest.samples import CrudeSample, TextSegment
from data_pipeline.store.open import open_store
from data_pipeline.text import Tokenizer, train_ranks

NOW = datetime.now(UTC)


class Archived:
    """`Records` in which one source may go and nobody uses any."""

    def __init__(self, store, name):
        self.store, self.name, self.gone, self.notes = store, name, {}, []

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
def bucket(s3_environment):
    """A bucket with object lock: two sources, one grown from the other, an upload in parts."""
    client = boto3.client("s3", endpoint_url=s3_environment.endpoint, region_name="us-east-1")
    name = "collected"
    client.create_bucket(Bucket=name, ObjectLockEnabledForBucket=True)
    store = open_store(f"s3://{name}/corpus", endpoint=s3_environment.endpoint)
    tokenizer = Tokenizer(train_ranks(["the tide and the harbour " * 9], 270), "t")

    def texts(prefix):
        return [CrudeSample(f"{prefix}{i}", [TextSegment(f"the tide {i}")]) for i in range(9)]

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
    store.put("notes_2/rejected.jsonl", b"once more")  # so that there is an older version
    assert len(versions(client, name, "notes_2/rejected")) > 1
    client.put_object_legal_hold(Bucket=name, Key=f"corpus/{shard}", LegalHold={"Status": "ON"})
    records = Archived(store, "notes_2")
    things, kept = propose(store, records)
    assert not kept
    assert [(one.kind, one.name, len(one.spots)) for one in things] == [
        ("upload", "notes", 1),
        ("source", "notes_2", 5),
    ]
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
