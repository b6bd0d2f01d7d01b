"""The frame of every page, and the HTML elements that pages share.

`text` escapes everything that comes from data, because a caption may contain `<script>`.
"""

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

STYLE = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
"""Style sheet of every page: embedded in static pages, a separate file on the server."""


def text(value: object) -> str:
    """Return a value as escaped text that is safe in content and in attributes."""
    return html.escape(str(value), quote=True)


def page(title: str, body: Iterable[str]) -> str:
    """Return a complete, self-contained page.

    Args:
        title: title of the page, plain text.
        body: parts of HTML, which are joined by line breaks.
    """
    content = "\n".join(body)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{text(title)}</h1>\n{content}\n</body>\n</html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table with escaped values."""
    top = "".join(f"<th>{text(cell)}</th>" for cell in head)
    lines = ("".join(f"<td>{text(cell)}</td>" for cell in row) for row in rows)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table>\n<thead><tr>{top}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def amount(value: float) -> str:
    """Return a human-readable number: 1,234 or 12.3 or 0.0123."""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def num_bytes(value: float) -> str:
    """Return a human-readable size: 512 B, 1.5 kB, 2.0 GB (powers of ten)."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def percent(share: float) -> str:
    """Return a fraction as text such as 12.3 %."""
    return f"{100 * share:.1f} %"
