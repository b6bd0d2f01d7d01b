"""Megatron-Core behind one door: the only room that imports it.

`host` lets it run without CUDA; `mesh` knows ranks and process groups; `model_builder` translates
our configuration and puts our layers into its spec (`packed_attention`, with what
`kimi_pretrain.attention` computes, `fused_attention`, `latent_attention`, `experts`, `gated_mlp`,
`language_model`); `param_names` maps its parameters to checkpoint names; `tp_full_params` joins the
slices of tensor-parallel ranks; `microbatch` makes its inputs; `gradient_buffers` and `backbone`
run its pipeline schedule, with the vision embeddings as leaves.

Importing this room prepares the process: the host backend has to be in place before Megatron-Core
is imported for the first time.
"""

from kimi_pretrain.engine import host

host.enable()
