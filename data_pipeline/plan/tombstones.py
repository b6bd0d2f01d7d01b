"""Tombstones: samples that are not drawn any more from a step on; redacted ones among them.

A list says of each sample the first step without it (`data.tombstones`); a source's manifest says
which samples were redacted, and those are out from the step in which a run first finds them so.

- In windows opened at that step or later its place is filled as an unusable sample's is.
- From the rows of windows opened before, it is taken out: what stands behind it in its row moves
  up, and the row ends with padding. Nothing of it is read.

So both are functions of the step alone, and no row before it changes. A state holds what it was
made with: counts and hashes of the list by step, and of the samples that were redacted since when.
The run folder holds the same with the list as it was resolved (`Tombstones.record`), so the steps
of a run can be planned again whatever became of its checkpoints and of the list.
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
"""(source, sample) of samples."""
_KEYS = {"source": str, "key": str, "from_step": int}
_MAY = {"request": str}  # whose request it is: for people
_COMPARED = 20_000  # keys among which the nearest one is looked for


@dataclass(frozen=True)
class Entry:
    """A line of a list of tombstones; steps count from 1, as in metrics.jsonl."""

    source: str
    key: str
    from_step: int


@dataclass(frozen=True, eq=False)
class Tombstones:
    """The tombstones of a run.

    Attributes:
        names: of the sources, as plans number them.
        listed: int64 [n, 3] source, sample, first step (from 0) without it; each sample once.
        redacted: of each source the redacted samples, in the order in which they became so.
        since: from which steps on they are out.
        passed_over: sources of lines that are for other runs, as a notice names them.
    """

    names: tuple[str, ...]
    listed: NDArray[np.int64]
    redacted: tuple[tuple[int, ...], ...]
    since: Since
    passed_over: tuple[str, ...] = ()

    @cached_property
    def _by_step(self) -> NDArray[np.int64]:
        """[n, 3] as `listed`, the redacted ones among them, by their first step."""
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
        """How many of `_by_step` -> those, as a set: it keeps its hash, which plans ask for."""
        return {}

    def filled(self, opened: int | None = None) -> Pairs:
        """Return the samples whose places windows opened at a step fill; None: all there are."""
        steps = self._by_step[:, 2]
        count = len(steps) if opened is None else int(np.searchsorted(steps, opened, "right"))
        if count not in self._sets:
            pairs = self._by_step[:count, :2].tolist()
            self._sets[count] = frozenset((source, sample) for source, sample in pairs)
        return self._sets[count]

    def gone(
        self, samples: SampleTable, opened: int, step: int | NDArray[np.integer]
    ) -> NDArray[np.bool_]:
        """Return which samples of windows are not to be in the rows of a step, bool [n].

        Args:
            opened: step at which the windows were opened, the earliest of them.
            step: of all the samples, or of each.
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
        """Return the samples and items of a step without those that are gone by then."""
        gone = self.gone(tables[0], opened, step)
        return take_out(*tables, gone) if gone.any() else tables

    def fields(self, step: int) -> dict[str, Any]:
        """Return what a state before a step says of them: nothing if none was in force."""
        found: dict[str, Any] = {}
        if early := [list(one) for one in self._by_first if one[0] < step]:
            found["tombstones"] = early
        if self.since:
            found["redacted"] = [*self._note]
        return found

    def record(self) -> dict[str, Any]:
        """Return what a run folder keeps of them, ready for JSON; `recorded_tombstones` reads it.

        `tombstones`: [source, sample, first step from 0] of each; `redacted`: as in a state.
        """
        listed = [[self.names[a], b, c] for a, b, c in self.listed.tolist()]
        return {"tombstones": listed, "redacted": self._note}

    @cached_property
    def _note(self) -> list[list[Any]]:
        return note_of(self.names, self.redacted, self.since)

    @cached_property
    def _by_first(self) -> tuple[tuple[int, int, str], ...]:
        """First step, number of tombstones, a hash over their sources' names and samples."""
        found = []
        for first in np.unique(self.listed[:, 2]).tolist():
            rows = self.listed[self.listed[:, 2] == first].tolist()
            text = "\n".join(f"{self.names[source]} {sample}" for source, sample, _ in rows)
            found.append((first, len(rows), hashlib.sha256(text.encode()).hexdigest()[:HASH]))
        return tuple(found)

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse a state whose steps were planned with other tombstones than the list has.

        Raises:
            ValueError: names the step, and the earliest one at which new tombstones may begin.
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
        """Return those of a run that goes on from a state: what was redacted since is out from it.

        Raises:
            ValueError: other samples were redacted first here than the state says.
        """
        note = state.get("redacted", [])
        since = since_of("state field 'redacted'", note, self.names, self.redacted)
        now = tuple(map(len, self.redacted))
        if now != (since[-1][1] if since else (0,) * len(now)):
            since = (*since, (int(state["step"]), now))
        return replace(self, since=since)

    def notices(self) -> list[str]:
        """Return what a person should know of them, a line each."""
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
        """Say from which steps on how many of a source's redacted samples are out."""
        found, before = list[tuple[int, int]](), 0
        for step, counts in self.since:
            if counts[source] > before:
                found.append((counts[source] - before, step + 1))
                before = counts[source]
        if len(found) == 1:
            return f"from step {found[0][1]} on"
        return ", ".join(f"{n:,} from step {step} on" for n, step in found)


