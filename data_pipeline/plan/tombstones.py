"""Excludes samples from a given step on: samples with a tombstone, and redacted samples.

The list at `data.tombstones` gives the first step without each sample. A source's manifest lists
its redacted samples; a run excludes them from the step at which it first finds them redacted.

- Windows opened at that step or later fill the sample's position like an unusable sample's.
- In rows of windows opened earlier, the sample is removed. Later samples of the row move up, and
  the row ends with padding. Nothing of the sample is read.

Both rules depend only on the step, and no earlier row changes. A state records the tombstones it
was planned with: counts and hashes of the list by step, and of the redacted samples with their
first steps. The run folder records the same with the resolved list (`Tombstones.record`), so the
steps of a run can be planned again even if its checkpoints or the list are lost.
"""

import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from data_pipeline.config import DataConfig
from data_pipeline.index.columns import SourceIndex
from data_pipeline.index.manifest import manifest_key, read_manifest
from data_pipeline.index.shards import check_source_name
from data_pipeline.names import listed
from data_pipeline.plan.redactions import HASH, Since, note_of, since_of
from data_pipeline.plan.step_plan import ItemTable, SampleTable
from data_pipeline.store.json_objects import parse_json
from data_pipeline.store.open import MissingBucket, MissingKey, Store, open_store

Pairs = frozenset[tuple[int, int]]
"""(source, sample) pairs."""
_KEYS = {"source": str, "key": str, "from_step": int}
_MAY = {"request": str}  # name of the deletion request, for human readers
_COMPARED = 20_000  # keys searched for the nearest match


@dataclass(frozen=True)
class Entry:
    """A line of a tombstone list; steps count from 1, as in metrics.jsonl."""

    source: str
    key: str
    from_step: int


