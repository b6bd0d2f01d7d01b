"""Compares exposure with a log of each step's reads, for every event during a run."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import copytree, rmtree
from types import MappingProxyType

import pytest

from data_pipeline.access import run_sources
from data_pipeline.fetch import everything, resolve
from data_pipeline.govern.redact import carry_out
from data_pipeline.index.manifest import (
    RUN_BEGAN_AT,
    RUN_MIXTURES,
    RUN_SOURCES,
    RUN_TOMBSTONES,
    IndexMismatch,
    read_index,
)
from data_pipeline.ingest.reindex import reindex
from data_pipeline.plan.change import change
from data_pipeline.plan.planner import Planner
from data_pipeline.plan.report import mixtures
from data_pipeline.store.open import FolderStore
from data_pipeline.sync.sync import sync
from data_pipeline.text import Tokenizer
from kimi_pretrain.checkpoint.manifest import INDEX, MANIFEST, Fingerprint, RunState, manifest_of
from kimi_pretrain.config import dump_config, load_config
from kimi_pretrain.reliability.anomaly_guard import sample_names
from kimi_pretrain.reliability.status import Status, write_status
from kimi_pretrain.telemetry.run_dir import note_beginning
from kimi_pretrain.tools.exposure import exposure, known_names, replay
from launch.cli.data_show import read_rows, show_rows
from tests.dist.jobs import SMALL

STEPS, FOUND, SAVED, FROM = 200, 20, (60, 150), 121
ONE = ("layout.pp=1", "layout.vpp=1", "layout.dp=1", "layout.ep=1")


class Made:
    """Run folder of a training of 200 steps, and the log of its reads.

    Args:
        change_at: step before which the run adds a second source; 0: never.
        redact: step before which samples are redacted and the run restarts -> numbers of samples
            of the first source.
    """

    def __init__(
        self,
        folder: Path,
        data_root: Path,
        *keys: str,
        change_at: int = 0,
        redact: Mapping[int, Sequence[int]] = MappingProxyType({}),
    ):
        self.root, self.run = folder / "corpus", folder / "run"
        copytree(data_root, self.root)
        lists = self.root / "gone.jsonl"
        self.config = load_config(
            "tiny_cpu",
            [*SMALL, *ONE, f"data.root={self.root}", "data.pack_window=64", *keys]
            + [f"data.tombstones={lists}"],
        )
        data, store = self.config.data, FolderStore(self.root)
        indices = [read_index(store, name) for name in data.source_names]
        index = indices[-1]
        line = {"source": index.name, "key": index.key_of(2), "from_step": FROM}
        lists.write_text(json.dumps(line) + "\n")
        self.run.mkdir()
        (self.run / "config.yaml").write_text(dump_config(self.config))
        planner = Planner(indices, data)
        self.begin(planner)
        state = planner.state_dict()
        if change_at:  # until then with one source and only its index
            names = data.source_names[1:]
            planner = Planner(indices[1:], data.replace(sources=dict.fromkeys(names, 1.0)))
            state = planner.state_dict()
        self.log: list[tuple[int, int, str, int]] = []  # step, row, shard, offset of the document
        faults, lines = [], []
        for step in range(1, STEPS + 1):
            if step in redact:
                first = planner.indices[0]
                carry_out(store, {first.name: [first.key_of(n) for n in redact[step]]})
                before = planner.with_quarantine(state)
                planner = Planner([read_index(store, name) for name in data.source_names], data)
                planner.load_state_dict(before)
                state = planner.state_dict()
                self.begin(planner)
            if step == change_at:
                before, planner = planner.with_quarantine(state), Planner(indices, data)
                assert change(planner, before) is not None
                state = planner.state_dict()
                self.begin(planner)
                (self.run / RUN_MIXTURES).write_text(json.dumps(mixtures(planner)))
            plan, state = planner.plan(state)
            request = resolve(planner, plan, everything(plan))
            self.log += [(step, r.row, shard_of(r.span.key), r.span.offset) for r in request.texts]
            if step == FOUND:
                source, sample = int(plan.samples.source[1]), int(plan.samples.index[1])
                assert planner.quarantine(source, sample, plan.step)
                index = planner.indices[source]
                self.bad = (step, int(plan.samples.row[1]), index.name, index.key_of(sample))
                faults.append({"step": step, "source": index.name, "key": index.key_of(sample)})
            if step in SAVED:
                self.save(step, planner.with_quarantine(state))
            lines.append({"step": step, "loss": 1.0})
        for name, found in (("metrics", lines), ("quarantine", faults)):
            text = "".join(json.dumps(line) + "\n" for line in found)
            (self.run / f"{name}.jsonl").write_text(text)
        self.indices = planner.indices

    def begin(self, planner):
        """Write the data records of a start."""
        sources = run_sources(self.config.data, planner.indices, [])
        (self.run / RUN_SOURCES).write_text(json.dumps(sources))
        (self.run / RUN_TOMBSTONES).write_text(json.dumps(planner.tombstones.record()))

    def save(self, step, state):
        folder = self.run / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        files = {INDEX: Fingerprint(2, "0" * 64)}
        manifest = manifest_of(self.config, RunState(step, step, state), files, {})
        (folder / MANIFEST).write_text(manifest.text())

    def logged(self, source, samples):
        """Return the logged (step, row, key) of samples, one entry for each read."""
        index = next(one for one in self.indices if one.name == source)
        at = {
            (shard_of(index.shards[index.shard[n]].key), int(index.json_offset[n])): index.key_of(n)
            for n in samples
        }
        return sorted(
            (s, r, at[key, offset]) for s, r, key, offset in self.log if (key, offset) in at
        )


def shard_of(key):
    """Return the key under which a shard was first written, despite later redactions."""
    return key.partition(".redacted-")[0].removesuffix(".tar")


@pytest.fixture(scope="module")
def made(data_root, tmp_path_factory):
    return Made(tmp_path_factory.mktemp("exposure"), data_root)


def told(found):
    return sorted((use.step, use.row, use.key) for use in found.uses)


def test_it_is_what_a_log_of_every_step_says(made):
    for index in made.indices:
        wanted = [index.key_of(n) for n in range(0, index.num_samples, 3)]
        if index.name == made.bad[2]:
            wanted = list(dict.fromkeys([*wanted, made.bad[3]]))
        numbers = [n for n in range(index.num_samples) if index.key_of(n) in wanted]
        found = exposure(made.run, {index.name: wanted})
        assert (found.first, found.last) == (1, STEPS)
        assert told(found) == made.logged(index.name, numbers)
        assert len(found.uses) > 50
        assert [use[:4] for use in found.uses if use.masked] == (
            [made.bad] if index.name == made.bad[2] else []
        )
    tombstone = made.indices[-1].key_of(2)
    uses = exposure(made.run, {made.indices[-1].name: [tombstone]}).uses
    assert uses
    assert max(use.step for use in uses) < FROM


def shown_as_logged(made):
    """Check that `data show --step` with the run's config.yaml shows what the run read."""
    config = str(made.run / "config.yaml")
    for step in (1, 89, 90, 100, FROM, STEPS):
        found = read_rows(config, (), step, range(1, 4))
        texts = [(r.row + 1, shard_of(r.span.key), r.span.offset) for r in found.request.texts]
        wanted = [(*at,) for when, *at in made.log if when == step and 1 <= at[0] < 4]
        assert sorted(texts) == sorted(wanted)
        assert found.batch.row_ids.tolist() == [1, 2, 3]
    moved = (f"data.root={made.root}/.", "data.workers=1")
    assert "Step 89, rows 1 to 1" in show_rows(config, moved, 89, range(1, 2))
    with pytest.raises(ValueError, match=r"^data\.seed, data\.pack_window: the run of .*/run went"):
        read_rows(config, ("data.seed=5", "data.pack_window=32"), 89, range(1))


