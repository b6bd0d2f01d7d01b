"""Tests of the installed wheel without access to the checkout, which reveal missing files."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

PACKAGES = ("typed_config", "moonvit3d", "data_pipeline", "kimi_pretrain", "launch")

BUILD = "import sys, setuptools.build_meta as backend; print(backend.build_wheel(sys.argv[1]))"

IMPORT_ALL = f"""
import importlib, pathlib, pkgutil, sys
packages = [importlib.import_module(name) for name in {PACKAGES}]
names = [
    module.name
    for package in packages
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    if not module.name.endswith(".__main__")
]
for name in names:
    importlib.import_module(name)
target = pathlib.Path(sys.argv[1])
strangers = [
    name
    for name in (*names, *{PACKAGES})
    if not pathlib.Path(sys.modules[name].__file__).is_relative_to(target)
]
assert not strangers, strangers
assert len(names) > 200, names
"""

# Runs the installed `kimi-pretrain` script as a dry run of a preset.
DRY_RUN = """
import runpy, sys
script = sys.argv[1] + "/bin/kimi-pretrain"
sys.argv = [script, "train", "--config", sys.argv[2], "--dry-run"]
runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Install the wheel into a folder; build from a copy, because a build leaves files behind."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in (*PACKAGES, "configs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    built = subprocess.run(
        [sys.executable, "-P", "-c", BUILD, copy], cwd=copy, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr[-3000:]
    (wheel,) = copy.glob("*.whl")
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        + ["--no-deps", "--no-index", "--no-compile", "--target", out, wheel],
        check=True,
    )
    return out


def alone(target: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the wheel and its dependencies; -S hides the editable checkout."""
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(target), *libraries])}
    return subprocess.run(
        [sys.executable, "-S", "-P", *arguments], cwd=cwd, env=env, capture_output=True, text=True
    )


def test_it_holds_every_file_of_the_packages(target):
    shipped = {
        str(path.relative_to(ROOT))
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    configs = ROOT / "configs"
    shipped |= {
        f"kimi_pretrain/configs/{path.relative_to(configs)}" for path in configs.rglob("*.yaml")
    }
    held = {
        str(path.relative_to(target))
        for path in target.rglob("*")
        if path.is_file() and path.relative_to(target).parts[0] in PACKAGES
    }
    assert held == shipped


def test_every_module_can_be_imported_and_a_preset_built(target, tmp_path):
    dry_run(target, tmp_path, IMPORT_ALL + DRY_RUN, "tiny_cpu")


@pytest.mark.slow
def test_the_largest_preset_builds_from_another_folder(target, tmp_path):
    dry_run(target, tmp_path, DRY_RUN, "kimi_k25_1t")


def dry_run(target: Path, cwd: Path, script: str, preset: str) -> None:
    done = alone(target, cwd, "-c", script, str(target), preset)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "language model" in done.stdout
    assert not list(cwd.iterdir())
