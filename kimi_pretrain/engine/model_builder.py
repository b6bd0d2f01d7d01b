"""Translates our configuration to Megatron-Core's and builds the language model from its modules.

The layer spec is Megatron-Core's local one (no Transformer Engine). Our own modules replace its
attention (`PackedLatentAttention`, with the core attention that `CORE_ATTENTION` lists for
`train.attention`), its router (`PaddingAwareRouter`) and its routed experts (`GroupedExperts`).
Norms and SwiGLU use `kimi_pretrain.memory.pointwise`.
"""

import hashlib
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig

from kimi_pretrain.attention.choice import Kind
from kimi_pretrain.config import Config
from kimi_pretrain.engine.experts import ExpertLayer, GroupedExperts, PaddingAwareRouter
from kimi_pretrain.engine.fused_attention import FusedCoreAttention
from kimi_pretrain.engine.gated_mlp import DenseMlp, SharedExperts
from kimi_pretrain.engine.language_model import LanguageModel
from kimi_pretrain.engine.latent_attention import (
    FirstNorm,
    LastNorm,
    PackedLatentAttention,
    PartNorm,
    PlainQueryAttention,
)
from kimi_pretrain.engine.packed_attention import FlexCoreAttention, PortableCoreAttention
from kimi_pretrain.parallel.layout import LayoutConfig
from kimi_pretrain.weights.model_config import LanguageConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
CORE_ATTENTION = {
    "portable": PortableCoreAttention,
    "flex": FlexCoreAttention,
    "transformer_engine": FusedCoreAttention,
}


def engine_config(config: Config, attention: Kind) -> MLATransformerConfig:
    """Return Megatron-Core's configuration of the language model for this run.

    Args:
        config: configuration of the run.
        attention: the core attention that `build_chunks` uses.
    """
    language, layout = config.model.language, config.layout
    dtype = DTYPES[config.train.dtype]
    engine = MLATransformerConfig(
        **_architecture(language),
        **_rotary(language),
        **_experts(config),
        **_pipeline(layout, dtype, in_slots=config.dep.bubbles != "none"),
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # `initialise` sets the weights later. CPU initialisation keeps them off the GPU until then,
        # and on the meta device in a dry run.
        use_cpu_initialization=True,
        perform_initialization=False,
        init_method_std=language.init_std,
        # The loss stays a sum over tokens; `kimi_pretrain.update` divides it.
        calculate_per_token_loss=True,
        # Records the maxima of attention; Megatron-Core's own clip is not used.
        log_max_attention_logit=attention == "transformer_engine",
        # Fused kernels exist only for CUDA.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        overlap_moe_expert_parallel_comm=layout.overlap_experts and dtype == torch.bfloat16,
    )
    # Megatron-Core's own check admits only bfloat16. The schedule is the same for every dtype, and
    # its tests run in float32.
    engine.overlap_moe_expert_parallel_comm = layout.overlap_experts
    if layout.overlap_experts:
        check_overlap(engine)
    return engine


def check_overlap(engine: MLATransformerConfig) -> None:
    """Assert the requirements of Megatron-Core 0.19.2's combined schedule, for every dtype.

    Its own check (transformer_config.py, `__post_init__`) sees the switch only in bfloat16.
    """
    virtual = engine.virtual_pipeline_model_parallel_size
    assert engine.pipeline_model_parallel_size == 1 or virtual is not None
    assert engine.expert_model_parallel_size > 1
    assert engine.moe_token_dispatcher_type == "alltoall"
    assert engine.recompute_granularity is None
    assert not engine.moe_shared_expert_overlap
    assert not engine.mtp_num_layers
    assert not engine.delay_wgrad_compute  # not supported by `GroupedExperts`


def _architecture(language: LanguageConfig) -> dict:
    return dict(
        num_layers=language.num_layers,
        hidden_size=language.hidden_size,
        num_attention_heads=language.num_heads,
        ffn_hidden_size=language.dense_ffn_size,
        q_lora_rank=language.q_lora_rank,
        kv_lora_rank=language.kv_lora_rank,
        qk_head_dim=language.qk_nope_dim,
        qk_pos_emb_head_dim=language.qk_rope_dim,
        v_head_dim=language.v_dim,
        qk_layernorm=True,
        normalization="RMSNorm",
        layernorm_epsilon=language.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )


def _rotary(language: LanguageConfig) -> dict:
    yarn = language.yarn
    if yarn is None:
        # The softmax scale uses YaRN's factor for every rope type; 1.0 turns it off.
        return dict(rope_type="rope", rotary_base=language.rope_theta, rotary_scaling_factor=1.0)
    return dict(
        rope_type="yarn",
        rotary_base=language.rope_theta,
        rotary_scaling_factor=yarn.factor,
        original_max_position_embeddings=yarn.original_max_position,
        beta_fast=yarn.beta_fast,
        beta_slow=yarn.beta_slow,
        mscale=yarn.mscale,
        mscale_all_dim=yarn.mscale_all_dim,
    )


