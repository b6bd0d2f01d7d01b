"""Core attention of packed rows, pure torch: which keys a query sees, and what computes it.

`spans` says what the rank's queries see; `blockwise` is the portable form, block by block; `flex`
is torch's FlexAttention on CUDA; `choice` picks one and refuses what cannot run. All give the
output and the largest logit of each query and head. `kimi_pretrain.engine.packed_attention` puts
them into Megatron-Core's layers.
"""
