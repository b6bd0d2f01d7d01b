"""The way in stays short: the reading path, the appendix beside it, and the README."""

import re

import pytest

from tests import ROOT

ARCHITECTURE = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
PACKAGES = ("typed_config", "moonvit3d", "data_pipeline", "kimi_pretrain", "launch")
MOST_FILES, MOST_LINES, README_LINES = 20, 5000, 150


def path_of(text: str) -> list[tuple[int, str]]:
    """Return (number, file) of the reading path, in the order of the page."""
    found = re.findall(r"^(\d+)\. `([\w./]+)`:", text.partition("\n## Appendix")[0], re.MULTILINE)
    return [(int(number), file) for number, file in found]


def appendix_of(text: str) -> list[str]:
    """Return the files of the appendix, in the order of the page."""
    return re.findall(r"^- `([\w./]+)`: \S", text.partition("\n## Appendix")[2], re.MULTILINE)


def modules() -> set[str]:
    """Return every module of the five packages but `__init__`, whose room the appendix names."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    return {str(file.relative_to(ROOT)) for file in files if file.name != "__init__.py"}


def test_the_path_is_short_numbered_and_there():
    path = path_of(ARCHITECTURE)
    files = [file for _, file in path]
    assert [number for number, _ in path] == list(range(1, len(path) + 1))
    assert len(set(files)) == len(files)
    lines = {file: len((ROOT / file).read_text().splitlines()) for file in files}
    assert len(files) <= MOST_FILES
    assert sum(lines.values()) <= MOST_LINES, lines


def test_the_page_speaks_of_names_that_exist():
    """`name` in the lines of a file of the path; `name` (`file`) anywhere before the appendix."""
    text = ARCHITECTURE.partition("\n## Appendix")[0]
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


def test_the_appendix_names_every_other_module_once():
    files = [file for _, file in path_of(ARCHITECTURE)]
    named = appendix_of(ARCHITECTURE)
    twice = {file for file in named if named.count(file) > 1 or file in files}
    missing = modules() - set(named) - set(files)
    gone = set(named) - modules()
    assert (missing, gone, twice) == (set(), set(), set()), (
        "one line for each file in docs/ARCHITECTURE.md, appendix: - `path`: what it does; "
        f"missing {sorted(missing)}, gone {sorted(gone)}, on the path or twice {sorted(twice)}"
    )


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


@pytest.mark.parametrize(
    ("page", "path", "appendix"),
    [
        ("1. `a/b.py`: x\n2. `c.yaml`: y\n\n## Appendix\n\n- `d.py`: z\n",
         [(1, "a/b.py"), (2, "c.yaml")], ["d.py"]),
        ("2. `a.py`: x\n\n## Appendix\n\n- `a.py`:\n", [(2, "a.py")], []),
    ],
)  # fmt: skip
def test_a_page_is_read_as_written(page, path, appendix):
    assert path_of(page) == path
    assert appendix_of(page) == appendix
