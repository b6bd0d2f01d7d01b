"""Tests of the command line: help, dry runs, and one-line errors."""

import subprocess
import sys
from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from launch.cli.main import app
from launch.local.user_errors import user_message

runner = CliRunner()


def test_help_loads_nothing_heavy():
    code = """
import sys
from typer.testing import CliRunner
from launch.cli.main import app
assert CliRunner().invoke(app, ["--help"]).exit_code == 0
heavy = {"torch", "numpy", "boto3", "megatron", "matplotlib"} & set(sys.modules)
sys.exit(", ".join(sorted(heavy)) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def one_line_error(arguments: list[str]) -> str:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    return line


def test_unknown_key_names_its_path_and_the_nearest():
    line = one_line_error(["train", "--config", "tiny_cpu", "optim.learning=1"])
    assert "optim.learning" in line
    line = one_line_error(["submit", "--config", "tiny_cpu", "train.stepz=1"])
    assert "train.stepz" in line
    assert "train.steps" in line


def test_missing_config_file():
    assert "no_such.yaml" in one_line_error(["train", "--config", "no_such.yaml"])


def test_processes_that_do_not_fit_the_layout():
    base = ["train", "--config", "tiny_cpu"]
    assert "--nproc 3" in one_line_error([*base, "--nproc", "3"])
    assert "do not divide over 3 nodes" in one_line_error([*base, "--nnodes", "3"])
    assert "--rendezvous" in one_line_error([*base, "--nnodes", "2"])


@pytest.mark.parametrize("run_dir", ["s3://bucket/run", "s3:/bucket/run", "gs:x", "file:///x"])
@pytest.mark.parametrize("command", ["train", "submit", "demo", "verify dep"])
def test_a_run_folder_in_a_store_is_refused(command, run_dir, tmp_path, monkeypatch):
    """A URI as run folder would otherwise become a local folder of that name."""
    monkeypatch.chdir(tmp_path)
    option = "--keep" if command.startswith("verify") else "--run-dir"
    line = one_line_error([*command.split(), "--config", "tiny_cpu", option, run_dir])
    assert f"{option} {run_dir.replace('//', '/').replace('//', '/')}: expected a folder" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["data.root", "data.tokenizer", "checkpoint.place"])
def test_a_place_that_is_misspelt_is_refused_with_the_configuration(key):
    line = one_line_error(["train", "--config", "tiny_cpu", "--dry-run", f"{key}=s3:/bucket/x"])
    assert "s3:/bucket/x: expected s3://bucket/prefix" in line
    assert key.rpartition(".")[2] in line


def test_a_place_to_write_to_that_is_misspelt_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a text")
    ingest = ["ingest", "--name", "a", "--category", "text", "--tokenizer", "a.tiktoken"]
    for command in (ingest, ["tokenizer"]):
        line = one_line_error(["data", *command, "texts", "--to", "s3:/corpus"])
        assert "s3:/corpus: expected s3://bucket/prefix" in line
    assert [file.name for file in tmp_path.iterdir()] == ["texts"]


def test_versions_are_told_at_once():
    code = """
import sys
from typer.testing import CliRunner
from launch.cli.main import app
print(CliRunner().invoke(app, ["--version"]).stdout)
sys.exit(", ".join(sorted({"torch", "megatron", "numpy", "boto3"} & set(sys.modules))) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    import torch

    assert done.stdout.split() == [
        *("kimi-pretrain", version("kimi-pretrain"), "torch", torch.__version__),
        *("megatron-core", version("megatron-core"), "python", sys.version.split()[0]),
    ]


@pytest.mark.parametrize(("option", "code"), [("--version", 0), ("--no-such-option", 2)])
@pytest.mark.parametrize("engine", [True, False])
def test_what_is_left_of_process_groups_ends_with_no_other_code(engine, option, code):
    """The exit code is kept, although Gloo's threads can abort the interpreter's shutdown."""
    program = f"""
import atexit, sys, types
if {engine}:
    sys.modules["kimi_pretrain.engine"] = types.ModuleType("engine")
atexit.register(print, "taken down")
sys.argv = ["kimi-pretrain", {option!r}]
from launch.cli.main import main
main()
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert ("taken down" in done.stdout) is not engine
    assert (f"kimi-pretrain {version('kimi_pretrain')}" in done.stdout) is (code == 0)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--nproc", "3"], "--nproc 3 x --nnodes 1 is not the layout's 1 processes"),
        (["--nnodes", "2", "--rendezvous", "a:1"], "1 processes (pp x dp x cp x tp) do not divide"),
        (["--rendezvous", "a:1"], "--rendezvous a:1 is for several machines"),
    ],
)
def test_one_process_heeds_how_many_were_asked_for(options, told, tmp_path):
    axes = [f"layout.{axis}=1" for axis in ("pp", "vpp", "dp", "cp", "tp", "ep")]
    base = ["train", "--config", "tiny_cpu", "--run-dir", str(tmp_path / "run"), *axes]
    assert told in one_line_error([*base, *options])
    assert not (tmp_path / "run").exists()


def test_one_of_many_processes_takes_no_options_for_who_starts_them(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "0")
    base = ["train", "--config", "tiny_cpu", "--run-dir", str(tmp_path / "run")]
    assert "RANK is set" in one_line_error([*base, "--max-restarts", "1"])


def test_a_table_that_cannot_be_written(tmp_path):
    base = ["train", "--config", "tiny_cpu", "--table"]
    assert "add --dry-run" in one_line_error([*base, str(tmp_path / "t.tsv")])
    missing = str(tmp_path / "no" / "t.tsv")
    assert "no/t.tsv: expected a file in" in one_line_error([*base, missing, "--dry-run"])


def test_resume_from_what_is_no_checkpoint(tmp_path):
    line = one_line_error(["train", "--config", "tiny_cpu", "--resume", str(tmp_path)])
    assert "manifest.json" in line


def test_submit_dry_run_prints_the_script_of_the_256_gpu_layout(tmp_path):
    run_dir = tmp_path / "r"
    result = runner.invoke(
        app,
        ["submit", "--config", "kimi_k25_1t", "--dry-run", "--run-dir", str(run_dir)]
        + ["--module", "cuda/12", "train.steps=9"],
    )
    assert result.exit_code == 0, result.output
    assert result.output.startswith("#!/bin/bash\n")
    assert "#SBATCH --nodes=32\n#SBATCH --ntasks-per-node=8\n" in result.output
    assert "module load cuda/12\n" in result.output
    assert f'"config": "{run_dir}/job.yaml"' in result.output
    assert not run_dir.exists()


def test_show_index_of_a_missing_source(tmp_path):
    line = one_line_error(["data", "show-index", str(tmp_path / "digits")])
    assert "digits" in line


def test_only_the_user_s_errors_are_shortened():
    assert user_message(ValueError("a\n  b")) == "a b"
    assert user_message(FileNotFoundError("gone")) == "gone"
    assert user_message(RuntimeError("a bug")) is None
    gone = FileNotFoundError(2, "No such file or directory", "a.json")
    assert user_message(gone) == "a.json: no such file or folder"
    from data_pipeline.store.open import MissingBucket

    assert user_message(MissingBucket("s3://x: no bucket")) == "s3://x: no bucket"