@dataclass(frozen=True, eq=False)
class Tombstones:
    """Tombstones of a run.

    Attributes:
        names: source names in the order of the plan's source numbers.
        listed: int64 [n, 3] source, sample, first step (from 0) without it; each sample once.
        redacted: redacted samples of each source, in order of redaction.
        since: first steps without the redacted samples.
        passed_over: names of sources whose lines are for other runs, as shown in a notice.
    """

    names: tuple[str, ...]
    listed: NDArray[np.int64]
    redacted: tuple[tuple[int, ...], ...]
    since: Since
    passed_over: tuple[str, ...] = ()

    @cached_property
    def _by_step(self) -> NDArray[np.int64]:
        """Rows [n, 3] like `listed`, with redacted samples, sorted by first step."""
        rows, before = [self.listed], (0,) * len(self.names)
        for step, counts in self.since:
            for source, (begin, end) in enumerate(zip(before, counts, strict=True)):
                new = self.redacted[source][begin:end]
                rows.append(np.array([[source, one, step] for one in new], np.int64).reshape(-1, 3))
            before = counts
        found = _earliest(np.concatenate(rows))
        return found[np.argsort(found[:, 2], kind="stable")]

    @cached_property
    def _sets(self) -> dict[int, Pairs]:
        """Cache: count -> the first `count` rows of `_by_step` as a set, which plans hash often."""
        return {}

    def filled(self, opened: int | None = None) -> Pairs:
        """Return the samples that windows opened at a step replace; None returns all samples."""
        steps = self._by_step[:, 2]
        count = len(steps) if opened is None else int(np.searchsorted(steps, opened, "right"))
        if count not in self._sets:
            pairs = self._by_step[:count, :2].tolist()
            self._sets[count] = frozenset((source, sample) for source, sample in pairs)
        return self._sets[count]

    def gone(
        self, samples: SampleTable, opened: int, step: int | NDArray[np.integer]
    ) -> NDArray[np.bool_]:
        """Return the mask of samples that the rows of a step must not contain, bool [n].

        Args:
            opened: earliest step at which one of the windows was opened.
            step: step of all samples, or of each sample.
        """
        if not len(samples) or not len(self._by_step):
            return np.zeros(len(samples), np.bool_)
        steps = self._by_step[:, 2]
        first, end = (int(np.searchsorted(steps, n, "right")) for n in (opened, np.max(step)))
        if first >= end:
            return np.zeros(len(samples), np.bool_)
        out = self._by_step[first:end]
        order = np.argsort(codes := _codes(out[:, 0], out[:, 1]))
        mine = _codes(samples.source, samples.index)
        at = order[np.minimum(np.searchsorted(codes[order], mine), len(order) - 1)]
        return (codes[at] == mine) & (out[at, 2] <= step)

    def taken_out(
        self, tables: tuple[SampleTable, ItemTable], opened: int, step: int
    ) -> tuple[SampleTable, ItemTable]:
        """Return the samples and items of a step without the excluded ones."""
        gone = self.gone(tables[0], opened, step)
        return take_out(*tables, gone) if gone.any() else tables

    def fields(self, step: int) -> dict[str, Any]:
        """Return the tombstone fields of a state before a step; empty if none was in force."""
        found: dict[str, Any] = {}
        if early := [list(one) for one in self._by_first if one[0] < step]:
            found["tombstones"] = early
        if self.since:
            found["redacted"] = [*self._note]
        return found

    def record(self) -> dict[str, Any]:
        """Return the run folder's record, ready for JSON; `recorded_tombstones` reads it.

        `tombstones` lists [source, sample, first step from 0]; `redacted` is as in a state.
        """
        listed = [[self.names[a], b, c] for a, b, c in self.listed.tolist()]
        return {"tombstones": listed, "redacted": self._note}

    @cached_property
    def _note(self) -> list[list[Any]]:
        return note_of(self.names, self.redacted, self.since)

    @cached_property
    def _by_first(self) -> tuple[tuple[int, int, str], ...]:
        """Rows of (first step, number of tombstones, hash of their source names and samples)."""
        found = []
        for first in np.unique(self.listed[:, 2]).tolist():
            rows = self.listed[self.listed[:, 2] == first].tolist()
            text = "\n".join(f"{self.names[source]} {sample}" for source, sample, _ in rows)
            found.append((first, len(rows), hashlib.sha256(text.encode()).hexdigest()[:HASH]))
        return tuple(found)

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse a state whose steps were planned with tombstones that differ from the list.

        Raises:
            ValueError: the tombstones differ; the message names the step and the earliest step at
                which new tombstones may begin.
        """
        done = state["step"]
        theirs, mine = state.get("tombstones", []), self.fields(done).get("tombstones", [])
        if theirs == mine:
            return
        known = {json.dumps(one) for one in theirs if isinstance(one, list) and one}
        odd = next((one for one in mine if json.dumps(one) not in known), None)
        if odd is None:
            gone = next(one for one in theirs if one not in mine)
            raise ValueError(
                f"data.tombstones: state field 'tombstones' is {gone} and the list has nothing "
                f"from step {gone[0] + 1} on: {done} steps are done with it; put those lines back"
            )
        first, count, _ = odd
        before = next((one for one in theirs if one[:1] == [first]), None)
        was = "none" if before is None else f"{before[1]:,} ({before[2]})"
        raise ValueError(
            f"data.tombstones: {count:,} samples from step {first + 1} on, but {done} steps are "
            f"done, with {was} from that step on; the earliest possible step for what is new is "
            f"from_step={done + 1}, and lines that were in force must stay as they were"
        )

    def going_on(self, state: Mapping[str, Any]) -> "Tombstones":
        """Return the tombstones of a run resumed from a state; new redactions start at its step.

        Raises:
            ValueError: the order of redactions in this root differs from the state.
        """
        note = state.get("redacted", [])
        since = since_of("state field 'redacted'", note, self.names, self.redacted)
        now = tuple(map(len, self.redacted))
        if now != (since[-1][1] if since else (0,) * len(now)):
            since = (*since, (int(state["step"]), now))
        return replace(self, since=since)

    def notices(self) -> list[str]:
        """Return notices for the user, one line each."""
        told = []
        if n := len(self.listed):
            first, last = (int(end(self.listed[:, 2])) + 1 for end in (np.min, np.max))
            steps = f"step {first}" if first == last else f"steps {first} to {last}"
            told.append(f"data.tombstones: {n:,} samples are not drawn from {steps} on")
        if self.passed_over:
            names = listed(self.passed_over)
            told.append(
                f"data.tombstones: lines of sources that this run does not read count for nothing "
                f"here: {names}"
            )
        for source, name in enumerate(self.names):
            if n := len(self.redacted[source]):
                told.append(
                    f"source {name!r}: {n:,} samples were redacted and count as tombstones, "
                    f"{self._redacted_since(source)}: others of the source stand in their places"
                )
        return told

    def _redacted_since(self, source: int) -> str:
        """Return a text with the counts and first steps of a source's redacted samples."""
        found, before = list[tuple[int, int]](), 0
        for step, counts in self.since:
            if counts[source] > before:
                found.append((counts[source] - before, step + 1))
                before = counts[source]
        if len(found) == 1:
            return f"from step {found[0][1]} on"
        return ", ".join(f"{n:,} from step {step} on" for n, step in found)


