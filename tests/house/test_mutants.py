"""Plants faults in a tiny project: detected faults, survivors, and outdated tables."""

import pytest

from tests.mutants.__main__ import check_equivalents, named_faults
from tests.mutants.faults import NotThere, fault_of, faults_in, sample
from tests.mutants.named import NAMED
from tests.mutants.run import plant_all

CODE = '''\
"""A module."""

LIMIT = 3


def first(values, *, least=0):
    """Return the first that is at least so large; None: there is none."""
    for value in values:
        if value >= least:
            return value
    return None


def told(values):
    """Return a text."""
    count = len(values) + 1 - 1
    while count > 10:
        count -= 10
    return f"{count + 0} values"
'''
TESTS = """\
import subprocess, sys
from pkg.mod import first, told

def test_first():
    assert first([1, 2, 3], least=2) == 2

def test_told():
    assert told([]).endswith("values")

def test_in_a_process():
    code = "from pkg.mod import told; print(told(list(range(25))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "5 values\\n"
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    root = tmp_path_factory.mktemp("project")
    for name, text in {"pkg/mod.py": CODE, "checks/test_mod.py": TESTS, "pytest.ini": INI}.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    return root


INI = "[pytest]\nmarkers =\n    slow\n    gpu\n    slurm\n"


def plant(project, faults, folder):
    return plant_all(faults, ["checks/test_mod.py"], folder, root=project, least_limit=1.5)


def test_faults_are_noticed_or_survive_and_are_known_the_next_time(project, tmp_path):
    found = {
        old: fault_of(project, "pkg/mod.py", old, new)
        for old, new in {
            "if value >= least": "if value > least",  # detected in this process
            "count -= 10\n": "count -= 9\n",  # detected in a subprocess
            "count > 10": "True",  # never ends
            "return None": "return 0",  # no test reaches it
            "len(values) + 1 - 1": "len(values) - 1 + 1",
        }.items()
    }
    outcomes = plant(project, list(found.values()), tmp_path)
    noticed, started, endless, unreached, same = (outcomes[one.key] for one in found.values())
    assert (noticed.outcome, noticed.killer) == ("killed", "checks/test_mod.py::test_first")
    assert (started.outcome, started.killer) == ("killed", "checks/test_mod.py::test_in_a_process")
    assert (endless.outcome, endless.noticed) == ("time-out", True)
    assert (unreached.outcome, unreached.tried, unreached.noticed) == ("unreached", 0, False)
    assert (same.outcome, same.tried, same.noticed) == ("survived", 3, False)
    kept = (tmp_path / "outcomes.jsonl").read_text()
    assert plant(project, list(found.values()), tmp_path) == outcomes
    assert (tmp_path / "outcomes.jsonl").read_text() == kept
    assert (project / "pkg/mod.py").read_text() == CODE


def test_a_fault_that_does_not_apply_is_an_error(project):
    for old, why in (("value > least", "0 times"), ("value", "8 times"), ("LIMIT = 3", "inside")):
        with pytest.raises(NotThere, match=why):
            fault_of(project, "pkg/mod.py", old, "x")
    with pytest.raises(NotThere, match="is not Python"):
        fault_of(project, "pkg/mod.py", "return None", "return (")


def test_faults_are_drawn_by_the_seed_and_keep_lines_and_texts(project):
    faults = faults_in(project, "pkg/mod.py")
    changes = {(one.where, one.new) for one in faults}
    assert ("first", "if value > least:") in changes
    assert ("first", "if not (value >= least):") in changes
    assert ("told", "pass") in changes
    assert ("told", "count = len(values) - 1 - 1") in changes
    assert not any('values"' in one.new for one in faults)  # message texts stay unchanged
    source = (project / "pkg/mod.py").read_bytes()
    assert {one.planted(source).count(b"\n") for one in faults} == {source.count(b"\n")}
    drawn = sample(project, faults, 5, seed=3)
    assert len(drawn) == 5
    assert drawn == sample(project, faults[::-1], 5, seed=3)
    assert drawn != sample(project, faults, 5, seed=4)


def test_the_tables_apply():
    """The named faults and the equivalents apply to the current files."""
    named = named_faults()
    assert len(named) == len(NAMED)
    check_equivalents()
