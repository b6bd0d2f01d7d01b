"""The model of one rank: the replicated vision encoder and its chunks of the language model."""

from dataclasses import dataclass

from torch import Tensor

from kimi_pretrain.config import Config
from kimi_pretrain.dep.encoder import DecoupledEncoder
from kimi_pretrain.engine.backbone import Backbone
from kimi_pretrain.engine.mesh import Mesh


@dataclass(frozen=True)
class Model:
    """Both halves, built and initialised alike for training and for evaluation."""

    encoder: DecoupledEncoder
    backbone: Backbone

    @classmethod
    def build(cls, config: Config, mesh: Mesh) -> "Model":
        """Build this rank's share; every layout starts from the same weights."""
        backbone = Backbone(config, mesh)
        encoder = DecoupledEncoder(
            config.model.vision,
            config.dep.max_patches_per_chunk,
            config.train.seed,
            backbone.dtype,
            mesh.device,
        )
        return cls(encoder, backbone)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of this rank by its checkpoint name, routing biases too."""
        vision = {name: p.detach() for name, p in self.encoder.module.named_parameters()}
        return vision | {view.name: view.data for view in self.backbone.views(buffers=True)}
