"""Result of a verification: a comparison, outcomes of planted faults, and the verdict. Pure."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Comparison:
    """Comparison of two runs; each kind adds its own fields."""

    @property
    def passed(self) -> bool:
        """True if the runs are the same; an empty comparison does not pass."""
        raise NotImplementedError

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; numbers that are not finite become null."""
        return {"passed": self.passed, **_plain(asdict(self))}


Outcome = Comparison | str  # outcome of a planted fault; a string says why it was not planted


@dataclass(frozen=True)
class Result:
    """Result of a verification."""

    comparison: Comparison  # of the runs without a fault, or with the fault `planted`
    faults: Mapping[str, Outcome] = field(default_factory=dict[str, Outcome])
    # Name -> further comparison that must pass, or None if it was not requested.
    further: Mapping[str, Comparison | None] = field(default_factory=dict[str, Comparison | None])
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])  # description of the runs
    planted: str | None = None

    @property
    def passed(self) -> bool:
        """True if nothing differs and every planted fault was found."""
        if self.planted is not None:
            return self.comparison.passed
        further = (one.passed for one in self.further.values() if one is not None)
        found = (one.get("found", True) for one in map(self._outcome, self.faults.values()))
        return self.comparison.passed and all(further) and all(found)

    def with_fault(self, fault: str) -> "Result":
        """Return the result as if the run with a fault were the run to verify.

        Raises:
            ValueError: the fault cannot be planted in this run.
        """
        outcome = self.faults[fault]
        if isinstance(outcome, str):
            raise ValueError(f"--plant {fault} cannot be done here: {outcome}")
        return replace(self, comparison=outcome, faults={}, planted=fault)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON.

        Returns:
            "passed"; "comparison"; "faults": name -> {found, comparison} or {obstacle}; "planted"
            only after `with_fault`; `further` and `facts` under their names.
        """
        values = {"passed": self.passed, "comparison": self.comparison.as_dict()}
        values |= {name: one and one.as_dict() for name, one in self.further.items()}
        values["faults"] = {name: self._outcome(one) for name, one in self.faults.items()}
        planted = {"planted": self.planted} if self.planted else {}
        return {**values, **self.facts, **planted}

    def _outcome(self, outcome: Outcome) -> dict[str, Any]:
        if isinstance(outcome, str):
            return {"obstacle": outcome}
        # If the clean run differs, every fault would count as found.
        found = self.comparison.passed and not outcome.passed
        return {"found": found, "comparison": outcome.as_dict()}


def relative_error(found: float, reference: float) -> float:
    """Return |found - reference| / |reference|; 0 if both are zero."""
    if reference == 0:
        return 0.0 if found == 0 else math.inf
    return abs(found - reference) / abs(reference)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
