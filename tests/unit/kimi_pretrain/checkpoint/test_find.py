"""Tests that only complete, sound checkpoints are loaded and that damaged ones are reported."""

import shutil

import pytest
import torch

from kimi_pretrain.checkpoint.errors import CheckpointError
from kimi_pretrain.checkpoint.file_access import FolderFiles
from kimi_pretrain.checkpoint.find import find
from kimi_pretrain.checkpoint.load import load
from kimi_pretrain.checkpoint.manifest import MOST_MANIFEST_BYTES
from kimi_pretrain.checkpoint.storage_read import open_checkpoint, open_place
from tests.unit.kimi_pretrain.checkpoint import ranks

FILE = "rank_00000_000.safetensors"


def latest(root, *overrides: str, world_size: int = 1):
    place, config = open_place(root), ranks.config(*overrides)
    found = ranks.on_ranks(world_size, lambda mesh: find("latest", place, config, mesh))
    assert len({getattr(one, "uri", None) for one in found}) == 1
    return found[0]


def test_the_newest_complete_one_is_found(root):
    (root / "step_00000003" / "manifest.json").unlink()  # an incomplete save
    shutil.copytree(root / "step_00000002", root / "step_00000009.partial")
    (root / "step_7").mkdir()
    shutil.copy(root / "step_00000002" / "manifest.json", root / "step_7")
    assert open_place(root).steps() == [1, 2]
    assert latest(root, world_size=3).step == 2


def test_one_rank_reads_what_all_need_to_know(root, monkeypatch):
    """Reads by thousands of ranks would overload the file, and ranks could see different texts."""
    read: list[str] = []
    plain = FolderFiles.read
    monkeypatch.setattr(
        FolderFiles, "read", lambda self, name, *at: read.append(name) or plain(self, name, *at)
    )
    place, config = open_place(root), ranks.config()

    def work(mesh):
        found = find("latest", place, config, mesh)
        assert found is not None
        tensors = ranks.tensors(9)
        load(found, tensors)
        return tensors

    for tensors in ranks.on_ranks(4, work):
        assert all(torch.equal(tensors[name], value) for name, value in ranks.tensors(3).items())
    assert read.count("manifest.json") == 1
    assert read.count("index.json") == 2  # once for its content, once for its hash


def test_nothing_there_is_nothing(tmp_path):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "nowhere", world_size=2) is None


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def flip_step(file):
    text = file.read_text()
    assert text.count('"step": 3') == 1
    file.write_text(text.replace('"step": 3', '"step": 2'))  # one bit


def cut_off(file):
    file.write_bytes(file.read_bytes()[:-10])


