"""Configuration of a run: typed, strict, with defaults < YAML file < `key=value` overrides.

Each section is defined next to the code that reads it (`parallel.layout`, `weights.model_config`,
`dep.config`, `optim.config`, `checkpoint.config`, `reliability.config`, `data_pipeline.config`,
`moonvit3d.config`). This module joins them and adds `train`, whose reader starts Megatron-Core. It
also checks settings that depend on several sections. An unknown key raises an error that names its
path and the nearest existing key. `describe()` prints the derived sizes of a step.
"""

import difflib
import reprlib
import types
import typing
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from data_pipeline.config import DataConfig
from data_pipeline.store.addresses import split_place
from kimi_pretrain.checkpoint.config import CheckpointConfig, ResumeConfig
from kimi_pretrain.dep.config import DepConfig
from kimi_pretrain.optim.config import OptimConfig
from kimi_pretrain.optim.schedule import describe_schedule, stretches
from kimi_pretrain.parallel.layout import LayoutConfig, check_stages, chunks_of
from kimi_pretrain.reliability.config import GuardConfig
from kimi_pretrain.siglip.config import SiglipConfig
from kimi_pretrain.weights.model_config import LanguageConfig, ModelConfig
from typed_config import yaml_text
from typed_config.section import Section, problems

# Shortens values in messages: YAML's aliases let a few lines stand for a billion entries.
_SHORT = reprlib.Repr()
_SHORT.maxstring, _SHORT.maxother, _SHORT.maxlevel = 200, 200, 2


class ConfigError(ValueError):
    """A configuration that cannot run; the message names the key, its value and what is allowed."""


AnySection = typing.TypeVar("AnySection", bound=Section)

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float64": 8}
"""Bytes per number, by `train.dtype`."""

MIB, GIB = 1 << 20, 1 << 30
"""Bytes per MiB and GiB, the units of keys and messages."""


