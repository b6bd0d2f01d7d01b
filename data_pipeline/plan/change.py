"""Other shares and new sources in the middle of a run: the past stays, the rest is the new mixture.

`change` takes the state in which a run was saved over to a planner of another configuration. What
was handed out stays as it was, and the window in progress is finished with its own shares; the next
window, which no one has begun, is the first of the new mixture. All of it is a function of state
and configuration, so every rank comes to the same, and so does every restart from that state.

Sources are numbered by their names. A new one moves the numbers of others, so what a state says by
number is numbered anew: of a source that was not there the past drew nothing. A source from which
the past drew stays part of the run: left out of the shares, it stands under `data.past_sources`.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from data_pipeline.names import listed
from data_pipeline.plan.mixture import OtherShares
from data_pipeline.plan.planner import Planner, State
from data_pipeline.plan.state import blend_segments_of, packing_of


class Change(NamedTuple):
    """Where another mixture begins.

    Attributes:
        step: the first one, counted from 1, with rows of it.
        position: of the stream, a border of a window.
        sources: names of those that are new.
        shares: source -> its share of the draws from there on.
    """

    step: int
    position: int
    sources: list[str]
    shares: dict[str, float]

    def __str__(self) -> str:
        shares = ", ".join(f"{name} {share:.4f}" for name, share in self.shares.items())
        new = f"; new: {listed(self.sources)}" if self.sources else ""
        return (
            f"another mixture from step {self.step} on (position {self.position:,}): of the draws "
            f"{shares}{new}"
        )


def change(planner: Planner, state: Mapping[str, Any]) -> Change | None:
    """Have a planner begin with a state of another configuration; None: nothing is to be changed.

    Args:
        planner: of the configuration from now on; `state_dict` returns the state then.
        state: as a checkpoint of the run has it.

    Raises:
        ValueError: a source of the past is not there, or other data, or something else than shares
            and sources differs; nothing was changed.
    """
    here = planner.state_dict()
    _check_past(state, here["sources"])
    carried = renumbered(state, planner.config.source_names)
    carried |= {"manifest": here["manifest"], "sources": here["sources"]}
    augment = {k: v for k, v in planner.config.augment.items() if k in state["sources"]}
    if state["packing"] == packing_of(planner.config.replace(augment=augment)):
        carried["packing"] = here["packing"]  # augmentation of new sources alone is new
    new = sorted({*planner.config.source_names} - {*state["sources"]})
    if not new:
        with suppress(OtherShares):
            planner.load_state_dict(carried)
            return None
    moved = planner.with_own_blend(carried)
    planner.load_state_dict(moved)
    position, weights = blend_segments_of(moved)[-1]
    step = state["step"] + 1 + planner.rows_left(moved) // planner.config.rows_per_step
    # One that was decided on and had not begun never does.
    before = [one for one in moved.get("changes", ()) if one[1] < position]
    planner.load_state_dict(moved | {"changes": [*before, [step, position, new]]})
    whole = sum(weights)
    names = planner.config.source_names
    shares = {name: weight / whole for name, weight in zip(names, weights) if weight}
    return Change(step, position, new, shares)


def renumbered(state: Mapping[str, Any], names: Sequence[str]) -> State:
    """Return a state whose sources have other numbers.

    Args:
        state: of any version; one that does not name its sources is returned as it is.
        names: of all sources by their numbers: those of the state, and perhaps more.
    """
    number = [names.index(name) for name in sorted(state.get("sources", ()))]
    if number in ([], [*range(len(names))]):
        return dict(state)
    blend = [[start, _spread(weights, number, len(names))] for start, weights in state["blend"]]
    quarantine = sorted([number[a], b, c] for a, b, c in state["quarantine"])
    return {**state, "blend": blend, "quarantine": quarantine}


def _check_past(state: Mapping[str, Any], here: Mapping[str, str]) -> None:
    """Refuse a state of which a source is not here, or holds other data.

    Args:
        here: name -> content of the sources, as a state has them.
    """
    then = state.get("sources")
    if not isinstance(then, Mapping):
        raise ValueError(
            "state field 'sources' is missing: the state was written by an earlier version, so its "
            "data cannot be changed; resume it with its own once, and change them then"
        )
    for name in sorted(then):
        if name not in here:
            raise ValueError(
                f"source {name!r} is part of this run's past and no longer among data.sources: "
                f"earlier steps drew from it; name it under data.past_sources, as {{{name}: 1}}"
            )
        if then[name] != here[name]:
            raise ValueError(
                f"source {name!r} is {then[name]!r} in the state and {here[name]!r} here "
                "(content, bounds): what a run has drawn from never changes under it; give other "
                "data another name"
            )


def _spread(values: Sequence[int], number: Sequence[int], count: int) -> list[int]:
    """Return values by their new numbers, 0 for those that had none."""
    found = [0] * count
    for at, value in zip(number, values, strict=True):
        found[at] = value
    return found
