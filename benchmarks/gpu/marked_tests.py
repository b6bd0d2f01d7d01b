"""Runs the tests marked gpu and writes each outcome as soon as the test ends.

Only files with such tests are imported, because others may need packages that the machine lacks. On
CUDA a skipped test counts as a failure.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
MARK = "pytest.mark.gpu"


class Recorder:
    """pytest plugin that writes the outcomes so far after each test."""

    def __init__(self, out: Path, device: str):
        self.tests: list[dict[str, Any]] = []
        self._out, self._device = out, device

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome of a test's call, or of a setup or teardown that did not pass."""
        if report.when != "call" and report.outcome == "passed":
            return
        outcome = "failed" if report.failed else report.outcome
        self.tests.append(
            {
                "name": report.nodeid.removeprefix("tests/"),
                "outcome": outcome,
                "seconds": report.duration,
                "why": report.longreprtext[-2000:],
            }
        )
        self.write()

    def write(self) -> None:
        """Write the outcomes so far."""
        counts = Counter(one["outcome"] for one in self.tests)
        about = {"device": self._device}
        found = {"about": about, "counts": dict(counts), "tests": self.tests}
        self._out.write_text(json.dumps(found, indent=1) + "\n")

    @property
    def good(self) -> bool:
        """True if there were tests and each had the outcome that this device requires."""
        wanted = "passed" if self._device == "cuda" else "skipped"
        return bool(self.tests) and all(one["outcome"] == wanted for one in self.tests)


def marked_files() -> list[Path]:
    """Return the files with tests marked gpu. Attention comes last because it compiles most."""
    files = [file for file in (ROOT / "tests").rglob("test_*.py") if MARK in file.read_text()]
    return sorted(files, key=lambda file: ("attention" in file.parts, file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    recorder = Recorder(arguments.out, arguments.device)
    options = ["-m", "gpu", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    code = pytest.main([*options, *map(str, marked_files())], plugins=[recorder])
    recorder.write()
    sys.exit(0 if code == 0 and recorder.good else 1)


if __name__ == "__main__":
    main()
