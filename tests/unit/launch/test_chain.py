"""Tests of `kimi-pretrain chain`: its file, the checks before it starts, and its SLURM jobs."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from typer.testing import CliRunner

from data_pipeline.plan.budget import budget_end
from data_pipeline.plan.planner import Planner
from kimi_pretrain.checkpoint.errors import CheckpointError
from kimi_pretrain.checkpoint.manifest import Fingerprint, RunState, manifest_of, step_name
from kimi_pretrain.config import dump_config, load_config
from kimi_pretrain.reliability import preflight, run_lock
from kimi_pretrain.reliability.preflight import check_start
from kimi_pretrain.reliability.run_history import BEGAN
from kimi_pretrain.weights.initial_weights import check_initial_weights, open_initial_weights
from kimi_pretrain.weights.planned import planned_weights
from launch.chain.run import run_chain
from launch.chain.stages_file import read_stages
from launch.cli.main import app
from launch.slurm import queue as slurm_queue
from moonvit3d.layouts import released_shapes
from tests.dist.jobs import SMALL, layout
from tests.unit.launch.test_submit_command import sbatch  # noqa: F401

OTHER_WIDTH = {  # of the decoder
    "model.vision.out_width": 32, "model.language.hidden_size": 32, "model.language.q_lora_rank": 8
}  # fmt: skip


def small() -> dict:
    """Return the small configuration as a mapping of config keys to values."""
    pairs = (text.partition("=") for text in (*SMALL, *layout()))
    return {key: yaml.safe_load(value) for key, _, value in pairs}


def stages(tmp_path: Path, *changes: dict) -> Path:
    """Write a chain of the stages captions, projector, joint and long, with changes per stage."""
    chain = {
        "run_dir": str(tmp_path / "runs"),
        "slurm": {"gpus_per_node": 0, "tasks_per_node": 1, "partition": "cpu"},
        "set": {**small(), "checkpoint.every": 2},
        "stages": [
            {"stage": "captions", "set": {**OTHER_WIDTH, "train.frozen": ["language_model"]}},
            {"stage": "projector", "take": {"vision": "captions", "part": "tower"},
             "set": {"train.frozen": ["vision_tower", "language_model"]}},
            {"stage": "joint", "take": {"weights": "projector"}, "slurm": {"time": "2-0"}},
            {"stage": "long", "take": {"weights": "joint", "optimizer": "keep"},
             "set": {"train.steps": 500}},
        ],
    }  # fmt: skip
    for stage, change in zip(chain["stages"], (*changes, {}, {}, {}, {})):
        stage |= {"config": "tiny_cpu", **change}
    tmp_path.mkdir(exist_ok=True)
    file = tmp_path / "stages.yaml"
    file.write_text(yaml.safe_dump(chain, sort_keys=False))
    return file


def run(file: Path, *arguments: str):
    return CliRunner().invoke(app, ["chain", str(file), *arguments])


def refused(file: Path, *arguments: str) -> str:
    result = run(file, "--dry-run", *arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    return line


def test_what_a_stage_takes_becomes_keys_of_its_configuration(tmp_path):
    file = stages(tmp_path)
    captions, projector, joint, long = read_stages(file, ["train.threads=3"])
    runs = tmp_path / "runs"
    assert [one.config.train.stage for one in (captions, long)] == ["captions", "long"]
    assert (captions.config.train.start_from, captions.config.train.vision_weights) == (None, None)
    train = projector.config.train
    assert (train.vision_weights, train.vision_part) == (str(runs / "captions"), "tower")
    assert train.frozen == ["vision_tower", "language_model"]
    assert joint.config.train.start_from == str(runs / "projector")
    assert long.config.train.start_optimizer == "keep"
    assert {one.config.train.threads for one in (captions, long)} == {3}
    assert joint.folder == runs / "joint"
    assert (joint.slurm.time, joint.slurm.partition, captions.slurm.time) == (
        "2-0", "cpu", "1-00:00:00",
    )  # fmt: skip
    assert read_stages(file, (), Path("/elsewhere"))[0].folder == Path("/elsewhere/captions")


def test_a_chain_of_which_nothing_is_there_is_checked_by_its_configurations(tmp_path):
    result = run(stages(tmp_path), "--dry-run")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == f"4 stages in {tmp_path}/runs"
    assert f"stage 1 of 4 captions: {tmp_path}/runs/captions" in lines
    assert "  encoder from stage captions" in lines
    assert "  the optimizer goes on" in lines
    assert lines.count("  trained: projector") == 1
    assert not (tmp_path / "runs").exists()


def test_what_would_not_fit_is_told_before_the_first_stage_runs(tmp_path):
    take = {"vision": "captions"}
    told = refused(stages(tmp_path, {}, {"take": {**take, "part": "both"}}))
    assert told.startswith("error: stage projector: train.vision_weights: ")
    assert "mm_projector.proj.2.weight has shape [32, 128]: want [64, 128]" in told
    narrow = {"set": {**OTHER_WIDTH, "model.vision.width": 16}}
    told = refused(stages(tmp_path, narrow, {"take": {**take, "part": "tower"}}))
    assert "stage projector: train.vision_weights: " in told
    assert "has shape [16" in told
    told = refused(stages(tmp_path, {}, {}, {}, {"set": {**OTHER_WIDTH, "train.steps": 500}}))
    assert "stage long: train.start_from: " in told
    assert "does not fit the model" in told


def test_an_optimizer_that_could_not_go_on_is_told_too(tmp_path):
    frozen = {"set": {"train.frozen": ["vision_tower"]}}
    told = refused(stages(tmp_path, {}, {}, frozen))
    assert "stage long: train.start_from: " in told
    assert "of the optimizer's state are missing" in told
    assert "there train.frozen=[vision_tower]; set train.start_optimizer=fresh" in told
    told = refused(stages(tmp_path, {}, {}, {}, {"set": {"train.steps": 220}}))
    assert "has done 220 steps" in told
    # A budget may end the stage earlier; its last step is unknown until then.
    assert "has done" not in refused(
        stages(tmp_path, {}, {}, {"set": {"data.budget": {"text": 9}, "train.dtype": "bfloat16"}})
    )


@pytest.mark.parametrize(
    ("number", "change", "told"),
    [
        (1, {"stage": "captions"}, "stage 'captions' stands twice: both would have one run folder"),
        (1, {"stage": "../a"}, "stage '../a': expected a name for its folder"),
        (1, {"take": {"vision": "joint"}}, "take.vision=joint is no earlier stage; these are capt"),
        (1, {"take": {"weights": "capitons"}},
         "take.weights=capitons is neither an earlier stage (captions) nor a file or folder"),
        (1, {"take": {"weigths": "a"}}, "unknown key stages.1.take.weigths; did you mean stages.1"),
        (1, {"take": {"part": "all"}}, "stages.1.take.part"),
        (1, {"take": {"part": "tower"}}, "train.vision_part=tower without train.vision_weights"),
        (1, {"config": "tiny_gpu"}, "stage projector: no configuration file tiny_gpu"),
        (1, {"set": {"train.stepz": 3}}, "stage projector: "),
        (1, {"set": {"train.start_from": "a"}}, "train.start_from is not for `set`: write take.w"),
        (1, {"set": {"train.stage": "a"}}, "train.stage is not for `set`: write stage for"),
        (0, {"set": {**OTHER_WIDTH, "checkpoint.every": None}},
         "stage captions: checkpoint.every is null, so it would end without the checkpoint that "
         "stage projector takes over"),
        (3, {"set": {"model.language.yarn": {"factor": 2.0, "original_max_position": 32}}},
         "data.seq_len=128 is more than the 64 positions of model.language.yarn"),
        (0, {"slurm": {"partitoin": "x"}}, "did you mean stages.0.slurm.partition?"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_line(tmp_path, number, change, told):
    changes = [{}, {}, {}, {}]
    changes[number] = change
    line = refused(stages(tmp_path, *changes))
    assert line.startswith(f"error: {tmp_path}/stages.yaml: ")
    assert told in line


def test_two_stages_in_one_place_of_checkpoints_are_refused(tmp_path):
    places = ("runs/x", "./runs/x/")
    changes = [{"set": {**OTHER_WIDTH, "checkpoint.place": places[0]}},
               {"set": {"checkpoint.place": places[1]}}]  # fmt: skip
    assert "would both save to ./runs/x/; give each a" in refused(stages(tmp_path, *changes))
    told = refused(stages(tmp_path), "checkpoint.place=/shared/checkpoints")
    assert "stages captions and projector would both save to /shared/checkpoints" in told
    other = {"set": {"checkpoint.place": str(tmp_path / "runs" / "captions" / "checkpoints")}}
    told = refused(stages(tmp_path, {}, other))
    assert "stages captions and projector would both save to " in told


def test_two_stages_in_one_folder_are_refused(tmp_path):
    runs = tmp_path / "runs"
    (runs / "captions").mkdir(parents=True)
    (runs / "projector").symlink_to("captions")
    told = refused(stages(tmp_path))
    assert f"captions and projector would both save to {runs}/projector/checkpoints" in told


def test_a_key_stands_once(tmp_path):
    file = stages(tmp_path)
    file.write_text(f"{file.read_text()}stages: []\n")
    assert "key 'stages' stands twice" in refused(file)


def test_overrides_of_all_stages_are_no_hand_over(tmp_path):
    told = refused(stages(tmp_path), "train.start_from=/a")
    assert "train.start_from is not for `set`: write take.weights" in told


def test_a_tower_alone_has_no_projector_to_take(tmp_path):

    (projector,) = [one for one in read_stages(stages(tmp_path)) if one.number == 2]
    shapes = released_shapes(projector.config.model.vision)
    tensors = {n: torch.zeros(s) for n, s in shapes.items() if n.startswith("vision_tower.")}
    save_file(tensors, tmp_path / "tower.safetensors")
    take = {"vision": str(tmp_path / "tower.safetensors"), "part": "both"}
    told = refused(stages(tmp_path, {}, {"take": take}))
    assert "no tensor of mm_projector: part='vision_tower' takes the vision_tower alone" in told


def ended(
    file: Path,
    number: int,
    state: str = "finished",
    step: int = 220,
    saved: int = 220,
    loader: dict | None = None,
):
    """Write the folder that a stage's run leaves; its checkpoint holds no tensors."""
    stage = read_stages(file)[number]
    stage.folder.mkdir(parents=True, exist_ok=True)

    (stage.folder / "config.yaml").write_text(dump_config(stage.config))
    status = {"state": state, "step": step, "steps": 220}
    (stage.folder / "status.json").write_text(json.dumps(status))
    checkpoint = stage.folder / "checkpoints" / step_name(saved)
    checkpoint.mkdir(parents=True, exist_ok=True)
    index = b'{"weight_map": {}}'

    files = {"index.json": Fingerprint(len(index), hashlib.sha256(index).hexdigest())}
    (checkpoint / "index.json").write_bytes(index)
    manifest = manifest_of(stage.config, RunState(saved, saved, loader or {}), files, {})
    (checkpoint / "manifest.json").write_text(manifest.text())
    began = {
        key: {
            "checkpoint": f"{stage.folder.parent}/{name}/checkpoints/step_00000220",
            "manifest_sha256": sha256_of(stage.folder.parent / name),
        }
        for key, name in stage.sources.items()
    }
    (stage.folder / BEGAN).write_text(json.dumps(began))
    return stage


