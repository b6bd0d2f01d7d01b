"""A resumed run equals an uninterrupted one (I3); a bad checkpoint is refused before training."""

import dataclasses
import hashlib
import json
import math
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from data_pipeline.index.manifest import RUN_BEGAN_AT
from kimi_pretrain.checkpoint.errors import CheckpointError
from kimi_pretrain.checkpoint.load import load
from kimi_pretrain.checkpoint.saver import CheckpointSaver
from kimi_pretrain.checkpoint.storage_read import open_place
from kimi_pretrain.config import load_config
from kimi_pretrain.reliability.status import read_status
from kimi_pretrain.tools.exposure import exposure
from kimi_pretrain.weights.compatibility import open_compatible
from kimi_pretrain.weights.initial_weights import open_initial_weights
from kimi_pretrain.weights.kept_optimizer import check_kept
from moonvit3d.model import VisionEncoder, initialise
from moonvit3d.weights import save
from tests import fork_server
from tests.dist.jobs import SMALL, layout, read_metrics, train
from tests.dist.live import is_told, open_to_others, ranks, started, wait_for, wait_for_steps

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

# With the preset's seed, rounding routes one token to another expert in step 5, and the losses of
# two layouts differ by 2e-5. With this seed they stay within 4e-8 for eight steps.
SEED = "train.seed=1"
ONE = (*layout(), SEED)
# The row order differs from one process's, so a run also resumes under the other setting.
FOUR = (*layout(pp=2, vpp=2, dp=2, ep=2), SEED, "data.order_rows=light_ends")
PATIENCE = 30  # train.timeout_seconds: no phase of these steps takes as long, on any machine
# The optimizer's numbers in a metrics line, except its seconds.
OPTIMIZER = ("max_logits", "clipped_heads", "update_rms", "orthogonality_error", "skipped_steps")


HELDOUT = (
    "data.heldout={words_heldout: 1, pictures_heldout: 1}", "data.heldout_tokens=1000",
    "train.validate_every=4",  # does not divide the steps: the last step is validated too
)  # fmt: skip


class Alone:
    """The mesh of one process."""

    rank, world_size, device = 0, 1, torch.device("cpu")

    def all_gather_object(self, value: object) -> list[object]:
        return [value]

    def broadcast_from_rank0(self, make):
        return make()


