"""Sections of the configuration that belong to no single room; `kimi_pretrain.config` joins all."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from moonvit3d.config import MoonViTConfig


class Section(BaseModel):
    """A part of the configuration: frozen, and strict about its keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class YarnConfig(Section):
    """YaRN scaling of the rotary embedding (arXiv:2309.00071)."""

    factor: float
    original_max_position: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0


class LanguageConfig(Section):
    """The MLA + mixture-of-experts language model (Kimi K2 report, table 2; DeepSeek-V3 layout)."""

    num_layers: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    dense_ffn_size: int = Field(gt=0)
    expert_ffn_size: int = Field(gt=0)
    q_lora_rank: int | None
    kv_lora_rank: int = Field(gt=0)
    qk_nope_dim: int = Field(gt=0)
    qk_rope_dim: int = Field(gt=0)
    v_dim: int = Field(gt=0)
    num_experts: int = Field(gt=0)
    experts_per_token: int = Field(gt=0)
    num_shared_experts: int = Field(gt=0)
    num_dense_layers: int = Field(default=1, ge=0)
    routed_scaling_factor: float
    aux_loss_coeff: float = 1e-3
    expert_bias_update_rate: float = 1e-3
    vocab_size: int = Field(gt=0)
    rope_theta: float = 50_000.0
    yarn: YarnConfig | None = None
    norm_eps: float = 1e-5
    init_std: float = 0.02

    @model_validator(mode="after")
    def _check(self) -> "LanguageConfig":
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} is more than "
                f"num_experts={self.num_experts}"
            )
        if self.num_dense_layers > self.num_layers:
            raise ValueError(
                f"num_dense_layers={self.num_dense_layers} is more than "
                f"num_layers={self.num_layers}"
            )
        return self


class ModelConfig(Section):
    """The vision encoder (tower and projector) and the language model."""

    vision: MoonViTConfig
    language: LanguageConfig

    @model_validator(mode="after")
    def _check(self) -> "ModelConfig":
        if self.vision.out_width != self.language.hidden_size:
            raise ValueError(
                f"model.vision.out_width={self.vision.out_width} must equal "
                f"model.language.hidden_size={self.language.hidden_size}: "
                "the projector writes into the language model's embedding space"
            )
        return self


class LayoutConfig(Section):
    """How the processes are arranged: pp stages x dp replicas x cp x tp ranks of a row.

    `cp` ranks share the tokens of a row, `tp` ranks the heads and widths of a layer. Experts are
    spread over `ep` of the dp x cp x tp ranks of a stage.

    `stages` is Megatron-Core's layout string ("E" embedding, "t" a layer, "L" the loss, "|" between
    chunks, "(tt|)*3" repeats), needed where the layers do not divide evenly over pp x vpp chunks.
    """

    pp: int = Field(default=1, gt=0)
    vpp: int = Field(default=1, gt=0)
    dp: int = Field(default=1, gt=0)
    ep: int = Field(default=1, gt=0)
    cp: int = Field(default=1, gt=0)
    tp: int = Field(default=1, gt=0)
    stages: str | None = None

    def world_size(self) -> int:
        """Return the number of processes, one per GPU."""
        return self.pp * self.dp * self.cp * self.tp


class CostConfig(Section):
    """Seconds of a training step's encoder work on one item: forward, recompute and backward.

    What `kimi-pretrain plan --calibrate` prints for the hardware it runs on.
    """

    per_patch: float = Field(ge=0)
    per_patch_squared: float = Field(ge=0)
    per_item: float = Field(ge=0)


class DepConfig(Section):
    """The Decoupled Encoder Process (K2.5 report, section 4.5.1); docs/DEP.md explains each key.

    `placement: colocated` is the baseline that DEP is measured and verified against: each
    first-stage rank encodes the media of its own microbatches, inside the graph.

    `scope` is who shares the load: all ranks, each replica's own, or so many replicas at a time.
    `ranks_per_node` tells the plan which ranks are near each other: among equally good plans it
    takes the one that moves less, and only ranks of a node share an item.
    `max_split` is the most ranks that may encode one large item together. `memory_limit_gib` bounds
    the encoder's activations and outputs on a rank; a plan that goes over it is an error.
    """

    placement: Literal["decoupled", "colocated"] = "decoupled"
    assign: Literal["balanced", "round_robin", "owner"] = "balanced"
    scope: Literal["world", "replica"] | int = "world"
    ranks_per_node: int = Field(default=8, gt=0)
    max_patches_per_chunk: int = Field(default=65_536, gt=0)
    cost: CostConfig | None = None
    flops_per_second: float = Field(default=3.0e14, gt=0)
    max_split: Literal[1, 2, 4, 8, 16] = 1
    split_efficiency: float = Field(default=0.85, gt=0, le=1)
    keep_activations: Literal["none", "auto"] = "none"
    memory_limit_gib: float | None = Field(default=None, gt=0)
    exchange_dtype: Literal["model", "float32", "bfloat16"] = "model"
    exchange_budget_mib: int = Field(default=256, gt=0)
    offload_outputs: bool = False
    check_recompute: bool = False


