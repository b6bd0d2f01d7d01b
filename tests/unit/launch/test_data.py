"""Tests of `kimi-pretrain data ingest` and `reindex`: their output and one-line errors."""

import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from data_pipeline.ingest.texts import at_most
from data_pipeline.text import train_ranks
from launch.cli.main import app
from tests.unit.data_pipeline.media import encoded, noise

runner = CliRunner()


@pytest.fixture
def arguments(tmp_path):
    """Write five images, four of them with captions, and a tokenizer; return ingest's arguments."""
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


def test_ingest_then_reindex(arguments, tmp_path):
    result = run("ingest", *arguments, "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["uri"] == str(tmp_path / "out" / "pairs")
    assert (summary["samples"], summary["items"], summary["shards"]) == (4, 4, 1)
    assert summary["rejected"] == {"missing field": 1}
    assert re.search(r"missing field\W+1\W+p0: 'text' or", " ".join(result.stderr.split()))
    assert "out/pairs/rejected.jsonl" in "".join(result.stderr.split())
    strict = [*arguments, "--name", "strict", "--max-rejected", "0.1"]
    told = run("ingest", *strict)
    assert told.exit_code == 2
    assert (
        "1 of 5 samples rejected, the limit (max-rejected) is 0.1: missing field 1" in told.stderr
    )
    assert run("ingest", *strict[:-1], "0.2").exit_code == 0
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
    told = "1 images or clips carry an EXIF orientation or a rotation tag, which is not applied"
    assert told in result.stderr


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


def test_a_tokenizer_is_trained_on_raw_inputs_and_on_sources_alike(arguments, tmp_path):
    """Only caption texts count: the media are not read, and a source yields its input texts."""
    (tmp_path / "in" / "p0.txt").write_text("picture 0")
    run("ingest", *arguments)
    (tmp_path / "in" / "p1.png").write_bytes(b"no picture")
    wanted = train_ranks([f"picture {number}" for number in range(5)], 262)
    to = ["--to", str(tmp_path / "out"), "--vocab-size", str(262 + 256)]
    raw = ["tokenizer", str(tmp_path / "in"), *to, "--category", "caption"]
    assert json.loads(run(*raw, "--json").stdout)["vocab_size"] == 262 + 256
    stored = tmp_path / "out" / "tokenizer" / "tokenizer.tiktoken"
    assert stored.read_bytes() == wanted
    again = run(*raw)
    assert "data.tokenizer=tokenizer/tokenizer.tiktoken" in " ".join(again.stdout.split())
    made = run("tokenizer", str(tmp_path / "out" / "pairs"), *to, "--name", "of_source")
    assert made.exit_code == 0, made.output
    assert (tmp_path / "out" / "tokenizer" / "of_source.tiktoken").read_bytes() == wanted


def test_what_cannot_be_trained_on_is_counted_and_left_out(tmp_path):
    lines = [{"text": "\ud800"}, {"words": "no text"}, *({"text": f"line {n}"} for n in range(9))]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    to = ["--to", str(tmp_path), "--vocab-size", "515"]
    result = run("tokenizer", str(tmp_path / "a.jsonl"), *to)
    assert result.exit_code == 0, result.output
    assert "1 samples, not UTF-8" in result.stderr
    assert "1 samples, unknown field" in result.stderr
    wanted = train_ranks([f"line {number}" for number in range(9)], 259)
    assert (tmp_path / "tokenizer" / "tokenizer.tiktoken").read_bytes() == wanted


def test_text_is_bounded():
    texts = ["abc", "d\u00e9f", "ghi"]
    assert list(at_most(texts, 99)) == texts
    assert list(at_most(texts, 6)) == ["abc", "d\u00e9"]
    assert list(at_most(texts, 5)) == ["abc", "d"]  # a character is not split
    assert list(at_most(texts, 3)) == ["abc"]


def test_a_given_tokenizer_is_checked_and_never_replaces_another(tmp_path):
    to, given = ["--to", str(tmp_path / "out")], tmp_path / "given.tiktoken"
    given.write_bytes(train_ranks(["abc"] * 9, 258))
    result = run("tokenizer", "--given", str(given), *to, "--name", "kimi")
    assert result.exit_code == 0, result.output
    stored = tmp_path / "out" / "tokenizer" / "kimi.tiktoken"
    assert stored.read_bytes() == given.read_bytes()
    given.write_bytes(train_ranks(["xyz"] * 9, 258))
    refused = run("tokenizer", "--given", str(given), *to, "--name", "kimi")
    assert refused.exit_code == 2
    assert "another rank file has this name" in refused.stderr
    given.write_bytes(given.read_bytes()[:-20])
    refused = run("tokenizer", "--given", str(given), *to, "--name", "cut")
    assert refused.exit_code == 2
    assert "rank file" in refused.stderr
    assert not (tmp_path / "out" / "tokenizer" / "cut.tiktoken").exists()
    for wrong in ([], [str(tmp_path), "--given", str(given)]):
        assert "either INPUTs" in run("tokenizer", *wrong, *to).stderr


LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
from launch.cli.main import app
app(sys.argv[1:])
"""


def test_ingest_without_room_is_told_in_one_line(tmp_path):
    """A file size limit of the process causes EFBIG, which is handled like a full disk."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("sea " * 10_000)
    (tmp_path / "t.tiktoken").write_bytes(train_ranks(["sea and more sea"] * 9, 258))
    command = [
        sys.executable, "-c", LIMITED, "data", "ingest", str(tmp_path / "in"), "--name", "src",
        "--to", str(tmp_path / "out"), "--category", "text", "--workers", "0",
        "--tokenizer", str(tmp_path / "t.tiktoken"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"error: {tmp_path}/out/src/000000.tar: File too large"]
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    result = run("ingest", str(tmp_path / "loop.jsonl"), *command[6:])
    assert result.exit_code == 2
    assert "loop.jsonl: Too many levels of symbolic links" in result.stderr
