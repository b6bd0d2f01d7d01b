"""The `dep` section; docs/DEP.md explains each key."""

from typing import Literal

from pydantic import Field

from typed_config.section import Section


class CostConfig(Section):
    """Seconds of a training step's encoder work on one item: forward, recompute and backward.

    What `kimi-pretrain plan --calibrate` prints for the hardware it runs on.
    """

    per_patch: float = Field(ge=0)
    """For each patch. [s; kimi_pretrain/dep/cost.py]"""
    per_patch_squared: float = Field(ge=0)
    """For each patch, times the patches of the item (attention). [s; kimi_pretrain/dep/cost.py]"""
    per_item: float = Field(ge=0)
    """For each item. [s; kimi_pretrain/dep/cost.py]"""


class DepConfig(Section):
    """The Decoupled Encoder Process (K2.5 report, section 4.5.1)."""

    placement: Literal["decoupled", "colocated"] = "decoupled"
    """colocated is the baseline that DEP is measured and verified against: each first-stage rank
    encodes the media of its own microbatches, inside the graph.
    [-; kimi_pretrain/dep/planner.py]"""
    assign: Literal["balanced", "round_robin", "owner"] = "balanced"
    """How items are assigned to ranks. [-; kimi_pretrain/dep/planner.py]"""
    scope: Literal["world", "replica"] | int = "world"
    """Who shares the load: all ranks, each replica's own, or so many replicas at a time.
    [replicas; kimi_pretrain/parallel/ranks.py]"""
    ranks_per_node: int = Field(default=8, gt=0)
    """Tells the plan which ranks are near each other: among equally good plans it takes the one
    that moves less, and only ranks of a node share an item.
    [ranks; kimi_pretrain/parallel/ranks.py]"""
    max_patches_per_chunk: int = Field(default=65_536, gt=0)
    """Most patches that are encoded at once; the largest item must fit.
    [patches; kimi_pretrain/model.py]"""
    cost: CostConfig | None = None
    """The cost model of an item; null derives it from FLOPs and flops_per_second.
    [-; kimi_pretrain/dep/planner.py]"""
    flops_per_second: float = Field(default=3.0e14, gt=0)
    """What a rank does in the encoder, where `cost` is null.
    [FLOP/s; kimi_pretrain/dep/cost.py]"""
    max_split: Literal[1, 2, 4, 8, 16] = 1
    """Most ranks that may encode one large item together; divides model.vision.heads.
    [ranks; kimi_pretrain/dep/planner.py]"""
    split_efficiency: float = Field(default=0.85, gt=0, le=1)
    """What ranks that share an item keep of their speed, for the plan.
    [-; kimi_pretrain/dep/planner.py]"""
    keep_activations: Literal["none", "auto"] = "none"
    """auto keeps activations of the encoder as far as memory_limit_gib allows; none recomputes all.
    [-; kimi_pretrain/step.py]"""
    memory_limit_gib: float | None = Field(default=None, gt=0)
    """Bounds the encoder's activations and outputs on a rank; a plan that goes over it is an error.
    null: no bound.
    [GiB; kimi_pretrain/dep/planner.py]"""
    exchange_dtype: Literal["model", "float32", "bfloat16"] = "model"
    """Precision in which embeddings and their gradients travel; model: train.dtype.
    [-; kimi_pretrain/model.py]"""
    exchange_budget_mib: int = Field(default=256, gt=0)
    """What a rank sends or receives at a time. [MiB; kimi_pretrain/model.py]"""
    offload_outputs: bool = False
    """Embeddings wait in the host's memory until their microbatch. [-; kimi_pretrain/step.py]"""
    bubbles: Literal["none", "edges", "all"] = "none"
    """When ranks encode. none: before and after the pipeline. edges: also while a stage waits for
    its first pass, and behind its last one. all: also between its passes, where it would wait.
    Without a pipeline all are none. [-; kimi_pretrain/dep/bubble_planner.py]"""
    bubble_fill: float = Field(default=0.85, gt=0, le=1)
    """How much of each bubble is filled with work: the rest is for costs that turn out higher.
    [-; kimi_pretrain/dep/bubble_planner.py]"""
    bubble_ahead: int = Field(default=2, ge=0)
    """How many microbatches ahead a first stage begins to receive embeddings.
    [microbatches; kimi_pretrain/dep/bubble_step.py]"""
    check_recompute: bool = False
    """Compare a hash of every recomputed output with the forward's. [-; kimi_pretrain/model.py]"""
