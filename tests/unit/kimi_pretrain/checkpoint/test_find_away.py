"""Tests that unreachable or unreadable storage is not mistaken for a damaged checkpoint.

No older checkpoint is loaded instead.
"""

import errno
import os
import shutil

import pytest

from data_pipeline.store.open import (
    AccessDenied,
    MemoryStore,
    MissingBucket,
    StoreError,
    StoreUnavailable,
)
from kimi_pretrain.checkpoint.errors import CheckpointError, CheckpointUnavailable
from kimi_pretrain.checkpoint.file_access import (
    CheckpointUnreadable,
    FolderFiles,
    StoreFiles,
    fingerprint,
)
from kimi_pretrain.checkpoint.find import find
from kimi_pretrain.checkpoint.storage_read import Place, open_place
from tests.unit.kimi_pretrain.checkpoint import ranks

FILE, MANIFEST, INDEX = "rank_00000_000.safetensors", "manifest.json", "index.json"
NEWEST = "step_00000003"


@pytest.fixture
def fail(monkeypatch):
    """Return a function that makes a system call fail for some paths and records the failures."""

    def arm(call: str, path: str, number: int) -> list[str]:
        met, plain = [], getattr(os, call)

        def failing(target, *args, **more):
            name = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else target
            if str(name).endswith(path):
                met.append(str(name))
                raise OSError(number, os.strerror(number), None if name is not target else name)
            return plain(target, *args, **more)

        monkeypatch.setattr(os, call, failing)
        return met

    return arm


def told_on_ranks(place: Place, *overrides: str, world_size: int = 3) -> CheckpointError:
    """Return the error that `find` raises with fallback allowed; check that all ranks agree."""
    config = ranks.config("resume.fallback=true", *overrides)

    def work(mesh):
        with pytest.raises(Exception) as found:  # noqa: PT011
            find("latest", place, config, mesh)
        return found.value

    errors = ranks.on_ranks(world_size, work)
    assert len({(type(error), str(error)) for error in errors}) == 1
    return errors[0]


@pytest.mark.parametrize(
    ("call", "at"),
    [
        *(("stat", f"{NEWEST}/{MANIFEST}"), ("stat", f"{NEWEST}/{INDEX}")),
        *(("stat", f"{NEWEST}/{FILE}"), ("preadv", f"{NEWEST}/{FILE}")),
        *(("preadv", f"{NEWEST}/{MANIFEST}"), ("scandir", "root")),
    ],
)
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT])
def test_a_shared_folder_that_is_away_is_no_damage(number, call, at, root, fail):
    met = fail(call, at, number)
    error = told_on_ranks(open_place(root))
    assert type(error) is CheckpointUnavailable
    assert str(root / at).removesuffix("/root") in str(error)
    assert os.strerror(number) in str(error)
    assert len(met) == 1  # no older checkpoint was tried
    assert sorted(os.listdir(root)) == [f"step_0000000{step}" for step in (1, 2, 3)]


@pytest.mark.parametrize(
    ("call", "at"), [("scandir", "root"), ("stat", f"{NEWEST}/{INDEX}"), ("preadv", FILE)]
)
def test_what_may_not_be_read_is_the_users_and_no_damage(call, at, root, fail):
    fail(call, at, errno.EACCES)
    error = told_on_ranks(open_place(root))
    assert not isinstance(error, CheckpointUnavailable)
    assert isinstance(error, CheckpointError)
    assert at in str(error)
    assert "Permission denied" in str(error)


@pytest.mark.parametrize("call", ["stat", "preadv"])
@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ESTALE, CheckpointUnavailable), (errno.EACCES, CheckpointUnreadable)],
)
def test_every_way_to_read_a_file_of_a_folder_tells_it_apart(call, number, kind, root, fail):
    files = FolderFiles(root / NEWEST)
    ways = {
        "stat": [lambda: files.size(FILE), lambda: fingerprint(files, FILE)],
        "preadv": [
            lambda: files.read(FILE, 0, 9),
            lambda: files.read_into(FILE, 0, memoryview(bytearray(9))),
            lambda: fingerprint(files, FILE),
        ],
    }
    fail(call, FILE, number)
    for way in ways[call]:
        with pytest.raises(kind, match=f"{NEWEST}/{FILE}: {os.strerror(number)}"):
            way()


def test_what_is_not_there_is_missing(root):
    files = FolderFiles(root / NEWEST)
    for name in ("none", f"{FILE}/below"):
        assert files.size(name) is None
        with pytest.raises(CheckpointError, match=f"{name}: missing") as found:
            files.read(name, 0, 1)
        assert type(found.value) is CheckpointError


class Refusing(MemoryStore):
    """Store that answers requests for some keys with an error."""

    at: str = ""
    error: StoreError | None = None

    def _check(self, key: str) -> None:
        if self.error is not None and key.endswith(self.at):
            raise self.error

    def get(self, key, *args, **more):
        self._check(key)
        return super().get(key, *args, **more)

    def head(self, key):
        self._check(key)
        return super().head(key)

    def list_folders(self, prefix=""):
        self._check(prefix)
        return super().list_folders(prefix)


