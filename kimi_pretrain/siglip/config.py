"""`train.siglip` section: Kimi-VL's objective, L_siglip + 2 L_caption; docs/STAGES.md."""

from pydantic import Field

from typed_config.section import Finite, Section


class SiglipConfig(Section):
    """SigLIP's text tower and heads, which join the vision tower, and the weight of the losses.

    The defaults are those of siglip-so400m-patch14-384; the width is `model.vision.width`.
    """

    tokenizer: str
    """tokenizer.json of the text tower, from SigLIP and not from the language model: a key under
    data.root, or a path or URI. [-; kimi_pretrain/siglip/tokenizer.py]"""
    weights: str | None = None
    """Initial weights of heads, text tower, scale and bias: a SigLIP folder, or a checkpoint or run
    of this program that has them. null: random, from the seed.
    [-; kimi_pretrain/weights/siglip_heads.py]"""
    caption_weight: Finite = Field(default=2.0, gt=0)
    """Weight of the caption loss (Kimi-VL, section 2.1). [-;
    kimi_pretrain/siglip/pair_encoder.py]"""
    depth: int = Field(default=27, gt=0)
    """Blocks of the text tower. [blocks; kimi_pretrain/siglip/heads.py]"""
    heads: int = Field(default=16, gt=0)
    """Attention heads of the text tower and of the pooling head.
    [heads; kimi_pretrain/siglip/heads.py]"""
    mlp_width: int = Field(default=4304, gt=0)
    """Width of the MLPs in the text tower and the pooling head.
    [channels; kimi_pretrain/siglip/heads.py]"""
    positions: int = Field(default=64, gt=0)
    """Number of tokens that a text is cut or padded to; the last token's output is the embedding.
    [tokens; kimi_pretrain/siglip/tokenizer.py]"""
    vocabulary: int = Field(default=32_000, gt=0)
    """Vocabulary of the text tower. [tokens; kimi_pretrain/siglip/heads.py]"""
    texts_per_chunk: int = Field(default=64, gt=0)
    """Texts per forward pass of the text tower; only their activations are in memory at a time.
    [texts; kimi_pretrain/siglip/pair_encoder.py]"""