def _experts(config: Config) -> dict:
    language, dtype = config.model.language, config.train.dtype
    dense, frozen = language.num_dense_layers, "language_model" in config.train.frozen
    return dict(
        num_moe_experts=language.num_experts,
        moe_layer_freq=[0] * dense + [1] * (language.num_layers - dense),
        moe_ffn_hidden_size=language.expert_ffn_size,
        moe_shared_expert_intermediate_size=(
            language.num_shared_experts * language.expert_ffn_size
        ),
        moe_router_topk=language.experts_per_token,
        moe_router_score_function="sigmoid",
        moe_router_topk_scaling_factor=language.routed_scaling_factor,
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=language.expert_bias_update_rate,
        moe_router_load_balancing_type="seq_aux_loss",
        # A frozen router cannot become more balanced; its balance loss would only distort the
        # encoder's gradient.
        moe_aux_loss_coeff=0.0 if frozen else language.aux_loss_coeff,
        moe_router_dtype="fp64" if dtype == "float64" else "fp32",
        moe_token_dispatcher_type="alltoall",
    )


def _pipeline(layout: LayoutConfig, dtype: torch.dtype, in_slots: bool) -> dict:
    """Return the pipeline and parallelism settings.

    Args:
        layout: the layout of the run.
        dtype: dtype of the tensors sent between stages.
        in_slots: other work runs in the pipeline's bubbles, which batched p2p does not allow.
    """
    interleaved = layout.vpp > 1
    return dict(
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.tp > 1,
        expert_tensor_parallel_size=1,
        context_parallel_size=layout.cp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if interleaved else None,
        pipeline_model_parallel_layout=layout.stages,
        expert_model_parallel_size=layout.ep,
        pipeline_dtype=dtype,
        # In Megatron-Core, PP2 with virtual stages and batched p2p is silently wrong (loss off by
        # 0.9); its training scripts forbid the combination, but its library does not. Overlapped
        # p2p is correct for every interleaved layout.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved and not in_slots,
        # After a chunk's output is sent, it is only needed as the root of the graph.
        deallocate_pipeline_outputs=True,
    )


def layer_specs(
    config: MLATransformerConfig, attention_kind: Kind, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Return the layer specs of one chunk with our own modules in place."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention
        attention.submodules.core_attention = CORE_ATTENTION[attention_kind]
        attention.submodules.q_layernorm = attention.submodules.kv_layernorm = PartNorm
        layer.submodules.input_layernorm, layer.submodules.pre_mlp_layernorm = FirstNorm, PartNorm
        plain = config.q_lora_rank is None
        attention.module = PlainQueryAttention if plain else PackedLatentAttention
        mlp = layer.submodules.mlp
        # Layers may share a spec, so this one may already have been changed.
        if isinstance(mlp, partial) and mlp.func in (MoELayer, ExpertLayer):
            experts = mlp.keywords["submodules"]
            experts.router = PaddingAwareRouter
            experts.experts = GroupedExperts
            experts.shared_experts = partial(SharedExperts, **experts.shared_experts.keywords)
            layer.submodules.mlp = partial(ExpertLayer, *mlp.args, **mlp.keywords)
        else:
            layer.submodules.mlp = partial(DenseMlp.as_mlp_submodule, **mlp.keywords)
    block.layer_norm = LastNorm
    return block


def build_chunks(
    config: Config, engine: MLATransformerConfig, attention: Kind
) -> list[LanguageModel]:
    """Build this rank's model chunks (one, or `layout.vpp`), uninitialised.

    Args:
        config: configuration of the run.
        engine: result of `engine_config`.
        attention: the core attention. It has no parameters, so a dry run may pass any kind.
    """
    return [
        _build_chunk(config, engine, attention, stage)
        for stage in (range(config.layout.vpp) if config.layout.vpp > 1 else [None])
    ]


def _build_chunk(
    config: Config, engine: MLATransformerConfig, attention: Kind, vp_stage: int | None
) -> LanguageModel:
    virtual = {} if vp_stage is None else dict(ignore_virtual=False, vp_stage=vp_stage)
    chunk = LanguageModel(
        engine,
        layer_specs(engine, attention, vp_stage),
        vocab_size=config.model.language.vocab_size,
        max_sequence_length=config.data.seq_len,
        pre_process=parallel_state.is_pipeline_first_stage(**virtual),
        post_process=parallel_state.is_pipeline_last_stage(**virtual),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        vp_stage=vp_stage,
    )
    # Megatron-Core builds norms and routers in fp32 for every configured dtype.
    for param in chunk.parameters():
        param.data = param.data.to(engine.params_dtype)
    return chunk


def initialise(name: str, tensor: torch.Tensor, std: float, seed: int) -> None:
    """Fill one checkpoint tensor in place from a generator seeded by its name.

    Every layout therefore starts from the same weights. Norm gains are one, routing biases zero,
    and all other tensors N(0, std) (initializer_range of the published configurations).
    """
    if name.endswith("norm.weight"):
        tensor.fill_(1.0)
    elif name.endswith("e_score_correction_bias"):
        tensor.zero_()
    else:
        key = hashlib.blake2b(f"{seed}/init/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * std)
