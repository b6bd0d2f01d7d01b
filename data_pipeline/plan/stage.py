"""What a stage takes over of the data of the stage before it: they go on, or they begin anew."""

from collections.abc import Mapping
from typing import Any

from data_pipeline.plan.budget import used_up
from data_pipeline.plan.mixture import OtherShares
from data_pipeline.plan.planner import Planner, State

_ROWS = ("manifest", "seed", "packing")


def taken_over(planner: Planner, state: Mapping[str, Any], step: int) -> tuple[State, str | None]:
    """Return the state in which a stage begins after another's, and why its data begin anew.

    They go on (None) where sources, seed, packing and first shares are the same: rows that were
    trained on do not come again, and a budget counts the tokens of both stages. Where one of them
    differs the data begin anew, and a budget counts this stage's tokens alone.

    Args:
        planner: of the stage; not changed.
        state: in which the stage before ended.
        step: steps done until then.

    Raises:
        ValueError: the data are the same and cannot go on, or nothing is left of the budget.
    """
    here = planner.state_dict()
    try:
        planner.mixture_of(state)
    except ValueError as error:
        same = all(state.get(name) == here[name] for name in _ROWS)
        if same and state.get("blend", here["blend"])[:1] == here["blend"][:1]:
            if not isinstance(error, OtherShares):
                raise
            raise ValueError(
                f"{str(error).partition(';')[0]}: the data of the stage before go on with "
                "train.start_optimizer=keep, and with the shares that hold at its end; give its "
                "data.schedule here, too, and let other shares begin later"
            ) from None
        anew = here | {"step": step, "opened": step} | planner.tombstones.fields(step)
        return anew, str(error)
    if (told := used_up(planner.config.budget, state)) is not None:
        raise ValueError(
            f"{told} by the stages before, whose data go on with train.start_optimizer=keep: "
            "nothing would be trained; raise data.budget, which counts the tokens of all of them"
        )
    return dict(state), None
