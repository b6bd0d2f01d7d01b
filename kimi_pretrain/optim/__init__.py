"""MuonClip: Muon for matrices, AdamW for other tensors, and QK-Clip, usable with any torch model.

Reading order: `newton_schulz` (orthogonalises one matrix), `batched` (many matrices at once),
`groups` (optimizer and matrices of each tensor), `muon` (the update as plain functions), `owners`
(assigns tensors to ranks), `replica_group` (the ranks that divide tensors), `muonclip` (the sharded
update), `reduce` (gradients to owners), `broadcast` (weights from owners), `qk_clip`. `config` and
`recipes` hold the settings, `schedule` computes the learning rate from them, and `step_stats`
measures a step. `optimizer.MuonClip` combines all of this in a `torch.optim.Optimizer`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kimi_pretrain.optim.optimizer import AttentionHeads, MuonClip, Split

__all__ = ["AttentionHeads", "MuonClip", "Split"]


def __getattr__(name: str) -> Any:
    """Import the public optimizer on first use; planning and configuration need no torch."""
    if name not in __all__:
        raise AttributeError(f"module 'kimi_pretrain.optim' has no attribute {name!r}")
    return getattr(import_module("kimi_pretrain.optim.optimizer"), name)