class TrainConfig(Section):
    """Training loop: length, precision and measurements."""

    steps: int = Field(gt=0)
    """Length of the run. [optimizer steps; kimi_pretrain/train.py]"""
    rows_per_microbatch: int = Field(default=1, gt=0)
    """Rows of one microbatch. This setting changes more than the speed: the routers compute their
    balance loss per microbatch, over all its rows.
    [rows; kimi_pretrain/step.py]"""
    seed: int = 0
    """Seed of the weights and of the randomness in each step. [-; kimi_pretrain/model.py]"""
    vision_weights: str | None = None
    """Initial weights of the encoder: a safetensors file or a Hugging Face folder in any layout
    that `moonvit3d.weights` supports (Kimi K2.5, SigLIP), a checkpoint, or a run's folder (its
    latest checkpoint); docs/STAGES.md. [-; kimi_pretrain/weights/vision_weights.py]"""
    vision_part: Literal["tower", "projector", "both"] | None = None
    """Part of vision_weights to load. Load only the tower if the language model has another width.
    null: both; for SigLIP, which has no projector, the tower.
    [-; kimi_pretrain/weights/vision_weights.py]"""
    start_from: str | None = None
    """Initial weights of the whole model: a checkpoint, a run's folder (its latest checkpoint) or a
    Hugging Face folder of K2, Moonlight or K2.5. Optimizer, schedule and data start fresh by
    default; docs/WEIGHTS.md. Weights from vision_weights take precedence.
    [-; kimi_pretrain/weights/initial_weights.py]"""
    start_optimizer: Literal["fresh", "keep"] = "fresh"
    """keep: continue with the optimizer state, step count and schedule position of start_from
    (train.steps then counts the steps of both stages), and with its data position if the data are
    the same; docs/STAGES.md. [-; kimi_pretrain/weights/kept_optimizer.py]"""
    dtype: Literal["float32", "bfloat16", "float64"] = "bfloat16"
    """Precision of weights and activations. [-; kimi_pretrain/engine/model_builder.py]"""
    attention: Literal["auto", "portable", "flex", "transformer_engine"] = "auto"
    """Kernels for the language model's attention: plain torch block by block (portable), torch's
    FlexAttention on CUDA (flex), or Transformer Engine. None of them materializes the matrix of
    logits. auto: flex on a GPU in bfloat16, portable elsewhere.
    [-; kimi_pretrain/attention/choice.py]"""
    recompute: list[Literal["norms", "swiglu", "mla_up"]] = Field(default_factory=list)
    """Activations to recompute in the backward pass: outputs of norms, of SwiGLU, and query, key
    and value of MLA. Losses and gradients stay bit-identical; docs/MEMORY.md. [-;
    kimi_pretrain/memory/saved.py]"""
    fp8_storage: bool = False
    """Save the inputs of the experts' up projections and of SwiGLU in FP8 (E4M3, tiles of 1x128,
    fp32 scales) for the backward pass. Gradients of these layers differ by 3-4%; docs/MEMORY.md.
    [-; kimi_pretrain/engine/backbone.py]"""
    offload: bool = False
    """Offload saved tensors to host memory until the backward pass, layer by layer. Results stay
    bit-identical; docs/MEMORY.md. [-; kimi_pretrain/memory/host_memory.py]"""
    offload_min_mib: float = Field(default=1.0, ge=0)
    """Smaller tensors stay on the device. [MiB; kimi_pretrain/engine/backbone.py]"""
    validate_every: int | None = Field(default=None, gt=0)
    """Steps between validations, which measure the loss on the sources of `data.heldout`. The run
    also validates before its first and after its last step. Training results do not change. null:
    no validation. [steps; kimi_pretrain/train.py]"""
    print_every: int = Field(default=10, gt=0)
    """Steps between progress lines if the output goes to a file or a pipe.
    [steps; kimi_pretrain/telemetry/recorder.py]"""
    pictures: bool = True
    """Plot the finished run, as `kimi-pretrain plot` does. [-; launch/local/start.py]"""
    keep_diff: bool = True
    """Store the difference between the code and its commit in diff.patch of the run folder: at most
    1 MiB, with likely secrets masked. false: store only its size and SHA-256.
    [-; kimi_pretrain/telemetry/diff_secrets.py]"""
    trace_step: int | None = Field(default=None, gt=0)
    """Step to profile; results do not change. null: no profile.
    [step; kimi_pretrain/telemetry/recorder.py]"""
    efficiency_pairs: int = Field(default=0, ge=0)
    """Pairs of steps, one with and one without media, to time after the last step; results do not
    change. [pairs; kimi_pretrain/train.py]"""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Time limit of a collective or a read. The run ends if one takes longer.
    [s; kimi_pretrain/train.py]"""
    threads: int | None = Field(default=None, gt=0)
    """CPU threads per process for torch; null: torch's default.
    [threads; kimi_pretrain/train.py]"""
    peak_tflops: float | None = Field(default=None, gt=0)
    """Peak throughput that MFU divides by; null: the data-sheet value of a known GPU.
    [TFLOP/s per GPU; kimi_pretrain/telemetry/mfu.py]"""
    memory_limit_gib: float | None = Field(default=None, gt=0)
    """Memory limit per rank. A run is refused before it starts if its memory plan (`kimi-pretrain
    plan --memory`) exceeds the limit on any rank; leave a few GiB for CUDA and NCCL. null: none.
    [GiB; kimi_pretrain/memory/plan.py]"""
    frozen: list[Literal["vision_tower", "projector", "language_model"]] = Field(
        default_factory=list
    )
    """Parts that are not trained. A resume needs the same list. [-; kimi_pretrain/model.py]"""
    siglip: SiglipConfig | None = None
    """Kimi-VL's objective for the encoder: SigLIP's loss over all pairs of an image and a caption,
    added to the caption loss; docs/STAGES.md. null: only the caption loss.
    [-; kimi_pretrain/siglip/step.py]"""
    stage: str | None = Field(default=None, min_length=1)
    """Name of this training stage, stored in its checkpoints. A resume needs the same name.
    [-; kimi_pretrain/checkpoint/manifest.py]"""


class Config(Section):
    """All settings of a run; the resolved configuration is written into the run folder."""

    model: ModelConfig
    """Sizes of the encoder and of the language model. [-; kimi_pretrain/model.py]"""
    layout: LayoutConfig
    """Arrangement of the processes. [-; kimi_pretrain/engine/mesh.py]"""
    data: DataConfig
    """Sources, weights, rows and reading. [-; data_pipeline/loader.py]"""
    optim: OptimConfig
    """Optimizer and learning rate. [-; kimi_pretrain/update.py]"""
    dep: DepConfig = DepConfig()
    """The Decoupled Encoder Process. [-; kimi_pretrain/dep/planner.py]"""
    train: TrainConfig
    """Training loop. [-; kimi_pretrain/train.py]"""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving of checkpoints. [-; kimi_pretrain/checkpoint/scheduler.py]"""
    resume: ResumeConfig = ResumeConfig()
    """Resuming a run. [-; kimi_pretrain/checkpoint/find.py]"""
    guard: GuardConfig = GuardConfig()
    """Guard against harmful steps. [-; kimi_pretrain/reliability/anomaly_guard.py]"""

    def tokens_per_step(self) -> int:
        """Return the tokens of a global batch, including the padding of its rows."""
        return self.data.rows_per_step * self.data.seq_len

    def num_microbatches(self) -> int:
        """Return the microbatches that one replica runs in a step."""
        return self.data.rows_per_step // (self.layout.dp * self.train.rows_per_microbatch)

    def chunks(self) -> list[tuple[range, bool]]:
        """Return the layers of each virtual stage and whether it has the loss (`chunks_of`)."""
        return chunks_of(self.layout, self.model.language.num_layers)

    def in_bubbles(self) -> bool:
        """Return whether vision work runs inside pipeline bubbles; without a pipeline it cannot."""
        return self.dep.bubbles != "none" and self.layout.pp > 1

    def row_group(self) -> int:
        """Return the granularity of `data.rows_per_step` that the layout allows, in rows."""
        layout = self.layout
        groups = layout.pp if layout.vpp > 1 else 1  # interleaved 1F1B runs microbatches in groups
        return layout.dp * self.train.rows_per_microbatch * groups

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_layout(self)
        check_dep(self)
        check_attention(self)
        check_context(self)
        check_memory(self)
        check_deepspeed(self)
        check_siglip(self)
        if self.train.validate_every is not None and not self.data.heldout:
            raise ValueError(
                f"train.validate_every={self.train.validate_every} with no source in data.heldout: "
                "name those whose loss is wanted, as data.heldout={name: 1}"
            )
        if self.checkpoint.place is not None:
            split_place("checkpoint.place", self.checkpoint.place)
        stretches(self.optim, self.tokens_per_step())  # refuses segments that overlap
        return self


