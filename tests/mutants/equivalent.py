"""Faults that change nothing that anybody can see, each with its proof in a line.

The keys are those that the sweep prints. One that is no fault of its file any more is an error.
"""

EQUIVALENT: dict[str, str] = {
    "data_pipeline/plan/step_plan.py GlobalPlan.num_tokens: return "
    "int(self.samples.length.sum(dtype=np.int64)) -> return int(self.samples.length.sum())": (
        "numpy sums int32 in the machine's own integers, which are int64 wherever torch runs"
    ),
}