def sha256_of(folder: Path) -> str:
    files = sorted(folder.glob("checkpoints/step_*/manifest.json"))
    return hashlib.sha256(files[-1].read_bytes()).hexdigest() if files else ""


def test_a_finished_stage_is_that_of_the_file(tmp_path):
    file = stages(tmp_path)
    ended(file, 0)
    told = refused(file, "train.threads=7", "data.seed=4")
    assert told.startswith("error: stage captions: it has finished in ")
    assert "with data.seed=0 (now 4); train.threads=1 (now 7): what follows would not be" in told
    ended(file, 0, saved=210)
    ended(file, 0, step=230)
    told = refused(file)
    assert "stage captions: it finished after step 230, but its newest checkpoint is " in told
    assert told.endswith("step_00000220: the last one is gone")


def test_the_folder_of_a_run_that_has_not_ended_is_refused(tmp_path):
    file = stages(tmp_path)
    other = ended(file, 0, state="stopped", step=40).folder.rename(tmp_path / "elsewhere")
    take = {"vision": str(other), "part": "tower"}
    told = refused(stages(tmp_path, {}, {"take": take}))
    assert f"stage projector: train.vision_weights: the run of {other} has not finished" in told
    assert "(stopped after step 40 of 220); end it first, or name the checkpoint" in told
    keys = [*SMALL, "train.vision_part=tower"]
    for named in (other, other / "checkpoints"):  # `train` and SLURM jobs refuse it, too
        config = load_config("tiny_cpu", [*keys, f"train.vision_weights={named}"])
        with pytest.raises(CheckpointError, match="^train.vision_weights: the run of .* not fini"):
            open_initial_weights(config)
        config = load_config("tiny_cpu", [*SMALL, f"train.start_from={named}"])
        with pytest.raises(CheckpointError, match=f"^train.start_from: the run of {other} has not"):
            open_initial_weights(config)
    one = f"train.vision_weights={other}/checkpoints/{step_name(220)}"
    # A checkpoint that is given by its own path is opened.
    with pytest.raises(CheckpointError, match="no tensor of a known layout"):
        open_initial_weights(load_config("tiny_cpu", [*SMALL, one]))


