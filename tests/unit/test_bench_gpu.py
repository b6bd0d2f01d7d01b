"""Tests of `make gpu`: its short form on a CPU, and failures of single parts."""

import json
import sys

import pytest

from benchmarks.gpu import parts, run, wheels
from benchmarks.gpu.marked_tests import marked_files
from benchmarks.gpu.parts import PARTS, Part
from tests import ROOT, fork_server

QUICK = ("attention",)


def by_fork(arguments, seconds):
    done = fork_server.run(arguments, 100.0)
    return done.returncode, done.stdout + done.stderr


def test_the_short_form_runs_and_the_page_reads_it(tmp_path):
    chosen = [part for part in PARTS if part.name in QUICK]
    assert run.run(chosen, "cpu", tmp_path, by_fork) == 0
    page = (tmp_path / "gpu_cpu.md").read_text()
    assert "could not be read" not in page
    assert all(f"## {name}\n" in page for name in QUICK)
    assert page.count("not run now") == len(PARTS) - len(QUICK)


# Dependencies that docs/GPU.md does not require and `make gpu-wheels` does not provide.
ABSENT = {"av", "webdataset", "matplotlib", "tensorboard", "deepspeed", "sklearn", "skimage",
          "skvideo", "vega_datasets"}  # fmt: skip
HIDES = f"""
from importlib.machinery import PathFinder
found = PathFinder.find_spec
def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in {ABSENT} else found(name, path, target)
PathFinder.find_spec = classmethod(find_spec)
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_short_form_runs_without_packages_that_are_not_asked_for(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(HIDES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run.run(PARTS, "cpu", tmp_path) == 0
    assert "could not be read" not in (tmp_path / "gpu_cpu.md").read_text()
    memory = json.loads((tmp_path / "memory_cpu.json").read_text())
    assert all(one["met"] for one in memory["targets"])


def test_a_part_that_fails_or_hangs_does_not_stop_the_next(tmp_path):
    def part(name, code, seconds=30.0):
        return Part(name, "", seconds, (), ("-c", code, "{out}"))

    write = "import sys; open(sys.argv[1], 'w').write('{}')".replace("{}", "{{}}")
    chosen = [
        part("offload", "raise SystemExit('a reason')"),
        part("attention", "import time; time.sleep(60)", 0.1),
        part("memory", "pass"),
        part("muon", write),
    ]
    assert run.run(chosen, "cpu", tmp_path) == 3
    found = json.loads((tmp_path / "gpu_cpu.json").read_text())["parts"]
    outcomes = [one["outcome"] for one in found.values()]
    assert outcomes == ["failed", "took too long", "failed", "ok"]
    assert "a reason" in found["offload"]["output"]
    assert "wrote no memory_cpu.json" in found["memory"]["output"]


def test_all_parts_fit_into_nine_minutes():
    assert sum(part.seconds for part in PARTS) <= parts.MOST_SECONDS - 20
    assert len({part.name for part in PARTS}) == len(PARTS)


def test_every_marked_file_is_found():
    assert ROOT / "tests/unit/moonvit3d/test_vit_model.py" in marked_files()
    assert marked_files()[-1].name == "test_attention.py"


def test_wheels_have_pinned_versions_and_are_summed_up(tmp_path):
    pinned = {line.split("==")[0].replace("_", "-") for line in
              (ROOT / "constraints.txt").read_text().splitlines()}  # fmt: skip
    assert set(wheels.NAMES) <= pinned
    assert wheels.command(["a"], tmp_path)[0] == sys.executable
    (tmp_path / "one-1.0-py3-none-any.whl").write_bytes(b"x" * 10)
    (tmp_path / "two-2.0-py3-none-any.whl").write_bytes(b"x" * 5)
    lines, total = wheels.summary(tmp_path)
    assert total == 15
    assert [line.split()[:2] for line in lines[:2]] == [["one", "1.0"], ["two", "2.0"]]
