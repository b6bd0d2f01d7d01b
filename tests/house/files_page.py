"""Writes docs/FILES.md, which lists every module by room with the summary of its docstring.

`make fix` runs this, and `test_reading_path.py` compares the page with it.
"""

import ast
import re
from pathlib import Path

from tests import ROOT

PACKAGES = ("kimi_pretrain", "data_pipeline", "moonvit3d", "launch", "typed_config")
PAGE = ROOT / "docs" / "FILES.md"
ARCHITECTURE = ROOT / "docs" / "ARCHITECTURE.md"
HEAD = """\
# Every file, by room

A room is a folder. `docs/ARCHITECTURE.md` leads through the files that have a number here, in the
order of a batch; look the others up. Each line is the first of the file's own docstring: `make fix`
writes this page, and a test keeps it so. What a room may import: `tests/house/test_rooms.py`.
"""


def path_of(text: str) -> list[tuple[int, str]]:
    """Return (number, file) of the reading path, in page order."""
    found = re.findall(r"^(\d+)\. `([\w./]+)`:", text, re.MULTILINE)
    return [(int(number), file) for number, file in found]


def first_words(source: str) -> str:
    """Return the first paragraph of a module's docstring as one line; "" without a docstring."""
    docstring = ast.get_docstring(ast.parse(source)) or ""
    return " ".join(docstring.partition("\n\n")[0].split())


def page(root: Path, path: dict[str, int]) -> str:
    """Return the page for the packages under `root`; `path` maps files to their numbers."""
    marks = [mark for name in PACKAGES for mark in sorted(root.glob(f"{name}/**/__init__.py"))]
    parts = [HEAD]
    for room in (mark.parent for mark in marks):
        files = sorted(file for file in room.glob("*.py") if file.name != "__init__.py")
        if not files:
            continue
        about = first_words((room / "__init__.py").read_text())
        lines = [_line(root, file, path) for file in files]
        parts.append(f"## `{room.relative_to(root)}`\n\n{about}\n\n" + "".join(lines))
    return "\n".join(parts)


def _line(root: Path, file: Path, path: dict[str, int]) -> str:
    name = str(file.relative_to(root))
    number = f" ({path[name]})" if name in path else ""
    return f"- `{name}`{number}: {first_words(file.read_text())}\n"


def current() -> str:
    """Return the page for the current sources."""
    return page(ROOT, {file: number for number, file in path_of(ARCHITECTURE.read_text())})


if __name__ == "__main__":
    PAGE.write_text(current())
