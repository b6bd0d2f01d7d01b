"""Keeps every test process to one thread, so that several on two cores do not fight."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import ROOT, fork_server

# The same examples in every run, however long they take on a loaded machine.
settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where a test has more, on cores that others use: spinning took ten times as long as sleeping.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell starts background jobs with Ctrl-C ignored, and what they start inherits that; the tests
# that interrupt their own processes would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


_ENGINE = "kimi_pretrain.engine"


def pytest_configure() -> None:
    """One set of fork servers for all workers of xdist, which this process starts next."""
    fork_server.share()


def _in_turns(items: list[pytest.Item]) -> None:
    """Sort long files to the front, so that none is left alone at the end.

    Those of tests/dist need cores, those of tests/fault and tests/slurm mostly wait: they take
    turns, so that workers of xdist do the one while they do the other.
    """
    folders: dict[Path, dict[Path, int]] = {}
    for item in items:
        files = folders.setdefault(item.path.parent, {})
        files.setdefault(item.path, len(files))
    long = {ROOT / "tests" / name for name in ("dist", "fault", "slurm")}

    def place(item: pytest.Item) -> tuple[int, float, str]:
        folder = item.path.parent
        if folder not in long:
            return 2 * (folder != ROOT / "tests" / "unit"), 0.0, ""
        return 1, folders[folder][item.path] / len(folders[folder]), str(item.path)

    items.sort(key=place)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Bring files into their order; miss none.

    pytest skips folders by name (once it skipped tests/dist), and says nothing.
    """
    _in_turns(items)
    if [Path(argument).resolve() for argument in config.args] != [ROOT / "tests"]:
        return  # a part was asked for
    missing = {*(ROOT / "tests").rglob("test_*.py")} - {item.path for item in items}
    if missing:
        raise pytest.UsageError(f"not collected: {', '.join(map(str, sorted(missing)))}")


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


@pytest.fixture(scope="session")
def data_root(tmp_path_factory) -> Path:
    """A folder with a small ingested corpus, built once."""
    from tests.dist import corpus

    root = tmp_path_factory.mktemp("corpus")
    corpus.build(root)
    return root
