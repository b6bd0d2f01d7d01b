"""Counts the problems that `kimi-pretrain data verify` finds, and lists them by kind."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, TextIO

from data_pipeline.inspect.problem import KINDS
from data_pipeline.inspect.verify import Problem, ShardReport
from launch.pages.html import num_bytes


class Findings:
    """Counts all problems, keeps the first few of each kind, and can write all to a file.

    Memory is bounded by the number of kinds and sources.

    Args:
        first: number of problems of each kind to keep per source.
        report: open file for all problems, one JSON object a line; None writes no file.
    """

    def __init__(self, first: int, report: TextIO | None):
        self._first, self._report = first, report
        self._kept: dict[tuple[str, str], list[Problem]] = {}
        self._counts: Counter[tuple[str, str]] = Counter()
        self._checked: dict[str, Counter[str]] = {}
        self._about: dict[str, dict[str, Any]] = {}

    @property
    def total(self) -> int:
        """Number of problems."""
        return sum(self._counts.values())

    def begin(self, source: str, about: dict[str, Any]) -> None:
        """Record the content of a source and the checks applied to it, for JSON."""
        self._about[source] = about

    def add_report(self, source: str, report: ShardReport) -> None:
        """Add the counts and problems of a checked shard."""
        checked = self._checked.setdefault(source, Counter())
        checked.update(
            shards=bool(report.shard),
            samples=report.samples,
            files=report.files,
            bytes=report.bytes,
        )
        for problem in report.problems:
            self.add(problem)

    def add(self, problem: Problem) -> None:
        """Add a problem."""
        self._checked.setdefault(problem.source, Counter())
        group = (problem.source, problem.kind)
        self._counts[group] += 1
        kept = self._kept.setdefault(group, [])
        if len(kept) < self._first:
            kept.append(problem)
        if self._report is not None:
            self._report.write(problem.as_json() + "\n")

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report, by source and kind."""
        for source, checked in sorted(self._checked.items()):
            problems = sum(n for (name, _), n in self._counts.items() if name == source)
            yield (
                f"{source}: {_count(checked['samples'], 'sample')}, "
                f"{_count(checked['files'], 'file')}, {num_bytes(checked['bytes'])} in "
                f"{_count(checked['shards'], 'shard')}: "
                + (_count(problems, "problem") if problems else "sound")
            )
            for kind, meaning in KINDS.items():
                count = self._counts[source, kind]
                if not count:
                    continue
                yield f"  {kind}: {count:,} ({meaning})"
                for problem in self._kept[source, kind]:
                    where = " ".join(part for part in (problem.shard, problem.sample) if part)
                    yield f"    {where + ': ' if where else ''}{problem.detail}"
                if count > self._first:
                    yield f"    ... and {count - self._first:,} more"

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {
            "problems": self.total,
            "sources": {
                source: {
                    **self._about.get(source, {}),
                    **checked,
                    "problems": {
                        kind: self._counts[source, kind]
                        for kind in KINDS
                        if self._counts[source, kind]
                    },
                    "first": [
                        vars(problem)
                        for kind in KINDS
                        for problem in self._kept.get((source, kind), ())
                    ],
                }
                for source, checked in sorted(self._checked.items())
            },
        }


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
