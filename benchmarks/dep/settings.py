"""What is compared: the same step with these settings of `dep`."""

from typing import Any

TEXT_ONLY, COLOCATED, DEP = "text only", "co-located", "DEP"
SETTINGS: dict[str, dict[str, Any]] = {
    TEXT_ONLY: {},  # every media token is replaced by a text token, and nothing is encoded
    COLOCATED: {"placement": "colocated"},
    "DEP, by owner": {"assign": "owner"},
    "DEP, by count": {"assign": "round_robin"},
    DEP: {},
}
ALONE = "encoder alone"  # not a step: one forward and backward over DEP's shares
BACKBONE = "4 backbone"

# For the steps whose memory is measured, see `memory`.
GIVING_BACK = {
    "MALLOC_MMAP_THRESHOLD_": "16384",
    "MALLOC_TRIM_THRESHOLD_": "16384",
    "MALLOC_ARENA_MAX": "1",
    "MKL_DISABLE_FAST_MM": "1",
}
