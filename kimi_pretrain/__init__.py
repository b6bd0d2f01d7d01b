"""Pre-training of multimodal mixture-of-experts models in the style of Kimi K2.5.

docs/ARCHITECTURE.md walks through the code in the order of a batch: `train` (the loop), `run` (the
parts of a run), `step` (one step in its numbered phases), `dep/` (the Decoupled Encoder Process),
`engine/` (the interface to Megatron-Core), `update` and `optim/` (MuonClip), `checkpoint/`.
"""

__version__ = "0.1.0"
