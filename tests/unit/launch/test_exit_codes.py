"""Which errors a restart may mend."""

import pytest
import typer

from data_pipeline.loader import LoaderError
from data_pipeline.store.open import AccessDenied, StoreUnavailable
from kimi_pretrain.checkpoint.errors import CheckpointError, CheckpointUnavailable
from launch.errors import exit_code, told_plainly, user_message


def wrapped(inner: Exception, outer: type[Exception], *, hidden: bool) -> Exception:
    try:
        try:
            raise inner
        except type(inner) as error:
            raise outer("said again") from (None if hidden else error)
    except outer as error:
        return error


AWAY, REFUSED = StoreUnavailable("gave up"), AccessDenied("refused")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (AWAY, 75),
        (wrapped(AWAY, CheckpointError, hidden=True), 75),
        (wrapped(AWAY, ValueError, hidden=False), 75),
        (CheckpointUnavailable("another rank's store does not answer"), 75),
        (REFUSED, 2),
        (wrapped(REFUSED, CheckpointError, hidden=True), 2),
        (CheckpointError("damaged"), 2),
        (ValueError("a wrong key"), 2),
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
