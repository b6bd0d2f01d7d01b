"""`dep` section of the configuration; docs/DEP.md explains the method."""

from typing import Literal

from pydantic import Field

from typed_config.section import Section


class CostConfig(Section):
    """Seconds of a training step's encoder work on one item: forward, recompute and backward.

    `kimi-pretrain plan --calibrate` prints these values for the hardware it runs on.
    """

    per_patch: float = Field(ge=0)
    """Seconds for each patch. [s; kimi_pretrain/dep/cost.py]"""
    per_patch_squared: float = Field(ge=0)
    """Seconds for each pair of patches of an item (attention). [s; kimi_pretrain/dep/cost.py]"""
    per_item: float = Field(ge=0)
    """Seconds for each item. [s; kimi_pretrain/dep/cost.py]"""
    per_chunk: float = Field(default=0.0, ge=0)
    """Seconds for each chunk, whatever its content. Only predictions of whole steps (`plan --step`)
    use it; the assignment of items does not. [s; kimi_pretrain/tools/predict_step.py]"""


class PassCostConfig(Section):
    """Seconds of one microbatch's passes through parts of the language model on one rank.

    They refer to a microbatch with all tokens of its rows, the experts of one rank, and all
    activations kept on the device. `plan --step` adds the communication between ranks and the costs
    of `train.recompute`, `train.fp8_storage` and `train.offload`. `kimi-pretrain plan --calibrate`
    prints these values for the hardware it runs on.
    """

    embedding_forward: float = Field(ge=0)
    """Embedding of the tokens, forward. [s; kimi_pretrain/dep/pass_costs.py]"""
    embedding_backward: float = Field(ge=0)
    """Embedding, backward. [s; kimi_pretrain/dep/pass_costs.py]"""
    dense_forward: float = Field(ge=0)
    """Layer with a dense MLP, forward. [s; kimi_pretrain/dep/pass_costs.py]"""
    dense_backward: float = Field(ge=0)
    """Layer with a dense MLP, backward. [s; kimi_pretrain/dep/pass_costs.py]"""
    expert_forward: float = Field(ge=0)
    """Layer with experts, forward. [s; kimi_pretrain/dep/pass_costs.py]"""
    expert_backward: float = Field(ge=0)
    """Layer with experts, backward. [s; kimi_pretrain/dep/pass_costs.py]"""
    head_forward: float = Field(ge=0)
    """Last norm, head and loss, forward. [s; kimi_pretrain/dep/pass_costs.py]"""
    head_backward: float = Field(ge=0)
    """Last norm, head and loss, backward. [s; kimi_pretrain/dep/pass_costs.py]"""
    rows: int | None = Field(default=None, gt=0)
    """Rows of the measured microbatch; for another `train.rows_per_microbatch`, passes scale with
    the rows. null: as many as the run has. [rows; kimi_pretrain/dep/pass_costs.py]"""


class UpdateCostConfig(Section):
    """Seconds to update parts of the model, each on a single rank.

    An update zeroes gradients, computes their norm and steps the optimizer. `kimi-pretrain plan
    --calibrate` prints these values for the hardware it runs on.
    """

    vocabulary: float = Field(ge=0)
    """Embedding or head. [s; kimi_pretrain/dep/pass_costs.py]"""
    dense_layer: float = Field(ge=0)
    """Layer with a dense MLP. [s; kimi_pretrain/dep/pass_costs.py]"""
    expert_layer: float = Field(ge=0)
    """Layer with experts, excluding the routed experts. [s; kimi_pretrain/dep/pass_costs.py]"""
    expert: float = Field(ge=0)
    """One routed expert of a layer. [s; kimi_pretrain/dep/pass_costs.py]"""
    encoder: float = Field(ge=0)
    """Trained parts of the encoder. [s; kimi_pretrain/dep/pass_costs.py]"""


