"""Faults without any observable effect, each with a one-line proof.

The keys are those that the sweep prints. A key that is no longer a fault of its file is an error.
"""

EQUIVALENT: dict[str, str] = {
    "data_pipeline/plan/step_plan.py GlobalPlan.num_tokens: return "
    "int(self.samples.length.sum(dtype=np.int64)) -> return int(self.samples.length.sum())": (
        "numpy sums int32 in the machine's own integers, which are int64 wherever torch runs"
    ),
}
