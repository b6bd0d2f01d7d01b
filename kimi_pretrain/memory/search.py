"""Searches for settings that together bring a run under a memory limit, also with more ranks.

On the run's own layout every combination of switches is tried. Other layouts are the same ranks in
another pipeline, then two, four and eight times the replicas, also with experts spread over them. A
layout is listed if it needs less costly switches than all layouts before it. One combination is
less costly than another if it is milder in the most costly switch in which they differ (`switches`
defines the order).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from kimi_pretrain.config import Config
from kimi_pretrain.memory.plan import StageMemory, stages_of
from kimi_pretrain.memory.states import Sizes, divide_config
from kimi_pretrain.memory.switches import Change, changed, switches
from kimi_pretrain.parallel.layout import even_stages
from kimi_pretrain.tools.optimizer_division import Division

_MORE_RANKS = (2, 4, 8)


@dataclass(frozen=True)
class Combination:
    """A combination of changes and its memory.

    Attributes:
        settings: command-line overrides, those of the layout first.
        ranks: number of ranks of the job.
        fullest: memory of the stage with the fullest rank.
    """

    settings: tuple[str, ...]
    ranks: int
    fullest: StageMemory


@dataclass(frozen=True)
class Search:
    """Result of a search under a limit in bytes.

    Attributes:
        tried: number of combinations whose memory was planned.
        least: the combination with the least memory on the run's own layout.
        fits: fewest ranks first, then least costly. A combination is left out if a part of it
            fits.
    """

    limit: int
    tried: int
    least: Combination
    fits: tuple[Combination, ...]


Levels = tuple[int, ...]  # of each switch, 0 for off; the most costly first


@dataclass(frozen=True)
class Layout:
    """A configuration on one layout, with its switches, the most costly first."""

    changes: tuple[Change, ...]
    config: Config
    levels: tuple[tuple[Change, ...], ...]

    @classmethod
    def of(cls, config: Config, changes: Sequence[Change] = ()) -> "Layout":
        """Return the layout of a configuration; `changes`: those made to the run's own config."""
        levels = tuple(map(tuple, switches(config)))[::-1]
        return cls(tuple(changes), config, levels)

    def combinations(self) -> Iterator[Levels]:
        """Yield all combinations of levels, the least costly first."""
        yield from product(*(range(len(levels) + 1) for levels in self.levels))

    def with_levels(self, taken: Levels) -> Config:
        """Return the configuration with a combination of levels.

        Raises:
            ValueError: it cannot run.
        """
        return changed(self.config, self._chosen(taken))

    def _chosen(self, taken: Levels) -> list[Change]:
        return [levels[n - 1] for levels, n in zip(self.levels, taken, strict=True) if n]

    def plan(self, taken: Levels, division: Division | None, sizes: Sizes) -> Combination | None:
        """Return the memory of a combination; None if it cannot run."""
        own = self._chosen(taken)
        try:
            config = self.with_levels(taken)
        except ValueError:
            return None
        stages = stages_of(config, division, sizes)
        fullest = max(stages, key=lambda stage: (stage.peak, -stage.stage))
        settings = tuple(map(str, (*self.changes, *reversed(own))))
        return Combination(settings, config.layout.world_size(), fullest)


def search(config: Config, limit: int, division: Division | None = None) -> Search:
    """Search for combinations of settings under a limit.

    Args:
        limit: bytes that a rank may hold.
        division: of the optimizer's state on the run's own layout, if it is known.
    """
    own = Layout.of(config)
    sizes, division = Sizes.of(config), division or divide_config(config)
    planned = {taken: own.plan(taken, division, sizes) for taken in own.combinations()}
    found = {taken: one for taken, one in planned.items() if one is not None}
    enough = {taken: one for taken, one in found.items() if one.fullest.peak <= limit}
    fits = [one for taken, one in enough.items() if not _part_of(enough, taken)]
    tried, best = len(found), min(enough, default=None)
    for layout in _others(config):
        if best is not None and not any(best):
            break  # no switch to spare
        counted, taken, one = cheapest(layout, limit, best)
        tried += counted
        if one is not None:
            fits.append(one)
            best = taken
    least = min(found.values(), key=lambda one: (one.fullest.peak, len(one.settings)))
    return Search(limit, tried, least, tuple(fits))


def _part_of(enough: Iterable[Levels], taken: Levels) -> bool:
    """Return whether milder or fewer switches already suffice."""
    return any(
        other != taken and all(a <= b for a, b in zip(other, taken, strict=True))
        for other in enough
    )


def cheapest(
    layout: Layout, limit: int, below: Levels | None
) -> tuple[int, Levels | None, Combination | None]:
    """Return the number of tried combinations, and the least costly one below `below` that fits.

    The division of the optimizer's state takes a second, so it is only made if the mean state fits.
    """
    sizes, division, tried = Sizes.of(layout.config), None, 0
    for taken in layout.combinations():
        if below is not None and taken >= below:
            break
        one = layout.plan(taken, division, sizes)
        tried += 1
        if division is None and one is not None and one.fullest.peak <= limit:
            division = divide_config(layout.config)
            one = layout.plan(taken, division, sizes)
        if one is not None and one.fullest.peak <= limit:
            return tried, taken, one
    return tried, None, None


def _others(config: Config) -> Iterator[Layout]:
    """Yield other layouts that can run: first with the same number of ranks, then with more."""
    layout = config.layout
    for pp, dp in ((layout.pp, layout.dp), (layout.pp * 2, layout.dp // 2),
                   (layout.pp // 2, layout.dp * 2)):  # fmt: skip
        for vpp in (1, 2, 4):
            if pp * dp == layout.pp * layout.dp and (pp, vpp) != (layout.pp, layout.vpp):
                ep = max(1, layout.ep * dp // layout.dp)
                yield from _with_layout(config, pp=pp, vpp=vpp, dp=dp, ep=ep)
    for times in _MORE_RANKS:
        yield from _with_layout(config, dp=layout.dp * times)
        yield from _with_layout(config, dp=layout.dp * times, ep=layout.ep * times)


def _with_layout(config: Config, **sizes: int) -> Iterator[Layout]:
    values: dict[str, int | str | None] = dict(sizes)
    try:
        if "pp" in sizes:
            chunks = sizes["pp"] * sizes["vpp"]
            values["stages"] = even_stages(config.model.language.num_layers, chunks)
        changes = [
            Change("layout", key, value)
            for key, value in values.items()
            if value != getattr(config.layout, key)
        ]
        yield Layout.of(changed(config, changes), changes)
    except ValueError:  # it cannot run
        return
