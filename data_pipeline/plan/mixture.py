"""Blend of a whole training run: stages with different shares, and limits on epochs.

    config (shares, schedule, max_epochs) + totals of each source -> segments of the blend

Everything follows from the config and the indices before the first step. The start of a stage (in
expected tokens of the stream) and the end of a source's last epoch are positions in closed form.
Both take effect at the boundary of a packing window, because a window is packed as a whole. A
source stops at the last boundary before it would exceed its epochs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from data_pipeline.config import BlendStage, DataConfig, share_of
from data_pipeline.plan.blend import (
    UNITS,
    Segment,
    SourceTotals,
    append_segment,
    counts_before,
    position_of,
    weights_for_ratio,
)


class OtherShares(ValueError):
    """The state's shares differ from those of the config at that position."""


@dataclass(frozen=True)
class Mixture:
    """Blend from the first position to `end`.

    Attributes:
        segments: segments with constant weights, each starting at a window boundary.
        end: position at which the data is used up; None if never.
        reason: why the data ends there.
    """

    segments: tuple[Segment, ...]
    end: int | None = None
    reason: str = ""


class Mixer:
    """Calculator of mixtures for one config.

    Args:
        config: shares, schedule and limits.
        totals: totals of each source, in the order of `config.source_names`.
        units: number of draws in one epoch of each source.
    """

    def __init__(self, config: DataConfig, totals: Sequence[SourceTotals], units: Sequence[int]):
        self._names, self._past = config.source_names, {*config.past_sources}
        self._window = config.pack_window
        self._totals = tuple(totals)
        # Stages count all tokens, or only the kind of tokens that has a budget.
        counted = [count_of(config, total) for total in totals]
        self._tokens = [Fraction(n, total.samples) for n, total in zip(counted, totals)]
        # Number of draws after which a source is used up.
        self._caps = [
            int(Fraction(str(config.max_epochs[name])) * n) if name in config.max_epochs else None
            for name, n in zip(self._names, units)
        ]
        first = BlendStage(
            after_tokens=1,
            sources=config.sources,
            vision_token_ratio=config.vision_token_ratio,
        )
        self._stages = (
            (Fraction(0), first), *((start_of(config, stage), stage) for stage in config.schedule)
        )  # fmt: skip
        self._ratio = config.vision_token_ratio

    def mixture(self, past: Sequence[Segment] = (), start: int = 0) -> Mixture:
        """Return the past segments followed by this config's segments from `start` on.

        Args:
            past: segments before `start`, of any config.
            start: window boundary from which on nothing has been drawn yet.

        Raises:
            ValueError: the shares of the stage at `start` are impossible.
        """
        segments = tuple(past)
        while True:
            try:
                segments, following = self._append(segments, start)
            except _UsedUp as error:
                if not segments:
                    raise ValueError(str(error)) from None
                return Mixture(segments, start, str(error))
            if following is None:
                return Mixture(segments)
            start = following

    def weights(self, stage: BlendStage, without: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the draw weights of a stage, with some sources left out.

        Raises:
            ValueError: the vision ratio is impossible.
        """
        shares = [
            0.0 if number in without else share_of(stage.sources.get(name, 0.0))
            for number, name in enumerate(self._names)
        ]
        ratio = stage.vision_token_ratio
        return weights_for_ratio(self._totals, shares, self._ratio if ratio is None else ratio)

    def refusal(
        self, parts: Sequence[tuple[int, tuple[int, ...]]], own: tuple[int, ...], missed: list[int]
    ) -> str:
        """Return the message on how a state's segments (start, weights) differ from this config.

        Args:
            parts: segments of the state.
            own: weights of this config at the start of the last segment.
            missed: positions at which this config would have changed the shares since then.
        """
        found = f"this config changes at {missed}" if missed else f"this config gives {own}"
        told = f"state field 'blend' ends with weights {parts[-1][1]}, {found}; "
        if all(stage.after_share is None for _, stage in self._stages):
            return told + (
                "to go on with the new shares from the next window on, add --change-data to "
                "`train --resume`"
            )
        places = [
            f"data.schedule[{number}] with after_tokens={tokens}"
            for number, tokens in self._begun(parts)
        ]
        return told + (
            "where a stage with after_share begins moves with data.budget, which may change before "
            "the first of them has begun; after that, leave it as it was, or give each stage its "
            "place in tokens" + (f": {', '.join(places)}" if places else "")
        )

    def _begun(self, parts: Sequence[tuple[int, tuple[int, ...]]]) -> Iterator[tuple[int, int]]:
        """Yield (number in the schedule, equivalent after_tokens) of each stage that has begun."""
        totals = [Fraction(total.tokens, total.samples) for total in self._totals]
        past: tuple[Segment, ...] = ()
        number = 0
        for start, weights in parts:
            past = append_segment(past, start, weights)
            if start and number < len(self._stages) - 1:
                try:
                    begun = self.weights(self._stages[number + 1][1]) == weights
                except ValueError:
                    begun = False
                if begun:
                    # Use the middle of the window before `start`, so that rounding cannot move the
                    # stage to another window.
                    first, end = (
                        counts_before(at, past[:-1]) for at in (start - self._window, start)
                    )
                    counts = (first + end).tolist()
                    tokens = sum((n * mean for n, mean in zip(counts, totals)), Fraction(0))
                    yield number, ceil(tokens / 2)
                    number += 1

    def check(self, mixture: Mixture) -> None:
        """Refuse a blend in which windows are so large that a source or a stage never occurs.

        Raises:
            ValueError: a source or stage never occurs; the message names them.
        """
        never = [
            name
            for number, name in enumerate(self._names)
            if not any(segment.weights[number] for segment in mixture.segments)
            and name not in self._past
        ]
        if mixture.end is not None:  # a later stage may not be reached
            never = [name for name in never if name in self._stages[0][1].sources]
        if never:
            raise ValueError(
                f"sources {never} would never be drawn: a source stops, and a stage begins, at the "
                f"border of a window of pack_window={self._window} samples, and theirs lies before "
                "the first; lower pack_window, raise max_epochs, or leave them out"
            )
        reached = [
            self._stage_at(self.tokens_before(segment.start, mixture.segments))
            for segment in mixture.segments
        ]
        skipped = [int(self._stages[n][0]) for n in range(max(reached)) if n not in reached]
        if skipped:
            raise ValueError(
                f"the stages of the schedule after {skipped} tokens are over before they begin: "
                f"they are shorter than a window of pack_window={self._window} samples"
            )

    def _stage_at(self, tokens: Fraction) -> int:
        return max(i for i, (after, _) in enumerate(self._stages) if after <= tokens)

    def tokens_before(self, position: int, segments: Sequence[Segment]) -> Fraction:
        """Return the expected tokens before a position."""
        if not position:
            return Fraction(0)
        counts = counts_before(position, segments).tolist()
        return sum((n * mean for n, mean in zip(counts, self._tokens)), Fraction(0))

    def _append(
        self, segments: tuple[Segment, ...], start: int
    ) -> tuple[tuple[Segment, ...], int | None]:
        """Return the segments with the one that begins at `start`, and its end; None if endless."""
        tokens = self.tokens_before(start, segments)
        number = self._stage_at(tokens)
        _, stage = self._stages[number]
        without: list[int] = []
        while True:
            weights = self._weights_left(stage, without)
            grown = append_segment(segments, start, weights)
            borders = self._last_borders(grown[-1])
            gone = [source for source, border in borders.items() if border <= start]
            if not gone:
                break
            without += gone
        ends = list(borders.values())
        if number + 1 < len(self._stages):
            rate = sum((w * mean for w, mean in zip(weights, self._tokens)), Fraction(0)) / UNITS
            if not rate:
                raise ValueError(
                    f"data.schedule[{number}] begins at a share of data.budget, of which "
                    "the sources before it hold nothing; give the budget of the other kind, too"
                )
            left = ceil((self._stages[number + 1][0] - tokens) / rate)
            ends.append(start + -(-left // self._window) * self._window)
        return grown, min(ends) if ends else None

    def _weights_left(self, stage: BlendStage, without: Sequence[int]) -> tuple[int, ...]:
        try:
            return self.weights(stage, without)
        except ValueError as error:
            if not without:
                raise
            names = [self._names[number] for number in sorted(without)]
            raise _UsedUp(
                f"sources {names} have reached their max_epochs, and the shares of the others do "
                f"not make a blend any more ({error}); raise max_epochs, add data, or add a stage "
                "to the schedule"
            ) from None

    def _last_borders(self, segment: Segment) -> Mapping[int, int]:
        """Return source -> the last window boundary before it would exceed its epochs."""
        borders: dict[int, int] = {}
        for source, (cap, weight) in enumerate(zip(self._caps, segment.weights)):
            if cap is None or not weight:
                continue
            if cap <= segment.counts[source]:
                borders[source] = segment.start
                continue
            last = position_of(source, cap, segment)
            since = (last - segment.start) // self._window * self._window
            borders[source] = segment.start + since
        return borders


def count_of(config: DataConfig, total: SourceTotals) -> int:
    """Return a source's tokens of the kind that the stages of the schedule count."""
    budget = config.budget
    if budget is None or not config.schedule or config.schedule[0].after_share is None:
        return total.tokens
    if budget.text is not None and budget.vision is not None:
        return total.tokens
    return total.vision_tokens if budget.text is None else total.tokens - total.vision_tokens


def start_of(config: DataConfig, stage: BlendStage) -> Fraction:
    """Return the tokens before a stage, of the kind that `count_of` counts."""
    if stage.after_tokens is not None:
        return Fraction(stage.after_tokens)
    assert config.budget is not None  # the config validator checks this
    assert stage.after_share is not None
    whole = (config.budget.text or 0) + (config.budget.vision or 0)
    return Fraction(str(stage.after_share)) * whole


class _UsedUp(Exception):
    """A stage has no source left."""