@pytest.fixture(scope="module")
def straight(data_root, tmp_path_factory):
    """Six steps in four processes with a checkpoint after the third."""
    folder = tmp_path_factory.mktemp("straight")
    overrides = (f"data.root={data_root}", "train.steps=6", "checkpoint.every=3", *FOUR)
    more = ("train.trace_step=2", "train.pictures=true", *HELDOUT, "--json")
    done = train(folder, *overrides, *more)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "told.json").write_text(done.stdout.splitlines()[-1])
    assert re.search(r"^step 1/6  loss [\d.]+  [\d,]+ tokens/s  ETA \d", done.stdout, re.MULTILINE)
    assert re.search(r"^step 6/6 .* ETA 0:00:00$", done.stdout, re.MULTILINE)
    assert re.search(r"^held out at step 4: loss \d\.\d+ \(pict", done.stdout, re.MULTILINE)
    log = (folder / "logs" / "rank_0.log").read_text()
    found = re.search(
        r"held out: (\d+) samples .*: \{'pictures_heldout': (\d+), 'words_heldout': (\d+)", log
    )
    assert found, log
    total, pictures, texts = map(int, found.groups())
    assert (total, pictures) == (pictures + texts, 8)
    assert texts in range(3, 8)
    for line in read_metrics(folder):
        times = {name: value for name, value in line.items() if "seconds" in name}
        assert all(0 <= one < 600 for one in times.values() if isinstance(one, float)), times
    # Drawn at the end of the run.
    for name in ("loss", "losses", "dep_balance", "muonclip", "timeline"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    return folder


@pytest.fixture
def checkpoint(straight, tmp_path):
    """A copy of the checkpoint that a test may damage."""
    copy = tmp_path / "step_00000003"
    shutil.copytree(straight / "checkpoints" / "step_00000003", copy)
    return copy


@dataclass(frozen=True)
class Interrupted:
    """Results of the interrupted run, and of a second run started in its folder meanwhile."""

    folder: Path
    out: str
    holder: int
    second: subprocess.CompletedProcess
    doors: tuple[list[str], list[str]]  # before and after the restart


@pytest.fixture(scope="module")
def interrupted(data_root, tmp_path_factory):
    """The same run: a rank hangs after two steps, and after the restart the run gets SIGTERM."""
    folder = tmp_path_factory.mktemp("interrupted")
    overrides = (
        f"data.root={data_root}", "train.steps=6", "checkpoint.every=1", *FOUR,
        "checkpoint.asynchronous=false",  # slow, so that steps remain when SIGTERM comes
        f"train.timeout_seconds={PATIENCE}",
    )  # fmt: skip
    with started(folder, *overrides, "--max-restarts", "2") as process:
        wait_for_steps(folder, 2, process)
        begun = ranks(process)
        begun[2].send_signal(signal.SIGSTOP)  # it neither works nor dies
        holder, before = begun[0].pid, open_to_others(process)
        second = train(folder, *overrides, resume=Path("latest"))
        wait_for(lambda: "resumed" in (folder / "logs" / "rank_0.log").read_text(), process)
        again = list(ranks(process).values())
        for rank in again:  # no step completes before the signal is pending
            rank.suspend()
        after = open_to_others(process)
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: all(is_told(rank.pid, signal.SIGTERM) for rank in again), process)
        for rank in again:
            rank.resume()
        out, err = process.communicate(timeout=250)
    assert process.returncode == 0, out + err
    return Interrupted(folder, out, holder, second, (before, after))


def test_nothing_listens_beyond_the_loopback(interrupted):
    assert interrupted.doors == ([], [])


def test_a_second_run_in_the_same_folder_is_refused(interrupted):
    assert interrupted.second.returncode == 2, interrupted.second.stdout
    told = f"{interrupted.folder} is in use by another run: process {interrupted.holder} on "
    assert told in interrupted.second.stderr
    assert "Traceback" not in interrupted.second.stderr


def test_a_rank_that_hangs_is_found_and_named_by_the_others(interrupted):
    logs = interrupted.folder / "logs"
    told = (logs / "torchrun.log").read_text()
    assert re.search(r"error: no progress for \d+ s \(train\.timeout_seconds\): rank ", told)
    assert "; no word from rank 2: stopped, dead, cut off" in told
    for rank in (0, 1, 3):
        assert "most recent call first" in (logs / f"stacks_rank_{rank}.txt").read_text()


def test_a_run_that_failed_goes_on_and_one_that_is_told_to_end_saves(interrupted):
    folder, out = interrupted.folder, interrupted.out
    status = read_status(folder)
    assert status is not None
    assert (status.state, status.reason) == ("stopped", "signal SIGTERM at rank 0")
    saved = folder / "checkpoints" / f"step_{status.step:08d}"
    assert status.checkpoint == str(saved)
    assert (saved / "manifest.json").is_file()
    assert f"stopped after step {status.step} (signal SIGTERM at rank 0), checkpoint {saved}" in out
    assert f"kimi-pretrain train --config tiny_cpu --run-dir {folder} --resume latest" in out
    assert not (folder / "state_hashes.json").exists()
    assert [line["step"] for line in read_metrics(folder)] == list(range(1, status.step + 1))


