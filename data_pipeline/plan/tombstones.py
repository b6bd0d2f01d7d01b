"""Tombstones: samples that are not drawn any more from a step on; redacted ones among them.

A list says of each sample the first step without it (`data.tombstones`); a source's manifest says
which samples were redacted, and those are out from the step in which a run first finds them so.

- In windows opened at that step or later its place is filled as an unusable sample's is.
- From the rows of windows opened before, it is taken out: what stands behind it in its row moves
  up, and the row ends with padding. Nothing of it is read.

So both are functions of the step alone, and no row before it changes. A state holds what it was
made with: counts and hashes of the list by step, and how many samples were redacted since when.
"""

import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from data_pipeline.config import DataConfig
from data_pipeline.index.columns import SourceIndex
from data_pipeline.names import did_you_mean
from data_pipeline.plan.step_plan import ItemTable, SampleTable
from data_pipeline.store.json_objects import parse_json
from data_pipeline.store.open import Store, open_store

Pairs = frozenset[tuple[int, int]]
"""(source, sample) of samples."""
_KEYS = {"source": str, "key": str, "from_step": int}
_MAY = {"request": str}  # whose request it is: for people
_HASH = 12  # hexadecimal digits of a list's hash in a state
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
        since: (step, how many of each source's `redacted` are out from it on), ascending.
    """

    names: tuple[str, ...]
    listed: NDArray[np.int64]
    redacted: tuple[tuple[int, ...], ...]
    since: tuple[tuple[int, tuple[int, ...]], ...]

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
        if any(self.redacted):
            found["redacted"] = [[step, list(counts)] for step, counts in self.since]
        return found

    @cached_property
    def _by_first(self) -> tuple[tuple[int, int, str], ...]:
        """First step, number of tombstones, a hash over their sources' names and samples."""
        found = []
        for first in np.unique(self.listed[:, 2]).tolist():
            rows = self.listed[self.listed[:, 2] == first].tolist()
            text = "\n".join(f"{self.names[source]} {sample}" for source, sample, _ in rows)
            found.append((first, len(rows), hashlib.sha256(text.encode()).hexdigest()[:_HASH]))
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
            ValueError: fewer samples are redacted than the state says.
        """
        now = tuple(map(len, self.redacted))
        try:
            since = tuple((int(a), tuple(map(int, b))) for a, b in state.get("redacted", []))
            wrong = any(len(counts) != len(now) for _, counts in since)
        except (TypeError, ValueError):
            since, wrong = (), True
        last = since[-1][1] if since else (0,) * len(now)
        if wrong or any(a < b for a, b in zip(now, last)):
            raise ValueError(
                f"state field 'redacted' is {state['redacted']!r}, the sources have {list(now)} "
                "redacted samples: a source's redacted manifest was replaced by an older one; "
                "restore it"
            )
        if now != last:
            since = (*since, (int(state["step"]), now))
        return replace(self, since=since)

    def notices(self) -> list[str]:
        """Return what a person should know of them, a line each."""
        told = []
        if n := len(self.listed):
            first, last = (int(end(self.listed[:, 2])) + 1 for end in (np.min, np.max))
            steps = f"step {first}" if first == last else f"steps {first} to {last}"
            told.append(f"data.tombstones: {n:,} samples are not drawn from {steps} on")
        for source, name in enumerate(self.names):
            if n := len(self.redacted[source]):
                steps = {step + 1 for step, counts in self.since if counts[source]}
                told.append(
                    f"source {name!r}: {n:,} samples were redacted and count as tombstones, from "
                    f"step {min(steps)} on: others of the source stand in their places"
                )
        return told


def tombstones_of(config: DataConfig, indices: Sequence[SourceIndex]) -> Tombstones:
    """Read the list that `data.tombstones` names, and take what the sources say was redacted.

    Args:
        config: of the run.
        indices: of the sources, as plans number them; lines of the run's others are left out.

    Raises:
        ValueError: the list is not as it must be; names file, line, value and what was expected.
        StoreError: it cannot be read.
    """
    names = tuple(index.name for index in indices)
    redacted = tuple(index.redacted for index in indices)
    counts = tuple(map(len, redacted))
    listed = np.zeros((0, 3), np.int64)
    if (opened := open_list(config)) is not None:
        where, text = _read(opened)
        known = sorted({*config.source_names, *config.heldout})
        listed = resolve_entries(where, parse_entries(where, text, known), indices)
    return Tombstones(names, listed, redacted, ((0, counts),) if any(counts) else ())


def parse_entries(
    where: str, text: str, known: Sequence[str] | None = None, *, steps: bool = True
) -> list[tuple[int, Entry]]:
    """Return the lines of a list of tombstones, with their numbers.

    Args:
        where: names the list in messages.
        text: JSON lines {"source", "key", "from_step"}; "request" is for people.
        known: names of sources that lines may have; None: any.
        steps: whether each line must have a step; 1 where it has none.

    Raises:
        ValueError: names the line.
    """
    found: list[tuple[int, Entry]] = []
    for number, line in enumerate(text.splitlines(), 1):
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
        if known is not None and one["source"] not in known:
            hint = did_you_mean(one["source"], known)
            raise ValueError(f"{told}: no source {one['source']!r} in this configuration; {hint}")
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


def _read(listed: tuple[Store, str]) -> tuple[str, str]:
    """Return what messages call the list, and its text."""
    store, key = listed
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