def test_the_folder_of_a_later_stage_is_looked_at_before_the_first_runs(tmp_path):
    file = stages(tmp_path)
    (tmp_path / "runs" / "long").mkdir(parents=True)
    (tmp_path / "runs" / "long" / "metrics.jsonl").touch()
    assert "stage long: " in (told := refused(file))
    assert "holds an earlier run" in told
    (tmp_path / "runs" / "joint").touch()
    assert "/runs/joint is a file; expected a folder" in refused(file)


def test_a_stage_that_has_saved_needs_no_longer_what_it_began_from(tmp_path):
    file = stages(tmp_path)
    captions, stage = ended(file, 0), ended(file, 1, state="running", step=3, saved=2)
    saved = stage.folder / "checkpoints"
    saved.rename(tmp_path / "saved")
    shutil.rmtree(captions.folder / "checkpoints")
    assert "stage captions: " in refused(file)
    (tmp_path / "saved").rename(saved)
    result = run(file, "--dry-run")
    assert result.exit_code == 0, result.output
    assert f"projector: running after step 3, goes on: {stage.folder}" in result.stdout


def test_a_stage_is_not_run_again_below_one_that_had_it(tmp_path):
    file = stages(tmp_path)
    captions, _ = ended(file, 0), ended(file, 1)
    shutil.rmtree(captions.folder)
    told = refused(file)
    assert "stage captions: it has not finished, but stage projector, which takes from it" in told
    shutil.rmtree(tmp_path / "runs" / "projector")
    assert run(file, "--dry-run").exit_code == 0


