"""Tests of the command `kimi-pretrain data sync`: its output and exit codes."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from data_pipeline.store.open import FolderStore
from data_pipeline.sync import sync as room
from launch.cli.main import app
from tests.unit.data_pipeline.synced import build, objects_of


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> FolderStore:
    return build(tmp_path_factory.mktemp("made"), shards=2)


def run(*arguments: object, code: int = 0):
    result = CliRunner().invoke(app, ["data", "sync", *map(str, arguments)])
    assert result.exit_code == code, result.output
    if code == 2:
        [told] = result.stderr.splitlines()
        assert told.startswith("error: ")
    return result


def test_copied_again_and_compared(made, tmp_path):
    there = tmp_path / "b"
    told = run(made.root, there, "--json").stdout
    found = json.loads(told.splitlines()[-1])
    assert (found["from"], found["to"]) == (str(made.root), str(there))
    assert found["sources"]["captions_2"] == "copied"
    assert objects_of(FolderStore(there)) == objects_of(made)
    told = run(made.root, there, "--source", "web", "--source", "captions").stdout
    assert [line.split() for line in told.splitlines()[2:5]] == [
        ["captions", "there"], ["web", "there"], ["copied", "0"],
    ]  # fmt: skip
    told = run(made.root, there, "--verify-only").stdout
    assert "problems             0" in told
    (there / "web" / "000001.tar").write_bytes(b"x")
    told = run(made.root, there, "--verify-only", "--json", code=1).stdout
    assert told.startswith(f"{there}/web/000001.tar: size is 1, expected ")
    assert len(json.loads(told.splitlines()[-1])["problems"]) == 1


def test_what_was_asked_wrongly_is_one_line(made, tmp_path):
    there = tmp_path / "b"
    run(made.root, there, "--source", "web")
    for arguments, message in (
        ((made.root, f"{made.root}/"), f"{made.root}: is the same place on both sides"),
        ((made.root, there, "--source", "wab"), "no source 'wab'; did you mean 'web'?"),
        ((made.root, there, "--from-profile", "x"), "--from-endpoint and --from-profile are for"),
        (("s3://a", "s3://b", "--to-profile", "x"), "--from-endpoint or --from-profile is missing"),
        ((tmp_path / "none", there), "no such folder; create it or correct the path"),
        ((made.root, there, "--max-mb-s", "0"), "bandwidth is 0.0; allowed: above 0"),
        ((made.root, "s3://u:p@x/y"), "the place to sync to holds a user name or password"),
    ):
        assert message in run(*arguments, code=2).stderr
    (there / "web" / "manifest.json").unlink()
    (there / "web" / "000000.tar").write_bytes(b"x")
    assert (
        f"error: {there}/web/000000.tar: size is 1, expected "
        in run(made.root, there, "--source", "web", code=2).stderr
    )


def test_a_source_whose_tokenizer_is_elsewhere_is_told(made, tmp_path):
    shutil.copytree(made.root, tmp_path / "a")
    shutil.rmtree(tmp_path / "a" / "tokenizer")
    told = run(tmp_path / "a", tmp_path / "b", "--source", "web").stdout
    assert "without_tokenizer    web" in told


def test_an_interrupted_sync_says_how_to_go_on(made, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(room, "_publish", interrupted)
        assert "the same command goes on" in run(made.root, tmp_path / "b", code=130).stderr
    assert json.loads(run(made.root, tmp_path / "b", "--json").stdout.splitlines()[-1])["there"]
    assert objects_of(FolderStore(tmp_path / "b")) == objects_of(made)
