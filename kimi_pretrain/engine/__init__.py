"""The only room that imports Megatron-Core.

`host` lets it run without CUDA, `mesh` knows every rank fact, `attention`, `latent_attention` and
`experts` are our layers in its spec, `names` ties its parameters to the checkpoint's names, `whole`
puts together what tensor-parallel ranks hold in slices, `backbone` runs its pipeline schedule with
the vision embeddings as leaves.

Importing this room prepares the process: the host backend has to be in place before Megatron-Core
is imported for the first time.
"""

from kimi_pretrain.engine import host

host.enable()
