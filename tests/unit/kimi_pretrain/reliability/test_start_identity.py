"""Tests that only the start that holds a run folder may write into it."""

import os

import pytest

from kimi_pretrain.reliability import start_identity
from kimi_pretrain.reliability.exit_report import ExitReport, error_file, write_exit_report
from kimi_pretrain.reliability.start_identity import (
    LOCK_WAIT_S,
    REPORTS,
    START,
    holds,
    join_start,
    joined_start,
    report_base,
    start_id,
)
from tests.held_folder import hold


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Leave this process's start without a name."""
    monkeypatch.setattr(start_identity, "_own", {})
    monkeypatch.setattr(start_identity, "_joined", {})
    for name in (START, REPORTS):
        monkeypatch.delenv(name, raising=False)


class Clock:
    def __init__(self, monkeypatch):
        self.slept, self.asleep = 0.0, lambda: None
        monkeypatch.setattr(start_identity, "time", self)

    def monotonic(self) -> float:
        return self.slept

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.asleep()


def test_a_fork_is_a_start_of_its_own(monkeypatch):
    first = start_id()
    assert start_id() == first
    monkeypatch.setattr(os, "getpid", lambda: 2**30)
    assert start_id() != first


def test_who_joins_rank_0_writes_where_that_one_does(tmp_path, monkeypatch):
    (tmp_path / "reports").mkdir()
    monkeypatch.setenv(START, "here")
    monkeypatch.setenv(REPORTS, str(tmp_path / "reports"))
    hold(tmp_path, "there")
    assert report_base(tmp_path) == tmp_path / "reports"
    join_start("here")
    assert joined_start(tmp_path / "reports") is None
    join_start("there")
    assert joined_start(tmp_path / "reports") == start_id() == "there"
    assert report_base(tmp_path) == tmp_path


def test_a_rank_without_a_supervisor_waits_for_the_lock_of_its_start(tmp_path, monkeypatch):
    """Under SLURM the rank may fail before rank 0 has begun."""
    clock = Clock(monkeypatch)
    write_exit_report(tmp_path, 1, ExitReport("of a start without a name"))
    assert clock.slept == 0
    monkeypatch.setenv(START, "77.0.0")
    write_exit_report(tmp_path, 1, ExitReport("its rank 0 never comes"))
    assert LOCK_WAIT_S <= clock.slept < LOCK_WAIT_S + 1
    assert list(tmp_path.iterdir()) == []
    clock.asleep = lambda: hold(tmp_path, "77.0.0")
    write_exit_report(tmp_path, 0, ExitReport("rank 0 knows that it has no lock"))
    assert not (tmp_path / "logs").exists()
    write_exit_report(tmp_path, 1, ExitReport("no such source"))
    assert error_file(tmp_path, 1).read_text() == "no such source\nexit code 2, start 77.0.0\n"


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"id": null}', '{"pid": 1}'])
def test_a_lock_that_says_nothing_is_nobody_s(tmp_path, text):
    (tmp_path / "lock").write_text(text)
    assert not holds(tmp_path)