class DepConfig(Section):
    """The Decoupled Encoder Process (K2.5 report, section 4.5.1)."""

    placement: Literal["decoupled", "colocated"] = "decoupled"
    """colocated is the baseline for measuring and verifying DEP: each first-stage rank encodes the
    media of its own microbatches, inside the graph. [-; kimi_pretrain/dep/planner.py]"""
    assign: Literal["balanced", "round_robin", "owner"] = "balanced"
    """Method for assigning items to ranks. [-; kimi_pretrain/dep/planner.py]"""
    scope: Literal["world", "replica"] | int = "world"
    """Group of ranks that shares the encoding: all ranks, each replica, or groups of this many
    replicas. [replicas; kimi_pretrain/parallel/ranks.py]"""
    ranks_per_node: int = Field(default=8, gt=0)
    """Ranks per node, for locality: among equally balanced plans, the vision planner takes the one
    with less traffic, and only ranks of one node share an item.
    [ranks; kimi_pretrain/parallel/ranks.py]"""
    max_patches_per_chunk: int = Field(default=65_536, gt=0)
    """Most patches in one forward pass of the encoder; the largest item must fit.
    [patches; kimi_pretrain/model.py]"""
    cost: CostConfig | None = None
    """Cost model of an item; null derives it from FLOPs and flops_per_second.
    [-; kimi_pretrain/dep/planner.py]"""
    pass_cost: PassCostConfig | None = None
    """Costs of the pipeline's passes; null derives them from FLOPs and flops_per_second.
    [-; kimi_pretrain/dep/pass_costs.py]"""
    update_cost: UpdateCostConfig | None = None
    """Costs of the update, for `plan --step`; null omits it. [-;
    kimi_pretrain/dep/pass_costs.py]"""
    flops_per_second: float = Field(default=3.0e14, gt=0)
    """Throughput of a rank, for the encoder if `cost` is null and for the pipeline's passes if
    `pass_cost` is null. [FLOP/s; kimi_pretrain/dep/cost.py]"""
    max_split: Literal[1, 2, 4, 8, 16] = 1
    """Largest number of ranks that may encode one large item together; divides model.vision.heads.
    [ranks; kimi_pretrain/dep/planner.py]"""
    split_efficiency: float = Field(default=0.85, gt=0, le=1)
    """Fraction of their speed that ranks keep when they share an item, for planning.
    [-; kimi_pretrain/dep/planner.py]"""
    keep_activations: Literal["none", "auto"] = "none"
    """auto keeps encoder activations as far as memory_limit_gib allows; none recomputes all.
    [-; kimi_pretrain/step.py]"""
    memory_limit_gib: float | None = Field(default=None, gt=0)
    """Limit for the encoder's activations and outputs on a rank; a plan that exceeds it is an
    error. null: no limit. [GiB; kimi_pretrain/dep/planner.py]"""
    exchange_dtype: Literal["model", "float32", "bfloat16"] = "model"
    """Precision of embeddings and their gradients in transit; model: train.dtype.
    [-; kimi_pretrain/model.py]"""
    exchange_budget_mib: int = Field(default=256, gt=0)
    """Most data that a rank sends or receives at a time. [MiB; kimi_pretrain/model.py]"""
    offload_outputs: bool = False
    """Offload embeddings to host memory until their microbatch. [-; kimi_pretrain/step.py]"""
    bubbles: Literal["none", "edges", "all"] = "none"
    """Times at which ranks encode. none: before and after the pipeline. edges: also while a stage
    waits for its first pass, and after its last pass. all: also between its passes, where it would
    wait. Without a pipeline every value means none. [-; kimi_pretrain/dep/bubble_planner.py]"""
    bubble_fill: float = Field(default=0.85, gt=0, le=1)
    """Fraction of each bubble to fill with work; the rest is a reserve for underestimated costs.
    [-; kimi_pretrain/dep/bubble_planner.py]"""
    bubble_ahead: int = Field(default=2, ge=0)
    """Number of microbatches ahead that a first stage starts to receive embeddings.
    [microbatches; kimi_pretrain/dep/bubble_step.py]"""
    check_recompute: bool = False
    """Compare hashes of recomputed outputs with the originals. [-; kimi_pretrain/model.py]"""
