"""Faults that a verification plants in a run, to see that it finds them.

The code that trains knows nothing of them: methods and values of one run's objects are replaced
from outside.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Generic, TypeVarTuple

Place = TypeVarTuple("Place")  # what a fault is planted in, such as (run, vision plan)


class Replaced(ExitStack):
    """Attributes of objects that are replaced until this context ends."""

    def put(self, owner: object, name: str, by: object) -> None:
        """Replace an attribute or method of this one object; replacements may nest."""
        held = vars(owner)
        if name in held:
            self.callback(setattr, owner, name, held[name])
        else:
            self.callback(delattr, owner, name)
        setattr(owner, name, by)


@dataclass(frozen=True)
class Fault(Generic[*Place]):
    """A fault that can be planted.

    Attributes:
        what: goes wrong, in a sentence.
        obstacle: why this run cannot have it, or None; the same on every rank, all of which ask.
        plant: puts it into the run of this rank; called on every rank.
        own_reference: the run with it is compared with a reference that was made for it, not with
            that of the run without a fault.
    """

    what: str
    obstacle: Callable[[*Place], str | None]
    plant: Callable[[Replaced, *Place], None]
    own_reference: bool = False


def register(
    faults: dict[str, Fault[*Place]], what: str, obstacle: Callable[[*Place], str | None],
    *, own_reference: bool = False,
) -> Callable[[Callable[[Replaced, *Place], None]], None]:  # fmt: skip
    """Return a decorator that adds a fault to `faults`; `_lost_item` plants "lost-item"."""

    def add(plant: Callable[[Replaced, *Place], None]) -> None:
        name = plant.__name__.strip("_").replace("_", "-")
        faults[name] = Fault(what, obstacle, plant, own_reference)

    return add
