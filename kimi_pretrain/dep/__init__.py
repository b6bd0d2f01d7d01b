"""The Decoupled Encoder Process (K2.5 report, section 4.5.1); docs/DEP.md explains it.

Planning, from metadata alone: `cost` prices an item, `assign` spreads the items of the whole global
batch over all ranks (with `balance`, `nearby`, `split`, `places`), `plan` says which token goes
where, `memory` what it takes.

Running: `encoder` does the forward without graph and the recompute with backward, in chunks;
`sharded` lets a few ranks encode one large item together; `exchange` carries embeddings to the
first pipeline stages and their gradients back; `reduce` sums the encoder's gradients. `calibrate`
and `fit` measure what the cost model needs.
"""