def test_a_run_whose_steps_were_not_changed_is_shown_as_it_was(made):
    """Covers a quarantined sample and a tombstone; other keys show a run that never happened."""
    config, overrides = str(made.run / "config.yaml"), ("data.seed=5",)
    for step, keys in ((FOUND + 80, ()), (FROM, ()), (FROM, overrides)):
        found = read_rows(config, keys, step, range(8))
        texts = sorted((r.row, shard_of(r.span.key), r.span.offset) for r in found.request.texts)
        logged = sorted((*at,) for when, *at in made.log if when == step and at[0] < 8)
        assert (texts == logged) == (not keys)


def test_a_run_that_went_over_to_other_data_is_planned_with_both(data_root, tmp_path):
    """A sample is quarantined before its source's numbers move, and checkpoints exist."""
    made = Made(tmp_path, data_root, "data.vision_token_ratio=null", change_at=90)
    for index in made.indices:
        wanted = [index.key_of(n) for n in range(0, index.num_samples, 3)]
        numbers = range(0, index.num_samples, 3)
        found = exposure(made.run, {index.name: wanted})
        assert told(found) == made.logged(index.name, numbers)
        assert (min(use.step for use in found.uses) < 90) == (index.name == "words")
    shown_as_logged(made)
    rmtree(made.run / "checkpoints" / "step_00000150")  # the remaining one numbers one source
    for index in made.indices:
        found = exposure(made.run, {index.name: [index.key_of(n) for n in range(9)]})
        assert told(found) == made.logged(index.name, range(9))
    later = goes_on_from(made, 60, tmp_path / "later")  # it then had one source and changed later
    for index in made.indices:
        found = exposure(later, {index.name: [index.key_of(n) for n in range(9)]})
        assert told(found) == [use for use in made.logged(index.name, range(9)) if use[0] > 60]
    (made.run / RUN_MIXTURES).unlink()
    with pytest.raises(ValueError, match="step 60 is at .* were changed on the way"):
        exposure(made.run, {"words": ["w0001"]})