def tombstones_of(config: DataConfig, indices: Sequence[SourceIndex]) -> Tombstones:
    """Read the list at `data.tombstones`, and take the redacted samples from the indices.

    Args:
        config: config of the run.
        indices: indices in the order of the plan's source numbers; lines of the run's other
            sources are left out.

    Raises:
        ValueError: the list is malformed; names file, line, value and the expected form.
        IndexMismatch, StoreError: the list, or the manifest of a source in it, cannot be read.
    """
    names = tuple(index.name for index in indices)
    redacted = tuple(index.redacted for index in indices)
    counts = tuple(map(len, redacted))
    rows, others = np.zeros((0, 3), np.int64), ()
    if (opened := open_list(config)) is not None:
        where, text = _read(opened)
        entries = parse_entries(where, text)
        rows = resolve_entries(where, entries, indices)
        others = _passed_over(where, entries, config, indices)
    return Tombstones(names, rows, redacted, ((0, counts),) if any(counts) else (), others)


def recorded_tombstones(where: str, text: str, indices: Sequence[SourceIndex]) -> Tombstones:
    """Return the tombstones of a run from the record in its folder (`Tombstones.record`).

    Args:
        where: name of the file, for messages.
        text: content of the file.
        indices: indices in the order of the plan's source numbers; more of their samples may be
            redacted by now.

    Raises:
        ValueError: the text is not such a record, or belongs to other sources.
    """
    names = tuple(index.name for index in indices)
    sizes = [index.num_samples for index in indices]
    try:
        noted = parse_json(text, where)
        redactions = noted["redacted"]
        rows = [(names.index(name), int(at), int(step)) for name, at, step in noted["tombstones"]]
        wrong = any(not (0 <= at < sizes[of] and 0 <= step < 2**62) for of, at, step in rows)
    except (KeyError, TypeError, ValueError):
        rows, redactions, wrong = [], None, True
    if wrong:
        raise ValueError(
            f"{where}: expected what a run on {', '.join(names)} keeps of its tombstones; restore "
            "it from a backup of the run folder"
        )
    listed = _earliest(np.array(rows, np.int64).reshape(-1, 3))
    redacted = tuple(index.redacted for index in indices)
    return Tombstones(names, listed, redacted, since_of(where, redactions, names, redacted))


