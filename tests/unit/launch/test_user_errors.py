"""Tests of exit codes: user errors, and transient errors that a restart may fix."""

import errno
import json
import os
import re

import pytest
import typer

from data_pipeline.index.manifest import IndexMismatch
from data_pipeline.loader import LoaderError
from data_pipeline.plan.planner import DataUsedUp
from data_pipeline.store.open import AccessDenied, StoreUnavailable
from data_pipeline.workers.workers import WorkerDied
from kimi_pretrain.checkpoint.errors import CheckpointError, CheckpointUnavailable
from kimi_pretrain.dep.memory_limit import TooMuchMemory
from kimi_pretrain.reliability.anomaly_guard import AnomalyError
from kimi_pretrain.reliability.exit_report import first_exit_report, step_faults
from kimi_pretrain.reliability.run_lock import FormerStart, RunLocked
from kimi_pretrain.reliability.start_identity import START
from launch.local import worker
from launch.local.job import Job
from launch.local.user_errors import exit_code, one_line_errors, user_message
from tests.held_folder import hold


def wrapped(inner: Exception, outer: type[Exception], *, hidden: bool) -> Exception:
    try:
        try:
            raise inner
        except type(inner) as error:
            raise outer("said again") from (None if hidden else error)
    except outer as error:
        return error


def of_loader(cause: Exception) -> LoaderError:
    error = LoaderError(3, cause)
    error.__cause__ = cause
    return error


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number), "shared/file")


AWAY, REFUSED = StoreUnavailable("gave up"), AccessDenied("refused")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (AWAY, 75),
        (wrapped(AWAY, CheckpointError, hidden=True), 75),
        (wrapped(AWAY, ValueError, hidden=False), 75),
        (CheckpointUnavailable("another rank's store does not answer"), 75),
        (FormerStart("an earlier start of this job lives"), 75),
        (RunLocked("in use"), 2),
        (REFUSED, 2),
        (wrapped(REFUSED, CheckpointError, hidden=True), 2),
        (CheckpointError("damaged"), 2),
        (ValueError("a wrong key"), 2),
        (wrapped(os_error(errno.ESTALE), CheckpointError, hidden=True), 75),
        (wrapped(os_error(errno.EIO), ValueError, hidden=False), 75),
        (wrapped(os_error(errno.ENOSPC), CheckpointError, hidden=True), 2),
        (wrapped(os_error(errno.ENOENT), ValueError, hidden=False), 2),
        (os_error(errno.EACCES), 2),
        (os_error(errno.EIO), 75),
        (of_loader(os_error(errno.ESTALE)), 75),
        # These errors do not mean that a folder is unavailable.
        (wrapped(os_error(errno.EWOULDBLOCK), ValueError, hidden=False), 2),
        (wrapped(os_error(errno.ESRCH), ValueError, hidden=False), 2),
        (wrapped(OSError("cannot identify image file"), ValueError, hidden=False), 2),
    ],
)
def test_a_store_that_does_not_answer_is_worth_a_restart(error, code):
    assert user_message(error) is not None
    assert exit_code(error) == code


def test_an_error_of_a_full_disk_that_names_no_file_names_the_line(tmp_path):
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        (tmp_path / "full").write_text("x")
    message = user_message(caught.value)
    assert message is not None
    assert re.fullmatch(
        r"a file written at .* called from tests/unit/launch/test_user_errors.py:\d+ "
        r"\(test_an_err.*\): No space left on device", message,
    )  # fmt: skip
    assert exit_code(caught.value) == 2


@pytest.mark.parametrize(("error", "code"), [(AWAY, 75), (REFUSED, 2)])
def test_commands_end_with_it(error, code, capsys):
    with pytest.raises(typer.Exit) as end, one_line_errors():
        raise error
    assert (end.value.exit_code, capsys.readouterr().err) == (code, f"error: {error}\n")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("operands could not be broadcast"), None),
        (json.JSONDecodeError("Expecting value", "", 0), None),
        (AnomalyError("guard.spike=stop"), "guard.spike=stop"),
        (CheckpointError("damaged"), "damaged"),
        (of_loader(ValueError("operands could not be broadcast")), None),
        (of_loader(DataUsedUp("max_epochs")), "step 3: max_epochs"),
        (of_loader(TooMuchMemory("GiB")), "step 3: GiB"),
        (of_loader(IndexMismatch("another tokenizer")), "step 3: another tokenizer"),
        (os_error(errno.ENOSPC), "shared/file: No space left on device"),
    ],
)
def test_in_a_step_a_plain_value_error_is_nobody_s_mistake(error, told):
    with pytest.raises(Exception, match=r".") as caught, step_faults():
        raise error
    assert user_message(caught.value) == told
    assert (caught.value is error) == (told is not None or isinstance(error, LoaderError))


@pytest.mark.parametrize("cause", [ValueError("no class"), IndexMismatch("another tokenizer")])
def test_a_plain_value_error_of_the_loader_ends_with_a_traceback(
    cause, tmp_path, capsys, monkeypatch
):
    def run(job):
        raise LoaderError(812, cause) from cause

    monkeypatch.setenv(START, "this")
    hold(tmp_path, "this")
    argument = Job("tiny_cpu", str(tmp_path)).argument()
    ours = isinstance(cause, IndexMismatch)
    assert worker.main(argument, run=run) == (2 if ours else 1)
    assert ("Traceback" in capsys.readouterr().err) == (not ours)
    assert (first_exit_report(tmp_path) is not None) == ours  # no report means a crash


def test_the_loader_s_error_has_the_code_of_its_cause():
    error = LoaderError(7, AWAY)
    error.__cause__ = AWAY
    assert (user_message(error), exit_code(error)) == ("step 7: gave up", 75)


@pytest.mark.parametrize("loader", [False, True])
def test_a_worker_that_died_is_told_in_a_line_and_worth_a_restart(loader):
    """The usual cause is lack of memory; code 2 (user error) would prevent a restart."""
    error: Exception = WorkerDied("step 7 cost 2 workers in a row")
    if loader:
        dead, error = error, LoaderError(7, error)
        error.__cause__ = dead
    assert str(user_message(error)).endswith("step 7 cost 2 workers in a row")
    assert exit_code(error) == 1