def check_layout(config: Config) -> None:
    """Refuse layouts that cannot run or that Megatron-Core would run with silent errors.

    Raises:
        ValueError: names the numbers that do not divide.
    """
    layout, language = config.layout, config.model.language
    rows, per_microbatch = config.data.rows_per_step, config.train.rows_per_microbatch
    chunks = layout.pp * layout.vpp
    sharing = layout.dp * layout.cp * layout.tp
    if sharing % layout.ep:
        raise ValueError(
            f"layout.ep={layout.ep} does not divide layout.dp={layout.dp} x layout.cp={layout.cp} "
            f"x layout.tp={layout.tp} = {sharing}: experts are spread over the ranks of a stage"
        )
    _check_widths(layout.tp, language)
    tokens = per_microbatch * config.data.seq_len
    if (layout.cp > 1 and tokens % (2 * layout.cp)) or tokens % (layout.cp * layout.tp):
        raise ValueError(
            f"a microbatch of {tokens} tokens (train.rows_per_microbatch={per_microbatch} x "
            f"data.seq_len={config.data.seq_len}) does not divide over layout.cp={layout.cp} ranks "
            f"with two equal chunks each, and these over layout.tp={layout.tp}"
        )
    if language.num_experts % layout.ep:
        raise ValueError(
            f"layout.ep={layout.ep} does not divide "
            f"model.language.num_experts={language.num_experts}"
        )
    if rows % (layout.dp * per_microbatch):
        raise ValueError(
            f"data.rows_per_step={rows} is not a multiple of layout.dp={layout.dp} x "
            f"train.rows_per_microbatch={per_microbatch} = {layout.dp * per_microbatch}"
        )
    if layout.vpp > 1 and layout.pp == 1:
        raise ValueError(f"layout.vpp={layout.vpp} needs layout.pp > 1: nothing to interleave")
    if layout.vpp > 1 and config.num_microbatches() % layout.pp:
        raise ValueError(
            f"{config.num_microbatches()} microbatches per replica (data.rows_per_step={rows} / "
            f"layout.dp={layout.dp} / train.rows_per_microbatch={per_microbatch}) is not a "
            f"multiple of layout.pp={layout.pp}: interleaved 1F1B runs them in groups of pp"
        )
    _check_overlap(config)
    if layout.stages is not None:
        check_stages(layout.stages, chunks, language.num_layers)
    elif language.num_layers % chunks:
        raise ValueError(
            f"model.language.num_layers={language.num_layers} does not divide over layout.pp="
            f"{layout.pp} x layout.vpp={layout.vpp} = {chunks} chunks; "
            'give layout.stages: for 5 layers over 2 chunks, for example, "Ettt|ttL"'
        )


