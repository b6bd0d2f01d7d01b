"""Draws sentences from docs, docstrings, comments and messages, for a reader to mark.

    python -m tests.house.sample_sentences 7              100 of all kinds, with seed 7
    python -m tests.house.sample_sentences 7 --of docs    only from README and docs

The reader marks each as natural, odd or cryptic; docs/LOG.md records the counts.
"""

import argparse
import ast
import io
import random
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests import ROOT

FOLDERS = ("typed_config", "moonvit3d", "data_pipeline", "kimi_pretrain", "launch", "benchmarks")
GENERATED = ("docs/FILES.md", "docs/CONFIG.md")
KINDS = ("docs", "docstrings", "comments", "messages")
_FEWEST_WORDS = 4
BLOCKS = re.compile(r"```.*?```|<!-- *([\w ]+: )?begin.*?end.*?-->", re.DOTALL)
_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*\"(])")


def sentences(kind: str) -> list[tuple[str, str]]:
    """Return the unique (file, sentence) pairs of a kind, in file order."""
    texts = _pages() if kind == "docs" else _modules(kind)
    found = [(file, one) for file, text in texts for one in _cut(text)]
    return list(dict.fromkeys(found))


def drawn(seed: int, number: int, kinds: tuple[str, ...] = KINDS) -> list[tuple[str, str, str]]:
    """Draw (kind, file, sentence) uniformly over all sentences of the kinds."""
    every = [(kind, file, text) for kind in kinds for file, text in sentences(kind)]
    return random.Random(seed).sample(every, min(number, len(every)))


def _pages() -> Iterator[tuple[str, str]]:
    """Yield (file, text) of each paragraph, list item and table cell of the handwritten pages."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        name = str(page.relative_to(ROOT))
        if name in GENERATED:
            continue
        text = BLOCKS.sub("\n\n", page.read_text())
        for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=\|)", text):
            if part.startswith("#"):
                continue
            cells = part.strip("|").split("|") if part.startswith("|") else [part]
            yield from ((name, re.sub(r"^\s*(?:[-*]|\d+\.) ", "", cell)) for cell in cells)


def _modules(kind: str) -> Iterator[tuple[str, str]]:
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            text, name = file.read_text(), str(file.relative_to(ROOT))
            read = {"docstrings": _docstrings, "comments": _comments, "messages": _messages}[kind]
            yield from ((name, part) for part in read(text))


def _docstrings(text: str) -> Iterator[str]:
    """Yield the paragraphs of docstrings, and each entry of sections such as Args."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and (docstring := ast.get_docstring(node)):
            for part in re.split(r"\n\s*\n|\n(?=    \S)", docstring):
                if not part.startswith("     "):  # code
                    yield re.sub(r"^\s*(?:[\w*, ]+:|Args:|Raises:|Attributes:)\s", "", part)


def _comments(text: str) -> Iterator[str]:
    """Yield comments; consecutive comment lines form one comment."""
    last, parts = -2, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or re.match(r"# (?:type|pyright|fmt|noqa)", token.string):
            continue
        if token.start[0] != last + 1:
            yield " ".join(parts)
            parts = []
        parts.append(token.string.lstrip("# ").rstrip("- "))
        last = token.start[0]
    yield " ".join(parts)


def _messages(text: str) -> Iterator[str]:
    """Yield the texts of errors and option help, with {} for interpolated values."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from map(_text, node.exc.args[:1])
        elif isinstance(node, ast.keyword) and node.arg == "help":
            yield _text(node.value)


def _text(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(value) for value in values)
        case ast.FormattedValue():
            return "{}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left) + _text(right)
    return ""


def _cut(text: str) -> list[str]:
    plain = " ".join(text.split())
    return [one for one in _END.split(plain) if len(one.split()) >= _FEWEST_WORDS]


def main() -> None:
    """Print the drawn sentences, each with its kind and file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seed", type=int)
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--of", choices=KINDS, action="append", help="all by default")
    given = parser.parse_args()
    chosen = drawn(given.seed, given.number, tuple(given.of or KINDS))
    for number, (kind, file, text) in enumerate(chosen, 1):
        print(f"{number}. [{kind}, {Path(file)}] {text}")


if __name__ == "__main__":
    main()
