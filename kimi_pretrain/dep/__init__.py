"""The Decoupled Encoder Process (K2.5 report, section 4.5.1).

`cost` prices an item, `assign` spreads the items of the whole global batch over all ranks,
`exchange` carries embeddings to the first pipeline stages and their gradients back, `encoder` runs
the forward without graph and the recompute with backward, in chunks.
"""
