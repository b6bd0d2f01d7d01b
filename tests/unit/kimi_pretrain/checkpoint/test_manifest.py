"""Tests that the statements of a manifest are checked before they are used."""

import json

import pytest

from kimi_pretrain.checkpoint.errors import CheckpointError
from kimi_pretrain.checkpoint.manifest import (
    MANIFEST,
    Fingerprint,
    Manifest,
    RunState,
    check_fits,
    check_resumes,
    manifest_of,
    parse_index,
    parse_json,
    parse_manifest,
    step_name,
    step_of,
)
from kimi_pretrain.checkpoint.storage_read import open_place
from tests.unit.kimi_pretrain.checkpoint import ranks

FILES = {
    "index.json": Fingerprint(2, "0" * 64),
    "rank_00000_000.safetensors": Fingerprint(9, "a1" * 32),
}
STATE = RunState(110, 108, {"drawn": 880, "quarantine": []}, (2.5, 0.1), 1)


def manifest():
    return manifest_of(ranks.config(), STATE, FILES, {"torch": "2", "numpy": None})


def test_a_manifest_comes_back_as_it_was_written():
    found = parse_manifest(manifest().text(), "here")
    assert found == manifest()
    assert found.hashed
    assert json.loads(manifest().text()) == json.loads(ranks.sealed(json.loads(manifest().text())))
    old = parse_manifest(ranks.unsealed(json.loads(manifest().text())), "here")
    assert old == manifest()
    assert not old.hashed


def read(root, text: bytes) -> Manifest | None:
    """Return the manifest that a run would accept for step 3, or None if it is damaged."""
    found = open_place(root).checkpoint(3)
    found.know({MANIFEST: text})
    if problems := found.manifest_problems():
        assert problems[0].startswith(f"{root}/step_00000003/manifest.json: ")
        return None
    return found.manifest()


def test_no_flipped_bit_lost_byte_or_doubled_byte_of_a_manifest_is_believed(root):
    """Each change is found or leaves the parsed values equal; 1e-05 may become 1E-05."""
    text = (root / "step_00000003" / MANIFEST).read_bytes()
    good = read(root, text)
    assert good is not None
    found = [
        read(root, text[:at] + new + text[at + 1 :])
        for at in range(len(text))
        for new in (*(bytes([text[at] ^ 1 << bit]) for bit in range(8)), b"", text[at : at + 1] * 2)
    ]
    assert [other for other in found if other not in (None, good)] == []
    assert found.count(None) > 0.9 * len(found)  # the rest only add or remove blanks


def with_change(change) -> str:
    values = json.loads(manifest().text())
    change(values)
    return ranks.sealed(values)


def named(name):
    def change(values):
        values["files"][name] = {"bytes": 1, "sha256": "0" * 64}

    return change


BAD = {
    "schema": (lambda v: v.update(schema=1), "schema 1"),
    "schema of text": (lambda v: v.update(schema="3"), "schema '3'"),
    "hash where none was": (lambda v: v.update(schema=2), "schema 2 with sha256"),
    "another loader": (lambda v: v["state"]["loader"].update(step=111), "the loader's is 111"),
    "climbs out": (named("../../etc/passwd"), "no file name"),
    "absolute": (named("/etc/passwd"), "no file name"),
    "hidden": (named(".bashrc"), "no file name"),
    "folder": (named("a/b"), "no file name"),
    "new line": (named("a\nb"), "no file name"),
    "itself": (named("manifest.json"), "not manifest.json"),
    "no index": (lambda v: v["files"].pop("index.json"), "index.json among"),
    "negative": (lambda v: v["files"]["index.json"].update(bytes=-1), "bytes and sha256"),
    "true": (lambda v: v["files"]["index.json"].update(bytes=True), "bytes and sha256"),
    "short hash": (lambda v: v["files"]["index.json"].update(sha256="ab"), "64 digits"),
    "no state": (lambda v: v.pop("state"), "state is NoneType"),
    "step": (lambda v: v["state"].update(step="7"), "state.step"),
    "losses": (lambda v: v["state"].update(losses=["x"]), "state.losses"),
    "contents": (lambda v: v.update(contents="code"), "'all' or 'weights'"),
    "files": (lambda v: v.update(files=[]), "files is list"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_manifest_is_refused(name):
    change, told = BAD[name]
    with pytest.raises(CheckpointError, match="^place/manifest.json: .*") as error:
        parse_manifest(with_change(change), "place/manifest.json")
    assert told in str(error.value)


def test_a_manifest_without_its_hash_is_refused():
    values = json.loads(manifest().text())
    del values["sha256"]
    with pytest.raises(CheckpointError, match="^there: schema 3 with sha256 None"):
        parse_manifest(json.dumps(values), "there")


@pytest.mark.parametrize("text", ["", "{", '{"a": ' * 200_000, "[]", "null", "\x00"])
def test_what_is_no_manifest_is_refused(text):
    with pytest.raises(CheckpointError, match="there"):
        parse_manifest(text, "there")


def test_a_text_of_absurd_size_is_not_parsed():
    with pytest.raises(CheckpointError, match="11 bytes, expected at most 10"):
        parse_json("[" * 11, "there", 10)


def test_an_index_names_only_files_of_the_manifest():
    text = json.dumps({"weight_map": {"a": "rank_00000_000.safetensors"}})
    assert parse_index(text, "there", FILES) == {"a": "rank_00000_000.safetensors"}
    for file in ("../x", "rank_00001_000.safetensors", 3):
        with pytest.raises(CheckpointError, match="there"):
            parse_index(json.dumps({"weight_map": {"a": file}}), "there", FILES)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("model.language.num_experts=4", "model.language.num_experts"),
        ("train.dtype=bfloat16", "train.dtype=float32"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(override, told):
    with pytest.raises(CheckpointError, match=told):
        check_fits(manifest(), ranks.config(override), "there")
    check_fits(manifest(), ranks.config("layout.dp=1", "layout.ep=1"), "there")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.frozen=[language_model]", "train.frozen=[projector, vision_tower], this run has "
         "train.frozen=[language_model]"),
        ("train.frozen=[]", "this run has train.frozen=[]"),
        ("train.stage=joint", "train.stage=captions, this run has train.stage=joint"),
        ("train.stage=null", "this run has train.stage=null"),
    ],
)  # fmt: skip
def test_a_stage_is_resumed_as_it_was(override, told):
    stage = ("train.stage=captions", "train.frozen=[vision_tower, projector]")
    written = manifest_of(ranks.config(*stage), STATE, FILES, {})
    found = parse_manifest(written.text(), "there")
    assert found == written
    with pytest.raises(CheckpointError) as error:
        check_resumes(found, ranks.config(*stage, override), "there")
    assert told in str(error.value)
    assert "\n" not in str(error.value)
    same = ("train.stage=captions", "train.frozen=[projector, vision_tower, projector]")
    check_resumes(found, ranks.config(*same, "data.rows_per_step=32"), "there")


def test_a_manifest_of_before_stages_had_names_is_resumed():
    values = json.loads(manifest().text())
    del values["training"]
    old = parse_manifest(ranks.sealed(values), "there")
    assert old.training is None
    assert json.loads(old.text()) == json.loads(ranks.sealed(values))
    check_resumes(old, ranks.config("train.stage=captions", "train.frozen=[projector]"), "there")


def test_names_of_steps():
    assert step_name(110) == "step_00000110"
    assert step_of("step_00000110") == 110
    assert step_of(step_name(123456789)) == 123456789
    for name in ("step_110", "step_00000110.partial", "step_000000110", "step_0000011x", "x"):
        assert step_of(name) is None, name