def _passed_over(
    where: str,
    entries: Sequence[tuple[int, Entry]],
    config: DataConfig,
    indices: Sequence[SourceIndex],
) -> tuple[str, ...]:
    """Return the sources whose lines are for other runs, because runs may share a list.

    Raises:
        ValueError: such a line probably means a source of this run. That source has a sample with
            the line's key but no line for it. In addition, the two sources share shards, or the
            line's source is not under the root and its name is similar.
    """
    known = sorted({*config.source_names, *config.heldout})
    own = {(entry.source, entry.key) for _, entry in entries}
    lines: dict[str, list[tuple[int, Entry]]] = {}
    for number, entry in entries:
        if entry.source not in known:
            lines.setdefault(entry.source, []).append((number, entry))
    told = []
    for name, shards in _shards_of(config, sorted(lines)).items():
        if shards is None:
            told.append(f"{name} (not under {config.root})")
            near = difflib.get_close_matches(name, known, 1)
            likely = [index for index in indices if index.name in near]
            why = f"is not under {config.root}"
        else:
            told.append(name)
            likely = [index for index in indices if any(s.key in shards for s in index.shards)]
            why = "is not read by this run and shares shards with one that is"
        for index in likely:
            left = [one for one in lines[name] if (index.name, one[1].key) not in own]
            found = samples_of(index, [entry.key for _, entry in left])
            for (number, entry), sample in zip(left, found, strict=True):
                if sample >= 0:
                    raise ValueError(
                        f"{where}, line {number}: source {name!r} {why}; did you mean "
                        f"{index.name!r}? It has sample {entry.key!r}, too, and the list no line "
                        "for it: correct the line, or add one for that source"
                    )
    return tuple(told)


def _shards_of(config: DataConfig, names: Sequence[str]) -> dict[str, set[str] | None]:
    """Return the shard keys of sources under the root of a run; None for a missing source."""
    found: dict[str, set[str] | None] = dict.fromkeys(names)
    if not names:
        return found
    with closing(
        open_store(config.root, endpoint=config.endpoint, patience=config.patience)
    ) as store:
        for name in names:
            with suppress(ValueError, MissingKey, MissingBucket):  # missing, or an invalid name
                check_source_name(name)
                store.head(manifest_key(name))
                found[name] = {shard["key"] for shard in read_manifest(store, name)["shards"]}
    return found


def parse_entries(where: str, text: str, *, steps: bool = True) -> list[tuple[int, Entry]]:
    """Return the lines of a tombstone list with their line numbers.

    Args:
        where: name of the list, for messages.
        text: JSON lines {"source", "key", "from_step"}; "request" is optional, for human readers.
        steps: True if each line must have a step; otherwise a missing step is 1.

    Raises:
        ValueError: a line is malformed; the message names it.
    """
    found: list[tuple[int, Entry]] = []
    # Not `splitlines`: inside a JSON text other separators of lines, as in a request, are letters.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        told = f"{where}, line {number}"
        try:
            one = parse_json(line, told)
        except ValueError:
            one = None
        form = '{"source": "captions", "key": "sea-1", "from_step": 1201}'
        if isinstance(one, dict) and not steps:
            one.setdefault("from_step", 1)
            form = '{"source": "captions", "key": "sea-1"}'
        if not isinstance(one, dict) or not {*_KEYS} <= {*one} <= {*_KEYS, *_MAY}:
            raise ValueError(f"{told}: {line.strip()[:120]!r}; expected {form}")
        for name, kind in (_KEYS | _MAY).items():
            if name in one and (not isinstance(one[name], kind) or isinstance(one[name], bool)):
                raise ValueError(f"{told}: {name} is {one[name]!r}; expected {form}")
        if not 1 <= one["from_step"] < 2**62:
            raise ValueError(
                f"{told}: from_step is {one['from_step']}; expected the first step without the "
                "sample, as metrics.jsonl counts them: 1 or more"
            )
        found.append((number, Entry(one["source"], one["key"], one["from_step"])))
    return found


def resolve_entries(
    where: str, entries: Sequence[tuple[int, Entry]], indices: Sequence[SourceIndex]
) -> NDArray[np.int64]:
    """Return the entries of a list as int64 [n, 3], in the form of `Tombstones.listed`.

    Raises:
        ValueError: a source lacks the key of a line; the message names the first such line.
    """
    rows = [np.zeros((0, 3), np.int64)]
    for source, index in enumerate(indices):
        mine = [(number, entry) for number, entry in entries if entry.source == index.name]
        found = samples_of(index, [entry.key for _, entry in mine])
        for (number, entry), sample in zip(mine, found, strict=True):
            if sample < 0:
                told = f"{where}, line {number}"
                raise ValueError(f"{told}: {unknown_key(index, entry.key)}")
        steps = np.array([entry.from_step - 1 for _, entry in mine], np.int64)
        rows.append(np.stack([np.full(len(mine), source), found, steps], axis=1))
    return _earliest(np.concatenate(rows))


