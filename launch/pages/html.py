"""The frame of every page, and the pieces of HTML that pages share.

Whatever comes from data is escaped by `text`: a caption may contain `<script>`.
"""

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

STYLE = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
"""Of every page: inside those that are files, a file of its own where a server shows them."""


def text(value: object) -> str:
    """Return a value as escaped text, safe in content and in attributes."""
    return html.escape(str(value), quote=True)


def page(title: str, body: Iterable[str]) -> str:
    """Return a whole page, with all that it needs inside.

    Args:
        title: plain text.
        body: HTML, joined by line breaks.
    """
    content = "\n".join(body)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{text(title)}</h1>\n{content}\n</body>\n</html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; the values are escaped."""
    top = "".join(f"<th>{text(cell)}</th>" for cell in head)
    lines = ("".join(f"<td>{text(cell)}</td>" for cell in row) for row in rows)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table>\n<thead><tr>{top}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def amount(value: float) -> str:
    """Return a number for reading: 1,234 or 12.3 or 0.0123."""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def num_bytes(value: float) -> str:
    """Return bytes for reading: 512 B, 1.5 kB, 2.0 GB (powers of ten)."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def percent(share: float) -> str:
    """Return a share as 12.3 %."""
    return f"{100 * share:.1f} %"
