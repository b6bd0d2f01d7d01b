"""Pre-training of multimodal mixture-of-experts models of the Kimi K2.5 kind.

Read in this order: `train` (builds everything, then the loop), `step` (one step in its numbered
phases), `dep/` (the Decoupled Encoder Process), `engine/` (Megatron-Core behind one door),
`optim/` (MuonClip). docs/ARCHITECTURE.md follows one batch through all of them.
"""

__version__ = "0.1.0"
