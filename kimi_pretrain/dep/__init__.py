"""The Decoupled Encoder Process (K2.5 report, section 4.5.1); docs/DEP.md explains it.

Planning uses metadata only. `cost` estimates the seconds of an item. `assign` spreads the items of
the global batch over all ranks (with `makespan`, `nearby`, `split`, `places`). `vision_plan` holds
the result with the route of every token, and `memory_limit` checks its memory. `planner` combines
these modules.

At run time, `encoder` runs the forward pass without a graph, then the recompute with backward, in
chunks. `sharded` lets a few ranks encode one large item together. `exchange` carries embeddings to
the first pipeline stages and gradients back; `leaves` attaches the embeddings to microbatches.
`reduce` sums the encoder's gradients. `measure` and `cost_fit` calibrate the cost model.
"""
