"""Start state of a stage's data: continues the data order of the stage before, or restarts it."""

from collections.abc import Mapping
from typing import Any

from data_pipeline.plan.budget import used_up
from data_pipeline.plan.mixture import OtherShares
from data_pipeline.plan.planner import Planner, State

_ROWS = ("manifest", "seed", "packing")


def taken_over(planner: Planner, state: Mapping[str, Any], step: int) -> tuple[State, str | None]:
    """Return the start state of a stage, and the reason if its data order restarts.

    The order continues (reason None) if sources, seed, packing and first shares are the same. Rows
    that were trained on do not repeat then, and a budget counts the tokens of both stages. If any
    of them differs, the order restarts, and a budget counts only this stage's tokens.

    Args:
        planner: planner of the stage; it is not changed.
        state: final state of the stage before.
        step: number of steps done until then.

    Raises:
        ValueError: the data is the same but cannot continue, or the budget is used up.
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
