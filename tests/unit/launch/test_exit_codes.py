"""Which errors a restart may mend."""

import errno
import os

import pytest
import typer

from data_pipeline.loader import LoaderError
from data_pipeline.store.open import AccessDenied, StoreUnavailable
from data_pipeline.workers.workers import WorkerDied
from kimi_pretrain.checkpoint.errors import CheckpointError, CheckpointUnavailable
from kimi_pretrain.run_lock import FormerStart, RunLocked
from launch.errors import exit_code, told_plainly, user_message


def wrapped(inner: Exception, outer: type[Exception], *, hidden: bool) -> Exception:
    try:
        try:
            raise inner
        except type(inner) as error:
            raise outer("said again") from (None if hidden else error)
    except outer as error:
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
        # These tell of something else than a folder that is away.
        (wrapped(os_error(errno.EWOULDBLOCK), ValueError, hidden=False), 2),
        (wrapped(os_error(errno.ESRCH), ValueError, hidden=False), 2),
        (wrapped(OSError("cannot identify image file"), ValueError, hidden=False), 2),
    ],
)
def test_a_store_that_does_not_answer_is_worth_a_restart(error, code):
    assert user_message(error) is not None
    assert exit_code(error) == code


@pytest.mark.parametrize(("error", "code"), [(AWAY, 75), (REFUSED, 2)])
def test_commands_end_with_it(error, code, capsys):
    with pytest.raises(typer.Exit) as end, told_plainly():
        raise error
    assert (end.value.exit_code, capsys.readouterr().err) == (code, f"error: {error}\n")


def test_the_loader_s_error_has_the_code_of_its_cause():
    error = LoaderError(7, AWAY)
    error.__cause__ = AWAY
    assert (user_message(error), exit_code(error)) == ("step 7: gave up", 75)


@pytest.mark.parametrize("loader", [False, True])
def test_a_worker_that_died_is_told_in_a_line_and_worth_a_restart(loader):
    """Killed for want of memory, as a rule; 2 would end the job for ever."""
    error: Exception = WorkerDied("step 7 cost 2 workers in a row")
    if loader:
        dead, error = error, LoaderError(7, error)
        error.__cause__ = dead
    assert str(user_message(error)).endswith("step 7 cost 2 workers in a row")
    assert exit_code(error) == 1
