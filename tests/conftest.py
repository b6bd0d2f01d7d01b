"""Keeps every test process to one thread, so that several on two cores do not fight."""

import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, however long they take on a loaded machine.
settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")

os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts background jobs with Ctrl-C ignored, and what they start inherits that; the tests
# that interrupt their own processes would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


_ENGINE = "kimi_pretrain.engine"


def pytest_collection_finish(session: pytest.Session) -> None:
    """On a host without CUDA the engine patches torch: other tests would see that torch.

    A `*_case.py` has a process of its own.
    """
    tests = [item for item in session.items if not item.path.name.endswith("_case.py")]
    if tests and _ENGINE in sys.modules:
        raise pytest.UsageError(f"a test module imports {_ENGINE}: start a process for it")


@pytest.fixture(autouse=True, scope="module")
def _the_engine_stays_out() -> Iterator[None]:
    """The same for what is imported while tests run."""
    before = _ENGINE in sys.modules
    yield
    if not before and _ENGINE in sys.modules:
        raise AssertionError(f"imported {_ENGINE} here: start a process for it")
