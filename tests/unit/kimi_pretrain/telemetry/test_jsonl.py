"""Tests that files with one line per step are cut at a start and never torn."""

import json
import os
import random

import pytest

from kimi_pretrain.telemetry import jsonl
from kimi_pretrain.telemetry.jsonl import cut_after, last_step


def plain(text: str, step: int) -> str:
    """Return the lines up to a step, as a reference that reads everything."""
    lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return "".join(line for line in lines if json.loads(line)["step"] <= step)


def line(step: int, length: int = 0) -> str:
    return json.dumps({"step": step, "text": "x" * length}) + "\n"


def test_shortened_as_by_reading_everything(tmp_path, monkeypatch):
    """Covers lines longer and shorter than a block, repeated and missing steps, and torn ends."""
    monkeypatch.setattr(jsonl, "_BLOCK", 64)
    draw = random.Random(0)
    for case in range(300):
        steps = sorted(draw.choices(range(1, 9), k=draw.randrange(8)))
        text = "".join(line(step, draw.choice((0, 20, 41, 42, 43, 64, 200))) for step in steps)
        text += draw.choice(("", "", '{"step": 9, "te', "\0" * 70))
        (tmp_path / "lines.jsonl").write_text(text)
        step = draw.randrange(10)
        kept = draw.choice(("", line(7), line(7) + '{"step": 8'))
        (tmp_path / "lines.abandoned.jsonl").write_text(kept)
        last = cut_after(tmp_path / "lines.jsonl", step)
        assert (tmp_path / "lines.jsonl").read_text() == plain(text, step), (case, text, step)
        # Lines that were cut are appended to those cut before, whose own end may be torn.
        cut = plain(text, 9)[len(plain(text, step)) :]
        assert last == (json.loads(cut.splitlines()[-1])["step"] if cut else None)
        if cut:
            before = kept[: kept.rfind("\n") + 1]
            assert (tmp_path / "lines.abandoned.jsonl").read_text() == before + cut


def test_what_is_read_does_not_grow_with_the_steps_done(tmp_path, monkeypatch):
    file = tmp_path / "metrics.jsonl"
    with file.open("w") as out:
        out.writelines(line(step, 50_000) for step in range(1, 1001))
    size, counted = file.stat().st_size, []
    assert size > 50_000_000

    def pread(fd: int, length: int, at: int) -> bytes:
        counted.append(length)
        return real(fd, length, at)

    real = os.pread
    monkeypatch.setattr(jsonl.os, "pread", pread)
    before = read_by_this_process()
    cut_after(file, 998)
    assert sum(counted) < 1_000_000  # three lines of 50 kB, each searched in blocks of 64 kB
    assert read_by_this_process() - before < 5_000_000  # by any system call
    assert file.stat().st_size == pytest.approx(size * 0.998, rel=1e-4)
    with file.open("rb") as cut:
        cut.seek(-60_000, os.SEEK_END)
        assert json.loads(cut.read().splitlines()[-1])["step"] == 998


def read_by_this_process() -> int:
    with open("/proc/self/io") as numbers:
        return int(numbers.readline().removeprefix("rchar:"))


def test_the_last_step_of_a_file(tmp_path):
    file = tmp_path / "heldout.jsonl"
    assert last_step(file) is None
    file.write_text('{"step"')
    assert last_step(file) is None
    file.write_text(line(3) + line(40, length=70_000) + '{"step": 50')
    assert last_step(file) == 40


def test_lines_are_cut_only_when_they_are_kept(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(line(1) + line(2))
    (tmp_path / "metrics.abandoned.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*metrics.abandoned.jsonl'"):
        cut_after(file, 1)
    assert file.read_text() == line(1) + line(2)


def test_a_file_that_is_right_is_left_alone(tmp_path):
    file = tmp_path / "anomalies.jsonl"
    file.write_text(line(1) + line(2))
    os.utime(file, (1, 1))
    cut_after(file, 2)
    assert (file.read_text(), file.stat().st_mtime) == (line(1) + line(2), 1)
    cut_after(tmp_path / "none.jsonl", 2)
    assert not (tmp_path / "none.jsonl").exists()


@pytest.mark.parametrize("wrong", ["no JSON\n", "[1]\n", '{"stop": 1}\n', "\n", '{"step": null}\n'])
def test_a_line_that_is_none_is_named(wrong, tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(line(1) + wrong)
    with pytest.raises(ValueError, match=r"metrics.jsonl: the line that begins at byte 24 is not"):
        cut_after(file, 1)
    assert file.read_text() == line(1) + wrong
