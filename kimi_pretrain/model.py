"""Model of one rank: the replicated vision encoder and its virtual stages of the language model.

`Model.build` makes both halves and the exchange between them. The optimizer and checkpoints see a
model as a table of tensors keyed by Hugging Face checkpoint name, independent of the layout.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kimi_pretrain.config import MIB, Config
from kimi_pretrain.dep.encoder import DecoupledEncoder
from kimi_pretrain.dep.exchange import Exchange, scope_group
from kimi_pretrain.dep.sharded import blocks
from kimi_pretrain.engine.backbone import Backbone, build_backbone
from kimi_pretrain.engine.mesh import Mesh
from kimi_pretrain.optim.groups import NamedTensor, replicas_of
from kimi_pretrain.parallel.ranks import scopes
from kimi_pretrain.siglip.pair_encoder import PairEncoder

WIRE_DTYPES = {"model": None, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Model:
    """Both halves and the exchange between them, the same for training and evaluation."""

    encoder: DecoupledEncoder
    backbone: Backbone
    exchange: Exchange

    @classmethod
    def build(cls, config: Config, mesh: Mesh) -> "Model":
        """Build this rank's part of the model; the initial weights do not depend on the layout."""
        dep, timeout = config.dep, config.train.timeout_seconds
        backbone = build_backbone(config, mesh)
        sharing = [ranks.tolist() for ranks in scopes(config)]
        (mine,) = [ranks for ranks in sharing if mesh.rank in ranks]
        siglip = config.train.siglip
        kind = DecoupledEncoder if siglip is None else partial(PairEncoder, siglip=siglip)
        encoder = kind(
            config.model.vision,
            dep.max_patches_per_chunk,
            config.train.seed,
            backbone.dtype,
            mesh.device,
            frozen=config.train.frozen,
            blocks=blocks(sharing, dep.max_split, timeout),
            check_recompute=dep.check_recompute,
        )
        group = scope_group(sharing, timeout)
        dtype = WIRE_DTYPES[dep.exchange_dtype]
        exchange = Exchange(group, mine, dep.exchange_budget_mib * MIB, dtype)
        return cls(encoder, backbone, exchange)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of this rank by checkpoint name, including routing biases."""
        vision = {name: p.detach() for name, p in self.encoder.module.named_parameters()}
        return vision | {view.name: view.data for view in self.backbone.views(buffers=True)}


def trained_tensors(encoder: DecoupledEncoder, backbone: Backbone) -> list[NamedTensor]:
    """Return every trained tensor of this rank with its gradient and its replica group."""
    vision = [
        NamedTensor(
            name, param.detach(), lambda name=name: encoder.sums.views[name], replicas_of(name)
        )
        for name, param in encoder.trained().items()
    ]
    if not backbone.trainable:
        return vision
    language = [
        NamedTensor(
            view.name, view.data, lambda view=view: backbone.grad_of(view), replicas_of(view.name)
        )
        for view in backbone.views()
    ]
    return vision + language
