"""Counts parameters and optimizer state of a run's stages from names and shapes. Pure.

The owners of optimizer state are those that the run itself would choose (`optim.owners`).
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from kimi_pretrain.config import ITEMSIZE, Config
from kimi_pretrain.optim.groups import ModelShape, replicas_of
from kimi_pretrain.optim.owners import TensorSize
from kimi_pretrain.tools.optimizer_division import Division, PlannedGroup, divide, stage_groups
from kimi_pretrain.weights.model_config import LanguageConfig
from kimi_pretrain.weights.shapes import BIAS, LANGUAGE, is_routed_expert, language_shapes
from kimi_pretrain.weights.siglip_shapes import siglip_shapes
from moonvit3d.layouts import released_shapes

_Shapes = list[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Sizes:
    """Sizes that depend on the layout only.

    Attributes:
        stages: for each stage, the elements in a rank's parameters, and in the whole tensors that
            it keeps in addition to its slices under tensor parallelism.
        encoder: the elements in all parameters of the encoder, and in its trained parameters.
        state: for each stage, a lower bound on the optimizer state of its fullest rank, in bytes:
            the mean over its ranks, by Muon's rule.
    """

    stages: tuple[tuple[int, int], ...]
    encoder: tuple[int, int]
    state: tuple[int, ...]

    @classmethod
    def of(cls, config: Config) -> "Sizes":
        """Return the sizes of a configuration."""
        layout, train = config.layout, config.train
        language = config.model.language  # frozen, so hashable; its type does not say so
        counts = _language_counts(language)  # pyright: ignore[reportArgumentType]
        item = ITEMSIZE[train.dtype]
        ranks = layout.world_size() // layout.pp
        a_number = max(4, item) * (2 if item < 4 else 1) * ("language_model" not in train.frozen)
        stages, state = list[tuple[int, int]](), list[int]()
        for stage in range(layout.pp):
            own = [layer for layers, _ in config.chunks()[stage :: layout.pp] for layer in layers]
            own += [_EMBEDDING] * (stage == 0) + [_HEAD] * (stage == layout.pp - 1)
            plain, cut, experts = (sum(counts[one][kind] for one in own) for kind in range(3))
            whole = cut if layout.tp > 1 else 0
            stages.append((plain + cut // layout.tp + experts // layout.ep, whole))
            state.append((plain + cut + experts) * a_number // ranks)
        encoder = [
            sum(prod(shape) for _, shape in _encoder_shapes(config, trained))
            for trained in (False, True)
        ]
        return cls(tuple(stages), (encoder[0], encoder[1]), tuple(state))


def divide_config(config: Config) -> Division:
    """Divide the optimizer's work as the run itself would, without building a model."""
    groups = replica_groups(config, trained=True)
    return divide(groups, config.layout.world_size(), ModelShape.of(config.model), config.optim)


def replica_groups(config: Config, *, trained: bool) -> list[PlannedGroup]:
    """Return the groups of ranks that hold copies of the same tensors, without routing biases.

    Args:
        trained: include trained tensors only.
    """
    layout, item = config.layout, ITEMSIZE[config.train.dtype]
    per_stage = layout.world_size() // layout.pp
    encoder = tuple(
        TensorSize(name, shape, item) for name, shape in _encoder_shapes(config, trained)
    )
    groups = [PlannedGroup("encoder", tuple(range(layout.world_size())), encoder)]
    first_slice = config.model.language.num_experts // layout.ep
    without = trained and "language_model" in config.train.frozen
    for stage, parameters in enumerate(_by_stage(config)):
        held: dict[str, list[TensorSize]] = {"dense": [], "expert": []}
        for name, shape in parameters if not without else ():
            if not is_routed_expert(name) or _expert(name) < first_slice:
                held[replicas_of(name)].append(TensorSize(name, shape, item))
        groups += stage_groups(stage, per_stage, layout.ep, held)
    return groups


_CUT = ("embed_tokens", "lm_head", "q_proj", "q_b_proj", "kv_b_proj", "o_proj", "gate_proj",
        "up_proj", "down_proj")  # fmt: skip


def _is_cut(name: str) -> bool:
    return name.split(".")[-2] in _CUT


_EMBEDDING, _HEAD = -1, -2


@lru_cache(maxsize=4)
def _language_counts(language: LanguageConfig) -> dict[int, tuple[int, int, int]]:
    """Return the elements in each layer, in the embedding, and in the final norm with the head, as
    (replicated on every rank, sharded by tensor parallelism, in routed experts).
    """
    counts: dict[int, list[int]] = {}
    for name, shape in language_shapes(language).items():
        if not name.endswith(BIAS):
            kind = 2 if is_routed_expert(name) else int(_is_cut(name))
            counts.setdefault(_place(name), [0, 0, 0])[kind] += prod(shape)
    return {place: (plain, cut, experts) for place, (plain, cut, experts) in counts.items()}


def _place(name: str) -> int:
    """Return the layer number of a tensor, or `_EMBEDDING` or `_HEAD`."""
    layer = name.removeprefix(f"{LANGUAGE}model.layers.").partition(".")[0]
    if layer.isdecimal():
        return int(layer)
    return _EMBEDDING if "embed_tokens" in name else _HEAD


def _by_stage(config: Config) -> list[_Shapes]:
    """Return name and unsharded shape of every language-model parameter, by stage."""
    pp = config.layout.pp
    stage_of = {
        layer: number % pp for number, (layers, _) in enumerate(config.chunks()) for layer in layers
    }
    stage_of |= {_EMBEDDING: 0, _HEAD: pp - 1}
    found: list[_Shapes] = [[] for _ in range(pp)]
    for name, shape in language_shapes(config.model.language).items():
        if not name.endswith(BIAS):
            found[stage_of[_place(name)]].append((name, shape))
    return found


def _encoder_shapes(config: Config, trained: bool) -> _Shapes:
    prefixes = {"vision_tower": "vision_tower.", "projector": "mm_projector."}
    frozen = config.train.frozen if trained else []
    without = tuple(prefix for part, prefix in prefixes.items() if part in frozen)
    shapes = released_shapes(config.model.vision)
    shapes |= siglip_shapes(config.train.siglip, config.model.vision.width)
    return [(name, shape) for name, shape in shapes.items() if not name.startswith(without)]


def _expert(name: str) -> int:
    return int(name.partition(".experts.")[2].partition(".")[0])
