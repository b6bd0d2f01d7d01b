"""`data sync` killed at any moment, and through a proxy that breaks answers, on real S3."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.bulk_source import bulk_source
from data_pipeline.ingest import claim
from data_pipeline.store import multipart, objects, s3
from data_pipeline.store.open import (
    AccessDenied,
    FolderStore,
    MissingBucket,
    StoreUnavailable,
    open_store,
)
from data_pipeline.sync.compare import compare
from data_pipeline.sync.places import Place, open_places
from data_pipeline.sync.sync import Options, sync
from data_pipeline.sync.transfer import Damaged
from tests.fault.fault_proxy import Fault
from tests.unit.data_pipeline.synced import assert_whole, build, objects_of

pytestmark = pytest.mark.fault
SHARDS = 9  # of the source whose sync is killed


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> FolderStore:
    return build(tmp_path_factory.mktemp("made"), shards=6)


@pytest.fixture(autouse=True)
def _no_settling(monkeypatch):
    """Skip the settling time, because only one sync runs at a time."""
    monkeypatch.setattr(claim, "_SETTLE_S", 0.0)


# At every step, in a process that forks -----------------------------------------------------------


def sync_and_die(source: Path, target: Path, kill: int) -> bool:
    """Sync in a forked process that is killed at its step `kill`; return whether it finished."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    try:
        steps = iter(range(1, 1 << 20))

        def counted(step):
            def do(*arguments):
                result = step(*arguments)
                if next(steps) == kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            return do

        objects.os.fsync = lambda _: None  # slow, and only guards against power loss
        objects.os.replace = counted(os.replace)
        objects.os.link = counted(os.link)
        FolderStore.delete = counted(FolderStore.delete)
        claim.BEAT_S = 1e6
        sync(FolderStore(source), FolderStore(target), options=Options(parallel=2))
        os._exit(0)
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(1)


def kill_everywhere(source: str, folder: str, every: str) -> None:
    """Kill at every `every`-th step, check the visible objects, and resume."""
    claim._SETTLE_S = 0.0
    whole, points = objects_of(FolderStore(source)), 0
    for kill in range(1, 1000, int(every)):
        target = FolderStore(f"{folder}/{kill}")
        if sync_and_die(Path(source), target.root, kill):
            break
        points += 1
        left = objects_of(target)
        assert_whole(target)
        assert all(whole[key] == data for key, data in left.items() if "/." not in key)
        before = {key for key in left if key.endswith(".tar")}
        noted = sum("/.sync/" in key for key in left)
        shown = sum("/." not in key for key in left)
        assert shown <= noted + 2 or any(key.endswith("/manifest.json") for key in left)
        report = sync(FolderStore(source), target)
        # Completed objects are not copied again. Two copies run at once, so at most two lack their
        # note.
        assert report.copied + report.there == sum(
            not key.endswith("manifest.json") for key in whole
        )
        assert report.there >= len(before)
        # The lock of a dead process may remain; the next process takes it over.
        found = {key: data for key, data in objects_of(target).items() if "/.ingest/" not in key}
        assert found == whole
        # So may a partial rank file, because no process tidies its folder.
        assert not [
            path for path in target.root.rglob(".*")
            if path.name != ".ingest" and path.parent.name != "tokenizer"
        ]  # fmt: skip
    print(json.dumps({"points": points}))


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_any_step_no_manifest_is_without_its_shards(made, tmp_path, every):
    code = "import sys; from tests.fault.test_sync import kill_everywhere as k; k(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(made.root), str(tmp_path), str(every)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["points"] >= 80 // every


# The command, on S3 -------------------------------------------------------------------------------


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "launch.cli", "data", "sync", *map(str, arguments), "--json"]


def environment(server) -> dict[str, str]:
    return os.environ | server.environment()


def in_bucket(server, name: str, endpoint: str | None = None, **more):
    return open_store(f"s3://{server.bucket}/{name}", endpoint=endpoint, **more)