@pytest.mark.parametrize("state", ["finished", "stopped"])
def test_a_source_that_was_gone_on_with_by_hand_is_refused(tmp_path, state):
    file = stages(tmp_path)
    captions, projector = ended(file, 0), ended(file, 1, state=state)
    if state == "finished":  # later stages have finished, so they do not open its checkpoint
        ended(file, 2)
        ended(file, 3)
    assert run(file, "--dry-run").exit_code == 0
    ended(file, 0, step=230, saved=230)
    told = refused(file)
    assert f"stage captions: its last checkpoint is {captions.folder}/checkpoints/step_0000" in told
    assert "step_00000230, but stage projector, which takes from it, began from " in told
    assert f"step_00000220 as it was then; remove {projector.folder}, too" in told
    shutil.rmtree(captions.folder / "checkpoints")  # a user frees disk space
    assert run(file, "--dry-run").exit_code == 0


def test_what_began_elsewhere_is_no_run_of_this_chain(tmp_path):
    file = stages(tmp_path)
    ended(file, 0)
    projector = ended(file, 1)
    (projector.folder / BEGAN).write_text("{}")
    assert "which takes from it, began from elsewhere as it was then" in refused(file)
    (projector.folder / BEGAN).write_text("[")
    assert f"{projector.folder}/{BEGAN}: expected the checkpoints that a run" in refused(file)