DAMAGE = {
    "flipped byte": (lambda f: flip(f / FILE), FILE, "sha256 .*, expected"),
    "flipped in the index": (lambda f: flip(f / "index.json"), "index.json", "sha256"),
    "cut off": (lambda f: cut_off(f / FILE), FILE, r"bytes, expected \d+ bytes"),
    "longer": (lambda f: (f / FILE).open("ab").write(b"x"), FILE, r"bytes, expected \d+ bytes"),
    "missing": (lambda f: (f / FILE).unlink(), FILE, r"missing, expected \d+ bytes"),
    "a folder": (lambda f: ((f / FILE).unlink(), (f / FILE).mkdir()), FILE, "missing"),
    "flipped in the manifest": (
        lambda f: flip_step(f / "manifest.json"), "manifest.json", "its values have",
    ),
    "manifest cut off": (lambda f: cut_off(f / "manifest.json"), "manifest.json", "not JSON"),
    "manifest empty": (lambda f: (f / "manifest.json").write_text(""), "manifest.json", "not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_named_and_passed_over_only_where_allowed(damage, root, caplog):
    change, file, told = DAMAGE[damage]
    change(root / "step_00000003")
    named = f"step_00000003/{file}: .*{told}"
    for world_size in (1, 3):
        with pytest.raises(CheckpointError, match=f"{named}.*resume.fallback=true"):
            latest(root, world_size=world_size)
    found = latest(root, "resume.fallback=true", world_size=2)
    assert found.step == 2
    assert "passing over a damaged checkpoint" in caplog.text
    with pytest.raises(CheckpointError, match=named):  # one asked for by name is never skipped
        find(root / "step_00000003", open_place(root), ranks.config("resume.fallback=true"), None)


def test_one_of_before_manifests_had_a_hash_is_taken_with_a_warning(root, caplog):
    for step in (2, 3):
        ranks.change_manifest(root / f"step_{step:08d}", lambda values: None, ranks.unsealed)
    found = latest(root, world_size=3)
    assert found.manifest().state == ranks.state(3, 3)
    assert caplog.text.count("step_00000003: its manifest.json was written without a hash") == 1
    shutil.rmtree(root / "step_00000003")
    shutil.copytree(root / "step_00000002", root / "step_00000003")  # visible without a hash
    with pytest.raises(CheckpointError, match="state.step is 2, expected that of its folder"):
        latest(root, world_size=2)


def test_all_damaged_is_an_error_and_no_fresh_start(root):
    for step in (1, 2, 3):
        flip(root / f"step_{step:08d}" / FILE)
    with pytest.raises(CheckpointError, match="all 3 checkpoints are damaged"):
        latest(root, "resume.fallback=true", world_size=2)


def test_a_checkpoint_of_another_model_is_no_damage(root):
    with pytest.raises(CheckpointError, match="another model: model.language.num_experts"):
        latest(root, "resume.fallback=true", "model.language.num_experts=4", world_size=2)


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="no manifest.json"):
        find(tmp_path / "step_00000001", open_place(tmp_path), ranks.config(), None)
    with pytest.raises(ValueError, match="ftp://"):
        open_checkpoint("ftp://x/y")


def test_a_manifest_of_absurd_size_is_not_read(root):
    with (root / "step_00000003" / "manifest.json").open("r+b") as file:
        file.truncate(MOST_MANIFEST_BYTES + 1)
    with pytest.raises(CheckpointError, match="expected at most"):
        open_place(root).checkpoint(3).manifest()


def test_load_refuses_before_it_changes_anything(root):
    found = open_place(root).checkpoint(3)
    base = {name: torch.zeros_like(tensor) for name, tensor in ranks.tensors(3).items()}
    norm = "language_model.model.norm.weight"
    momentum = "optim.momentum.language_model.lm_head.weight"
    bad = {
        "1 tensors are missing, first 'new'": {**base, "new": torch.zeros(1)},
        "written with another optim.matrices": {
            **base, momentum.replace("momentum", "exp_avg"): torch.zeros(1)
        },
        "this run has torch.float64": {**base, norm: base[norm].double()},
        r"is torch.float32 \(64,\), this run has torch.float32 \(63,\)": {
            **base, norm: torch.zeros(63)
        },
    }  # fmt: skip
    for told, tensors in bad.items():
        with pytest.raises(CheckpointError, match=told):
            load(found, tensors)
        assert not any(tensor.any() for tensor in tensors.values())
    assert load(found, base) == ranks.state(3, 3)
    assert all(torch.equal(base[name], t) for name, t in ranks.tensors(3).items())


def test_manifest_and_optimizer_must_agree_on_the_steps(root):
    folder = root / "step_00000003"
    ranks.change_manifest(folder, lambda values: values["state"].update(optimizer_steps=2))
    tensors = {name: torch.zeros_like(tensor) for name, tensor in ranks.tensors(3).items()}
    with pytest.raises(CheckpointError, match="optim.step is 3, the manifest says optimizer_steps"):
        load(open_checkpoint(folder), tensors)
    assert not any(tensor.any() for tensor in tensors.values())


def test_weights_alone_are_no_checkpoint_to_go_on_from(root):
    folder = root / "step_00000003"
    ranks.change_manifest(folder, lambda values: values.update(contents="weights"))
    with pytest.raises(CheckpointError, match="train.start_from"):
        load(open_checkpoint(folder), {"optim.exp_avg.x": torch.zeros(1)})


def test_tensors_on_any_memory_are_filled(root):
    """Targets may be non-contiguous or parts of a larger tensor, as fused parameters are."""
    found = open_place(root).checkpoint(2)
    whole = torch.zeros(2, 33, 64).transpose(1, 2)
    wanted = ranks.tensors(2)["optim.momentum.language_model.lm_head.weight"]
    load(found, {"optim.momentum.language_model.lm_head.weight": whole[1]})
    assert torch.equal(whole[1], wanted)
    assert not whole[0].any()


def test_one_tensor_is_read_only_into_its_like(root):
    found = open_place(root).checkpoint(2)
    norm = "language_model.model.norm.weight"
    for like in (torch.zeros(63), torch.zeros(64, dtype=torch.float64), torch.zeros(64, 1)):
        with pytest.raises(CheckpointError, match=r"is torch.float32 \(64,\), expected"):
            found.read_into(norm, like)
        assert not like.any()
    with pytest.raises(CheckpointError, match="no tensor 'x'"):
        found.tensor("x")


def test_small_files_beside_the_checkpoints(root):
    place = open_place(root)
    assert place.read_text("owner.json") is None
    place.write_text("owner.json", "a")
    place.write_text("owner.json", "b")
    assert place.read_text("owner.json") == "b"
    assert place.steps() == [1, 2, 3]
    assert not list(root.glob(".owner*"))
