"""Tests that other ranks receive rank 0's result: its value, or an error of the same kind."""

import pickle

import pytest

from data_pipeline.store.open import StoreUnavailable
from kimi_pretrain.checkpoint.errors import CheckpointUnavailable
from kimi_pretrain.parallel.errors import Outcome
from kimi_pretrain.reliability.run_lock import RunLocked
from launch.local.user_errors import exit_code


class Demanding(ValueError):
    """Error that cannot be rebuilt from its message, although only messages are sent."""

    def __init__(self, key: str, found: int):
        super().__init__(f"{key} is {found}")


def sent(work):
    return pickle.loads(pickle.dumps(Outcome.of(work).sendable()))


def fail(error: Exception):
    def work():
        raise error

    return work


def test_a_value_arrives():
    assert sent(lambda: [3]).result() == [3]
    assert sent(lambda: None).result() is None


@pytest.mark.parametrize(
    "error",
    [
        CheckpointUnavailable("s3://b: gave up"),
        RunLocked("in use"),
        FileNotFoundError(2, "No such file", "a.json"),
        KeyError("name"),
    ],
)
def test_an_error_keeps_its_kind_and_message(error):
    with pytest.raises(type(error)) as found:
        sent(fail(error)).result()
    assert str(found.value) == str(error)


@pytest.mark.parametrize("hidden", [False, True])
def test_its_causes_arrive_too(hidden):
    """The causes decide whether a restart helps."""

    def work():
        try:
            raise StoreUnavailable("gave up")
        except StoreUnavailable as error:
            raise RunLocked("cannot be written") from (None if hidden else error)

    with pytest.raises(RunLocked) as found:
        sent(work).result()
    assert exit_code(found.value) == 75
    with pytest.raises(RunLocked) as found:
        Outcome.of(work).result()
    assert exit_code(found.value) == 75


def test_an_error_that_cannot_be_sent_is_told_all_the_same():
    with pytest.raises(RuntimeError, match="Demanding: steps is 3"):
        sent(fail(Demanding("steps", 3))).result()
    with pytest.raises(Demanding):  # unchanged where it was raised
        Outcome.of(fail(Demanding("steps", 3))).result()


def test_what_ends_a_process_is_no_outcome():
    with pytest.raises(KeyboardInterrupt):
        Outcome.of(fail(KeyboardInterrupt()))  # type: ignore[arg-type]
