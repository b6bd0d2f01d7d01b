"""Mechanical rules of plain English: how docstrings open, and words that no sentence may use.

What no rule can check is read: `python -m tests.house.sample_sentences SEED` draws sentences for a
reader to mark, and docs/LOG.md has the counts.
"""

import ast
import re
from pathlib import Path

import pytest

from tests import ROOT
from tests.house import sample_sentences

FOLDERS = (*sample_sentences.FOLDERS, "tests")
_QUESTION = re.compile(r"(What|Which|How|Whether|Where|Who|When|Why|From)\b")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def question_openings(text: str) -> list[str]:
    """Return the first lines of docstrings that open with a question word."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, DOCUMENTED)]
    found = [ast.get_docstring(node) or "" for node in nodes]
    return [one.splitlines()[0] for one in found if _QUESTION.match(one)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_open_with_a_noun_or_a_verb(folder):
    bad = [
        f"{file.relative_to(ROOT)}: {line}"
        for file in sorted((ROOT / folder).rglob("*.py"))
        for line in question_openings(file.read_text())
    ]
    assert not bad, "\n".join(bad)


def test_a_question_is_seen():
    assert question_openings('"""What a run does."""\ndef f():\n    """How it ends."""') == [
        "What a run does.",
        "How it ends.",
    ]
    assert not question_openings('"""Whatever."""\nx = 1\n"""What it is."""')


# Calques that came with the text before it was rewritten.
CALQUES = ("as a rule", "anew", "is told", "are told", "without a sign", "beside", "crude")


@pytest.mark.parametrize("words", CALQUES)
def test_docs_have_no_calques(words):
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in pages
        for line in _prose(page).splitlines()
        if re.search(rf"\b{words}\b", line, re.IGNORECASE)
    ]
    assert not found, "\n".join(found)


def _prose(page: Path) -> str:
    """Return a page without generated blocks and code."""
    if str(page.relative_to(ROOT)) in sample_sentences.GENERATED:
        return ""
    return re.sub(r"`[^`]*`", "", sample_sentences.BLOCKS.sub("", page.read_text()))
