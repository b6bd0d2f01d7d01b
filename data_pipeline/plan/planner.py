"""Data planner: plans every global step from metadata only; every rank computes the same plan.

    position -> (source, draw) -> sample -> length -> row     mixture, blend, order, source, pack
    step     -> the next `rows_per_step` rows of the packed windows          this module

Positions form windows of `pack_window` samples. Every window is packed separately, and its rows
follow the rows of the window before. A step takes the next rows, across window boundaries. Plans do
not depend on ranks, workers, prefetching or earlier calls: a step is a function of a state of a few
numbers, and the state of step k + 1 is a function of the state of step k.

A sample that proves unusable when it is fetched goes into quarantine. Another sample replaces it in
every window that is opened QUARANTINE_DELAY or more steps later. No such window can have been
planned when the sample was found, so plans stay the same on every rank and after every resume.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.config import MAX_PREFETCH, DataConfig
from data_pipeline.index.columns import SourceIndex
from data_pipeline.names import listed
from data_pipeline.plan.blend import Segment, append_segment, blend
from data_pipeline.plan.csr import gather_rows
from data_pipeline.plan.mixture import Mixer, Mixture, OtherShares
from data_pipeline.plan.pack import pack_window
from data_pipeline.plan.source import DataUsedUp, Drawn, Source
from data_pipeline.plan.state import SCHEMA, TOMBSTONES, Identity, State, blend_segments_of
from data_pipeline.plan.step_plan import GlobalPlan, ItemTable, SampleTable
from data_pipeline.plan.tombstones import Pairs, Tombstones, tombstones_of
from data_pipeline.plan.window import Window, join

__all__ = [
    "DataUsedUp",
    "GlobalPlan",
    "ItemTable",
    "Planner",
    "SampleTable",
    "State",
    "TooManyUnusable",
]

_CARRIED = ("quarantine", "changes")  # kept when the data changes
KEPT_WINDOWS = 16  # packed windows in memory, about 100 bytes per sample
# Exceeds the number of steps that may be planned ahead, with some margin.
QUARANTINE_DELAY = MAX_PREFETCH + 8


class TooManyUnusable(ValueError):
    """More samples than `data.max_quarantined` are unusable, so the data is probably damaged."""


class Planner:
    """Planner of steps from the indices of all sources.

    Args:
        indices: one index per source of the config, in any order; plans number them by sorted name.
        config: the data config.
        without: tombstones to apply; None reads those of config and indices.

    Raises:
        ValueError: indices and config name different sources, a source has no usable sample, or
            the vision ratio cannot be reached.
    """

    def __init__(
        self, indices: Sequence[SourceIndex], config: DataConfig, without: Tombstones | None = None
    ):
        self.config = config
        self.indices = tuple(sorted(indices, key=lambda index: index.name))
        names = tuple(index.name for index in self.indices)
        if names != config.source_names:
            wanted = listed(config.source_names)
            raise ValueError(f"config names sources {wanted}; indices are of {listed(names)}")
        self.sources = tuple(Source(index, config) for index in self.indices)
        self.totals = [source.totals for source in self.sources]
        self._mixer = Mixer(config, self.totals, [source.num_units for source in self.sources])
        self.mixture = self._mixer.mixture()
        self._mixer.check(self.mixture)
        self._identity = Identity(self.indices, config)
        self.manifest = self._identity.manifest
        self.tombstones = without or tombstones_of(config, self.indices)
        self._window = lru_cache(maxsize=KEPT_WINDOWS)(self._pack)
        self._mixtures = lru_cache(maxsize=KEPT_WINDOWS)(self._mix)
        # Always replaced, never modified, because the loader's thread reads it while planning.
        self._quarantine: tuple[tuple[int, int, int], ...] = ()
        # (first step, position, new sources) of each mid-run change of the data.
        self._changes: tuple[tuple[int, int, list[str]], ...] = ()
        self._state = self._encode(self.mixture, 0, 0, 0, 0, (0, 0))

    def plan(self, state: Mapping[str, Any]) -> tuple[GlobalPlan, State]:
        """Return the plan of the state's step and the state after it; `state` is not modified.

        The plan is a function of the state and of this planner's quarantine. The quarantine inside
        a state applies only after `load_state_dict`.

        Raises:
            ValueError: the state belongs to other data, another seed or another packing.
            DataUsedUp: the step exceeds the last epoch of the data.
        """
        mixture = self.mixture_of(state)
        step, opened = state["step"], state["opened"]
        window, row, missing = state["window"], state["row"], self.config.rows_per_step
        pieces: list[tuple[Window, int, int]] = []
        first_opened = opened if row else step
        while missing:
            opened = opened if row else step
            content = self._content(window, mixture, opened)
            rows = content.packed.num_rows
            if row >= rows:
                raise ValueError(f"state field 'row' is {row}, but window {window} has {rows} rows")
            end = min(row + missing, rows)
            pieces.append((content, row, end))
            missing -= end - row
            window, row = (window + 1, 0) if end == rows else (window, end)
        tables = self.tombstones.taken_out(join(pieces), first_opened, step)
        plan = GlobalPlan(step, self.config.seq_len, self.config.rows_per_step, *tables)
        known, before = len(state["blend"]), state.get("tokens")
        # None if the state comes from an earlier version, which did not count tokens.
        tokens = before and (before[0] + plan.text_tokens, before[1] + plan.vision_tokens)
        return plan, self._encode(mixture, window, row, step + 1, opened, tokens, known)

    def state_at(self, step: int) -> State:
        """Return the state before `step` of a run that began at step 0 with this config.

        It packs every window up to `step`. It reads no data, but its cost grows with `step`.
        """
        window, first, per_step = 0, 0, self.config.rows_per_step
        tokens = np.zeros(2, np.int64)
        while True:
            opened = first // per_step  # `first` counts the rows before the window
            content = self._content(window, self.mixture, opened)
            steps = (first + content.samples.row) // per_step
            kept = ~self.tombstones.gone(content.samples, opened, steps)
            row = min(step * per_step - first, content.packed.num_rows)
            tokens += content.tokens_before(row, kept)
            if row < content.packed.num_rows:
                return self._encode(self.mixture, window, row, step, opened, tokens.tolist())
            window, first = window + 1, first + row

    def state_dict(self) -> State:
        """Return the start state: step 0, or the state given to `load_state_dict`."""
        return self.with_quarantine(self._state)

    def rows_left(self, state: Mapping[str, Any]) -> int:
        """Return the number of unused rows in a state's current window; 0 if none is open."""
        if not state["row"]:
            return 0
        content = self._content(state["window"], self.mixture_of(state), state["opened"])
        return content.packed.num_rows - state["row"]

    def with_quarantine(self, state: Mapping[str, Any]) -> State:
        """Return a copy of a state with the current quarantine."""
        return json.loads(json.dumps({**state, "quarantine": self._quarantine}))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check a state and start from it.

        Raises:
            ValueError: a field does not belong to this planner; the message names it.
            OtherShares: the state's shares differ from this config.
        """
        self.mixture_of(state)
        self._quarantine = tuple((int(a), int(b), int(c)) for a, b, c in state["quarantine"])
        self._changes = tuple((a, b, [*c]) for a, b, c in state.get("changes", ()))
        self.tombstones = self.tombstones.going_on(state)
        fields = {"schema": SCHEMA, "changes": self._changes}
        fields |= self.tombstones.fields(state["step"])
        self._state = json.loads(json.dumps(dict(state) | fields))

    def mixture_of(self, state: Mapping[str, Any]) -> Mixture:
        """Check a state like `load_state_dict` and return its mixture."""
        self._identity.check(state)
        self.tombstones.check(state)
        parts = blend_segments_of(state)
        mixture = self.mixture
        if tuple((s.start, s.weights) for s in mixture.segments[: len(parts)]) != parts:
            mixture = self._mixtures(parts)
        # A segment that should have begun by now but is missing in the state is a mismatch.
        position = state["window"] * self.config.pack_window
        missed = [s.start for s in mixture.segments[len(parts) :] if s.start <= position]
        own = mixture.segments[len(parts) - 1].weights
        if own != parts[-1][1] or missed:
            raise OtherShares(self._mixer.refusal(parts, own, missed))
        return mixture

    def quarantine(self, source: int, sample: int, step: int) -> bool:
        """Quarantine a sample that step `step` found unusable; later windows replace it.

        Every rank must make the same calls for a step before it starts the next one. Returns False
        if the sample was already in quarantine.

        Raises:
            TooManyUnusable: the quarantine already holds `data.max_quarantined` samples.
        """
        if any(entry[:2] == (source, sample) for entry in self._quarantine):
            return False
        most = self.config.max_quarantined
        if len(self._quarantine) >= most:
            raise TooManyUnusable(
                f"more than data.max_quarantined={most} samples are unusable; check the data with "
                "`kimi-pretrain data verify --decode`; if so many may be lost, raise "
                "data.max_quarantined and go on"
            )
        self._quarantine = tuple(sorted((*self._quarantine, (source, sample, step))))
        return True

    def with_own_blend(self, state: Mapping[str, Any]) -> State:
        """Return a state that switches to this config's shares at the next window.

        Rows already drawn stay; the window in progress is finished with its old shares.

        Raises:
            ValueError: the state belongs to other data, another seed or another packing.
        """
        self._identity.check(state)
        parts = blend_segments_of(state)
        start = (state["window"] + (state["row"] > 0)) * self.config.pack_window
        kept: tuple[Segment, ...] = ()
        for begin, weights in (part for part in parts if part[0] < start):
            kept = append_segment(kept, begin, weights)
        mixture = self._mixer.mixture(kept, start)
        where = (state["window"], state["row"], state["step"], state["opened"])
        changed = self._encode(mixture, *where, state.get("tokens"), len(kept) + 1)
        # Keep the state's tombstones and redactions, which `load_state_dict` compares.
        mine = {key: one for key, one in changed.items() if key not in TOMBSTONES}
        return {**mine, **{key: state[key] for key in (*TOMBSTONES, *_CARRIED) if key in state}}

    def notices(self) -> list[str]:
        """Return notices for the user on changed or excluded samples, one line each."""
        told = (source.notice for source in self.sources)
        return [*(one for one in told if one is not None), *self.tombstones.notices()]

    def _content(self, window: int, mixture: Mixture, opened: int) -> Window:
        end = (window + 1) * self.config.pack_window
        if mixture.end is not None and end > mixture.end:
            raise DataUsedUp(f"the data ends at position {mixture.end}: {mixture.reason}")
        found = [(a, b) for a, b, step in self._quarantine if step + QUARANTINE_DELAY <= opened]
        out = self.tombstones.filled(opened)
        return self._window(window, mixture.segments, out.union(found) if found else out)

    def _pack(self, window: int, segments: tuple[Segment, ...], quarantined: Pairs) -> Window:
        size = self.config.pack_window
        position = np.arange(window * size, (window + 1) * size)
        source, draw = blend(position, segments)
        return self.packed(position, source, draw, quarantined)

    def packed(
        self,
        position: NDArray[np.int64],
        source: NDArray[np.int16],
        draw: NDArray[np.int64],
        quarantined: Pairs = frozenset(),
    ) -> Window:
        """Pack the draws of positions [n] into rows of their own window."""
        places: list[NDArray[np.int64]] = []
        parts: list[Drawn] = []
        for number, origin in enumerate(self.sources):
            chosen = np.flatnonzero(source == number)
            if chosen.size:
                bad = sorted(sample for owner, sample in quarantined if owner == number)
                places.append(chosen)
                parts.append(origin.draw(draw[chosen], bad))
        # Index of each window sample in the concatenation of the samples by source.
        joined = np.empty(len(position), np.int64)
        joined[np.concatenate(places)] = np.arange(len(position))
        length = np.concatenate([part.layout.length for part in parts])[joined]
        packed = pack_window(length, self.config.seq_len)
        at = joined[packed.sample]
        samples = SampleTable(
            source=source[packed.sample],
            index=np.concatenate([part.sample for part in parts])[at],
            part=np.concatenate([part.part for part in parts])[at],
            position=position[packed.sample],
            epoch=np.concatenate([part.epoch for part in parts])[at].astype(np.int32),
            varied=np.concatenate([part.varied for part in parts])[at],
            row=packed.row,
            start=packed.start,
            length=packed.length,
        )
        items, item_ptr = self._items(parts, source[np.concatenate(places)], at, samples)
        return Window(packed, samples, items, item_ptr)

    def _items(
        self,
        parts: Sequence[Drawn],
        source: NDArray[np.int16],
        at: NDArray[np.int64],
        samples: SampleTable,
    ) -> tuple[ItemTable, NDArray[np.int64]]:
        """Return the items of a window in packed order, and the first item of each sample.

        Args:
            parts: drawn samples of each source.
            source: source of each sample, in the order of `parts`.
            at: index of each packed sample in that order.
            samples: the packed samples.
        """
        counts = np.concatenate([np.diff(part.layout.item_ptr) for part in parts])
        ptr = np.concatenate([[0], np.cumsum(counts)])
        item, item_ptr = gather_rows(ptr, at)
        line = np.concatenate([part.layout.item for part in parts])[item]
        grid = np.concatenate([part.layout.grid for part in parts])[item]
        start = np.concatenate([part.layout.start for part in parts])[item]
        tokens = np.concatenate([part.layout.tokens for part in parts])[item]
        level = np.concatenate([part.level for part in parts])
        sample = np.repeat(np.arange(at.size), np.diff(item_ptr))
        kind, media, chunk = np.zeros((3, item.size), np.int16)
        owner = source[at][sample]
        for number, index in enumerate(self.indices):
            chosen = np.flatnonzero(owner == number)
            columns = (index.item_kind, index.item_media, index.item_chunk)
            for found, column in zip((kind, media, chunk), columns):
                found[chosen] = column[line[chosen]]
        table = ItemTable(
            sample=sample.astype(np.int32),
            index_line=line,
            kind=kind.astype(np.int8),
            media=media,
            chunk=chunk,
            level=level[at][sample],
            frames=grid[:, 0].copy(),
            grid_h=grid[:, 1].copy(),
            grid_w=grid[:, 2].copy(),
            row=samples.row[sample],
            start=samples.start[sample] + start,
            tokens=tokens,
        )
        return table, item_ptr

    def _mix(self, parts: tuple[tuple[int, tuple[int, ...]], ...]) -> Mixture:
        """Return the mixture of a state with these segments; the config sets the last weights."""
        *before, (start, _) = parts
        past: tuple[Segment, ...] = ()
        for begin, weights in before:
            past = append_segment(past, begin, weights)
        return self._mixer.mixture(past, start)

    def _encode(
        self,
        mixture: Mixture,
        window: int,
        row: int,
        step: int,
        opened: int,
        tokens: Sequence[int] | None,
        known: int = 1,
    ) -> State:
        """Return a state with the segments that have begun, but at least the first `known`.

        Later segments are omitted because the config determines them. `known` keeps segments that
        `with_own_blend` added before they begin. `opened` is the step at which the window in
        progress was opened, which decides its quarantine. `tokens` counts text and vision tokens
        before the step.
        """
        # No window is open at a window boundary: normalise the field so that equal states match.
        opened = opened if row else step
        position = window * self.config.pack_window
        begun = sum(segment.start <= position for segment in mixture.segments)
        begun = mixture.segments[: max(begun, known)]
        return {
            **self._identity.fields(),
            **self.tombstones.fields(step),
            "blend": [[s.start, list(s.weights)] for s in begun],
            "window": int(window),
            "row": int(row),
            "opened": int(opened),
            "step": int(step),
            "tokens": None if tokens is None else list(tokens),
            "quarantine": [],
            "changes": [list(change) for change in self._changes],
        }