def test_a_begun_stage_keeps_what_it_took_over(tmp_path):
    ended(stages(tmp_path), 0)
    stage = ended(stages(tmp_path), 1, state="stopped", step=40, saved=40)
    told = refused(stages(tmp_path, {}, {"take": {"vision": "captions", "part": "both"}}))
    assert f"stage projector: it has begun in {stage.folder} with train.vision_part='tower' (" in (
        told
    )
    slower = {"train.frozen": ["vision_tower", "language_model"], "optim.lr": 0.5}
    result = run(stages(tmp_path, {}, {"set": slower}), "--dry-run")
    assert result.exit_code == 0, result.output
    assert "set otherwise now: optim.lr=" in result.stdout


def test_a_lost_status_is_no_beginning(tmp_path):
    file = stages(tmp_path)
    captions = ended(file, 0)
    (captions.folder / "metrics.jsonl").touch()
    (captions.folder / "status.json").unlink()
    result = run(file, "--dry-run")
    assert result.exit_code == 0, result.output
    assert "captions: stopped after step 220, goes on: " in result.stdout


def test_what_take_leaves_out_is_of_the_configuration(tmp_path):
    own = tmp_path / "own.yaml"
    file = stages(tmp_path)
    long = dump_config(read_stages(file)[3].config.replace(checkpoint={"every": 2}))
    own.write_text(long)
    change = {"config": str(own), "take": {"weights": "joint"}}
    assert read_stages(stages(tmp_path, {}, {}, {}, change))[3].config.train.start_optimizer == (
        "keep"
    )
    change["take"]["optimizer"] = "fresh"
    assert read_stages(stages(tmp_path, {}, {}, {}, change))[3].config.train.start_optimizer == (
        "fresh"
    )


@pytest.mark.parametrize("name", ["tiny", "kimi_k25"])
def test_shipped_chains_fit(name, tmp_path):
    """Each stage of a shipped chain can load the weights that the stage before it will write."""
    chain = read_stages(name, (), tmp_path)
    planned = {str(one.folder): planned_weights(one.config, str(one.folder)) for one in chain}
    for stage in chain:
        train = stage.config.train
        known = {key: getattr(train, key) for key in ("start_from", "vision_weights")}
        elsewhere = {key: None for key, uri in known.items() if uri not in planned}
        part = None if "vision_weights" in elsewhere else train.vision_part
        config = stage.config.replace(train=train.replace(**elsewhere, vision_part=part))
        check_initial_weights(config, planned)
        if part == "tower":
            whole = config.replace(train=config.train.replace(vision_part="both"))
            with pytest.raises(CheckpointError, match="mm_projector.*train.vision_part=tower"):
                check_initial_weights(whole, planned)


def test_a_status_that_is_none_is_told(tmp_path):
    file = stages(tmp_path)
    ended(file, 0)
    (tmp_path / "runs" / "captions" / "status.json").write_text('{"sta')
    assert "expected how a run stands" in refused(file)


@pytest.fixture
def queue(sbatch, monkeypatch):  # noqa: F811
    """Stand in for a SLURM queue: job numbers start at 41, and job states come from `states`."""
    numbers = iter(range(41, 99))
    monkeypatch.setattr(slurm_queue, "submit", lambda script: next(numbers))
    return sbatch


