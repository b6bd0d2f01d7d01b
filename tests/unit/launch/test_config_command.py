"""Tests of `kimi-pretrain config`: the explanation of every key, the template, and `check`."""

import json
import re
import subprocess
import sys

import pytest
import yaml
from pydantic import ValidationError
from typer.testing import CliRunner

from data_pipeline.config import DataConfig
from kimi_pretrain.config import Config, load_config
from launch.cli import config_view
from launch.cli.main import app
from launch.local.user_errors import user_message
from moonvit3d.geometry import PatchLimits
from tests import ROOT
from tests.dist.jobs import SMALL, layout
from typed_config.reference import Default, keys
from typed_config.section import Section

# Code reads these keys through `OptimConfig.group_values`.
READ_BY_ANOTHER_NAME = {"optim.groups.<name>.lr_scale", "optim.adam_betas", "optim.adam_eps"}


def run(*arguments: str, code: int = 0):
    result = CliRunner().invoke(app, ["config", *arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_every_key_says_unit_and_who_reads_it():
    found = list(keys(Config))
    assert len({key.path for key in found}) == len(found) > 150
    for key in found:
        name = re.split(r"\W+", key.path)[-1]
        text = (ROOT / key.reader).read_text()
        assert key.section or name in text or key.path in READ_BY_ANOTHER_NAME, key


def test_a_key_without_unit_or_reader_is_refused():
    class Bare(Section):
        width: int = 3
        """How wide."""

    with pytest.raises(ValueError, match=r"bare.width: .* must end with \[unit; file\]"):
        list(keys(Bare, "bare."))


def test_defaults_are_those_of_a_configuration():
    dumped = load_config("tiny_cpu").model_dump(mode="json")
    required = {"model", "layout", "data", "optim", "train"}
    by_path = {key.path: key for key in keys(Config)}
    for section in set(dumped) - required:
        assert by_path[section].default == type(load_config("tiny_cpu")).model_fields[
            section
        ].default.model_dump(mode="json")
    assert {path for path in dumped if by_path[path].default is Default.REQUIRED} == required
    assert by_path["optim.ns_steps"].default == 5
    assert by_path["data.limits.side"].kind == "int, >= 2, a multiple of 2"
    assert by_path["data.max_epochs"].kind == "{name: float > 0}"
    assert by_path["train.dtype"].kind == "float32 / bfloat16 / float64"


def test_show_tells_every_key_and_the_values_of_a_file():
    told = run("show").stdout
    for key in keys(Config):
        assert f"\n{key.path}" in f"\n{told}"
    told = run("show", "--config", "tiny_cpu", "--section", "data", "data.seq_len=96").stdout
    assert "data.seq_len = 96  [tokens]" in told
    assert "layout" not in {line.split(".")[0] for line in told.splitlines()}
    objects = json.loads(run("show", "--json", "--config", "tiny_cpu").stdout.splitlines()[-1])
    by_key = {one["key"]: one for one in objects["keys"]}
    assert by_key["train.steps"] == {
        "key": "train.steps", "type": "int, > 0", "unit": "optimizer steps",
        "text": "Length of the run.", "reader": "kimi_pretrain/train.py", "required": True,
        "value": 220,
    }  # fmt: skip
    assert by_key["data.workers"]["default"] == by_key["data.workers"]["value"] == 0
    assert "value" not in by_key["data.augment.<name>.flip"]


def test_a_section_that_code_makes_is_refused_in_one_line():
    with pytest.raises(ValidationError) as error:
        PatchLimits().replace(side=3, image=0.5)
    assert user_message(error.value) == (
        "image: Input should be a valid integer (got 0.5); "
        "side: Input should be a multiple of 2 (got 3)"
    )


def test_an_error_does_not_print_what_may_be_secret():
    endpoint = "http://me:secret@host"
    with pytest.raises(ValidationError) as error:
        DataConfig(root="s3://a/b", sources={"a": 1}, seq_len=9, rows_per_step=1, endpoint=endpoint)
    assert "user name or password" in str(error.value)
    for told in (str(error.value), user_message(error.value)):
        assert "secret" not in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["show", "--section", "dat"], "--section dat: no such key; the sections are model, "),
        (["show", "data.seq_len=3"], "add --config"),
        (["show", "--config", "nothing.yaml"], "no configuration file nothing.yaml"),
        (["check", "--config", "tiny_cpu", "data.seqlen=3"], "did you mean data.seq_len?"),
        (["check", "--config", "tiny_cpu", "layout.ep=4"], "layout.ep=4 does not divide"),
        (["template", "--out", "/nowhere/my.yaml"], "there is no folder /nowhere"),
    ],
)
def test_a_wrong_use_is_one_line(arguments, told):
    (line,) = run(*arguments, code=2).stderr.splitlines()
    assert line.startswith("error: ")
    assert told in line


