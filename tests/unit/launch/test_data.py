"""`kimi-pretrain data ingest` and `reindex`: what they print, and errors in one line."""

import json
import re

import pytest
from typer.testing import CliRunner

from data_pipeline.text import train_ranks
from launch.cli import app
from tests.unit.data_pipeline.media import encoded, noise

runner = CliRunner()


@pytest.fixture
def arguments(tmp_path):
    """A folder of five pictures, of which four have captions; ranks under the target."""
    (tmp_path / "in").mkdir()
    for number in range(5):
        (tmp_path / "in" / f"p{number}.png").write_bytes(encoded(noise(30, 40, number)))
        if number:
            (tmp_path / "in" / f"p{number}.txt").write_text(f"picture {number}")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "t.tiktoken").write_bytes(train_ranks(["picture 1 2 3 of 4"] * 9, 260))
    to, name = ["--to", str(tmp_path / "out")], ["--name", "pairs", "--category", "caption"]
    return [str(tmp_path / "in"), *to, *name, "--tokenizer", "t.tiktoken", "--workers", "0"]


def run(*arguments: str):
    return runner.invoke(app, ["data", *arguments])


@pytest.mark.parametrize("command", ["ingest", "reindex"])
def test_help_has_an_example(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"kimi-pretrain data {command} " in " ".join(result.output.split())


def test_ingest_then_reindex(arguments, tmp_path):
    result = run("ingest", *arguments, "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["uri"] == str(tmp_path / "out" / "pairs")
    assert (summary["samples"], summary["items"], summary["shards"]) == (4, 4, 1)
    assert summary["rejected"] == {"missing field": 1}
    assert re.search(r"missing field\W+1\W+p0: 'text' or", " ".join(result.stderr.split()))
    assert "out/pairs/rejected.jsonl" in "".join(result.stderr.split())
    again = run("ingest", *arguments)
    assert again.exit_code == 2
    assert "finished source of this name exists" in again.stderr
    new = train_ranks(["pictures"] * 9, 258)
    (tmp_path / "new.tiktoken").write_bytes(new)
    named = ["--name", "pairs2", "--tokenizer", str(tmp_path / "new.tiktoken"), "--workers", "0"]
    result = run("reindex", summary["uri"], *named, "--json")
    assert result.exit_code == 0, result.output
    counted = json.loads(result.stdout.splitlines()[-1])
    assert (counted["samples"], counted["shards_of"]) == (4, "pairs")
    assert counted["text_tokens"] != summary["text_tokens"]
    shown = run("show-index", str(tmp_path / "out" / "pairs2"))
    assert json.loads(shown.stdout)["category"] == "caption"


def test_plain_output_and_turned_pictures(arguments, tmp_path):
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 3
    (tmp_path / "in" / "p0.jpg").write_bytes(encoded(noise(20, 20), "JPEG", exif=exif))
    (tmp_path / "in" / "p0.png").unlink()
    (tmp_path / "in" / "p0.txt").write_text("turned")
    result = run("ingest", *arguments)
    assert result.exit_code == 0, result.output
    assert re.search(r"samples +5\n", result.stdout)
    assert "rejected" not in result.stderr
    assert "1 images carry an EXIF orientation, which is not applied" in result.stderr


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"--category": "captions"}, "category is 'captions'; known are agent"),
        ({"--tokenizer": "none.tiktoken"}, "none.tiktoken"),
        ({"--name": "a/b"}, "source name 'a/b'"),
        ({0: "no/such/folder"}, "input no/such/folder: no such file or folder"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, changed, message):
    for what, value in changed.items():
        arguments[0 if what == 0 else arguments.index(what) + 1] = value
    result = run("ingest", *arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert message in line