def tombstones_of(config: DataConfig, indices: Sequence[SourceIndex]) -> Tombstones:
    """Read the list that `data.tombstones` names, and take what the sources say was redacted.

    Args:
        config: of the run.
        indices: of the sources, as plans number them; lines of the run's others are left out.

    Raises:
        ValueError: the list is not as it must be; names file, line, value and what was expected.
        IndexMismatch, StoreError: it or the manifest of a source that it names cannot be read.
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
    """Return the tombstones of a run by what its folder keeps of them (`Tombstones.record`).

    Args:
        where: names the file in messages.
        text: of it.
        indices: of the sources, as plans number them; more may be redacted in them by now.

    Raises:
        ValueError: it is no such file, or belongs to other sources.
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
    """Return the sources of lines that are for other runs: a list may be shared.

    Raises:
        ValueError: such a line looks meant for a source of this run. A sample of its key is there
            without a line, and the two share shards, or the line's source is not under the root and
            has a similar name.
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
    """Return the keys of the shards of sources under the root of a run; None: there is no such."""
    found: dict[str, set[str] | None] = dict.fromkeys(names)
    if not names:
        return found
    with closing(
        open_store(config.root, endpoint=config.endpoint, patience=config.patience)
    ) as store:
        for name in names:
            with suppress(ValueError, MissingKey, MissingBucket):  # or no name of a source
                check_source_name(name)
                store.head(manifest_key(name))
                found[name] = {shard["key"] for shard in read_manifest(store, name)["shards"]}
    return found


def parse_entries(where: str, text: str, *, steps: bool = True) -> list[tuple[int, Entry]]:
    """Return the lines of a list of tombstones, with their numbers.

    Args:
        where: names the list in messages.
        text: JSON lines {"source", "key", "from_step"}; "request" is for people.
        steps: whether each line must have a step; 1 where it has none.

    Raises:
        ValueError: names the line.
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
    """Return what lines of a list mean, int64 [n, 3] as `Tombstones.listed`.

    Raises:
        ValueError: names the first line whose key its source does not have.
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
    """Return the numbers of samples by their keys, -1 for one that the source does not have."""
    if not keys:
        return np.zeros(0, np.int64)
    number = {key: at for at, key in enumerate(dict.fromkeys(keys))}
    options = pc.SetLookupOptions(pa.array(number, pa.string()))
    at = pc.call_function("index_in", [pa.array(index.key, pa.string())], options)
    places = at.fill_null(-1).to_numpy(zero_copy_only=False)
    there = np.flatnonzero(places >= 0)
    found = np.full(len(number), -1, np.int64)
    # Backwards, so that of a key that is there twice the first one counts.
    found[places[there[::-1]]] = there[::-1]
    return found[[number[key] for key in keys]]


def unknown_key(index: SourceIndex, key: str) -> str:
    """Say that a source has no sample of a key, and which one may be meant."""
    near = difflib.get_close_matches(key, [str(one) for one in index.key[:_COMPARED]], 1)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    return f"source {index.name!r} has no sample {key!r} among {index.num_samples:,}{guess}"


def take_out(
    samples: SampleTable, items: ItemTable, gone: NDArray[np.bool_]
) -> tuple[SampleTable, ItemTable]:
    """Take samples [n] out of the rows of a step; those behind them in a row move up."""
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
    """Return the store and the key of the list that `data.tombstones` names; None: it names none.

    Raises:
        ValueError, AccessDenied: as `open_store`.
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
    """Return what messages call the list, and its text."""
    store, key = opened
    where = f"data.tombstones {store.uri}/{key}"
    try:
        return where, store.get(key).decode()
    except UnicodeDecodeError:
        raise ValueError(f"{where}: not UTF-8; expected JSON lines") from None
    finally:
        store.close()


def _earliest(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return rows [n, 3] sorted by source and sample; of equal ones that of the first step."""
    rows = rows[np.lexsort(rows.T[::-1])]
    same = (rows[1:, :2] == rows[:-1, :2]).all(axis=1)
    return rows[np.concatenate([np.ones(min(len(rows), 1), np.bool_), ~same])]


def _codes(source: NDArray[np.integer], sample: NDArray[np.integer]) -> NDArray[np.int64]:
    return source.astype(np.int64) << 48 | sample.astype(np.int64)