@pytest.fixture
def store(three_saved, request):
    found = Refusing(request.node.name)
    for file in sorted(three_saved.glob("step_*/*")):
        found.put(file.relative_to(three_saved).as_posix(), file.read_bytes())
    return found


AT = ["step_", f"{NEWEST}/{MANIFEST}", f"{NEWEST}/{FILE}"]


@pytest.mark.parametrize("at", AT)
def test_a_store_that_does_not_answer_is_no_damage(at, store):
    store.at, store.error = at, StoreUnavailable(f"{store.uri}/{at}: gave up")
    error = told_on_ranks(Place(store.uri, None, store))
    assert type(error) is CheckpointUnavailable
    assert f"{at}: gave up" in str(error)
    assert str(error).count(store.uri) == 1


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("kind", [AccessDenied, MissingBucket])
def test_what_a_store_refuses_is_the_users_and_no_damage(kind, at, store):
    store.at, store.error = at, kind("no such luck")
    error = told_on_ranks(Place(store.uri, None, store))
    assert type(error) is CheckpointError  # its exit code says that a restart does not help
    assert "no such luck" in str(error)
    assert store.uri in str(error)


def test_every_way_to_read_an_object_tells_of_a_store_that_is_away(store):
    files = StoreFiles(store, NEWEST)
    store.at, store.error = FILE, StoreUnavailable("gave up")
    for way in (
        lambda: files.size(FILE),
        lambda: files.read(FILE, 0, 9),
        lambda: files.read_into(FILE, 0, memoryview(bytearray(9))),
        lambda: fingerprint(files, FILE),
    ):
        with pytest.raises(CheckpointUnavailable, match="gave up"):
            way()


def test_a_manifest_that_goes_while_it_is_looked_at_is_no_damage(root, monkeypatch):
    """The next start lists the folder again and uses what is there then."""
    (root / NEWEST / MANIFEST).unlink()
    place = open_place(root)
    monkeypatch.setattr(place, "steps", lambda: [1, 2, 3])
    error = told_on_ranks(place)
    assert type(error) is CheckpointUnavailable
    assert f"{NEWEST}: its manifest.json was there a moment ago" in str(error)


def test_a_machine_that_does_not_see_the_place_finds_no_damage(root):
    """The mount may be missing, although another rank has already shared the manifest's text."""
    found = open_place(root).checkpoint(3)
    found.know(found.texts())
    (root / NEWEST / FILE).unlink()
    assert "missing" in found.verify()[0]
    shutil.rmtree(root / NEWEST)
    with pytest.raises(CheckpointUnavailable, match="does not see the place"):
        found.verify()


def test_a_fault_of_the_program_stays_one_on_all_ranks(root):
    place, config = open_place(root), ranks.config("resume.fallback=true")

    def work(mesh):
        def progress(count: int) -> None:
            if mesh.rank == 1:
                raise RuntimeError("not a matter of checkpoints")

        with pytest.raises(RuntimeError, match="not a matter of checkpoints"):
            find("latest", place, config, mesh, progress)

    ranks.on_ranks(2, work)


def test_a_place_that_is_only_read_is_left_as_it_is(root):
    replaced = root / f"{NEWEST}.replaced"
    os.replace(root / NEWEST, replaced)
    for other in ("step_by_step.replaced", "step_00000007.partial", "step_00000001.leaving"):
        (root / other).mkdir()
    found = find("latest", open_place(root), ranks.config(), None)
    assert found is not None
    assert (found.step, replaced.is_dir()) == (2, True)
    found = find("latest", open_place(root), ranks.config(), None, own=True)
    assert found is not None
    assert (found.step, replaced.exists()) == (3, False)
    assert (root / "step_by_step.replaced").is_dir()


def test_what_lies_in_a_place_is_told_by_both_kinds(root, store):
    (root / f"{NEWEST}.partial").mkdir()
    (root / "step_9").touch()
    (root / "other").mkdir()
    store.put("other/x", b"")
    store.put("step_9", b"")
    steps = [f"step_0000000{step}" for step in (1, 2, 3)]
    assert open_place(root).folders() == [*steps, f"{NEWEST}.partial"]
    assert Place(store.uri, None, store).folders() == steps
    assert open_place(root / "nowhere").folders() == []
    assert open_place(root / "step_9").folders() == []


def test_to_list_checkpoints_does_not_list_their_files(store, monkeypatch):
    for step in range(10, 30):
        for number in range(50):
            store.put(f"step_{step:08d}/rank_{number:05d}_000.safetensors", b"")
        if step % 2:
            store.put(f"step_{step:08d}/{MANIFEST}", b"")
    monkeypatch.delattr(MemoryStore, "list")
    before = store.stats.requests
    assert Place(store.uri, None, store).steps() == [1, 2, 3, *range(11, 30, 2)]
    assert store.stats.requests - before == 1 + 23  # one for the folders, one for each manifest
