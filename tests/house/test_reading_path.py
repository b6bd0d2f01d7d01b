"""Keeps the reading path and the README short, and the generated list of files current."""

import re
import subprocess

from tests import ROOT
from tests.house import files_page
from tests.house.files_page import path_of

ARCHITECTURE = files_page.ARCHITECTURE.read_text()
MOST_FILES, README_LINES = 20, 150


def test_the_path_is_short_numbered_and_there():
    path = path_of(ARCHITECTURE)
    files = [file for _, file in path]
    assert [number for number, _ in path] == list(range(1, len(path) + 1))
    assert len(set(files)) == len(files)
    assert all((ROOT / file).is_file() for file in files)
    assert len(files) <= MOST_FILES


def test_the_page_speaks_of_names_that_exist():
    """Checks `name` in entries of the reading path, and `name` (`file`) anywhere in the page."""
    text = ARCHITECTURE
    entry = r"^\d+\. `([\w./]+)`:(.*?)(?=^\d+\. |^## )"
    entries = re.findall(entry, text, re.MULTILINE | re.DOTALL)
    named = [(file, name) for file, about in entries for name in re.findall(r"`(\w+)`", about)]
    named += [(file, name) for name, file in re.findall(r"`(\w+)`\s\(`([\w./]+)`\)", text)]
    gone = [
        (file, name)
        for file, name in named
        if not re.search(rf"\b{name}\b", (ROOT / file).read_text())
    ]
    assert named
    assert not gone, gone


def test_no_file_holds_two_versions():
    """Finds unresolved merge markers."""
    done = subprocess.run(
        ["git", "grep", "-lE", "^(<{7}|>{7}) "],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr


def test_the_list_of_files_is_that_of_the_docstrings():
    page = files_page.current()
    unnamed = re.findall(r"^- `(.*)`.*: $", page, re.MULTILINE)
    assert not unnamed, f"modules without a docstring: {unnamed}"
    assert files_page.PAGE.read_text() == page, "run: make fix"


def test_the_drawing_has_the_phases_of_the_step():
    step = (ROOT / "kimi_pretrain" / "step.py").read_text()
    table = "\n".join(re.findall(r"^    \d .*", step.split('"""')[1], re.MULTILINE))
    phases = {int(n): name for n, name in re.findall(r"(\d) ([a-z-]+(?: [a-z]+)?)", table)}
    assert sorted(phases) == list(range(9))
    for page in (ARCHITECTURE, (ROOT / "README.md").read_text()):
        drawn = re.findall(r'p(\d)\["(\d) ([a-z, -]+)<br/>', page)
        assert [int(number) for _, number, _ in drawn] == list(range(9))
        assert all(node == number for node, number, _ in drawn)
        assert {int(n): name for _, n, name in drawn} == phases | {8: "record, save"}
    timed = re.findall(r'phase\("(\d) ([a-z -]+)"\)', step)
    assert timed
    assert all(phases[int(n)] == name for n, name in timed if name != "gradient sum")


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_a_page_is_read_as_written():
    page = "1. `a/b.py`: x\n2. `c.yaml`: y\n- `d.py`: z\n3. `e.py`\n"
    assert path_of(page) == [(1, "a/b.py"), (2, "c.yaml")]


def test_every_module_has_its_line_and_the_path_its_numbers(tmp_path):
    room = tmp_path / "kimi_pretrain" / "dep"
    room.mkdir(parents=True)
    (room / "__init__.py").write_text('"""The room."""')
    (room / "b.py").write_text('"""What b does,\nin two lines.\n\nMore."""')
    (room / "a.py").write_text("x = 1")
    (room / "no_module.txt").write_text("")
    page = files_page.page(tmp_path, {"kimi_pretrain/dep/b.py": 7})
    assert page.removeprefix(files_page.HEAD) == (
        "\n## `kimi_pretrain/dep`\n\nThe room.\n\n"
        "- `kimi_pretrain/dep/a.py`: \n"
        "- `kimi_pretrain/dep/b.py` (7): What b does, in two lines.\n"
    )
