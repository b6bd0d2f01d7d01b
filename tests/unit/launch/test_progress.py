"""Progress where there is no terminal: lines on stderr, and not too many."""

import pytest

from launch.cli import progress


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
