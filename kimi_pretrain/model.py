"""The model of one rank: the replicated vision encoder and its chunks of the language model."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_pretrain.config import Config
from kimi_pretrain.dep.encoder import DecoupledEncoder
from kimi_pretrain.dep.exchange import Exchange
from kimi_pretrain.dep.groups import scope_group
from kimi_pretrain.dep.memory import MIB
from kimi_pretrain.dep.sharded import blocks
from kimi_pretrain.engine.backbone import Backbone
from kimi_pretrain.engine.mesh import Mesh
from kimi_pretrain.parallel.ranks import scopes

WIRE = {"model": None, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Model:
    """Both halves and the exchange between them, built alike for training and for evaluation."""

    encoder: DecoupledEncoder
    backbone: Backbone
    exchange: Exchange

    @classmethod
    def build(cls, config: Config, mesh: Mesh) -> "Model":
        """Build this rank's share; every layout starts from the same weights."""
        dep, timeout = config.dep, config.train.timeout_seconds
        backbone = Backbone(config, mesh)
        sharing = [ranks.tolist() for ranks in scopes(config)]
        (mine,) = [ranks for ranks in sharing if mesh.rank in ranks]
        encoder = DecoupledEncoder(
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
        exchange = Exchange(group, mine, dep.exchange_budget_mib * MIB, WIRE[dep.exchange_dtype])
        return cls(encoder, backbone, exchange)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of this rank by its checkpoint name, routing biases too."""
        vision = {name: p.detach() for name, p in self.encoder.module.named_parameters()}
        return vision | {view.name: view.data for view in self.backbone.views(buffers=True)}