def test_resume_is_bitwise(straight, interrupted, data_root):
    """A run ended by the watchdog, restarted, stopped and resumed is bit-identical.

    Only its last start is validated, while the other run always is; validation changes nothing.
    """
    folder = interrupted.folder
    overrides = (f"data.root={data_root}", "train.steps=6", "checkpoint.every=3", *FOUR)
    begun = read_status(folder).step
    done = train(folder, *overrides, *HELDOUT, resume=Path("latest"))
    assert done.returncode == 0, done.stdout + done.stderr
    rest = read_metrics(straight)
    assert [line["step"] for line in rest] == [1, 2, 3, 4, 5, 6]
    for line, expected in zip(read_metrics(folder), rest, strict=True):
        for number in ("step", "loss", "grad_norm", "loss_tokens", "items", *OPTIMIZER):
            assert line[number] == expected[number], number
    resumed, first = (
        json.loads((run / "state_hashes.json").read_text()) for run in (folder, straight)
    )
    assert resumed == first
    assert first["tensors"] > 200
    assert any(name.startswith("optim.") for name in first["per_tensor"])
    status = read_status(folder)
    assert status is not None
    assert (status.state, status.step) == ("finished", 6)
    whole, part = (held_out(run) for run in (straight, folder))
    assert [line["step"] for line in whole] == [0, 4, 6]
    # A run without a validation starts with one, at the step where it resumes.
    assert [line["step"] for line in part] == sorted({begun, 6} | ({4} if begun < 4 else set()))
    assert [line for line in part if line["step"] in (4, 6)] == [
        line for line in whole if line["step"] >= begun
    ]
    for line in whole:  # the mean over the learned tokens, which are fewer
        tokens, sums = line["loss_tokens_by_source"], line["loss_by_source"]
        mean = sum(sums[name] * tokens[name] for name in sums) / sum(tokens.values())
        assert line["loss"] == pytest.approx(mean, rel=1e-9)
        assert sum(tokens.values()) == line["loss_tokens"] < line["text_tokens"]
    assert whole[0]["loss"] == pytest.approx(math.log(768), rel=0.05)  # nothing is learned yet


def count_tokens(lines: list[dict]) -> tuple[int, int]:
    """Return the text and vision tokens of steps."""
    return sum(line["text_tokens"] for line in lines), sum(line["vision_tokens"] for line in lines)


def held_out(folder: Path) -> list[dict]:
    """Return the lines of heldout.jsonl without their seconds."""
    lines = (folder / "heldout.jsonl").read_text().splitlines()
    return [{**json.loads(line), "seconds": None} for line in lines]


def test_eval_gives_the_last_validation(straight):
    """One process, with the checkpoint of four: the same samples give the same numbers."""
    wanted = held_out(straight)[-1]
    command = ["-m", "launch.cli", "eval", "--config", str(straight / "config.yaml")]
    done = fork_server.run([*command, "--checkpoint", str(straight), "--heldout", "--json"], 100.0)
    assert done.returncode == 0, done.stdout + done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    for name in ("step", "loss_tokens", "loss_tokens_by_source", "vision_tokens"):
        assert line[name] == wanted[name], name
    for name in ("loss", "loss_by_source", "loss_by_position"):
        assert line[name] == pytest.approx(wanted[name], rel=1e-5), name


def test_a_stage_that_keeps_all_and_changes_nothing_is_an_unbroken_run(
    straight, data_root, tmp_path
):
    start = f"train.start_from={straight / 'checkpoints' / 'step_00000003'}"
    settings = (f"data.root={data_root}", "train.steps=6", *FOUR, start)
    budget = "data.budget={vision: 100000}"
    done = train(tmp_path / "kept", *settings, "train.start_optimizer=keep", *HELDOUT, budget)
    assert done.returncode == 0, done.stdout + done.stderr
    used = "{:,} and {:,}".format(*count_tokens(read_metrics(straight)[:3]))
    told = "train.steps=6 ends the run before data.budget does, which ends after"
    assert re.search(rf"{told} .* \(those of earlier steps, {used}, among them\)", done.stderr)
    began = json.loads((tmp_path / "kept" / RUN_BEGAN_AT).read_text())
    assert began["step"] == 3
    uses = exposure(tmp_path / "kept", {"words": [f"w{n:04d}" for n in range(200)]}).uses
    assert {use.step for use in uses} == {4, 5, 6}
    # Validated at its first step, like any stage, and when due.
    assert [line["step"] for line in held_out(tmp_path / "kept")] == [3, 4, 6]
    assert held_out(tmp_path / "kept")[1:] == held_out(straight)[-2:]
    kept, first = (
        json.loads((run / "state_hashes.json").read_text()) for run in (tmp_path / "kept", straight)
    )
    assert kept == first
    assert [line["step"] for line in read_metrics(tmp_path / "kept")] == [4, 5, 6]