def samples_of(index: SourceIndex, keys: Sequence[str]) -> NDArray[np.int64]:
    """Return the numbers of samples by key; -1 for keys that the source does not have."""
    if not keys:
        return np.zeros(0, np.int64)
    number = {key: at for at, key in enumerate(dict.fromkeys(keys))}
    options = pc.SetLookupOptions(pa.array(number, pa.string()))
    at = pc.call_function("index_in", [pa.array(index.key, pa.string())], options)
    places = at.fill_null(-1).to_numpy(zero_copy_only=False)
    there = np.flatnonzero(places >= 0)
    found = np.full(len(number), -1, np.int64)
    # Assign in reverse order, so that the first sample wins if a key occurs twice.
    found[places[there[::-1]]] = there[::-1]
    return found[[number[key] for key in keys]]


def unknown_key(index: SourceIndex, key: str) -> str:
    """Return the message that a source has no sample with a key, with the nearest known key."""
    near = difflib.get_close_matches(key, [str(one) for one in index.key[:_COMPARED]], 1)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    return f"source {index.name!r} has no sample {key!r} among {index.num_samples:,}{guess}"


def take_out(
    samples: SampleTable, items: ItemTable, gone: NDArray[np.bool_]
) -> tuple[SampleTable, ItemTable]:
    """Remove samples (mask `gone` [n]) from the rows of a step; later samples move up."""
    lost = np.where(gone, samples.length, 0).astype(np.int64)
    before = np.cumsum(lost) - lost
    shift = (before - before[np.searchsorted(samples.row, samples.row)]).astype(np.int32)
    number = (np.cumsum(~gone) - 1).astype(np.int32)
    kept = ~gone[items.sample]
    columns = {column.name: getattr(samples, column.name)[~gone] for column in fields(samples)}
    columns["start"] = columns["start"] - shift[~gone]
    media = {column.name: getattr(items, column.name)[kept] for column in fields(items)}
    media["start"] = media["start"] - shift[media["sample"]]
    media["sample"] = number[media["sample"]]
    return SampleTable(**columns), ItemTable(**media)


def open_list(config: DataConfig) -> tuple[Store, str] | None:
    """Return store and key of the list at `data.tombstones`; None if there is no list.

    Raises:
        ValueError, AccessDenied: as in `open_store`.
    """
    name = config.tombstones
    if name is None:
        return None
    root, key = config.root, name
    if "://" in name or name.startswith(("/", "~")):
        folder, _, key = name.rpartition("/")
        root = folder or "/"
    return open_store(root, endpoint=config.endpoint, patience=config.patience), key


def _read(opened: tuple[Store, str]) -> tuple[str, str]:
    """Return the list's name for messages, and its text."""
    store, key = opened
    where = f"data.tombstones {store.uri}/{key}"
    try:
        return where, store.get(key).decode()
    except UnicodeDecodeError:
        raise ValueError(f"{where}: not UTF-8; expected JSON lines") from None
    finally:
        store.close()


def _earliest(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return rows [n, 3] sorted by source and sample; duplicates keep the earliest step."""
    rows = rows[np.lexsort(rows.T[::-1])]
    same = (rows[1:, :2] == rows[:-1, :2]).all(axis=1)
    return rows[np.concatenate([np.ones(min(len(rows), 1), np.bool_), ~same])]


def _codes(source: NDArray[np.integer], sample: NDArray[np.integer]) -> NDArray[np.int64]:
    return source.astype(np.int64) << 48 | sample.astype(np.int64)