def test_stages_are_jobs_one_after_the_other(queue):
    file = stages(queue)
    ended(file, 0)
    take = {"vision": str(queue / "none"), "part": "tower"}
    broken = run(stages(queue, {}, {"take": take}), "--submit", "--unchecked")
    assert broken.exit_code == 2  # no job was submitted
    first = {"take": None}
    file = stages(queue, {}, first)
    result = run(file, "--submit", "--unchecked")
    assert result.exit_code == 0, result.output
    runs = queue / "runs"
    assert result.stdout.splitlines() == [
        f"4 stages in {runs}",
        f"stage 1 of 4 captions: finished after step 220: {runs}/captions",
        *(
            f"stage {n} of 4 {name}: job {39 + n}; its log: {runs}/{name}/slurm-{39 + n}.out"
            for n, name in ((2, "projector"), (3, "joint"), (4, "long"))
        ),
    ]
    scripts = {name: (runs / name / "job.sbatch").read_text() for name in ("projector", "joint")}
    assert "dependency" not in scripts["projector"]
    assert "#SBATCH --dependency=afterok:41\n" in scripts["joint"]
    assert "#SBATCH --kill-on-invalid-dep=yes\n" in scripts["joint"]
    assert "#SBATCH --time=2-0\n" in scripts["joint"]
    kept = load_config(runs / "joint" / "job.yaml").train
    assert (kept.start_from, kept.stage) == (str(runs / "projector"), "joint")
    (queue / "states").write_text("JobId=41 JobState=PENDING\n")
    again = run(file, "--submit", "--unchecked")
    assert again.exit_code == 0, again.output
    assert f"stage 2 of 4 projector: job 41 is in the queue: {runs}/projector" in again.stdout
    slower = {"set": {"optim.lr": 0.5}}
    changed = run(stages(queue, {}, first, slower), "--submit", "--unchecked")
    assert "stage joint: its job 42 is in the queue with optim.lr=" in changed.stderr
    assert "scancel 42 first" in changed.stderr
    file = stages(queue, {}, first)
    (queue / "states").write_text("JobId=41 JobState=CANCELLED\nJobId=42 JobState=PENDING\n")
    again = run(file, "--submit", "--unchecked")
    assert again.exit_code == 2
    assert "stage joint: its job 42 is in the queue, after a job of stage projector" in again.stderr
    never = "JobId=42 JobState=PENDING Reason=DependencyNeverSatisfied\n"
    (queue / "states").write_text(f"JobId=41 JobState=PENDING\n{never}")
    again = run(file, "--submit", "--unchecked")
    assert again.exit_code == 0, again.output
    assert "stage 2 of 4 projector: job 41 is in the queue" in again.stdout
    assert "stage 3 of 4 joint: job 44; " in again.stdout
    scripts = {name: (runs / name / "job.sbatch").read_text() for name in ("joint", "long")}
    assert "#SBATCH --dependency=afterok:41\n" in scripts["joint"]
    assert "#SBATCH --dependency=afterok:44\n" in scripts["long"]
    (queue / "states").write_text("JobId=41 JobState=CANCELLED\n")
    again = run(file, "--submit", "--unchecked")
    assert f"stage 2 of 4 projector: job 46; its log: {runs}/projector/slurm-46.out" in again.stdout


def test_nothing_is_submitted_where_a_later_job_could_not_be(queue):
    long = {"slurm": {"gpus_per_node": 8, "tasks_per_node": 3}}
    result = run(stages(queue, {}, {}, {}, long), "--submit", "--unchecked")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: stage long: ")
    assert not (queue / "runs").exists()


def test_a_folder_that_a_run_holds_is_not_submitted(queue):
    file = stages(queue)
    folder = queue / "runs" / "captions"
    folder.mkdir(parents=True)
    lock = run_lock.take(folder)
    try:
        result = run(file, "--submit", "--unchecked")
    finally:
        lock.release()
    assert result.exit_code == 2
    assert "error: stage captions: " in result.stderr


