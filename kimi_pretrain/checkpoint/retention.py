"""Which checkpoints stay: a pure function of their steps."""

from collections.abc import Iterable


def steps_to_keep(
    steps: Iterable[int],
    keep_last: int | None,
    keep_every: int | None,
    *,
    good: int | None = None,
) -> set[int]:
    """Return the steps whose checkpoints stay.

    Args:
        steps: of the complete checkpoints.
        keep_last: so many of the newest stay; None: all of them.
        keep_every: those whose step it divides are kept as well; None: no others.
        good: the checkpoint that is known to be sound (it was written or verified just now). It
            stays, and so many before it count as the newest: a damaged one after it, which a run
            that fell back has left behind, must not push it out.
    """
    found = sorted(set(steps))
    if keep_last is None:
        return set(found)
    newest = found if good is None else [step for step in found if step <= good]
    stay = set(newest[-keep_last:]) | {step for step in found if step == good}
    stay |= set(found[-1:])  # unless it is known to be bad, the newest is what a resume would take
    return stay | {step for step in found if keep_every and step % keep_every == 0}
