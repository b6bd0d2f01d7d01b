"""Variants of the DEP benchmark: the same step with different settings of `dep`."""

from typing import Any

TEXT_ONLY, COLOCATED, DEP = "text only", "co-located", "DEP"
SETTINGS: dict[str, dict[str, Any]] = {
    TEXT_ONLY: {},  # text replaces every media token, and nothing is encoded
    COLOCATED: {"placement": "colocated"},
    "DEP, by owner": {"assign": "owner"},
    "DEP, by count": {"assign": "round_robin"},
    DEP: {},
}
ALONE = "encoder alone"  # not a step: one encoder forward and backward over DEP's assignment
BACKBONE = "4 backbone"

# Environment of the memory part, see `memory`.
GIVING_BACK = {
    "MALLOC_MMAP_THRESHOLD_": "16384",
    "MALLOC_TRIM_THRESHOLD_": "16384",
    "MALLOC_ARENA_MAX": "1",
    "MKL_DISABLE_FAST_MM": "1",
}

# Too small for meaningful figures; shows only that everything runs.
QUICK = (
    "model.vision.width=32", "model.vision.depth=1", "model.vision.mlp_width=64",
    "model.vision.out_width=64", "model.vision.heads=2", "model.language.num_layers=2",
    "model.language.hidden_size=64", "model.language.num_heads=2",
    "model.language.dense_ffn_size=64", "model.language.expert_ffn_size=32",
    "model.language.q_lora_rank=32", "model.language.kv_lora_rank=16",
    "model.language.qk_nope_dim=12", "model.language.qk_rope_dim=4", "model.language.v_dim=12",
    "data.rows_per_step=4", "data.pack_window=64", "data.vision_token_ratio=0.15",
    "data.limits={image: 256, frame: 64}",
)  # fmt: skip