def data_keys(data_root: Path, **budget: int) -> list[str]:
    return [f"data.root={data_root}", "data.pack_window=16", f"data.budget={json.dumps(budget)}"]


def test_one_budget_for_a_stage_and_the_one_that_keeps_is_refused(tmp_path, data_root):
    """The budget covers the tokens of both stages, unless the first stage's steps run out first."""
    keys = data_keys(data_root, text=9000)
    told = refused(stages(tmp_path), *keys)
    assert told.startswith(f"error: stage long: train.start_from: {tmp_path}/runs/joint: data.budg")
    assert ".text=9,000 tokens are used up (" in told
    assert "by the stages before, whose data go on with train.start_optimizer=keep" in told
    assert "used up" in refused(stages(tmp_path), *data_keys(data_root, text=45_000))
    result = run(stages(tmp_path, {}, {}, {"set": {"train.steps": 2}}), "--dry-run", *keys)
    assert result.exit_code == 0, result.output
    more = {"set": {"train.steps": 500, "data.budget": {"text": 99_000}}}
    result = run(stages(tmp_path, {}, {}, {"set": {"data.budget": {"text": 9000}}}, more),
                 "--dry-run", *keys[:2])  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "stage 4 of 4 long: data.budget ends after about " in result.stdout
    fewer = {"set": {"train.steps": 3, "data.budget": {"text": 99_000}}}
    told = refused(
        stages(tmp_path, {}, {}, {"set": {"data.budget": {"text": 9000}}}, fewer), *keys[:2]
    )
    assert "train.steps=3 leave nothing to train after the " in told


def test_a_schedule_that_cannot_go_on_is_told_before_the_first_stage(tmp_path, data_root):
    keys = data_keys(data_root, text=10**9)[:2]
    shares = {"sources": {"words": 1.0, "pictures": 1.0}, "vision_token_ratio": 0.1}
    later = [{"after_tokens": 4000, **shares}]
    told = refused(stages(tmp_path, {}, {}, {"set": {"data.schedule": later}}), *keys)
    assert told.startswith(f"error: stage long: train.start_from: {tmp_path}/runs/joint: state fie")
    assert "give its data.schedule here, too, and let other shares begin later" in told
    long = {"set": {"train.steps": 500, "data.schedule": later}}
    result = run(
        stages(tmp_path, {}, {}, {"set": {"data.schedule": later}}, long), "--dry-run", *keys
    )
    assert result.exit_code == 0, result.output


def test_notices_of_a_begun_stage_count_what_it_has_used(tmp_path, data_root):
    keys = data_keys(data_root, text=9000)
    file = stages(tmp_path, {}, {}, {"set": {"train.steps": 2}})
    (captions, *_) = read_stages(file, keys)
    planner = Planner(check_start(captions.config).indices, captions.config.data)
    state = planner.state_at(2)
    folder = ended(file, 0, "stopped", 2, 2, state).folder
    (folder / "config.yaml").write_text(dump_config(captions.config))
    result = run(file, "--dry-run", *keys)
    assert result.exit_code == 0, result.output
    ends = budget_end(planner)
    text, vision = state["tokens"]
    assert f"captions: data.budget ends after {ends.step} steps" in result.stdout
    assert f"those of earlier steps, {text:,} and {vision:,}, among them" in result.stdout
    assert result.stdout.count("those of earlier steps") == 2  # for long, which keeps joint's data
    assert "stage captions: state field 'seed' is 0" in refused(file, *keys, "data.seed=1")


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"data.vision_token_ratio": 0.97}, "stage joint: vision_token_ratio is 0.97, but the"),
        ({"data.sources": {"words": {"share": 1, "min_tokens": 9999}},
          "data.vision_token_ratio": None},
         "stage joint: data.sources.words: none of its 200 samples is chosen by min_tokens=9999"),
    ],
)  # fmt: skip
def test_what_a_later_stage_s_sources_do_not_hold_is_told_at_once(tmp_path, data_root, keys, told):
    line = refused(stages(tmp_path, {}, {}, {"set": keys}), f"data.root={data_root}")
    assert told in line


