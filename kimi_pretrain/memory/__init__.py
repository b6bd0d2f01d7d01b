"""What the backward pass needs, and how it waits: kept, recomputed, in FP8, or in host memory.

`saved` is the one policy over saved tensors, `fp8_tiles` and `host_memory` are what it may do with
them, `pointwise` has the functions that save their inputs alone. Plain torch: the engine's modules
are given a policy, and nothing here knows of them. docs/MEMORY.md explains the settings.
"""
