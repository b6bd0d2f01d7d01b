"""Runs the code blocks of the documentation unchanged.

A test creates the files that a page names, changes into their folder (`monkeypatch.chdir`), calls
`run` and checks the variables that the code leaves.
"""

import re
from typing import Any

from tests import ROOT


def blocks(page: str, language: str = "python") -> list[str]:
    """Return the code blocks of a language in a page (path from the root), in page order."""
    text = (ROOT / page).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def run(page: str, changes: dict[str, str] | None = None) -> dict[str, Any]:
    """Run all Python blocks of a page as one program and return its variables.

    Args:
        page: path from the root.
        changes: text replacements, applied first to run the code with other sizes. Each old text
            must occur in the page.
    """
    code, scope = "\n".join(blocks(page)), dict[str, Any]()
    for old, new in (changes or {}).items():
        assert old in code, f"{page} does not say {old!r}"
        code = code.replace(old, new)
    exec(code, scope)
    return scope
