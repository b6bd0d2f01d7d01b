"""Policies for saved activations: keep, recompute, store in FP8, or offload to host memory.

`saved` holds the policy over saved tensors; `fp8_tiles` and `host_memory` implement two of its
options, and `pointwise` has functions that save only their inputs. All of it is plain torch: the
engine's modules receive a policy, and nothing here depends on them. docs/MEMORY.md explains the
settings.
"""
