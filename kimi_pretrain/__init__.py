"""Pre-training of multimodal mixture-of-experts models of the Kimi K2.5 kind.

docs/ARCHITECTURE.md leads through the code in the order of a batch: `train` (the loop), `run` (what
a run is made of), `step` (one step in its numbered phases), `dep/` (the Decoupled Encoder Process),
`engine/` (Megatron-Core behind one door), `update` and `optim/` (MuonClip), `checkpoint/`.
"""

__version__ = "0.1.0"
