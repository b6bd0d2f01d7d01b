"""The frame of every page, and the pieces of HTML that pages share.

Whatever comes from data is escaped by `text`: a caption may contain `<script>`.
"""

import html
from collections.abc import Iterable, Sequence

# Every colour has a light and a dark value; drawings use the names.
STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --ink: #1f2937; --muted: #5b6472; --line: #d8dde5; --panel: #f5f7fa;
  --learnt: #cfe8d5; --special: #4b3fa0; --wrong: #c0262d; --bar: #1f4e9c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171c; --ink: #e3e7ed; --muted: #9aa5b4; --line: #343b46; --panel: #1d2229;
    --learnt: #1f4a30; --special: #b3a8ff; --wrong: #ff8080; --bar: #7fb0f0;
  }
}
body { background: var(--paper); color: var(--ink); margin: 2rem auto; max-width: 76rem;
  padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
p.note, figcaption, header { color: var(--muted); }
header b { color: var(--ink); }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { color: var(--muted); font-weight: 600; }
figure { margin: 1rem 0; } svg { max-width: 100%; height: auto; }
figure svg { outline: 1px solid var(--line); margin-right: 4px; }
article { border: 1px solid var(--line); border-radius: 6px; margin: .8rem 0; }
article > header { background: var(--panel); padding: .35rem .8rem; border-radius: 6px 6px 0 0; }
article > div { padding: .6rem .8rem; }
code, pre, .tokens { font: 14px/1.9 ui-monospace, monospace; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.4; }
.wrong { color: var(--wrong); font-weight: 600; }
"""


def text(value: object) -> str:
    """Return a value as escaped text, safe in content and in attributes."""
    return html.escape(str(value), quote=True)


def page(title: str, body: Iterable[str], style: str = "") -> str:
    """Return a whole page.

    Args:
        title: plain text.
        body: HTML, joined by line breaks.
        style: CSS besides `STYLE`.
    """
    content = "\n".join(body)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{text(title)}</title>\n<style>{STYLE}{style}</style>\n</head>\n<body>\n"
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
