"""Samples damaged at rest, text and pictures: counted, recorded, and kept in the checkpoint."""

import json
from pathlib import Path

import pytest

from data_pipeline.index.manifest import read_index
from data_pipeline.store.open import open_store
from tests.dist import corpus
from tests.dist.jobs import layout, read_metrics, train

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]
STEPS = 3


@pytest.fixture
def damaged(tmp_path) -> Path:
    root = tmp_path / "corpus"
    corpus.build(root)
    return root


def damage(root: Path, name: str, every: int) -> set[str]:
    """Flip a bit in the document of some samples; return their keys."""
    index = read_index(open_store(str(root)), name)
    keys = set[str]()
    for sample in range(0, index.num_samples, every):
        inside = [s for s in range(index.num_samples) if index.shard[s] == index.shard[sample]]
        if sample == (inside[0] + inside[-1] + 1) // 2:  # probed when the job starts
            continue
        file = root / index.shards[index.shard[sample]].key
        data = bytearray(file.read_bytes())
        data[int(index.json_offset[sample]) + int(index.json_length[sample]) // 2] ^= 0x01
        file.write_bytes(bytes(data))
        keys.add(index.key_of(sample))
    return keys


def test_damaged_text_is_skipped_and_the_checkpoint_holds_the_quarantine(damaged, tmp_path):
    bad = {"pictures": damage(damaged, "pictures", 3), "words": damage(damaged, "words", 2)}
    run = tmp_path / "run"
    done = train(
        run, f"data.root={damaged}", f"train.steps={STEPS}", f"checkpoint.every={STEPS}",
        *layout(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    ledger = [json.loads(line) for line in (run / "quarantine.jsonl").read_text().splitlines()]
    # A document without its text cannot be laid out, so the entry names no item.
    written = [(line["step"], line["source"], line["key"]) for line in ledger]
    assert {source for _, source, _ in written} == {"pictures", "words"}
    assert all(key in bad[source] for _, source, key in written)
    assert all(line["item"] is None and "CRC-32" in line["reason"] for line in ledger)
    for line in read_metrics(run):
        mine = [entry for entry in written if entry[0] == line["step"]]
        assert line["skipped_samples"] == len(mine) > 0
    [checkpoint] = (run / "checkpoints").glob("step_*")
    state = json.loads((checkpoint / "manifest.json").read_text())["state"]["loader"]
    store = open_store(str(damaged))
    indices = [read_index(store, name) for name in ("pictures", "words")]
    kept = {
        (indices[source].name, indices[source].key_of(sample)): step
        for source, sample, step in state["quarantine"]
    }
    first = {}
    for step, source, key in sorted(written):
        first.setdefault((source, key), step - 1)  # the ledger counts completed steps
    assert kept == first
    assert len(kept) > 5
