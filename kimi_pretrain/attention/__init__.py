"""Core attention over packed rows in pure torch: key spans, implementations and their choice.

`spans` gives the keys that each query of a rank sees. `blockwise` is the portable implementation,
block by block; `flex` is torch's FlexAttention on CUDA. `choice` selects one and refuses one that
cannot run. Both return the output and the largest logit of each query and head.
`kimi_pretrain.engine.packed_attention` puts them into Megatron-Core's layers.
"""