def test_a_start_that_told_its_sources_and_failed_has_used_nothing(made, tmp_path):
    (tmp_path / RUN_SOURCES).write_text((made.run / RUN_SOURCES).read_text())
    found = exposure(tmp_path, {"words": ["w0001"]})
    assert (found.first, found.last, found.uses, found.heldout) == (0, 0, [], [])


def goes_on_from(made, step, folder, *keys):
    """Return a run folder that continues another run after `step` and keeps only its state."""
    copytree(made.run, folder)
    saved = made.run / "checkpoints" / f"step_{step:08d}" / MANIFEST
    state = json.loads(saved.read_text())["state"]["loader"]
    for file in (folder / "quarantine.jsonl", folder / "metrics.jsonl"):
        lines = [line for line in file.read_text().splitlines() if json.loads(line)["step"] > step]
        file.write_text("".join(f"{line}\n" for line in lines))
    rmtree(folder / "checkpoints")
    note_beginning(folder, state, "none")
    config = load_config(folder / "config.yaml", keys)
    (folder / "config.yaml").write_text(dump_config(config))
    return folder


KEEP = ("train.start_optimizer=keep", "train.start_from=gone/checkpoints/step_00000060")


@pytest.mark.parametrize("keys", [KEEP, ()], ids=["a stage that keeps all", "a run resumed there"])
def test_a_run_goes_on_with_the_quarantine_of_the_run_before(made, tmp_path, keys):
    """The checkpoints of both runs are gone."""
    folder = goes_on_from(made, 60, tmp_path / "run", *keys)
    for index in made.indices:
        wanted = [index.key_of(n) for n in range(0, index.num_samples, 3)]
        found = exposure(folder, {index.name: wanted})
        numbers = range(0, index.num_samples, 3)
        logged = [use for use in made.logged(index.name, numbers) if use[0] > 60]
        assert told(found) == logged
        assert (found.first, found.last) == (61, STEPS)
    wanted = {made.indices[0].name: [made.indices[0].key_of(0)]}
    if keys:
        shown = read_rows(str(folder / "config.yaml"), (), 100, range(4)).request.texts
        texts = sorted((r.row, r.span.offset) for r in shown)
        assert texts == sorted((row, offset) for s, row, _, offset in made.log if s == 100)
    (folder / RUN_BEGAN_AT).write_text('{"step": 80}')
    with pytest.raises(ValueError, match="is of step 80, but metrics.jsonl begins with step 61"):
        exposure(folder, wanted)
    (folder / RUN_BEGAN_AT).unlink()
    with pytest.raises(ValueError, match="data_began_at.json is missing: the data of this run go"):
        exposure(folder, wanted)


