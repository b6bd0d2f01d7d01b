"""Limits every test process to one thread, so that parallel tests do not compete for two cores."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import ROOT, fork_server

# Every run tests the same examples, however long they take on a loaded machine.
settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some tests use more threads. On cores with other load, spinning took ten times as long as
# sleeping.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell starts background jobs with SIGINT ignored, and their children inherit that. Tests that
# interrupt their own processes would then hang.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


_ENGINE = "kimi_pretrain.engine"


def pytest_configure() -> None:
    """Create one set of fork servers for all xdist workers, which this process starts next."""
    fork_server.share()


def _in_turns(items: list[pytest.Item]) -> None:
    """Sort long files to the front, so that no long file runs alone at the end.

    Files in tests/dist need cores; files in tests/fault and tests/slurm mostly wait. Alternating
    between them lets some xdist workers compute while others wait.
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
    """Order the test files and check that none is missing.

    pytest skips some folders by name without a message; it once skipped tests/dist.
    """
    _in_turns(items)
    if [Path(argument).resolve() for argument in config.args] != [ROOT / "tests"]:
        return  # the user asked for a subset
    missing = {*(ROOT / "tests").rglob("test_*.py")} - {item.path for item in items}
    if missing:
        raise pytest.UsageError(f"not collected: {', '.join(map(str, sorted(missing)))}")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse test modules that import the engine, which patches torch on a host without CUDA.

    The other tests would run with the patched torch. A `*_case.py` runs in a separate process.
    """
    tests = [item for item in session.items if not item.path.name.endswith("_case.py")]
    if tests and _ENGINE in sys.modules:
        raise pytest.UsageError(f"a test module imports {_ENGINE}: start a process for it")


@pytest.fixture(autouse=True, scope="module")
def _the_engine_stays_out() -> Iterator[None]:
    """Refuse imports of the engine while tests run."""
    before = _ENGINE in sys.modules
    yield
    if not before and _ENGINE in sys.modules:
        raise AssertionError(f"imported {_ENGINE} here: start a process for it")


@pytest.fixture(scope="session")
def data_root(tmp_path_factory) -> Path:
    """Return a folder with a small ingested corpus, built once."""
    from tests.dist import corpus

    root = tmp_path_factory.mktemp("corpus")
    corpus.build(root)
    return root