def _check_overlap(config: Config) -> None:
    layout, language = config.layout, config.model.language
    if not layout.overlap_experts:
        return
    if layout.ep == 1:
        raise ValueError(
            "layout.overlap_experts=true with layout.ep=1: tokens are sent nowhere, there is "
            "nothing to overlap; set it to false"
        )
    if layout.pp > 1 and layout.vpp == 1:
        raise ValueError(
            f"layout.overlap_experts=true with layout.pp={layout.pp}, layout.vpp=1: Megatron-Core "
            "pairs microbatches in the interleaved schedule alone; set layout.vpp to 2 or more"
        )
    if language.num_dense_layers == language.num_layers:
        raise ValueError(
            f"layout.overlap_experts=true with model.language.num_dense_layers="
            f"{language.num_dense_layers} of {language.num_layers} layers: the model has no experts"
        )


def replicas_per_scope(config: Config) -> int:
    """Return the number of replicas that share the encoding of their media (`dep.scope`)."""
    scope = config.dep.scope
    if scope == "world":
        return config.layout.dp
    return 1 if scope == "replica" else int(scope)


def check_dep(config: Config) -> None:
    """Refuse encoder settings that contradict each other.

    Raises:
        ValueError: names the keys and their values.
    """
    dep, layout, train = config.dep, config.layout, config.train
    shared = replicas_per_scope(config)
    if shared < 1 or layout.dp % shared:
        raise ValueError(
            f"dep.scope={dep.scope}: layout.dp={layout.dp} replicas do not divide into groups of it"
        )
    heads = config.model.vision.heads
    if heads % dep.max_split:
        raise ValueError(
            f"dep.max_split={dep.max_split} does not divide model.vision.heads={heads}: the ranks "
            "that share an item divide its attention heads"
        )
    if dep.keep_activations == "auto" and dep.memory_limit_gib is None:
        raise ValueError(
            "dep.keep_activations=auto needs dep.memory_limit_gib: how much may be kept"
        )
    if dep.placement == "colocated" and layout.cp * layout.tp > 1:
        raise ValueError(
            f"dep.placement=colocated with layout.cp={layout.cp}, layout.tp={layout.tp}: the "
            "baseline encodes a microbatch on the one first-stage rank that holds it"
        )
    _check_bubbles(config)
    _check_start(train)
    if len(set(train.frozen)) == 3:
        raise ValueError(f"train.frozen={train.frozen}: nothing is left to train")


def _check_bubbles(config: Config) -> None:
    """Refuse settings that conflict with vision work inside pipeline bubbles."""
    dep = config.dep
    if dep.bubbles == "none":
        return
    asked = f"dep.bubbles={dep.bubbles}"
    if dep.placement == "colocated":
        raise ValueError(
            f"{asked} with dep.placement=colocated: the baseline encodes inside the graph of each "
            "microbatch; set one of them back"
        )
    if dep.assign != "balanced":
        raise ValueError(
            f"{asked} with dep.assign={dep.assign}: bubbles have a plan of their own of who "
            "encodes what; set dep.assign=balanced, or dep.bubbles=none to compare"
        )
    if config.layout.overlap_experts:
        raise ValueError(
            f"{asked} with layout.overlap_experts=true: Megatron-Core's combined schedule runs a "
            "forward and a backward pass as one, and vision work in it is not proven; set "
            "dep.bubbles=none or layout.overlap_experts=false"
        )
    if dep.offload_outputs:
        raise ValueError(
            f"{asked} with dep.offload_outputs=true: embeddings arrive dep.bubble_ahead="
            f"{dep.bubble_ahead} microbatches before they are needed; set it to false"
        )
    if config.train.siglip is not None:
        raise ValueError(f"{asked} with train.siglip: pairs are encoded together; set none")


