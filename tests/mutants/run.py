"""Copies the tree, plants faults in the copy organ by organ, and records their outcomes."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests import ROOT
from tests.mutants.faults import Fault
from tests.mutants.worker import JOB, stamp

NOTICED = ("killed", "time-out", "died")
_LEAST_LIMIT_S = 30.0


@dataclass(frozen=True)
class Planted:
    """Outcome of a fault.

    Attributes:
        outcome: a value of `NOTICED`; "survived"; "unreached" by any test; "unfit" to be planted.
        killer: the test that noticed the fault.
        tried: number of tests run with the fault.
        stamp: hash of the file and of the tests that determine the outcome.
    """

    key: str
    outcome: str
    killer: str | None
    tried: int
    seconds: float
    stamp: str

    @property
    def noticed(self) -> bool:
        """True if a test failed, did not end, or died."""
        return self.outcome in NOTICED


class Results:
    """Known outcomes, one line each in a file, so that an interrupted sweep continues."""

    def __init__(self, file: Path):
        self.file = file
        self._known: dict[str, Planted] = {}
        for line in file.read_text().splitlines() if file.exists() else ():
            one = Planted(**json.loads(line))
            self._known[one.key] = one

    def last(self, fault: Fault) -> Planted | None:
        """Return the outcome of a fault when it was last planted."""
        return self._known.get(fault.key)

    def of(self, root: Path, fault: Fault, tests: Sequence[str]) -> Planted | None:
        """Return the outcome of a fault if neither its file nor its tests have changed since."""
        known = self._known.get(fault.key)
        if known is None:
            return None
        noticed = [known.killer.partition("::")[0]] if known.killer else tests
        files = [fault.file, *noticed]
        there = all((root / file).exists() for file in files)
        return known if there and stamp(root, files) == known.stamp else None


def plant_all(
    faults: Sequence[Fault],
    tests: Sequence[str],
    folder: Path,
    *,
    watched: Sequence[Fault] = (),
    forks: bool = False,
    only: Mapping[str, Sequence[str]] | None = None,
    root: Path = ROOT,
    least_limit: float = _LEAST_LIMIT_S,
) -> dict[str, Planted]:
    """Plant the faults that have no outcome yet; return the outcomes of all faults.

    Args:
        tests: test files.
        folder: stores the outcomes and the lines that tests reach.
        watched: additional faults whose lines are traced, so that a longer list reuses the trace.
        forks: True if tests start processes through `tests.fork_server`.
        only: tests of individual faults, by fault key.
        least_limit: minimum time limit of one test file with a fault, in seconds.

    Raises:
        RuntimeError: the tests cannot be run, or fail without a fault.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results, only = folder / "outcomes.jsonl", only or {}
    known = Results(results)
    outcomes = {one.key: known.of(root, one, only.get(one.key, tests)) for one in faults}
    left = [one for one in faults if outcomes[one.key] is None]
    if left:
        with TemporaryDirectory(prefix="mutants-") as made:
            tree = Path(made).resolve() / "tree"
            copy_tree(root, tree)
            job = {
                "root": str(tree), "folder": str(tree.parent), "results": str(results.resolve()),
                "kept": str((folder / "reached").resolve()), "path": [str(tree), str(ROOT)],
                "lines": _lines_of([*faults, *watched]), "tests": list(tests), "forks": forks,
                "least_limit": least_limit,
                "faults": [_as_job(one, only.get(one.key, tests)) for one in left],
            }  # fmt: skip
            _work(tree, job)
    found = Results(results)
    outcomes |= {one.key: found.last(one) for one in left}
    if missing := [key for key, one in outcomes.items() if one is None]:
        raise RuntimeError(f"{len(missing)} faults have no outcome, the first is {missing[0]}")
    return {key: one for key, one in outcomes.items() if one is not None}


def copy_tree(root: Path, tree: Path) -> None:
    """Copy the files that git tracks or would track; all files if there is no git."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"],
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    names = listed.stdout.split("\0") if listed.returncode == 0 else _files_of(root)
    for name in filter(None, names):
        if (root / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, tree / name)
    if (root / ".venv").exists():
        (tree / ".venv").symlink_to((root / ".venv").resolve())


def _files_of(root: Path) -> Iterable[str]:
    return [str(file.relative_to(root)) for file in sorted(root.rglob("*"))]


def _lines_of(faults: Sequence[Fault]) -> dict[str, list[int]]:
    found = dict[str, set[int]]()
    for fault in faults:
        first, last = fault.lines
        found.setdefault(fault.file, set()).update(range(first, last + 1))
    return {file: sorted(found[file]) for file in sorted(found)}


def _as_job(fault: Fault, tests: Sequence[str]) -> dict[str, Any]:
    begin, end, text = fault.span
    return {
        "key": fault.key, "file": fault.file, "lines": fault.lines,
        "span": [begin, end, text.decode()], "tests": list(tests),
    }  # fmt: skip


def _work(tree: Path, job: dict[str, Any]) -> None:
    file = tree.parent / "job.json"
    file.write_text(json.dumps(job))
    environment = os.environ | {
        JOB: str(file), "PYTHONPATH": os.pathsep.join(job["path"]), "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "1",
    }  # fmt: skip
    command = [
        sys.executable, "-m", "pytest", "-s", "-p", "tests.mutants.worker",
        "-p", "no:cacheprovider", "-p", "no:xdist",
        "-m", "not slow and not gpu and not slurm", *job["tests"],
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the tests cannot be run:\n{done.stdout[-4000:]}")