def test_parts_epochs_and_held_out_sources_are_told(data_root, tmp_path):
    """Texts are split into several rows, in several epochs."""
    copytree(data_root, tmp_path / "corpus")
    sources = "data.sources={words: 1, words_heldout: 1}"
    keys = (f"data.root={tmp_path / 'corpus'}", sources, "data.vision_token_ratio=null")
    config = load_config("tiny_cpu", [*SMALL, *ONE, *keys])
    store, data = FolderStore(tmp_path / "corpus"), config.data
    indices = [read_index(store, name) for name in data.source_names]
    held = [read_index(store, "pictures_heldout")]  # only in an earlier start
    (tmp_path / "config.yaml").write_text(dump_config(config))
    (tmp_path / RUN_SOURCES).write_text(json.dumps(run_sources(data, indices, held)))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 40}\n')
    planner = Planner(indices, data)
    state, logged = planner.state_dict(), []
    for step in range(1, 41):
        plan, state = planner.plan(state)
        table = plan.samples
        for at in range(len(table)):
            index = indices[table.source[at]]
            use = (int(table.row[at]), index.name, index.key_of(int(table.index[at])))
            logged.append((step, *use, int(table.part[at]), int(table.epoch[at]), False))
    wanted = {index.name: [index.key_of(n) for n in range(3)] for index in indices}
    wanted["pictures_heldout"] = [held[0].key_of(1)]
    found = exposure(tmp_path, wanted)
    chosen = [use for use in logged if use[3] in wanted[use[2]]]
    assert sorted(found.uses) == sorted(chosen)
    assert {use.part for use in found.uses} > {0, 1}
    assert {use.epoch for use in found.uses} > {0, 1}
    assert (found.heldout, found.untold) == (["pictures_heldout"], [])
    rmtree(tmp_path / "corpus" / "pictures_heldout")
    found = exposure(tmp_path, {"words": ["w0001"]})
    assert (found.heldout, found.untold) == ([], ["pictures_heldout"])


def test_steps_that_metrics_do_not_know_count(made, tmp_path):
    """If the disk was full or the file is lost, status.json and checkpoints know later steps."""
    run, wanted = copytree(made.run, tmp_path / "run"), {"words": ["w0001", "w0003"]}
    all_of_it = exposure(run, wanted)
    assert all_of_it.uses
    (run / "metrics.jsonl").unlink()
    write_status(run, Status("running", STEPS))
    assert replace(exposure(run, wanted), first=1) == all_of_it
    rmtree(run / "checkpoints")
    assert replace(exposure(run, wanted), first=1) == all_of_it
    # A run without steps of its own reports the step of the run that it continues.
    write_status(run, Status("running", 60))
    note_beginning(run, {"step": 60}, "other")
    assert (exposure(run, wanted).last, exposure(run, wanted).uses) == (0, [])


def test_a_validation_before_the_first_step_is_told(made, data_root, tmp_path):
    """The run read held-out sources but did no step."""
    run = copytree(made.run, tmp_path / "run")
    rmtree(run / "checkpoints")
    (run / "metrics.jsonl").unlink()
    held_out = read_index(FolderStore(made.root), "words_heldout")
    sources = run_sources(made.config.data, made.indices, [held_out])
    (run / RUN_SOURCES).write_text(json.dumps(sources))
    wanted = {"words_heldout": [held_out.key_of(0)]}
    assert exposure(run, wanted).heldout == []
    (run / "heldout.jsonl").write_text('{"step": 0}\n')
    found = exposure(run, wanted)
    assert (found.heldout, found.last, found.uses) == (["words_heldout"], 0, [])