def _check_start(train: TrainConfig) -> None:
    """Refuse settings of the initial weights that need, or conflict with, other settings."""
    if train.vision_part is not None and train.vision_weights is None:
        raise ValueError(
            f"train.vision_part={train.vision_part} without train.vision_weights: a part of what?"
        )
    if train.start_optimizer == "keep" and (train.start_from is None or train.vision_weights):
        raise ValueError(
            f"train.start_optimizer=keep with train.start_from={train.start_from}, "
            f"train.vision_weights={train.vision_weights}: what is kept is the optimizer's state "
            "of the weights in train.start_from, and of no others"
        )


def check_attention(config: Config) -> None:
    """Refuse settings that the selected attention kernels do not support.

    Raises:
        ValueError: names the keys and their values.
    """
    train, layout = config.train, config.layout
    instead = "set train.attention=portable"
    if train.attention == "flex" and train.dtype == "float64":
        raise ValueError(
            "train.attention=flex with train.dtype=float64: its kernels compute in bfloat16 and "
            f"float32; {instead}"
        )
    if train.attention != "transformer_engine":
        return
    if train.dtype != "bfloat16":
        raise ValueError(
            f"train.attention={train.attention} with train.dtype={train.dtype}: its kernels give "
            f"largest logits in bfloat16 alone; {instead}"
        )
    if layout.cp > 1:
        raise ValueError(
            f"train.attention={train.attention} with layout.cp={layout.cp}: it would cut each "
            f"document over the ranks, here the row is cut; {instead}"
        )


def check_context(config: Config) -> None:
    """Refuse rows longer than the range of positions that the rotary angles are scaled for.

    Raises:
        ValueError: names the keys and their values.
    """
    yarn, seq_len = config.model.language.yarn, config.data.seq_len
    if yarn is None or yarn.factor * yarn.original_max_position >= seq_len:
        return
    scaled = int(yarn.factor * yarn.original_max_position)
    raise ValueError(
        f"data.seq_len={seq_len} is more than the {scaled} positions of model.language.yarn "
        f"(factor={yarn.factor:g} x original_max_position={yarn.original_max_position}): expected "
        f"a factor of at least {seq_len / yarn.original_max_position:g}, or shorter rows"
    )


def check_memory(config: Config) -> None:
    """Refuse contradictory settings for saved tensors.

    Raises:
        ValueError: names the keys and their values.
    """
    train = config.train
    if len(set(train.recompute)) < len(train.recompute):
        raise ValueError(f"train.recompute={train.recompute}: expected each kind once")
    if train.fp8_storage and train.dtype == "float64":
        raise ValueError(
            "train.fp8_storage=true with train.dtype=float64: float64 is for exact comparisons, "
            "FP8 keeps two digits; set train.fp8_storage=false"
        )


