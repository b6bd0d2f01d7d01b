"""MuonClip: Muon for matrices, AdamW for the rest, QK-Clip; in training, or for any torch model.

Read in this order: `newton_schulz` (orthogonalise one matrix), `batched` (many at once), `groups`
(which optimizer trains a tensor, and as which matrices), `muon` (the update as plain functions),
`owners` (which rank updates which tensor), `replica_group` (those ranks), `muonclip` (the update
sharded over them), `reduce` (gradients to owners), `broadcast` (weights from owners), `qk_clip`.
`config` and `recipes` hold the numbers, `schedule` makes a learning rate of them, `step_stats`
measures a step. `optimizer.MuonClip` is all of it as a `torch.optim.Optimizer`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kimi_pretrain.optim.optimizer import AttentionHeads, MuonClip, Split

__all__ = ["AttentionHeads", "MuonClip", "Split"]


def __getattr__(name: str) -> Any:
    """Import the public optimizer on first use: planning and configuration need no torch."""
    if name not in __all__:
        raise AttributeError(f"module 'kimi_pretrain.optim' has no attribute {name!r}")
    return getattr(import_module("kimi_pretrain.optim.optimizer"), name)
