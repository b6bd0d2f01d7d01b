"""The `train.siglip` section: Kimi-VL's objective, L_siglip + 2 L_caption; docs/STAGES.md."""

from pydantic import Field

from typed_config.section import Finite, Section


class SiglipConfig(Section):
    """SigLIP's text tower and heads beside the vision tower, and how the two losses are weighed.

    The defaults are those of siglip-so400m-patch14-384; the width is `model.vision.width`.
    """

    tokenizer: str
    """tokenizer.json of the text tower, SigLIP's own and not the language model's: a key under
    data.root, or a path or URI. [-; kimi_pretrain/siglip/tokenizer.py]"""
    weights: str | None = None
    """What heads, text tower, scale and bias start from: a SigLIP folder, or a checkpoint or run of
    this program that has them. null: the seed. [-; kimi_pretrain/weights/siglip_heads.py]"""
    caption_weight: Finite = Field(default=2.0, gt=0)
    """The caption loss counts so many times (Kimi-VL, section 2.1).
    [-; kimi_pretrain/siglip/pair_encoder.py]"""
    depth: int = Field(default=27, gt=0)
    """Blocks of the text tower. [blocks; kimi_pretrain/siglip/heads.py]"""
    heads: int = Field(default=16, gt=0)
    """Attention heads of the text tower and of the pooling head.
    [heads; kimi_pretrain/siglip/heads.py]"""
    mlp_width: int = Field(default=4304, gt=0)
    """Of the text tower's and the pooling head's MLPs. [channels; kimi_pretrain/siglip/heads.py]"""
    positions: int = Field(default=64, gt=0)
    """A text is cut or padded to so many tokens; the last one is its embedding.
    [tokens; kimi_pretrain/siglip/tokenizer.py]"""
    vocabulary: int = Field(default=32_000, gt=0)
    """Of the text tower. [tokens; kimi_pretrain/siglip/heads.py]"""
    texts_per_chunk: int = Field(default=64, gt=0)
    """Texts that go through the tower together; their activations are all that is held of it.
    [texts; kimi_pretrain/siglip/pair_encoder.py]"""