IN_TOKENS = "optim={schedule: [{tokens: 40960, lr: 1.0e-3, shape: linear}]}"
# Settings that cannot keep the optimizer of the checkpoint after three steps, and the messages.
NOT_KEPT = {
    "all done": (("train.steps=3",), "has done 3 steps"),
    "precision": (("train.dtype=bfloat16",), "written with train.dtype=float32"),
    "matrices": (("optim.matrices=adamw",), "first 'optim.exp_avg.*another optim.matrices"),
    "tokens a step": (("data.rows_per_step=16", IN_TOKENS), "had 512 tokens, .* have 2,048"),
    "another model": (("model.language.num_experts=4",), "does not fit the model"),
}


@pytest.mark.parametrize("name", NOT_KEPT)
def test_what_cannot_be_kept_is_named_from_headers(name, straight):
    overrides, told = NOT_KEPT[name]
    start = f"train.start_from={straight / 'checkpoints' / 'step_00000003'}"
    keep = (*SMALL, *ONE, start, "train.start_optimizer=keep", "train.steps=6")
    with pytest.raises(CheckpointError, match=rf"^train\.start_from: .*{told}") as error:
        open_initial_weights(load_config("tiny_cpu", (*keep, *overrides)))
    assert "\n" not in str(error.value)
    in_steps = ("data.rows_per_step=16", "layout.dp=2")  # the position in a schedule of steps stays
    assert open_initial_weights(load_config("tiny_cpu", (*keep, *in_steps))) is not None


def test_a_part_that_was_frozen_has_nothing_to_keep(straight):
    config = load_config("tiny_cpu", (*SMALL, *ONE))
    weights, _ = open_compatible(straight / "checkpoints" / "step_00000003", config.model)
    reader = weights.reader
    headers = {
        name: header
        for name, header in reader.headers.items()
        if not (name.startswith("optim.") and "mm_projector" in name)
    }
    training = {"stage": None, "frozen": ["projector"]}
    manifest = dataclasses.replace(reader.manifest, training=training)
    frozen = dataclasses.replace(reader, headers=headers, manifest=manifest)
    with pytest.raises(
        CheckpointError, match=r"mm_projector\S+: there train\.frozen=\[projector\]"
    ):
        check_kept(dataclasses.replace(weights, reader=frozen), config)


def test_an_earlier_version_s_place_in_a_schedule_of_tokens_is_not_known(straight):
    """Old manifests lack the tokens per step, which only a schedule in tokens needs."""
    steps = load_config("tiny_cpu", (*SMALL, *ONE, "train.steps=9"))
    weights, _ = open_compatible(straight / "checkpoints" / "step_00000003", steps.model)
    for training in (None, {"stage": None, "frozen": []}):
        manifest = dataclasses.replace(weights.reader.manifest, training=training)
        older = dataclasses.replace(weights.reader, manifest=manifest)
        check_kept(dataclasses.replace(weights, reader=older), steps)
        tokens = load_config("tiny_cpu", (*SMALL, *ONE, "train.steps=9", IN_TOKENS))
        with pytest.raises(CheckpointError, match="nobody knows how many tokens, .* 512 "):
            check_kept(dataclasses.replace(weights, reader=older), tokens)


def test_resume_in_another_layout_equals_to_rounding(straight, checkpoint, data_root, tmp_path):
    overrides = (f"data.root={data_root}", "train.steps=6", *ONE)
    done = train(tmp_path / "one", *overrides, resume=checkpoint)
    assert done.returncode == 0, done.stdout + done.stderr
    for line, expected in zip(read_metrics(tmp_path / "one"), read_metrics(straight)[3:]):
        assert line["loss_tokens"] == expected["loss_tokens"]
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert line["max_logits"] == pytest.approx(expected["max_logits"], rel=1e-4)
        assert line["update_rms"] == pytest.approx(expected["update_rms"], rel=1e-3)


