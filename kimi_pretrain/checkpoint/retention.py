"""Retention of checkpoints, as a pure function of their steps."""

from collections.abc import Iterable


def steps_to_keep(
    steps: Iterable[int],
    keep_last: int | None,
    keep_every: int | None,
    *,
    good: int | None = None,
) -> set[int]:
    """Return the steps whose checkpoints are kept.

    Args:
        steps: steps of the complete checkpoints.
        keep_last: number of newest checkpoints to keep; None for all.
        keep_every: also keep steps that are a multiple of this; None for no others.
        good: step of a checkpoint that is known to be intact (just written or verified). It is
            kept, and `keep_last` counts back from it, so that a damaged later checkpoint, which a
            run skipped when it fell back, cannot displace it.
    """
    found = sorted(set(steps))
    if keep_last is None:
        return set(found)
    newest = found if good is None else [step for step in found if step <= good]
    stay = set(newest[-keep_last:]) | {step for step in found if step == good}
    stay |= set(found[-1:])  # a resume would use the newest, unless it is known to be damaged
    return stay | {step for step in found if keep_every and step % keep_every == 0}