def test_settings_that_differ_from_those_of_the_weights_are_shown(tmp_path):
    yarn = {"factor": 4.0, "original_max_position": 64}
    long = {"set": {"train.steps": 500, "model.language.yarn": yarn}}
    result = run(stages(tmp_path, {}, {}, {}, long), "--dry-run")
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.stdout.splitlines() if "set otherwise than there" in line]
    assert "model.language.yarn was None, here it is {'factor': 4.0" in line


def test_another_function_of_the_weights_is_not_kept_and_a_jump_of_the_rate_is_told(tmp_path):
    def with_long(**settings) -> Path:
        long = {"train.steps": 500, **{key.replace("__", "."): v for key, v in settings.items()}}
        return stages(tmp_path, {}, {}, {}, {"set": long})

    for key, value in (
        ("experts_per_token", 1), ("rope_theta", 1e6), ("routed_scaling_factor", 1.5)
    ):  # fmt: skip
        told = refused(with_long(**{f"model__language__{key}": value}))
        assert told.startswith("error: stage long: train.start_from: ")
        assert f"model.language.{key} was " in told
        assert "set it as it was, or train.start_optimizer=fresh" in told
    yarn = {"factor": 4.0, "original_max_position": 64}
    file = with_long(optim__min_lr=1e-3, optim__weight_decay=0.5, model__language__yarn=yarn)
    result = run(file, "--dry-run")
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if "set otherwise than there" in line]
    assert [line.partition("there: ")[2] for line in lines[1:]] == [
        "learning rate 0.0003 in its last update, 0.001 in the first one here",
        "optim.weight_decay was 0.1, here it is 0.5",
    ]
    assert "set otherwise" not in run(with_long(), "--dry-run").stdout


def test_a_begun_stage_whose_checkpoint_is_gone_is_refused(tmp_path):
    file = stages(tmp_path)
    stage = ended(file, 0, state="stopped", step=40, saved=40)
    saved = stage.folder / "checkpoints" / step_name(40)
    status = {"state": "stopped", "step": 40, "steps": 220, "checkpoint": str(saved)}
    (stage.folder / "status.json").write_text(json.dumps(status))
    assert run(file, "--dry-run").exit_code == 0
    shutil.rmtree(saved)
    told = refused(file)
    assert told.startswith("error: stage captions: --resume latest: there is no checkpoint in ")
    assert f"but {stage.folder}/status.json names {saved}" in told


def test_memory_is_checked_where_data_are_elsewhere(tmp_path):
    elsewhere = ("data.root=s3://bucket/none", "train.memory_limit_gib=0.001")
    told = refused(stages(tmp_path), *elsewhere)
    assert told.startswith("error: stage captions: ")
    assert "train.memory_limit_gib=0.001" in told


def test_attention_that_cannot_run_here_is_told_of_a_later_stage(tmp_path, monkeypatch):
    file = stages(tmp_path, {}, {}, {}, {"set": {"train.steps": 500, "train.attention": "flex"}})
    monkeypatch.setattr(preflight, "check_start", lambda *_, **__: preflight.Checked(None, [], []))
    with pytest.raises(ValueError, match="stage long: train.attention=flex"):
        run_chain(read_stages(file))


def test_more_ranks_than_gpus_are_told_of_a_later_stage(tmp_path, monkeypatch):
    file = stages(tmp_path, {}, {}, {}, {"set": {"train.steps": 500, "layout.dp": 2}})
    monkeypatch.setattr(preflight, "check_start", lambda *_, **__: preflight.Checked(None, [], []))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="^stage long: the layout has 2 processes .* has 1 GPUs"):
        run_chain(read_stages(file))


def test_scripts_are_shown_without_slurm(tmp_path):
    result = run(stages(tmp_path), "--submit", "--dry-run")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("#!/bin/bash") == 4
    assert not (tmp_path / "runs").exists()


def test_a_chain_is_not_for_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert "run it outside torchrun and srun" in refused(stages(tmp_path))