def test_a_torn_line_of_the_quarantine_is_none_and_an_odd_one_is_told(made, tmp_path):
    run, wanted = copytree(made.run, tmp_path / "run"), {"words": ["w0001"]}
    file, found = run / "quarantine.jsonl", exposure(made.run, wanted)
    text = file.read_text()
    file.write_text(text + '{"step": 200, "sou')
    assert replace(exposure(run, wanted), run=found.run) == found
    odd = {"step": 3, "source": "words", "key": "w0001"}
    for line in ("{", "[]", *(json.dumps(odd | one) for one in ({"source": "x"}, {"key": "x"}))):
        file.write_text(f"{text}{line}\n")
        with pytest.raises(ValueError, match=r"quarantine\.jsonl, line 2: .* is no sample"):
            exposure(run, wanted)


@pytest.mark.parametrize("text", ["{", "3", '[{"name": "words"}]'])
def test_a_damaged_list_of_sources_is_told(made, tmp_path, text):
    run = copytree(made.run, tmp_path / "run")
    (run / RUN_SOURCES).write_text(text)
    with pytest.raises(ValueError, match=r"sources\.json: expected what a run writes"):
        exposure(run, {"words": ["w0001"]})


def test_a_held_out_source_is_not_believed_to_be_what_it_was(data_root, tmp_path):
    """The manifest claims so (`made_as`), but the source holds other data."""
    root, run = copytree(data_root, tmp_path / "corpus"), tmp_path / "run"
    keys = (f"data.root={root}", "data.sources={words: 1}", "data.vision_token_ratio=null")
    config, store = load_config("tiny_cpu", [*SMALL, *ONE, *keys]), FolderStore(root)
    indices = [read_index(store, name) for name in ("words", "words_heldout")]
    run.mkdir()
    (run / "config.yaml").write_text(dump_config(config))
    (run / RUN_SOURCES).write_text(json.dumps(run_sources(config.data, indices[:1], indices[1:])))
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    assert exposure(run, {"words": ["w0001"]}).untold == []
    manifest = json.loads((root / "pictures_heldout" / "manifest.json").read_text())
    manifest["redacted"] = {"made_as": indices[1].content_hash, "samples": [], "replaced": []}
    copytree(root / "pictures_heldout", root / "words_heldout", dirs_exist_ok=True)
    (root / "words_heldout" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(IndexMismatch, match=r"words_heldout: redacted\.made_as is"):
        exposure(run, {"words": ["w0001"]})


def test_of_a_source_that_is_gone_nothing_is_told(made, tmp_path):
    """The run drew from the missing source, or from another source that holds its shards."""
    copytree(made.root, tmp_path / "corpus")
    copytree(made.run, tmp_path / "run")
    text = (tmp_path / "run" / "config.yaml").read_text()
    moved = text.replace(str(made.root), str(tmp_path / "corpus"))
    (tmp_path / "run" / "config.yaml").write_text(moved)
    store, index = FolderStore(tmp_path / "corpus"), made.indices[0]
    reindex(store, index.name, "again", Tokenizer.from_store(store, "tokenizer.tiktoken"))
    wanted = {index.name: [index.key_of(0)]}
    assert exposure(tmp_path / "run", wanted).uses
    manifest = tmp_path / "corpus" / index.name / "manifest.json"
    manifest.rename(tmp_path / "manifest.json")  # its shards stay, because `again` needs them
    gone = rf"cannot be told: it drew from {index.name}, not under .* any more"
    for asked in (wanted, {"again": [index.key_of(0)]}):
        with pytest.raises(ValueError, match=gone):
            exposure(tmp_path / "run", asked)
    rmtree(tmp_path / "run" / "checkpoints")
    other = moved.replace(f"{index.name}: 1.0", "again: 1.0")
    (tmp_path / "run" / "config.yaml").write_text(other)
    with pytest.raises(ValueError, match=f"samples of {index.name} cannot be told: .* no finished"):
        exposure(tmp_path / "run", wanted)
    assert index.name in known_names(tmp_path / "run")
    with pytest.raises(ValueError, match="knows a source 'wodrs'; did you mean 'words'"):
        exposure(made.run, {"wodrs": ["w0001"]})


def test_it_is_found_by_another_source_of_the_same_shards_and_after_redaction(made, tmp_path):
    copytree(made.root, tmp_path / "corpus")
    copytree(made.run, tmp_path / "run")
    store, index = FolderStore(tmp_path / "corpus"), made.indices[0]
    text = (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "run" / "config.yaml").write_text(text.replace(str(made.root), store.uri))
    reindex(store, index.name, "again", Tokenizer.from_store(store, "tokenizer.tiktoken"))
    keys = [index.key_of(n) for n in range(5)]
    expected = made.logged(index.name, range(5))
    assert told(exposure(tmp_path / "run", {"again": keys})) == expected
    carry_out(store, {"again": keys})
    assert told(exposure(tmp_path / "run", {"again": keys})) == expected


def test_a_run_that_was_changed_on_the_way_is_refused(made, tmp_path):
    copytree(made.run, tmp_path / "run")
    name, key = made.indices[0].name, made.indices[0].key_of(0)
    text = (tmp_path / "run" / "config.yaml").read_text()
    rows = f"rows_per_step: {made.config.data.rows_per_step}"
    assert rows in text
    (tmp_path / "run" / "config.yaml").write_text(text.replace(rows, "rows_per_step: 2"))
    with pytest.raises(ValueError, match="checkpoint of step 60 is at .* were changed on the way"):
        exposure(tmp_path / "run", {name: [key]})
    with pytest.raises(ValueError, match="has no sample 'nobody' among"):
        exposure(made.run, {name: ["nobody"]})


# Samples of the first source redacted before steps 61 and 151, and after the end.
BEFORE_61, BEFORE_151, AT_THE_END = [7, 3], [1], [0]
REDACTED = [*BEFORE_61, *BEFORE_151, *AT_THE_END]


@pytest.fixture(scope="module")
def redacted(data_root, tmp_path_factory):
    """Return a run that was stopped twice for redactions, at its checkpoints."""
    folder = tmp_path_factory.mktemp("redacted")
    made = Made(folder, data_root, redact={61: BEFORE_61, 151: BEFORE_151})
    erase(made.root, made, AT_THE_END)
    return made


def erase(root, made, samples):
    index = made.indices[0]
    carry_out(FolderStore(root), {index.name: [index.key_of(n) for n in samples]})


def copied(made, folder, root=None, keeps_checkpoints=True):
    """Return a copy of the run; with `root`, the copy reads that root."""
    run = folder / "run"
    copytree(made.run, run)
    if root is not None:
        text = (run / "config.yaml").read_text()
        (run / "config.yaml").write_text(text.replace(str(made.root), str(root)))
    if not keeps_checkpoints:
        rmtree(run / "checkpoints")
    return run


def assert_as_logged(made, run):
    """Check the exposure of the redacted samples, and that rows without them can be shown."""
    index = made.indices[0]
    logged = made.logged(index.name, REDACTED)
    assert told(exposure(run, {index.name: [index.key_of(n) for n in REDACTED]})) == logged
    for before, samples in ((61, BEFORE_61), (151, BEFORE_151), (STEPS + 1, AT_THE_END)):
        steps = {step for n in samples for step, _, _ in made.logged(index.name, [n])}
        assert steps
        assert before - 40 < max(steps) < before
    full = {(step, row) for step, row, _ in logged}
    for step in (60, 61, 62, 150, 151, 152, STEPS):
        rows = [row for row in range(4) if (step, row) not in full]
        found = [
            (row, shard_of(r.span.key), r.span.offset)
            for row in rows
            for r in read_rows(
                str(run / "config.yaml"), (), step, range(row, row + 1)
            ).request.texts
        ]
        wanted = [(*at,) for when, *at in made.log if when == step and at[0] in rows]
        assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize("keeps_checkpoints", [True, False])
def test_redactions_count_from_the_steps_in_which_the_run_found_them(
    redacted, tmp_path, keeps_checkpoints
):
    assert_as_logged(redacted, copied(redacted, tmp_path, None, keeps_checkpoints))


def test_without_the_record_of_redactions_nothing_is_told(redacted, made, tmp_path):
    for one, why in ((redacted, "redacted in 'pictures'"), (made, "data.tombstones names")):
        run = copied(one, tmp_path / why[:4])
        (run / RUN_TOMBSTONES).unlink()
        name, key = one.indices[0].name, one.indices[0].key_of(3)
        with pytest.raises(
            ValueError, match=rf"tombstones\.json is missing.*{why}.*cannot be told"
        ):
            exposure(run, {name: [key]})
        with pytest.raises(ValueError, match="cannot be told"):
            read_rows(str(run / "config.yaml"), (), 1, range(1))


def test_a_list_that_changed_after_the_end_changes_nothing(made, tmp_path):
    """Lines were added later, a line was removed, or the list is gone."""
    index, gone = made.indices[-1], str(made.root / "gone.jsonl")
    keys = [index.key_of(n) for n in range(9)]
    late = tmp_path / "list.jsonl"
    lines = [{"source": index.name, "key": key, "from_step": 5} for key in keys]
    late.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for number, name in enumerate((str(late), str(tmp_path / "nowhere.jsonl"))):
        run = copied(made, tmp_path / str(number), keeps_checkpoints=False)
        text = (run / "config.yaml").read_text()
        assert gone in text
        (run / "config.yaml").write_text(text.replace(gone, name))
        assert told(exposure(run, {index.name: keys})) == made.logged(index.name, range(9))
        found = read_rows(str(run / "config.yaml"), (), FROM - 1, range(4)).request.texts
        texts = sorted((r.row, shard_of(r.span.key), r.span.offset) for r in found)
        assert texts == sorted((*at,) for when, *at in made.log if when == FROM - 1)


def test_an_anomaly_is_shown_as_the_run_had_it(redacted, tmp_path):
    """Other samples were redacted since, and the list has a new line for this very step."""
    run = copied(redacted, tmp_path)
    manifest = json.loads((run / "checkpoints" / "step_00000060" / MANIFEST).read_text())
    planner, _ = replay(run, load_config(run / "config.yaml"), FolderStore(redacted.root))
    state = manifest["state"]["loader"]
    plan, _ = planner.plan(state)
    line = {"source": "words", "key": redacted.indices[1].key_of(plan.samples.index[-1])}
    late = tmp_path / "list.jsonl"
    late.write_text(json.dumps(line | {"from_step": 61}) + "\n")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace(str(redacted.root / "gone.jsonl"), str(late)))
    names = sample_names(plan, planner.indices)
    found = {"step": 61, "loader": state, "samples": names}
    logged = sorted((*at,) for when, *at in redacted.log if when == 61)
    assert len(logged) == len(names) > 4
    step = read_rows(str(run / "config.yaml"), (), 1, range(4), found)
    texts = [(r.row, shard_of(r.span.key), r.span.offset) for r in step.request.texts]
    assert sorted(texts) == logged


