"""What the backward pass needs, and how it waits: kept, made again, or in FP8.

`saved` is the one policy over saved tensors, `fp8_tiles` the codes that it may keep instead,
`pointwise` has the functions that save their inputs alone. Plain torch: the engine's modules
are given a policy, and nothing here knows of them. docs/MEMORY.md explains the settings.
"""
