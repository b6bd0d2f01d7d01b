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
    per_chunk: float = Field(default=0.0, ge=0)
    """For each chunk, whatever is in it. Who encodes what does not depend on it: it is for the
    seconds of whole steps (`plan --step`). [s; kimi_pretrain/tools/predict_step.py]"""


class PassCostConfig(Section):
    """Seconds of one microbatch's passes through parts of the language model on one rank.

    A microbatch of all tokens of its rows, with as many experts as a rank holds, everything kept on
    the device: `plan --step` adds what travels between ranks and what `train.recompute`,
    `train.fp8_storage` and `train.offload` cost. What `kimi-pretrain plan --calibrate` prints for
    the hardware it runs on.
    """

    embedding_forward: float = Field(ge=0)
    """The embedding of the tokens. [s; kimi_pretrain/dep/pass_costs.py]"""
    embedding_backward: float = Field(ge=0)
    """The embedding, back. [s; kimi_pretrain/dep/pass_costs.py]"""
    dense_forward: float = Field(ge=0)
    """A layer with a plain MLP. [s; kimi_pretrain/dep/pass_costs.py]"""
    dense_backward: float = Field(ge=0)
    """A layer with a plain MLP, back. [s; kimi_pretrain/dep/pass_costs.py]"""
    expert_forward: float = Field(ge=0)
    """A layer with experts. [s; kimi_pretrain/dep/pass_costs.py]"""
    expert_backward: float = Field(ge=0)
    """A layer with experts, back. [s; kimi_pretrain/dep/pass_costs.py]"""
    head_forward: float = Field(ge=0)
    """The last norm, the head and the loss. [s; kimi_pretrain/dep/pass_costs.py]"""
    head_backward: float = Field(ge=0)
    """The last norm, the head and the loss, back. [s; kimi_pretrain/dep/pass_costs.py]"""
    rows: int | None = Field(default=None, gt=0)
    """Rows of the microbatch that was measured: passes of another `train.rows_per_microbatch` take
    as long a row. null: as many as the run has. [rows; kimi_pretrain/dep/pass_costs.py]"""


class UpdateCostConfig(Section):
    """Seconds of the update of parts of the model, each done by one rank alone.

    Gradients are zeroed, their norm is taken and the optimizer steps. What `kimi-pretrain plan
    --calibrate` prints for the hardware it runs on.
    """

    vocabulary: float = Field(ge=0)
    """The embedding, or the head. [s; kimi_pretrain/dep/pass_costs.py]"""
    dense_layer: float = Field(ge=0)
    """A layer with a plain MLP. [s; kimi_pretrain/dep/pass_costs.py]"""
    expert_layer: float = Field(ge=0)
    """A layer with experts, without these. [s; kimi_pretrain/dep/pass_costs.py]"""
    expert: float = Field(ge=0)
    """One routed expert of a layer. [s; kimi_pretrain/dep/pass_costs.py]"""
    encoder: float = Field(ge=0)
    """The trained parts of the encoder. [s; kimi_pretrain/dep/pass_costs.py]"""


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
    pass_cost: PassCostConfig | None = None
    """The passes of the pipeline; null derives them from FLOPs and flops_per_second.
    [-; kimi_pretrain/dep/pass_costs.py]"""
    update_cost: UpdateCostConfig | None = None
    """The update, for `plan --step`; null leaves it out. [-; kimi_pretrain/dep/pass_costs.py]"""
    flops_per_second: float = Field(default=3.0e14, gt=0)
    """What a rank does in the encoder where `cost` is null, and in the passes of the pipeline where
    `pass_cost` is. [FLOP/s; kimi_pretrain/dep/cost.py]"""
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
