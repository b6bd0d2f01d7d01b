"""Plain prose and code from the Python installation that runs the demo.

Prose consists of the topics of `pydoc` (the language reference as text), the docstrings of the
standard library, and the descriptions of installed packages. Code is the standard library's source.
Files are read, never imported, in sorted order and up to a given number of bytes, so the same
versions give the same text.
"""

import ast
import importlib.metadata
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

from data_pipeline.ingest.samples import CrudeSample, TextSegment

# Share of the prose that is the language reference, whatever the total amount.
TOPIC_SHARE = 0.5
CHUNK_CHARS = 1100
# Shorter pieces are dropped.
SMALLEST_CHUNK = 40
# Packages in every installation of this project, because a varying list would vary the corpus.
DESCRIBED = ("einops", "matplotlib", "numpy", "pydantic", "rich", "tiktoken", "typer")


def standard_library() -> Path:
    """Return the folder of the standard library's Python sources."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    if not (folder / "pydoc_data" / "topics.py").is_file():
        raise FileNotFoundError(
            f"the Python installation has no sources in {folder}; the demo reads its text from "
            "them: use a python3 with its standard library as files"
        )
    return folder


def modules() -> list[Path]:
    """Return the top-level modules of the standard library, sorted by name."""
    # `_sysconfigdata` has this Python's build settings, which differ between machines.
    found = standard_library().glob("*.py")
    return sorted((p for p in found if not p.name.startswith("_sysconfig")), key=lambda p: p.name)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def docstrings(source: str) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and functions, in order of appearance."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield text


@cache
def topics() -> tuple[str, ...]:
    """Return the help topics of `pydoc`: the language reference as plain text."""
    # The module is a literal dictionary, so it is evaluated as a literal and no code runs.
    tree = ast.parse(_read(standard_library() / "pydoc_data" / "topics.py"))
    tables = [n for n in ast.walk(tree) if isinstance(n, ast.Dict)]
    table = ast.literal_eval(tables[0])
    return tuple(table[name] for name in sorted(table))


def bounded(texts: Iterator[str], most: int) -> Iterator[str]:
    """Yield texts until their bytes reach `most`; the last text is cut."""
    left = most
    for text in texts:
        raw = text.encode()[:left]
        yield raw.decode(errors="ignore")
        left -= len(raw)
        if left == 0:
            return


def prose_texts(most: int) -> Iterator[str]:
    """Yield documents of prose, at most `most` bytes in total."""

    def rest() -> Iterator[str]:
        for name in DESCRIBED:
            yield importlib.metadata.metadata(name)["Description"][:20_000]
        for path in modules():
            if text := "\n\n".join(docstrings(_read(path))):
                yield text

    yield from bounded(iter(topics()), int(most * TOPIC_SHARE))
    yield from bounded(rest(), most - int(most * TOPIC_SHARE))


def code_texts(most: int) -> Iterator[str]:
    """Yield sources of the standard library, at most `most` bytes in total."""
    yield from bounded((_read(path) for path in modules()), most)


def chunks(text: str, most: int = CHUNK_CHARS) -> Iterator[str]:
    """Cut a text at line ends into pieces of at most `most` characters.

    A single line longer than `most` is split within the line.
    """
    piece = ""
    for line in text.splitlines(keepends=True):
        while len(line) > most:
            if piece:
                yield piece
                piece = ""
            yield line[:most]
            line = line[most:]
        if len(piece) + len(line) > most:
            yield piece
            piece = ""
        piece += line
    if piece:
        yield piece


def fitting(text: str, most_tokens: int, encode: Callable[[str], list[int]]) -> Iterator[str]:
    """Halve a text, at a line end if possible, until every part fits `most_tokens`."""
    if len(encode(text)) <= most_tokens:
        yield text
        return
    middle = text.rfind("\n", 1, len(text) // 2) + 1 or len(text) // 2
    yield from fitting(text[:middle], most_tokens, encode)
    yield from fitting(text[middle:], most_tokens, encode)


def text_samples(
    name: str, texts: Iterable[str], most_tokens: int, encode: Callable[[str], list[int]]
) -> Iterator[CrudeSample]:
    """Yield samples of one text segment each, none longer than `most_tokens` tokens."""
    number = 0
    for text in texts:
        for chunk in chunks(text):
            for part in fitting(chunk, most_tokens, encode):
                if len(part.strip()) < SMALLEST_CHUNK:
                    continue
                yield CrudeSample(f"{name}-{number:06d}", [TextSegment(part, True)], {})
                number += 1