def test_four_processes_one_and_four_again(straight, data_root, tmp_path):
    """One process loads and saves four processes' checkpoint, and four load it, bit for bit."""
    saved = open_place(straight / "checkpoints").checkpoint(6)
    sizes = {name[:10]: size for name, size in saved.files.items() if name != "index.json"}
    assert sorted(sizes) == [f"rank_0000{rank}" for rank in range(4)]
    assert max(sizes.values()) < 0.5 * sum(sizes.values())  # all ranks wrote a share
    whole = {name: saved.tensor(name) for name in saved.weight_map()}
    tensors = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    state = load(saved, tensors)
    config = load_config("tiny_cpu", (*SMALL, *ONE))
    alone = CheckpointSaver(open_place(tmp_path / "alone"), config, Alone())  # type: ignore[arg-type]
    alone.begin(tensors, state)
    uri = alone.finish()
    alone.close()
    assert len(open_place(tmp_path / "alone").checkpoint(6).files) == 2
    # No step is left to train, so the loaded state is hashed unchanged.
    assert uri == str(tmp_path / "alone" / "step_00000006")
    done = train(
        tmp_path / "four", f"data.root={data_root}", "train.steps=6", *FOUR,
        resume=tmp_path / "alone",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all 6 steps (train.steps) are done: nothing is trained" in done.stderr
    assert f"finished after step 6: {tmp_path}/four\n  checkpoint {uri}\n" in done.stdout
    assert f"  tensorboard --logdir {tmp_path}/four/tensorboard\n" in done.stdout
    again, first = (
        json.loads((run / "state_hashes.json").read_text()) for run in (tmp_path / "four", straight)
    )
    assert again == first


def test_lines_hold_the_optimizer_s_numbers(straight):
    lines = read_metrics(straight)
    assert all(line["newton_schulz_seconds"] > 0 for line in lines)
    assert all(len(line["max_logits"]) == 4 for line in lines)
    assert all(max(line["max_logits"]) == line["max_logit"] for line in lines)
    assert all(0.2 < line["orthogonality_error"] <= 1.001 for line in lines)
    first = lines[0]["update_rms"]
    groups = ("attention", "dense_mlp", "embedding", "experts", "head", "norms", "projector")
    assert sorted(first) == [*groups, "router", "shared_experts", "vision_tower"]
    for group in ("attention", "dense_mlp", "experts", "shared_experts"):  # only Muon
        assert 0.05 < first[group] < 0.21, group
    for group in ("head", "norms"):  # AdamW, whose first update has size one
        assert first[group] == pytest.approx(1.0, abs=0.01), group


def test_a_training_tells_programs_how_it_ended(straight):
    assert json.loads((straight / "told.json").read_text()) == {
        "run_dir": str(straight),
        "exit_code": 0,
        "state": "finished",
        "step": 6,
        "steps": 6,
        "reason": None,
        "checkpoint": str(straight / "checkpoints" / "step_00000006"),
    }


def test_run_folder_is_complete(straight):
    for name in (
        "config.yaml", "versions.json", "metrics.jsonl", "trace.json", "state_hashes.json",
        "logs/rank_0.log", "logs/rank_3.log", "checkpoints/step_00000003/manifest.json",
    ):  # fmt: skip
        assert (straight / name).is_file(), name
    phases = {
        event["name"] for event in json.loads((straight / "trace.json").read_text())["traceEvents"]
    }
    assert {"2 vision forward", "4 backbone", "6 vision backward", "7 update"} <= phases
    assert not list((straight / "checkpoints").glob("*.partial"))
    for one in json.loads((straight / "sources.json").read_text()):
        index = Path(one["root"]) / one["name"] / "index.parquet"
        assert hashlib.sha256(index.read_bytes()).hexdigest() == one["index_sha256"]
        manifest = json.loads(index.with_name("manifest.json").read_text())
        assert (one["content_hash"], one["asked"]) == (manifest["content_hash"], one["name"])


def _truncate(folder):
    file = max(folder.glob("*.safetensors"), key=lambda f: f.stat().st_size)
    file.write_bytes(file.read_bytes()[:-100])


def _flip_a_byte(folder):
    file = max(folder.glob("*.safetensors"), key=lambda f: f.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


BAD = [
    ("torn", lambda folder: (folder / "manifest.json").unlink(), (), "manifest.json"),
    ("truncated", _truncate, (), "expected"),
    ("one bit", _flip_a_byte, (), "sha256"),
    ("another model", lambda folder: None, ("model.language.num_experts=4",), "num_experts"),
    ("another dtype", lambda folder: None, ("train.dtype=bfloat16",), "train.dtype=float32"),
    ("another stage", lambda folder: None, ("train.stage=next",), "train.stage=null"),
    ("other data", lambda folder: None, ("data.seed=5",), "seed"),
]


@pytest.mark.parametrize(("name", "damage", "overrides", "told"), BAD, ids=[row[0] for row in BAD])
def test_bad_checkpoint_is_refused(name, damage, overrides, told, checkpoint, data_root, tmp_path):
    damage(checkpoint)
    folder = tmp_path / "refused"
    settings = (f"data.root={data_root}", "train.steps=6", *ONE, *overrides)
    done = train(folder, *settings, resume=checkpoint)
    assert done.returncode == 2, done.stdout + done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "metrics.jsonl").exists() or not read_metrics(folder)


@pytest.mark.parametrize("axes", [FOUR, ONE], ids=["by torchrun", "in this process"])
def test_a_folder_with_an_earlier_run_is_not_trained_into(axes, straight, data_root):
    lines = read_metrics(straight)
    done = train(straight, f"data.root={data_root}", "train.steps=2", *axes)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "holds an earlier run" in done.stderr
    assert read_metrics(straight) == lines


def test_a_run_starts_from_given_vision_weights(data_root, tmp_path):
    """The seed's own weights give the same run, others another run; a resume ignores them."""
    encoder = VisionEncoder(load_config("tiny_cpu", SMALL).model.vision)
    runs = {}
    for seed in (0, 1):
        initialise(encoder, seed)
        save(encoder, tmp_path / f"{seed}.safetensors")
    for name, start in (("seed", "null"), ("same", tmp_path / "0.safetensors"),
                        ("other", tmp_path / "1.safetensors")):  # fmt: skip
        ends = ["train.steps=2"]
        if name == "same":  # ends by its budget: the second step exceeds it by one token
            first = read_metrics(tmp_path / "seed")[0]
            ends = ["train.steps=9", f"data.budget={{text: {first['text_tokens'] + 1}}}"]
        done = train(tmp_path / name, f"data.root={data_root}", *ends, *layout(),
                     "train.seed=0", "checkpoint.every=1", "train.rows_per_microbatch=2",
                     f"train.vision_weights={start}")  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("data.budget ends after 2 steps" in done.stderr) == (name == "same")
        assert (tmp_path / name / "checkpoints" / "step_00000002" / "manifest.json").is_file()
        status = read_status(tmp_path / name)
        assert status is not None
        assert (status.state, status.step) == ("finished", 2)
        runs[name] = [line["loss"] for line in read_metrics(tmp_path / name)]
    assert runs["same"] == runs["seed"]
    assert runs["other"][0] != runs["seed"][0]
    done = train(tmp_path / "resumed", f"data.root={data_root}", "train.steps=2", *layout(),
                 "train.seed=0", "train.rows_per_microbatch=2",
                 f"train.vision_weights={tmp_path / 'gone.safetensors'}",
                 resume=tmp_path / "other" / "checkpoints" / "step_00000001")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line["loss"] for line in read_metrics(tmp_path / "resumed")] == runs["other"][1:]