def kill_at_random(made, server, name: str, kills: int, seconds: float, draw: random.Random) -> int:
    """Kill the command at random moments `kills` times; return that count."""
    target, done, killed = in_bucket(server, name), 0, 0
    line = command(made.root, target.uri, "--source", "bulk", "--parallel", 2)
    while killed < kills:
        process = subprocess.Popen(
            [*line, "--max-mb-s", "5"],
            env=environment(server),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        time.sleep(draw.uniform(0.0, seconds))
        if process.poll() is None:
            killed += 1
        process.kill()
        process.communicate()
        keys = target.list()
        there = sum(key.endswith(".tar") for key in keys)
        noted = sum("/.sync/" in key for key in keys)
        assert "bulk/manifest.json" not in keys or assert_whole(target)
        # Two copies run at once, so at most two lack their note; completed shards remain.
        assert done <= there <= SHARDS
        assert "bulk/manifest.json" in keys or there <= noted + 2
        done = there
        if "bulk/manifest.json" in keys:
            for key in target.list():
                target.delete(key)
            done = 0
    report = subprocess.run(
        line, env=environment(server), capture_output=True, text=True, check=True
    )
    told = json.loads(report.stdout.splitlines()[-1])
    assert told["there"] >= done
    assert assert_whole(target) == ["bulk"]
    assert not [key for key in target.list() if "/." in key]
    return killed


@pytest.mark.slow
def test_twenty_kills_at_random_moments(tmp_path, s3_server, s3_environment):
    made = build(tmp_path / "a", shards=1)
    bulk_source(made, "web", "bulk", SHARDS, 3 << 20)
    assert kill_at_random(made, s3_server, "twenty", 20, 9.0, random.Random(7)) == 20


def test_a_bucket_is_filled_completed_and_emptied_again(made, s3_environment, tmp_path):
    """Folder to S3, S3 to S3, S3 to folder; large shards are uploaded in parts."""
    large = build(tmp_path / "large", shards=1)
    bulk_source(large, "web", "bulk", 2, 17 << 20)
    first = in_bucket(s3_environment, "first")
    second = in_bucket(s3_environment, "second")
    folder = FolderStore(tmp_path / "back")
    assert sync(large, first).copied == len(large.list()) - 5
    sync(first, second, options=Options(parallel=3))
    sync(second, folder)
    assert objects_of(folder) == objects_of(large)
    before = second.stats.requests
    assert set(sync(first, second).sources.values()) == {"there"}
    assert second.stats.requests - before <= 8 + 8 * 5
    assert compare(large, second).problems == ()


def test_the_server_confirms_what_it_took(s3_environment):
    store = in_bucket(s3_environment, "confirms")
    data = random.Random(0).randbytes(20 << 20)
    for size in (0, 1000, 20 << 20):
        part = data[:size]
        written = store.put_verified("x", size, None, lambda at, n, part=part: part[at : at + n])
        assert written.confirmed
        assert store.head("x") == written.info
        assert store.get("x", etag=written.info.etag) == part


def test_the_server_compares_what_arrives_with_its_checksum(s3_environment, monkeypatch, tmp_path):
    """Request bodies are not signed, so only these checksums reveal a change in transit."""
    store = in_bucket(s3_environment, "arrives", patience=0.2)
    (tmp_path / "file").write_bytes(bytes(17 << 20))
    for name in ("md5_of", "crc32_of"):
        real = getattr(multipart, name)
        for module in (multipart, s3):
            monkeypatch.setattr(module, name, lambda body, real=real: real(body[:-1] + b"?"))
    with pytest.raises(StoreUnavailable, match="BadDigest"):
        store.put("x", b"a body")
    with pytest.raises(StoreUnavailable, match="BadDigest"):
        store.put_new("x", b"a body")
    with pytest.raises(StoreUnavailable, match="BadDigest"):
        store.put_file("x", tmp_path / "file")
    for size in (1000, 17 << 20):
        with pytest.raises(StoreUnavailable, match="BadDigest"):
            store.put_verified("x", size, None, lambda _, length: bytes(length))
    assert store.list() == []


def test_each_body_is_signed_or_has_a_signed_checksum(s3_environment, tmp_path):
    store = in_bucket(s3_environment, "signed")
    sent: list[tuple[str, bool, bool]] = []

    def look(request, **_):
        headers = {name.lower(): str(value) for name, value in request.headers.items()}
        summed = {"content-md5", "x-amz-checksum-crc32"} & {*headers}
        assert all(f"{name};" in headers["authorization"] for name in summed)
        signed = "UNSIGNED" not in headers["x-amz-content-sha256"]
        sent.append((request.method, signed, bool(summed)))

    store._client.meta.events.register("before-send.s3", look)
    (tmp_path / "file").write_bytes(bytes(17 << 20))
    store.put("a", b"x")
    store.put_new("b", b"x")
    for size in (0, 1000, 17 << 20):
        store.put_verified("c", size, None, lambda _, length: bytes(length))
    store.put_file("d", tmp_path / "file")
    puts = [one for one in sent if one[0] == "PUT"]
    assert puts == [("PUT", False, True)] * 8
    store.discard(["a", "b"])
    # These begin and complete an upload, and one removes objects.
    posts = [signed for method, signed, _ in sent if method == "POST"]
    assert posts == [True] * 5


def test_nothing_appears_under_a_name_that_another_took_at_once(
    made, s3_environment, tmp_path, monkeypatch
):
    """As on a server that ignores If-None-Match, both processes briefly hold the name."""
    monkeypatch.setattr(claim, "_SETTLE_S", 0.5)
    large = build(tmp_path / "large", shards=1)
    bulk_source(large, "web", "bulk", 2, 33 << 20)
    target = in_bucket(s3_environment, "at-once")
    other = b'{"id": "other", "pid": 7, "host": "far"}'
    put_new = target.put_new

    def and_another(key: str, data: bytes) -> bool:
        created = put_new(key, data)
        target.put(key, other)
        return created

    monkeypatch.setattr(target, "put_new", and_another)
    for theirs in ([], ["bulk/000007.tar"]):
        marks = [target._call("create_multipart_upload", key)["UploadId"] for key in theirs]
        with pytest.raises(claim.NameTaken, match="another process: 7 on far"):
            sync(large, target, ["bulk"])
        assert target.list() == ["bulk/.ingest/lock"]
        target.delete("bulk/.ingest/lock")
        # Our uploads are removed, and those of the other process stay.
        assert [one.mark for one in target.unfinished()] == marks
    monkeypatch.setattr(target, "put_new", put_new)
    target._call("create_multipart_upload", "bulk/other.bin")  # of another program
    sync(large, target, ["bulk"])
    assert assert_whole(target) == ["bulk"]
    assert [one.key for one in target.unfinished()] == ["bulk/other.bin"]


def test_wrong_bytes_never_become_an_object(s3_environment):
    store = in_bucket(s3_environment, "wrong")
    for size in (1000, 17 << 20):
        with pytest.raises(objects.WrongBytes, match=r"/x: what was to be written has sha256"):
            store.put_verified("x", size, "f" * 64, lambda _, length: bytes(length))
    assert store.list() == []
    assert store.remove_uploads("", lambda _: False) == 0


def test_a_server_without_checksums_is_read_again(made, s3_environment, proxy, monkeypatch):
    """Some servers ignore checksums, so nothing is confirmed; others get requests without them."""
    source = in_bucket(s3_environment, "sums-a")
    sync(made, source, ["web"])
    target = in_bucket(s3_environment, "sums-b", endpoint=proxy.endpoint)
    proxy.faults = [Fault("error", method="PUT", path=r"\.tar", status=501, code="NotImplemented")]
    sync(source, target, ["web"], Options(parallel=1))
    assert assert_whole(target) == ["web"]
    gets = [r.path for r in proxy.requests if r.method == "GET" and ".tar" in r.path]
    assert len(gets) >= 2


# Through a proxy ----------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["from", "to"])
def test_faults_that_pass_are_survived(made, s3_environment, proxy, side):
    name = f"passing-{side}"
    plain, spoilt = (in_bucket(s3_environment, f"{name}-{n}") for n in "ab")
    through = {"endpoint": proxy.endpoint, "read_timeout": 1.0}
    if side == "from":
        sync(made, plain)
        source, target = in_bucket(s3_environment, f"{name}-a", **through), spoilt
    else:
        source, target = made, in_bucket(s3_environment, f"{name}-b", **through)
    proxy.faults = [
        *(
            Fault(kind, method="", path=f"captions_2/.*{name}")
            for kind in ("slowdown", "error", "refuse")
            for name in ("manifest", "index", "tar")
        ),
        *(Fault(kind, path=r"\.tar", after=700) for kind in ("truncate", "reset", "corrupt")),
        Fault("stall", path=r"\.tar", after=700, delay=1.5),
        Fault("truncate", path=r"manifest|index", after=100),
        Fault("truncate", method="PUT", path="manifest", after=0),
    ]
    sync(source, target)
    assert compare(made, spoilt if side == "to" else target).problems == ()
    keys = [key for key in spoilt.list() if "/." in key]
    assert keys == []


def test_a_storm_is_survived(made, s3_environment, proxy):
    target = in_bucket(s3_environment, "storm", endpoint=proxy.endpoint)
    proxy.faults = [
        Fault("slowdown", method="", times=None, p=0.05),
        Fault("refuse", method="", times=None, p=0.05),
    ]
    sync(made, target)
    proxy.faults = []
    assert objects_of(target) == objects_of(made)


def test_an_answer_that_is_lost_after_the_manifest_was_written(made, s3_environment, proxy):
    """If-None-Match refuses the second request, because the object is our own."""
    target = in_bucket(s3_environment, "lost", endpoint=proxy.endpoint)
    proxy.faults = [Fault("truncate", method="PUT", path="web/manifest.json", after=0)]
    sync(made, target, ["web"])
    assert assert_whole(target) == ["web"]


def test_faults_that_stay_are_one_clear_line(made, s3_environment, proxy, tmp_path):
    source = in_bucket(s3_environment, "staying")
    sync(made, source, ["web"])
    through = {"endpoint": proxy.endpoint, "attempts": 3}
    spoilt, target = in_bucket(s3_environment, "staying", **through), FolderStore(tmp_path / "b")
    proxy.faults = [Fault("corrupt", path=r"000001\.tar", after=9, times=None)]
    with pytest.raises(Damaged, match=r"/staying/web/000001\.tar: sha256 is \w{64}, read twice"):
        sync(spoilt, target)
    assert assert_whole(target) == []
    proxy.faults = [Fault("slowdown", path=r"000001\.tar", times=None)]
    with pytest.raises(StoreUnavailable, match=r"/staying/web/000001\.tar: gave up after 3 att"):
        sync(spoilt, target)
    proxy.faults = [Fault("error", path=r"000001\.tar", status=403, code="AccessDenied")]
    with pytest.raises(AccessDenied, match=r"/staying/web/000001\.tar: access denied"):
        sync(spoilt, target)
    assert assert_whole(target) == []
    proxy.faults = []
    assert sync(spoilt, target).there >= 1
    assert assert_whole(target) == ["web"]
    nowhere = open_store("s3://no-such-bucket/x")
    with pytest.raises(MissingBucket, match="there is no bucket 'no-such-bucket'"):
        sync(made, nowhere)


# Credentials --------------------------------------------------------------------------------------


@pytest.fixture
def profiles(s3_server, tmp_path, monkeypatch):
    """Two profiles, one with wrong keys; the environment has wrong keys and a dead endpoint."""
    right = s3_server.environment()
    keys, config = tmp_path / "credentials", tmp_path / "config"
    keys.write_text(
        f"[right]\naws_access_key_id={right['AWS_ACCESS_KEY_ID']}\n"
        f"aws_secret_access_key={right['AWS_SECRET_ACCESS_KEY']}\n"
        "[wrong]\naws_access_key_id=WRONGKEY\naws_secret_access_key=wrong-secret\n"
    )
    config.write_text(
        f"[profile right]\nendpoint_url={s3_server.endpoint}\nregion=eu-west-1\n"
        "[profile wrong]\nregion=us-east-1\n"
        f"[services own]\ns3 =\n  endpoint_url = {s3_server.endpoint}\n"
        "[profile service]\nservices=own\nsource_profile=right\n"
    )
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENVKEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "env-secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    return s3_server


def test_a_profile_has_its_own_keys_and_endpoint(made, profiles, proxy):
    uri = f"s3://{profiles.bucket}/profile"
    place = Place("to", uri, None, "right")
    _, target = open_places(Place("from", str(made.root)), place, 4)
    sync(made, target, ["web"])
    assert assert_whole(target) == ["web"]
    # The keys of one place are never sent to the server of the other.
    wrong = Place("to", uri, proxy.endpoint, "wrong")
    source, target = open_places(Place("from", uri, None, "right"), wrong, 4)
    with pytest.raises(AccessDenied, match="HTTP 403") as caught:
        sync(source, target, ["web"])
    assert {request.access_key for request in proxy.requests} == {"WRONGKEY"}
    assert "wrong-secret" not in str(caught.value)
    assert open_store(uri, profile="service").endpoint == profiles.endpoint
    assert "amazonaws.com" in open_store(uri, profile="wrong").endpoint
    with pytest.raises(AccessDenied, match=r"credentials of profile 'none' could not be fetched"):
        open_store(uri, profile="none")


def test_no_secret_is_told(made, profiles, tmp_path):
    uri = f"s3://{profiles.bucket}/secrets"
    secrets = ["wrong-secret", "env-secret", profiles.environment()["AWS_SECRET_ACCESS_KEY"]]
    line = command(made.root, uri)
    env = dict(os.environ)
    done = subprocess.run(
        [*line, "--to-profile", "right"], env=env, capture_output=True, text=True, check=True
    )
    bad = subprocess.run(
        [*line, "--to-profile", "wrong", "--to-endpoint", profiles.endpoint],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert bad.returncode == 2
    assert len(bad.stderr.splitlines()) == 1
    assert bad.stderr.startswith(f"error: {uri}/captions/manifest.json: access denied (HTTP 403")
    objects_there = objects_of(open_store(uri, profile="right"))
    told = done.stdout + done.stderr + bad.stdout + bad.stderr + repr(objects_there.values())
    assert not [secret for secret in secrets if secret in told]
