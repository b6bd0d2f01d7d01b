"""Changes mixture weights or adds sources mid-run without changing the rows already drawn.

`change` moves a saved state of a run to a planner with another configuration. Rows already drawn
stay the same, and the window in progress is finished with its old shares. The next window is the
first with the new mixture. The result is a function of state and configuration, so every rank and
every restart from that state agrees.

Sources are numbered by sorted name, so a new source shifts the numbers of others, and `change`
renumbers the state's fields. A source that earlier steps drew from stays part of the run. If it is
no longer in the shares, it must be listed under `data.past_sources`.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from data_pipeline.names import listed
from data_pipeline.plan.mixture import OtherShares
from data_pipeline.plan.planner import Planner, State
from data_pipeline.plan.state import blend_segments_of, packing_of


class Change(NamedTuple):
    """Start of a new mixture.

    Attributes:
        step: first step, counted from 1, with rows of the new mixture.
        position: position in the stream, at a window boundary.
        sources: names of the new sources.
        shares: source -> share of the draws from there on.
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
    """Load a state of another configuration into a planner; return None if nothing changes.

    Args:
        planner: planner of the new configuration; its `state_dict` returns the new state then.
        state: state from a checkpoint of the run.

    Raises:
        ValueError: a past source is missing or holds other data, or something other than shares
            and sources differs; the planner is unchanged.
    """
    here = planner.state_dict()
    _check_past(state, here["sources"])
    carried = renumbered(state, planner.config.source_names)
    carried |= {"manifest": here["manifest"], "sources": here["sources"]}
    augment = {k: v for k, v in planner.config.augment.items() if k in state["sources"]}
    if state["packing"] == packing_of(planner.config.replace(augment=augment)):
        carried["packing"] = here["packing"]  # only the augmentation of new sources differs
    new = sorted({*planner.config.source_names} - {*state["sources"]})
    if not new:
        with suppress(OtherShares):
            planner.load_state_dict(carried)
            return None
    moved = planner.with_own_blend(carried)
    planner.load_state_dict(moved)
    position, weights = blend_segments_of(moved)[-1]
    step = state["step"] + 1 + planner.rows_left(moved) // planner.config.rows_per_step
    # Drop an earlier change that has not begun: this one replaces it.
    before = [one for one in moved.get("changes", ()) if one[1] < position]
    planner.load_state_dict(moved | {"changes": [*before, [step, position, new]]})
    whole = sum(weights)
    names = planner.config.source_names
    shares = {name: weight / whole for name, weight in zip(names, weights) if weight}
    return Change(step, position, new, shares)


def renumbered(state: Mapping[str, Any], names: Sequence[str]) -> State:
    """Return a state with its sources renumbered.

    Args:
        state: state of any version; a state without source names is returned unchanged.
        names: all source names in the new order, including those of the state.
    """
    number = [names.index(name) for name in sorted(state.get("sources", ()))]
    if number in ([], [*range(len(names))]):
        return dict(state)
    blend = [[start, _spread(weights, number, len(names))] for start, weights in state["blend"]]
    quarantine = sorted([number[a], b, c] for a, b, c in state["quarantine"])
    return {**state, "blend": blend, "quarantine": quarantine}


def _check_past(state: Mapping[str, Any], here: Mapping[str, str]) -> None:
    """Refuse a state if one of its sources is missing or holds other data.

    Args:
        here: name -> content of this run's sources, as in a state.
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
    """Return values at their new numbers; 0 for new sources."""
    found = [0] * count
    for at, value in zip(number, values, strict=True):
        found[at] = value
    return found
