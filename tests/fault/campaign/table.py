"""Writes the campaign's results as a table into docs/RELIABILITY.md, between two markers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests import ROOT

DOCUMENT = ROOT / "docs" / "RELIABILITY.md"
JSON_FILE = ROOT / "docs" / "reliability.json"
BEGIN, END = "<!-- campaign: begin -->", "<!-- campaign: end -->"
_HEAD = (
    "| fault | where it hit | what happened | ended after | steps done again | equal afterwards |",
    "|---|---|---|---|---|---|",
)


def render(found: Mapping[str, Any]) -> str:
    """Return the text between the markers."""
    results, about = found["results"], found["about"]
    sound = sum(not row["wrong"] and row["equal"] is not False for row in results)
    lines = [
        f"{sound} of {len(results)} as promised; {about['date']}, {about['seconds']:.0f} s on "
        f"{about['cores']} cores, torch {about['torch']}, Python {about['python']}, seed "
        f"{found['seed']}. `make test-fault` writes this table.",
        "",
        *_HEAD,
        *(_row(row) for row in results),
    ]
    if found["skipped"]:
        lines += ["", "Not done in this campaign:", ""]
        lines += [f"- {name}: {reason}" for name, reason in sorted(found["skipped"].items())]
    return "\n".join(lines)


def _row(row: Mapping[str, Any]) -> str:
    equal = {True: "yes", False: "**NO**", None: "told what to do"}[row["equal"]]
    if row["wrong"]:
        equal += "; **" + "; ".join(row["wrong"]) + "**"
    ended = "" if row["noticed_s"] is None else f"{row['noticed_s']:.1f} s"
    again = "" if row["again"] is None else str(row["again"])
    cells = (row["fault"], row["moment"], row["happened"], ended, again, equal)
    return "| " + " | ".join(_plain(cell) for cell in cells) + " |"


def _plain(text: str) -> str:
    """Return the text as one line that a table cell can hold, with `<` escaped."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def write(found: Mapping[str, Any], document: Path = DOCUMENT, file: Path = JSON_FILE) -> None:
    """Write the results into the document, and as JSON next to it.

    Raises:
        ValueError: the document does not have the two markers.
    """
    text = document.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{document}: no {BEGIN} and {END} to write the table between")
    document.write_text(f"{before}{BEGIN}\n{render(found)}\n{END}{after}")
    file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
