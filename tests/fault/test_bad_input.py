"""User errors give one clear line before training starts; a single bad sample is skipped.

Each case runs the real command in a separate process, against a folder or a real S3 server.
"""

import shutil
from pathlib import Path

import pytest

from data_pipeline.index.manifest import read_index
from data_pipeline.store.open import open_store
from moonvit3d.config import MoonViTConfig
from moonvit3d.model import VisionEncoder, initialise
from moonvit3d.weights import save
from tests.dist.jobs import layout, read_metrics, run_job, train

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]


@pytest.fixture
def damaged(data_root, tmp_path) -> Path:
    """A copy of the corpus that a test may damage."""
    copy = tmp_path / "corpus"
    shutil.copytree(data_root, copy)
    return copy


def refused(tmp_path: Path, *overrides: str, axes: dict[str, int] | None = None) -> str:
    """Run a job that must be refused; return the one line it printed."""
    run_dir = tmp_path / "run"
    done = train(run_dir, *layout(**(axes or {})), *overrides)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert not (run_dir / "metrics.jsonl").exists(), "training must not have started"
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return line


def test_missing_source(data_root, tmp_path):
    line = refused(tmp_path, f"data.root={data_root}", "data.sources={pictures: 1.0, wrods: 1.0}")
    assert "/wrods: no manifest.json" in line


def test_wrong_credentials_and_missing_bucket(s3_environment, monkeypatch, tmp_path):
    line = refused(tmp_path / "a", "data.root=s3://no-such-bucket")
    assert "no-such-bucket" in line
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-wrong-secret-0123456789")
    line = refused(tmp_path / "b", f"data.root=s3://{s3_environment.bucket}")
    assert s3_environment.bucket in line
    written = "".join(
        file.read_text(errors="replace") for file in tmp_path.rglob("*") if file.is_file()
    )
    assert "a-wrong-secret" not in line + written


@pytest.mark.parametrize("axes", [{}, dict(pp=2, dp=2)], ids=["one process", "one rank of four"])
def test_shard_that_the_index_does_not_match(axes, damaged, tmp_path):
    """One rank finds the error in its shard while the others wait in a collective."""
    shard = damaged / "words" / "000000.tar"
    shard.write_bytes(shard.read_bytes() + bytes(512))
    line = refused(tmp_path, f"data.root={damaged}", axes=axes)
    assert "words/000000.tar" in line
    assert "size" in line


def test_medium_over_the_patch_limit(data_root, tmp_path):
    line = refused(tmp_path, f"data.root={data_root}", "dep.max_patches_per_chunk=64")
    assert "dep.max_patches_per_chunk=64" in line
    assert "'pictures', sample 'p0" in line


def test_tokenizer_larger_than_the_model(data_root, tmp_path):
    line = refused(tmp_path, f"data.root={data_root}", "model.language.vocab_size=300")
    assert "546 ids" in line
    assert "vocab_size is 300" in line


def damage_media(root: Path) -> int:
    """Overwrite the first bytes of every third picture, except in samples probed at the start."""
    index = read_index(open_store(str(root)), "pictures")
    shards: dict[str, bytearray] = {}
    damaged = 0
    for sample in range(0, index.num_samples, 3):
        inside = [s for s in range(index.num_samples) if index.shard[s] == index.shard[sample]]
        if sample == (inside[0] + inside[-1] + 1) // 2:
            continue
        key = index.shards[index.shard[sample]].key
        data = shards.setdefault(key, bytearray((root / key).read_bytes()))
        for item in range(index.item_ptr[sample], index.item_ptr[sample + 1]):
            offset = int(index.item_offset[item])
            data[offset : offset + 16] = b"not a picture..."
            damaged += 1
    for key, data in shards.items():
        (root / key).write_bytes(bytes(data))
    return damaged


def test_unusable_pictures_are_skipped_the_same_in_every_layout(damaged, tmp_path):
    assert damage_media(damaged) > 20
    common = (f"data.root={damaged}", "train.steps=3")
    one = run_job("losses", tmp_path / "one", 1, *common, *layout())
    axes = layout(pp=2, dp=2, ep=2)
    four = run_job("losses", tmp_path / "four", 4, *common, *axes)
    assert sum(step["skipped_samples"] for step in one) > 5
    for step, expected in zip(four, one, strict=True):
        assert step["skipped_samples"] == expected["skipped_samples"]
        assert step["loss_tokens"] == expected["loss_tokens"]
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_skipped_samples_are_written_down(damaged, tmp_path):
    damage_media(damaged)
    done = train(tmp_path / "run", f"data.root={damaged}", "train.steps=2", *layout())
    assert done.returncode == 0, done.stdout + done.stderr
    ledger = (tmp_path / "run" / "quarantine.jsonl").read_text()
    skipped = sum(line["skipped_samples"] for line in read_metrics(tmp_path / "run"))
    assert skipped > 0
    assert ledger.count("\n") >= skipped
    assert "source 'pictures', sample 'p0" in ledger


@pytest.mark.parametrize("axes", [{}, dict(pp=2, dp=2)], ids=["one process", "four"])
def test_vision_weights_that_do_not_fit(axes, data_root, tmp_path):
    encoder = VisionEncoder(MoonViTConfig(width=32, depth=1, heads=2, mlp_width=64, out_width=64))
    initialise(encoder, seed=0)
    save(encoder, tmp_path / "other.safetensors")
    start = f"train.vision_weights={tmp_path / 'other.safetensors'}"
    line = refused(tmp_path, f"data.root={data_root}", start, axes=axes)
    assert "other.safetensors: missing vision_tower.encoder.blocks.1." in line
