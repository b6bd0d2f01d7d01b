"""What every verification finds: a comparison, what became of planted faults, the verdict. Pure."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Comparison:
    """Two runs compared; the fields of each kind are its own."""

    @property
    def passed(self) -> bool:
        """Whether the runs are the same. Nothing compared is no pass."""
        raise NotImplementedError

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; numbers that are not finite become null."""
        return {"passed": self.passed, **_plain(asdict(self))}


Outcome = Comparison | str  # of a planted fault; a string: why it could not be planted


@dataclass(frozen=True)
class Result:
    """What a verification found."""

    comparison: Comparison  # of the runs without a fault, or with the fault `planted`
    faults: Mapping[str, Outcome] = field(default_factory=dict[str, Outcome])
    # Name -> comparison that must pass too; None: it was not requested.
    further: Mapping[str, Comparison | None] = field(default_factory=dict[str, Comparison | None])
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])  # what was run, plain values
    planted: str | None = None

    @property
    def passed(self) -> bool:
        """Whether nothing differs, and every fault that could be planted was found."""
        if self.planted is not None:
            return self.comparison.passed
        further = (one.passed for one in self.further.values() if one is not None)
        found = (one.get("found", True) for one in map(self._outcome, self.faults.values()))
        return self.comparison.passed and all(further) and all(found)

    def with_fault(self, fault: str) -> "Result":
        """Return the result as if the run with a fault were the run to verify.

        Raises:
            ValueError: the fault could not be planted in this run.
        """
        outcome = self.faults[fault]
        if isinstance(outcome, str):
            raise ValueError(f"--plant {fault} cannot be done here: {outcome}")
        return replace(self, comparison=outcome, faults={}, planted=fault)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON.

        Returns:
            passed; comparison; faults: name -> {found, comparison} or {obstacle}; "planted" only
            after `with_fault`; `further` and `facts` by their names.
        """
        values = {"passed": self.passed, "comparison": self.comparison.as_dict()}
        values |= {name: one and one.as_dict() for name, one in self.further.items()}
        values["faults"] = {name: self._outcome(one) for name, one in self.faults.items()}
        planted = {"planted": self.planted} if self.planted else {}
        return {**values, **self.facts, **planted}

    def _outcome(self, outcome: Outcome) -> dict[str, Any]:
        if isinstance(outcome, str):
            return {"obstacle": outcome}
        # Where the clean run differs, a fault would be "found" whether it is there or not.
        found = self.comparison.passed and not outcome.passed
        return {"found": found, "comparison": outcome.as_dict()}


def relative_error(found: float, reference: float) -> float:
    """Return |found - reference| / |reference|; 0 where both are zero."""
    if reference == 0:
        return 0.0 if found == 0 else math.inf
    return abs(found - reference) / abs(reference)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