def check_deepspeed(config: Config) -> None:
    """Refuse settings that the DeepSpeed ZeRO optimizer does not support.

    Raises:
        ValueError: names the keys and their values.
    """
    optim, train = config.optim, config.train
    if optim.deepspeed is None:
        return
    asked = f"optim.deepspeed={optim.deepspeed}"
    if optim.matrices != "adamw":
        raise ValueError(
            f"{asked} with optim.matrices={optim.matrices}: ZeRO lays all tensors end to end and "
            "gives each rank a flat shard, which cuts matrices anywhere, and Newton-Schulz needs "
            "them whole; set optim.matrices=adamw, or leave optim.deepspeed null"
        )
    if "language_model" not in train.frozen:
        raise ValueError(
            f"{asked} with train.frozen={train.frozen}: it trains the encoder, which every rank "
            "holds; experts and stages are not the same on all ranks; add language_model"
        )
    layout = config.layout
    parts = {name: getattr(layout, name) for name in ("pp", "ep", "cp", "tp")}
    if other := [f"layout.{name}={size}" for name, size in parts.items() if size > 1]:
        raise ValueError(
            f"{asked} with {', '.join(other)}: it is the data-parallel way, and no other was "
            "compared with our own; set these to 1, or leave optim.deepspeed null"
        )
    if train.dtype == "float64":
        raise ValueError(f"{asked} with train.dtype=float64: ZeRO's shards are float32")
    if not optim.shard_state:
        raise ValueError(f"{asked} with optim.shard_state=false: ZeRO shards it; leave it true")


def check_siglip(config: Config) -> None:
    """Refuse settings that SigLIP's objective does not support.

    Raises:
        ValueError: names the keys and their values.
    """
    train, dep, layout, width = config.train, config.dep, config.layout, config.model.vision.width
    if train.siglip is None:
        return
    asked = "train.siglip"
    if "language_model" not in train.frozen or "vision_tower" in train.frozen:
        raise ValueError(
            f"{asked} with train.frozen={train.frozen}: it trains the vision tower in front of a "
            "frozen language model; add language_model, and leave vision_tower out"
        )
    if dep.placement == "colocated":
        raise ValueError(f"{asked} with dep.placement=colocated: the decoupled encoder has it")
    if dep.max_split > 1:
        raise ValueError(
            f"{asked} with dep.max_split={dep.max_split}: the rank that pools an item has to have "
            "all of its patches; set dep.max_split=1"
        )
    if layout.cp * layout.tp > 1:
        raise ValueError(
            f"{asked} with layout.cp={layout.cp}, layout.tp={layout.tp}: captions are read from "
            "whole rows; set both to 1"
        )
    if train.start_optimizer == "keep":
        raise ValueError(f"{asked} with train.start_optimizer=keep: a resume keeps it; set fresh")
    if width % train.siglip.heads:
        raise ValueError(
            f"train.siglip.heads={train.siglip.heads} do not divide model.vision.width={width}, "
            "which is the width of the text tower, too"
        )


def _check_widths(tp: int, language: LanguageConfig) -> None:
    shared = language.num_shared_experts * language.expert_ffn_size
    widths = {
        "num_heads": language.num_heads,
        "vocab_size": language.vocab_size,
        "dense_ffn_size": language.dense_ffn_size,
        "num_shared_experts x expert_ffn_size": shared,
    }
    for name, width in widths.items():
        if width % tp:
            raise ValueError(f"model.language.{name}={width} is not a multiple of layout.tp={tp}")


def load_config(path: str | Path, overrides: typing.Sequence[str] = ()) -> Config:
    """Read a YAML file or a shipped preset, apply the overrides and validate the result.

    Args:
        path: a file, or a preset's name such as `tiny_cpu` or `configs/tiny_cpu.yaml`.
        overrides: `section.key=value`, the value in the YAML of `typed_config.yaml_text`.

    Raises:
        ConfigError: one message that names every key that is wrong.
    """
    file = find_config(path)
    values = read_yaml(file)
    for override in overrides:
        _apply_override(values, override)
    return parse_config(values, where=str(file))


def read_yaml(file: Path, such_as: str = "model") -> dict[str, Any]:
    """Return the mapping in a YAML file; a repeated key is an error.

    Args:
        such_as: an expected key, for the message.

    Raises:
        ConfigError: the file is not YAML or holds no mapping.
    """
    found = _parse_yaml(_text(file), str(file))
    if not isinstance(found, dict):
        raise ConfigError(
            f"{file}: expected sections such as `{such_as}:`, found {_SHORT.repr(found)}"
        )
    return typing.cast(dict[str, Any], found)


def parse_config(values: dict[str, Any], where: str = "config") -> Config:
    """Check nested plain values and return the typed configuration; see `load_config`."""
    return parse_section(Config, values, where)


