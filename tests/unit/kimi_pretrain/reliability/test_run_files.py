"""Tests a run folder on a full disk: training continues without gaps or a false status."""

import json
import logging
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kimi_pretrain.reliability import run_files
from kimi_pretrain.reliability.exit_report import ExitReport, first_exit_report, write_exit_report
from kimi_pretrain.reliability.run_files import Appended, write_whole
from kimi_pretrain.reliability.run_lock import run_id, take
from kimi_pretrain.reliability.status import Status, mark_failed, read_status, write_status
from kimi_pretrain.reliability.watchdog import Watchdog
from kimi_pretrain.telemetry.run_dir import MetricsWriter, log_to
from launch.local.user_errors import one_line_errors

FULL = Path("/dev/full")  # can be opened, but has no room for data


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """Let the kernel write only the part of a record that fits and then fail with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def records(count: int) -> list[bytes]:
    return [b"%03d %s\n" % (number, b"x" * (number % 50)) for number in range(count)]


def test_a_file_that_was_full_for_a_while_has_no_gap(tmp_path, caplog):
    lines, file = records(90), Appended(tmp_path / "metrics.jsonl")
    for number, line in enumerate(lines):
        with no_file_above(500 if number in range(10, 60) else 1 << 30):
            file.write(line)
        if number == 59:
            assert file.file.stat().st_size == 500  # in the middle of a line
    file.close()
    assert file.file.read_bytes() == b"".join(lines)
    assert [r.getMessage() for r in caplog.records] == [
        f"{file.file}: File too large; training goes on, and what could not be written is kept "
        "for later",
        f"{file.file}: written again",
    ]


def test_what_does_not_fit_into_memory_is_lost_by_whole_lines_and_counted(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(run_files, "KEPT_BYTES", 300)
    lines, file = records(40), Appended(tmp_path / "metrics.jsonl")
    with no_file_above(100):
        for line in lines:
            file.write(line)
    file.write(b"the last\n")
    found = file.file.read_bytes().splitlines(keepends=True)
    assert found[-1] == b"the last\n"
    assert found[:-1] == lines[: len(found) - 1]
    assert f"written again; {40 - len(found) + 1} records are lost" in caplog.text


def test_a_disk_that_stays_full_ends_nothing(tmp_path, caplog):
    (tmp_path / "full").symlink_to(FULL)
    file = Appended(tmp_path / "full")
    file.write(b"12345")
    file.write(b"678")
    file.close()
    assert len(caplog.records) == 2
    assert "the last 8 bytes could not be written" in caplog.text


def test_metrics_and_curves_of_a_run_whose_disk_was_full(tmp_path, capfd):
    metrics = MetricsWriter(tmp_path, 0)
    for step in range(1, 10):
        with no_file_above(50 if 3 <= step < 8 else 1 << 30):
            metrics.write({"step": step, "loss": 1.0 / step})
    metrics.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 10))
    curves = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    points = [(point.step, point.value) for point in curves.Scalars("loss")]
    assert points == [(step, pytest.approx(1.0 / step)) for step in range(1, 10)]
    assert "Traceback" not in capfd.readouterr().err


def test_curves_of_steps_that_are_done_again_are_replaced(tmp_path):
    for first, value in ((0, 1.0), (2, 2.0)):
        metrics = MetricsWriter(tmp_path, first)
        os.utime(tmp_path / "tensorboard", None)
        for step in range(first + 1, 5):
            metrics.write({"step": step, "loss": value})
        metrics.close()
        for file in (tmp_path / "tensorboard").glob(f"*.{os.getpid()}.0"):
            file.rename(file.with_name(file.name.replace(f".{os.getpid()}.0", f".{first}")))
    curves = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(p.step, p.value) for p in curves.Scalars("loss")] == [(1, 1), (2, 1), (3, 2), (4, 2)]


def test_a_log_on_a_full_disk_is_told_in_one_line(tmp_path, capfd):
    root = logging.getLogger()
    before, level = root.handlers, root.level
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_1.log").symlink_to(FULL)
    try:
        log = log_to(tmp_path, 1)
        log.info("one")
        log.info("two")
    finally:
        root.handlers = before
        root.setLevel(level)
    told = capfd.readouterr().err
    assert told == f"{tmp_path}/logs/rank_1.log: No space left on device; some lines are lost\n"


@pytest.fixture
def full_disk(tmp_path) -> Iterator[Path]:
    """Yield a run folder with a status, on a full disk."""
    folder = tmp_path / "run"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=32k", "none", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    try:
        write_status(folder, Status("running", 7, 100, checkpoint="x" * 100))
        with pytest.raises(OSError, match="No space left"):
            (folder / "theirs").write_bytes(bytes(1 << 16))
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_status_stays_true_where_the_disk_is_full(full_disk):
    for status in (
        Status("running", 8, 100, checkpoint="a"),  # shorter, then longer
        Status("stopped", 9, 100, "signal SIGUSR1 at rank 0", "s3://bucket/" + "y" * 300),
    ):
        write_status(full_disk, status)
        assert read_status(full_disk) == status
    mark_failed(full_disk, "no room")
    assert read_status(full_disk) == Status("failed", 9, 100, "no room", "s3://bucket/" + "y" * 300)
    assert {file.name for file in full_disk.iterdir()} == {"status.json", "theirs"}
    assert (full_disk / "theirs").stat().st_size >= 24 << 10


def test_a_file_that_cannot_be_written_is_named(full_disk):
    with pytest.raises(OSError, match="No space left on device: .*run/trace.json'"):
        write_whole(full_disk / "trace.json", "x" * 10_000)
    assert not list(full_disk.glob("trace*"))


def test_a_run_that_begins_on_a_full_disk_says_so_in_one_line(full_disk, capfd):
    for begin, name in ((take, "lock"), (run_id, "run.json")):
        with pytest.raises(typer.Exit) as end, one_line_errors():
            begin(full_disk)
        assert end.value.exit_code == 2
        told = f"error: {full_disk / name}: No space left on device\n"
        assert capfd.readouterr().err == told


def test_a_last_word_without_room_hides_nothing_and_is_not_half_a_word(full_disk):
    write_exit_report(full_disk, 0, ExitReport("why", 75))
    assert first_exit_report(full_disk) is None


def test_a_rank_that_stands_still_says_so_where_the_disk_is_full(full_disk, capfd):
    codes: list[int] = []
    dog = Watchdog(full_disk, 0, 1, 0.3, codes.append).start()
    dog._thread.join(30)
    assert codes == [75]
    told = capfd.readouterr().err
    assert told.startswith("error: no progress for 0 s (train.timeout_seconds): rank 0 is in ")
    assert told.count("\n") == 1


@pytest.mark.parametrize("data", ["", '{"id": 3}', "[1]", "\0\0"])
def test_a_run_json_that_is_none_is_named(data, tmp_path):
    (tmp_path / "run.json").write_text(data)
    with pytest.raises(ValueError, match=r"run.json is b.*expected .*owner.json of its checkpoint"):
        run_id(tmp_path)


def test_a_status_that_is_none_is_named_and_does_not_hide_why_a_run_failed(tmp_path):
    (tmp_path / "status.json").write_text("")
    with pytest.raises(ValueError, match=r"status.json is b'', expected how a run stands"):
        read_status(tmp_path)
    mark_failed(tmp_path, "a reason")
    assert read_status(tmp_path) == Status("failed", reason="a reason")
