"""Wraps Megatron-Core; the rest of the training code does not import it.

`host` lets it run without CUDA; `mesh` holds ranks and process groups; `model_builder` translates
our configuration and puts our layers into the layer spec (`packed_attention`, which calls
`kimi_pretrain.attention`, `fused_attention`, `latent_attention`, `experts`, `gated_mlp`,
`language_model`); `param_names` maps parameters to checkpoint names; `tp_full_params` joins the
slices of tensor-parallel ranks; `microbatch` builds the inputs; `gradient_buffers` and `backbone`
run the pipeline schedule, with the vision embeddings as leaves.

Importing this package prepares the process, because the host backend must be in place before the
first import of Megatron-Core.
"""

from kimi_pretrain.engine import host

host.enable()