def test_at_a_synced_copy_the_run_reads_the_same_rows(redacted, data_root, tmp_path):
    root = tmp_path / "copy"
    copytree(data_root, root)
    shutil.copy(redacted.root / "gone.jsonl", root)
    sync(FolderStore(redacted.root), FolderStore(root))
    assert_as_logged(redacted, copied(redacted, tmp_path, root, keeps_checkpoints=False))
    data = redacted.config.data.replace(root=str(root))
    indices = [read_index(FolderStore(root), name) for name in data.source_names]
    for step in SAVED:
        saved = redacted.run / "checkpoints" / f"step_{step:08d}" / MANIFEST
        state = json.loads(saved.read_text())["state"]["loader"]
        plans = []
        for found in (redacted.indices, indices):
            planner = Planner(found, data)
            planner.load_state_dict(state)
            planner.tombstones = replace(planner.tombstones, since=planner.tombstones.since[:1])
            plans.append(planner.plan(planner.state_dict())[0].content_hash())
        assert plans[0] == plans[1]


def test_at_a_root_with_another_order_of_redactions_nothing_is_told(redacted, data_root, tmp_path):
    root = tmp_path / "copy"
    copytree(data_root, root)
    shutil.copy(redacted.root / "gone.jsonl", root)
    for sample in sorted(REDACTED):
        erase(root, redacted, [sample])
    run = copied(redacted, tmp_path, root, keeps_checkpoints=False)
    index = redacted.indices[0]
    with pytest.raises(
        ValueError, match=r"json, from step 61 on: source 'pictures' .*another order"
    ):
        exposure(run, {index.name: [index.key_of(7)]})
