"""Faults that change nothing that anybody can see, each with its proof in a line.

The keys are those that the sweep prints. One that is no fault of its file any more is an error.
"""

EQUIVALENT: dict[str, str] = {}