def test_the_page_is_that_of_the_models():
    page = (ROOT / "docs" / "CONFIG.md").read_text()
    assert run("show", "--markdown").stdout == page, (
        "run: kimi-pretrain config show --markdown > docs/CONFIG.md"
    )
    for key in [key for key in keys(Config) if "." in key.path]:
        assert f"| `{re.split('[.]', key.path)[-1]}` |" in page


@pytest.fixture
def template(tmp_path, root):
    """Return the template, with the edits that it asks for made for the small corpus."""
    file = tmp_path / "my.yaml"
    assert "wrote" in run("template", "--out", str(file)).stdout
    text = file.read_text()
    assert text == run("template").stdout
    mine = {
        "root: /path/to/corpus": f"root: {root}",
        "sources: {my_images: 1.0, my_texts: 1.0}": "sources: {pictures: 1.0, words: 1.0}",
        "tokenizer: tokenizer/tokenizer.tiktoken": "tokenizer: tokenizer.tiktoken",
    }
    assert text.count("# EDIT ") == len(mine)
    for number, (given, wanted) in enumerate(mine.items(), start=1):
        after = text.partition(f"# EDIT {number} of 3")[2].splitlines()[1]
        assert after.strip() == given
        text = text.replace(f"  {given}\n", f"  {wanted}\n")
    file.write_text(text)
    return file


def test_the_template_is_sound_after_three_edits(template):
    told = run("check", "--config", str(template), "--json").stdout.splitlines()
    assert "source pictures: 150 samples" in told
    found = json.loads(told[-1])
    assert found["sources"] == {"pictures": 150, "words": 200}
    assert found["processes"] == 1
    assert found["steps"][0]["samples"] > 0
    assert run("template", "--out", str(template), code=2).stderr.startswith("error: --out")


def test_the_template_before_the_edits_says_what_is_not_there(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text(run("template").stdout)
    (line,) = run("check", "--config", str(file), code=2).stderr.splitlines()
    assert "/path/to/corpus" in line


def test_the_template_holds_every_key_once(template):
    """Keys that are commented out count, too: uncommented, they are valid and show the default."""
    shown = re.sub(r"(?m)^( *)#(?! )", r"\1", template.read_text())
    for key, example in config_view.EXAMPLES.items():
        assert f"{key.rpartition('.')[2]}: {example}\n" in shown
        shown = shown.replace(f"{key.rpartition('.')[2]}: {example}\n", "\n")
    uncommented = yaml.safe_load(shown)
    assert set(uncommented) == set(Config.model_fields)
    (template.parent / "all.yaml").write_text(shown)
    assert load_config(template.parent / "all.yaml") == load_config(template)


def test_a_dry_run_takes_the_template(template):
    command = [sys.executable, "-m", "launch.cli", "train", "--dry-run", "--config", str(template)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "language model" in done.stdout


def test_check_says_what_it_found(root):
    told = run(
        "check", "--config", "tiny_cpu", *SMALL, *layout(dp=2), f"data.root={root}", "--steps", "2"
    ).stdout
    assert "2 processes = 1 stages" in told
    assert "tokenizer tokenizer.tiktoken: 546 ids; model.language.vocab_size is 768" in told
    assert re.search(r"step 1: \d+ samples, \d+ media in 4 rows", told)
    assert told.splitlines()[-1].startswith("sound")
