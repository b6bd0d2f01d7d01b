"""Plants faults in a run, to show that a verification finds them.

The training code does not know about faults: methods and values of one run's objects are replaced
from outside.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Generic, TypeVarTuple

Place = TypeVarTuple("Place")  # the objects that receive the fault, such as (run, vision plan)


class Replaced(ExitStack):
    """Attributes of objects that are replaced until this context exits."""

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
        what: the defect, in one sentence.
        obstacle: returns why this run cannot have the fault, or None. Every rank calls it, and the
            result is the same on every rank.
        plant: plants the fault in the run of this rank; called on every rank.
        own_reference: compare the run with a reference made for this fault, rather than with the
            reference of the run without a fault.
    """

    what: str
    obstacle: Callable[[*Place], str | None]
    plant: Callable[[Replaced, *Place], None]
    own_reference: bool = False


def register(
    faults: dict[str, Fault[*Place]], what: str, obstacle: Callable[[*Place], str | None],
    *, own_reference: bool = False,
) -> Callable[[Callable[[Replaced, *Place], None]], None]:  # fmt: skip
    """Return a decorator that adds a fault to `faults`; `_lost_item` becomes "lost-item"."""

    def add(plant: Callable[[Replaced, *Place], None]) -> None:
        name = plant.__name__.strip("_").replace("_", "-")
        faults[name] = Fault(what, obstacle, plant, own_reference)

    return add
