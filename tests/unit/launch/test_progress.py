"""Tests of progress output: bars on a terminal, otherwise a few lines on stderr."""

import pytest

from data_pipeline.ingest.shard_writer import IngestProgress
from launch.cli import progress
from launch.cli.ingest_view import Pace, ingest_bar


@pytest.mark.parametrize("seconds", [0.0, 3600.0])
def test_a_file_or_a_pipe_gets_lines(monkeypatch, capfd, seconds):
    monkeypatch.setattr(progress, "LINE_SECONDS", seconds)
    with progress.item_bar("diff [a]") as items, progress.byte_bar("verify", 5_000_000) as read:
        items(1000, 2000)
        read(1_000_000)
        read(1_000_000)
    told = capfd.readouterr()
    assert told.out == ""
    lines = ["diff [a]: 1,000 of 2,000", "verify: 1.0 MB of 5.0 MB", "verify: 2.0 MB of 5.0 MB"]
    assert told.err.splitlines() == ([] if seconds else lines)


def test_a_terminal_gets_bars(monkeypatch, capfd):
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich assume a terminal
    with progress.item_bar("items") as items, ingest_bar("known", 20, Pace()) as known:
        items(1, 2)
        known(IngestProgress(samples=3, rejected=2))
    with progress.byte_bar("bytes", 1000) as read:
        read(300)
    with progress.share_bar("share") as share:
        share(0.5, "half of it")
    with ingest_bar("unknown", None, Pace()) as unknown:
        unknown(IngestProgress(samples=7))
    told = capfd.readouterr()
    assert told.out == ""
    for shown in ("items", "1/2", "known", "5/20", "bytes", "half of it", "unknown", "rejected"):
        assert shown in told.err