def parse_section(kind: type[AnySection], values: dict[str, Any], where: str) -> AnySection:
    """Check nested plain values and return the typed section.

    Raises:
        ConfigError: one message that names every key that is wrong.
    """
    if unknown := list(_unknown_keys(kind, values, "")):
        raise ConfigError(f"{where}: " + "; ".join(unknown))
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{where}: " + "; ".join(problems(error, _SHORT.repr))) from None


def find_config(path: str | Path, kind: str = "configs") -> Path:
    """Return the file for a path or a preset's name, in a checkout or in an installed package.

    Args:
        kind: folder of presets: "configs", or its subfolder "stages" (chains of stages).
    """
    given = Path(path)
    if given.is_file():
        return given
    packaged = Path(str(resources.files("kimi_pretrain"))) / "configs"
    checkout = packaged.parent.parent / "configs"
    presets = packaged if packaged.is_dir() else checkout
    presets = presets if kind == "configs" else presets / kind
    preset = presets / f"{given.stem}.yaml"
    if preset.is_file() and (given.parent.name in ("", kind)):
        return preset
    names = sorted(file.stem for file in presets.glob("*.yaml"))
    raise ConfigError(f"no configuration file {given}; shipped presets are {', '.join(names)}")


def dump_config(config: Config) -> str:
    """Return the resolved configuration as YAML that `load_config` reads back."""
    return yaml_text.dump(config.model_dump(mode="json"))


def describe(config: Config) -> str:
    """Return the sizes of a step in a few lines, printed before a run starts."""
    data, layout, train = config.data, config.layout, config.train
    tokens = config.tokens_per_step()
    return (
        f"{layout.world_size()} processes = {layout.pp} stages (x{layout.vpp} virtual) x "
        f"{layout.dp} replicas x {layout.cp * layout.tp} ranks of a row ({layout.cp} context- x "
        f"{layout.tp} tensor-parallel), experts over {layout.ep}\n"
        f"{data.rows_per_step} rows x {data.seq_len} tokens = {tokens:,} tokens a step = "
        f"{layout.dp} replicas x {config.num_microbatches()} microbatches x "
        f"{train.rows_per_microbatch} rows\n"
        f"{train.steps} steps = {tokens * train.steps:,} tokens\n"
        f"{describe_schedule(config.optim, tokens)}"
    )


def _text(file: Path) -> str:
    data = file.read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file}: not YAML: byte {error.start} is {data[error.start]:#04x}, which is no UTF-8; "
            "expected a text with sections such as `model:`"
        ) from None


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml_text.parse(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r}: expected section.key=value")
    *sections, last = key.split(".")
    for section in sections:
        inner: Any = values.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override {override!r}: {section} is a value, not a section")
        values = typing.cast(dict[str, Any], inner)
    values[last] = _parse_yaml(text, f"override {override!r}")


def _unknown_keys(section: Any, values: Any, where: str) -> typing.Iterator[str]:
    if typing.get_origin(section) in (typing.Union, types.UnionType):
        # Select the member of the union that matches the form of the written value.
        written = (s for s in typing.get_args(section) if typing.get_origin(s) is type(values))
        section = next(written, section)
    if typing.get_origin(section) in (dict, list):
        # A dict of sections under user-defined names, or a list of sections.
        *_, inner = typing.get_args(section)
        entries: typing.Iterable[Any] = ()
        if isinstance(values, dict):
            entries = typing.cast(dict[str, Any], values).items()
        elif isinstance(values, list):
            entries = enumerate(typing.cast(list[Any], values))
        for name, value in entries:
            yield from _unknown_keys(inner, value, f"{where}{name}.")
        return
    kinds = (kind for kind in (section, *typing.get_args(section)) if isinstance(kind, type))
    kind = next((kind for kind in kinds if issubclass(kind, Section)), None)
    if kind is None or not isinstance(values, dict):
        return
    hints = typing.get_type_hints(kind)  # without Annotated
    known = {name: hints[name] for name in kind.model_fields}
    for key, value in typing.cast(dict[str, Any], values).items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {where}{near[0]}?" if near else f"known are {', '.join(known)}"
            yield f"unknown key {where}{key}; {hint}"
        else:
            yield from _unknown_keys(known[key], value, f"{where}{key}.")