class CheckpointConfig(Section):
    """What is saved, when and where; docs/RELIABILITY.md explains each key.

    `every: null` saves nothing on its own; otherwise the last step is saved too. `place` is a
    folder that all ranks see or an s3:// URI; null is `checkpoints` in the run folder. Of complete
    checkpoints the newest `keep_last` stay, and those whose step `keep_every` divides; null keeps
    all. A save that fails is told and tried again when the next is due; after `failures` in a row
    the run stops. A rank's tensors are cut into files of about `file_mib`.
    """

    every: int | None = Field(default=None, gt=0)
    place: str | None = None
    asynchronous: bool = True
    keep_last: int | None = Field(default=None, gt=0)
    keep_every: int | None = Field(default=None, gt=0)
    failures: int = Field(default=3, gt=0)
    file_mib: int = Field(default=4096, gt=0)


class ResumeConfig(Section):
    """How a run goes on. `fallback` allows an older checkpoint where the newest is damaged."""

    fallback: bool = False


class GuardConfig(Section):
    """What happens to steps that would harm the model.

    A step with a loss or gradient that is not finite is skipped (no update), or the run stops. A
    spike is a loss above `spike_ratio` times the median of the last `spike_window` losses; null
    looks for none. `record` updates all the same. The samples of every such step are written down.
    After `skips_in_row` skipped steps in a row the run stops. Every `replicas_every` steps ranks
    compare their copies of some tensors, in turn; null: at the start alone.
    """

    nonfinite: Literal["skip", "stop"] = "skip"
    spike: Literal["record", "skip", "stop"] = "record"
    spike_ratio: float | None = Field(default=None, gt=1)
    spike_window: int = Field(default=64, gt=0)
    skips_in_row: int = Field(default=10, gt=0)
    replicas_every: int | None = Field(default=1, gt=0)


class TrainConfig(Section):
    """The loop: length, precision, what is measured.

    `rows_per_microbatch` is not only a matter of speed: the routers' balance loss is taken over
    each microbatch, all its rows together. Where output goes into a file or a pipe, every
    `print_every`-th step is told in a line. `pictures` draws the run once it is finished, as
    `kimi-pretrain plot` does. `trace_step` and `efficiency_pairs` measure and change
    nothing. `attention: transformer_engine` takes that library's fused kernels for the language
    model. A collective or a read that takes longer than `timeout_seconds` ends the run.
    `vision_weights` is a safetensors checkpoint (a file, or a folder that every node sees) that the
    encoder starts from, in any layout that `moonvit3d.weights` knows: Kimi K2.5's own, or SigLIP's.
    `start_from` is where all weights start from: a checkpoint, a run's folder (its latest one) or a
    Hugging Face folder of K2, Moonlight or K2.5, with a fresh optimizer, schedule and data;
    docs/WEIGHTS.md. Where both are given, the encoder is that of `vision_weights`.
    """

    steps: int = Field(gt=0)
    rows_per_microbatch: int = Field(default=1, gt=0)
    seed: int = 0
    vision_weights: str | None = None
    start_from: str | None = None
    dtype: Literal["float32", "bfloat16", "float64"] = "bfloat16"
    attention: Literal["portable", "transformer_engine"] = "portable"
    print_every: int = Field(default=10, gt=0)
    pictures: bool = True
    trace_step: int | None = Field(default=None, gt=0)
    efficiency_pairs: int = Field(default=0, ge=0)
    timeout_seconds: float = Field(default=600.0, gt=0)
    threads: int | None = Field(default=None, gt=0)
    peak_tflops: float | None = Field(default=None, gt=0)
    frozen: list[Literal["vision_tower", "projector", "language_model"]] = Field(
        default_factory=list
    )
