"""The Decoupled Encoder Process (K2.5 report, section 4.5.1); docs/DEP.md explains it.

Planning, from metadata alone: `cost` prices an item, `assign` spreads the items of the whole global
batch over all ranks (with `makespan`, `nearby`, `split`, `places`), `vision_plan` is the result
with the route of every token, `memory_limit` its memory, `planner` puts these together.

Running: `encoder` does the forward without graph and the recompute with backward, in chunks;
`sharded` lets a few ranks encode one large item together; `exchange` carries embeddings to the
first pipeline stages and their gradients back, where `leaves` attaches them to microbatches;
`reduce` sums the encoder's gradients. `measure` and `cost_fit` calibrate the cost model.
"""
