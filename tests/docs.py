"""The code of the documentation, run as it stands.

A test makes the files that a page names, changes into their folder (`monkeypatch.chdir`), calls
`run` and looks at the variables that the code leaves.
"""

import re
from typing import Any

from tests import ROOT


def blocks(page: str, language: str = "python") -> list[str]:
    """Return the blocks of a language in a page (path from the root), in their order."""
    text = (ROOT / page).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def run(page: str, changes: dict[str, str] | None = None) -> dict[str, Any]:
    """Run all Python of a page as one program, and return its variables.

    Args:
        page: path from the root.
        changes: text to replace first, to run the same code on other sizes. Each must be there.
    """
    code, scope = "\n".join(blocks(page)), dict[str, Any]()
    for old, new in (changes or {}).items():
        assert old in code, f"{page} does not say {old!r}"
        code = code.replace(old, new)
    exec(code, scope)
    return scope
