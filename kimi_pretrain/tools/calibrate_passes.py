"""Measures the language model's passes and the update on this machine, for `plan --step`.

Builds a backbone with few layers of the config's sizes in one process, as training does. One
microbatch goes forward and backward, part by part (`engine.pass_timing`), and the optimizer updates
one part at a time. An expert layer has as many experts as a rank of the run holds: with `layout.ep`
ranks, a rank receives as many tokens as it sends on average. Communication between ranks is not
measured. The tokens are random, so experts are loaded more evenly than in training.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from kimi_pretrain.config import Config
from kimi_pretrain.dep.config import PassCostConfig, UpdateCostConfig
from kimi_pretrain.engine import mesh as engine_mesh
from kimi_pretrain.engine.backbone import Backbone, build_backbone
from kimi_pretrain.engine.mesh import Mesh
from kimi_pretrain.engine.pass_timing import PartSeconds, PassTimer
from kimi_pretrain.optim.groups import ModelShape, NamedTensor, replicas_of
from kimi_pretrain.optim.muonclip import DistributedMuonClip
from kimi_pretrain.parallel.layout import LayoutConfig
from kimi_pretrain.tools.predict import Progress
from moonvit3d.model import VisionEncoder
from typed_config.yaml_text import one_line

MOST_REPEATS, LEAST_REPEATS = 20, 3
UPDATE_REPEATS = 5
UPDATE_SHARE = 0.3  # of the time
DIGITS = 4  # of a number to paste; a measurement is less precise
NO_CHANGE = 1e-12  # learning rate
LAYERS, HEAD = "language_model.model.layers.", "language_model.lm_head."
PARTS = {
    "embedding": "embedding",
    "dense": "dense layer",
    "expert": "expert layer",
    "head": "head and loss",
}


@dataclass
class PassCalibration:
    """Measured costs and the conditions of the measurement.

    Attributes:
        passes: medians.
        update: medians; None: not measured, see `left_out`.
        experts: number of experts in a measured layer.
        tokens: number of tokens in the microbatch.
        repeats: timed passes behind each median.
        spread: interquartile range of the whole pass's seconds, relative to the median.
        left_out: name of a cost that was not measured -> reason.
    """

    passes: PassCostConfig
    update: UpdateCostConfig | None
    experts: int
    tokens: int
    repeats: int
    spread: float
    left_out: dict[str, str] = field(default_factory=dict)


def calibrate_passes(
    config: Config,
    max_seconds: float,
    progress: Progress = lambda share, what: None,
    document_tokens: int | None = None,
) -> PassCalibration:
    """Time the language model's parts and the update on the first GPU, or the CPU without one.

    Args:
        config: gives sizes, dtypes, frozen parts, the optimizer and the layout's experts.
        max_seconds: bound on the timing; building the backbone comes on top.
        progress: called with the finished share and the name of the current measurement.
        document_tokens: length of the documents in a row; None: each row is one document.

    Raises:
        ValueError: one microbatch does not fit into the time or the memory of the device.
    """
    small = measured_config(config)
    length = min(document_tokens or config.data.seq_len, config.data.seq_len)
    before = torch.get_num_threads()
    torch.set_num_threads(config.train.threads or before)
    try:
        with engine_mesh.alone() as mesh:
            return _measure(config, small, mesh, max_seconds, progress, length)
    except torch.OutOfMemoryError:
        raise ValueError(
            f"plan --calibrate: a microbatch of {_tokens(config)} tokens through "
            f"{small.model.language.num_layers} layers with {small.model.language.num_experts} "
            "experts does not fit into the memory of the device; take a smaller "
            "train.rows_per_microbatch or data.seq_len, or a larger layout.ep"
        ) from None
    finally:
        torch.set_num_threads(before)


def measured_config(config: Config) -> Config:
    """Return the configuration of the backbone that is measured, in one process.

    It has one layer of each kind that the model has, and the experts of one rank, but at least
    `experts_per_token`. Recompute, FP8 storage and offload are off: the prediction of a step adds
    their cost (`memory_costs`).
    """
    model = config.model.language
    dense = min(1, model.num_dense_layers)
    experts = max(model.num_experts // config.layout.ep, model.experts_per_token)
    layers = dense + min(1, model.num_layers - model.num_dense_layers)
    language = model.replace(num_layers=layers, num_dense_layers=dense, num_experts=experts)
    return config.replace(
        model=config.model.replace(language=language),
        layout=LayoutConfig(),
        train=config.train.replace(
            memory_limit_gib=None, recompute=[], fp8_storage=False, offload=False
        ),
        dep=config.dep.replace(bubbles="none", max_split=1),
    )


def _tokens(config: Config) -> int:
    return config.train.rows_per_microbatch * config.data.seq_len


def _measure(
    config: Config, small: Config, mesh: Mesh, max_seconds: float, progress: Progress, length: int
) -> PassCalibration:
    progress(0.0, "building the language model")
    backbone = build_backbone(small, mesh, randomise)
    passes = max_seconds if config.optim.deepspeed else (1 - UPDATE_SHARE) * max_seconds
    with closing(PassTimer(backbone, length)) as timer:
        runs = _time_passes(timer, passes, progress, config)
    left_out: dict[str, str] = {}
    update = None
    if config.optim.deepspeed is not None:
        left_out["update"] = "optim.deepspeed: its own optimizer is not measured"
    else:
        seconds = UPDATE_SHARE * max_seconds
        update = _time_update(small, backbone, mesh, seconds, progress, left_out)
    progress(1.0, "done")
    return PassCalibration(
        _pass_cost(small, runs), update, small.model.language.num_experts, _tokens(small),
        len(runs), _spread(runs), left_out,
    )  # fmt: skip


def randomise(backbone: Backbone) -> None:
    """Fill every tensor on its device; initialisation by name takes minutes at full size."""
    draw = torch.Generator(backbone.mesh.device).manual_seed(0)
    with torch.no_grad():
        for view in backbone.views(buffers=True):
            if view.name.endswith("norm.weight"):
                view.data.fill_(1.0)
            elif view.name.endswith("e_score_correction_bias"):
                view.data.zero_()
            else:
                view.data.normal_(0.0, backbone.config.model.language.init_std, generator=draw)


def _time_passes(
    timer: PassTimer, max_seconds: float, progress: Progress, config: Config
) -> list[list[PartSeconds]]:
    progress(0.0, "warming up the passes")
    timer.run()  # the first run initialises the libraries
    each = min(_seconds_of(timer.run) for _ in range(2))
    if LEAST_REPEATS * each > max_seconds:
        raise ValueError(
            f"plan --calibrate: a microbatch of {_tokens(config)} tokens takes {each:.2g} s, and "
            f"{LEAST_REPEATS} of them more than there is time for; give --max-seconds more"
        )
    count = max(LEAST_REPEATS, min(MOST_REPEATS, int(max_seconds / each)))
    runs = []
    for number in range(count):
        progress((1 - UPDATE_SHARE) * number / count, f"pass {number + 1} of {count}")
        runs.append(timer.run())
    return runs


def _seconds_of(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _spread(runs: Sequence[Sequence[PartSeconds]]) -> float:
    whole = torch.tensor([sum(one.forward + one.backward for one in run) for run in runs])
    low, middle, high = torch.quantile(whole, torch.tensor([0.25, 0.5, 0.75])).tolist()
    return (high - low) / middle


def _pass_cost(small: Config, runs: Sequence[Sequence[PartSeconds]]) -> PassCostConfig:
    model = small.model.language
    names = ["dense"] * model.num_dense_layers + ["expert"] * (
        model.num_layers - model.num_dense_layers
    )
    found = {name: 0.0 for name in PassCostConfig.model_fields if name != "rows"}
    for number, name in enumerate(["embedding", *names, "head"]):
        found[f"{name}_forward"] = _rounded(median(run[number].forward for run in runs))
        found[f"{name}_backward"] = _rounded(median(run[number].backward for run in runs))
    return PassCostConfig(**found, rows=small.train.rows_per_microbatch)


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.{DIGITS}g}")


def _time_update(
    small: Config,
    backbone: Backbone,
    mesh: Mesh,
    max_seconds: float,
    progress: Progress,
    left_out: dict[str, str],
) -> UpdateCostConfig:
    """Time the update of each part with a separate optimizer; parts without tensors cost 0."""
    parts = {name: tensors for name, tensors in _parts(small, backbone, mesh).items() if tensors}
    found = dict.fromkeys(UpdateCostConfig.model_fields, 0.0)
    for number, (name, tensors) in enumerate(parts.items()):
        done = 1 - UPDATE_SHARE * (1 - number / len(parts))
        progress(done, f"update of {name.replace('_', ' ')}")
        try:
            seconds = update_seconds_of(tensors, small, mesh, max_seconds / len(parts))
        except torch.OutOfMemoryError:
            left_out[f"update_cost.{name}"] = "does not fit into the memory of the device"
            continue
        experts = small.model.language.num_experts if name == "expert" else 1
        found[name] = _rounded(seconds / experts)
    return UpdateCostConfig(**found)


def _parts(small: Config, backbone: Backbone, mesh: Mesh) -> dict[str, dict[str, Tensor]]:
    """Return the trained tensors of each key of `dep.update_cost`, keyed by checkpoint name.

    The head stands for the embedding as well, because both have the same size.
    """
    parts: dict[str, dict[str, Tensor]] = {name: {} for name in UpdateCostConfig.model_fields}
    for view in backbone.views() if backbone.trainable else ():
        part = _part_of(view.name, small.model.language.num_dense_layers)
        if part is not None:
            parts[part][view.name] = view.data
    frozen = small.train.frozen
    for name, param in VisionEncoder(small.model.vision).named_parameters():
        part = "projector" if name.startswith("mm_projector") else "vision_tower"
        if part not in frozen:
            parts["encoder"][name] = param.detach().to(mesh.device, backbone.dtype)
    return parts


def _part_of(name: str, dense_layers: int) -> str | None:
    """Return the `dep.update_cost` key of a language-model tensor; None: it is not measured."""
    if name.startswith(HEAD):
        return "vocabulary"
    if not name.startswith(LAYERS):
        return None
    if ".mlp.experts." in name:
        return "expert"
    layer = int(name.removeprefix(LAYERS).split(".")[0])
    return "dense_layer" if layer < dense_layers else "expert_layer"


def update_seconds_of(
    tensors: Mapping[str, Tensor], config: Config, mesh: Mesh, max_seconds: float
) -> float:
    """Return the median seconds that one rank needs to update some tensors.

    They include all that a step does with the gradients: zeroing, the norm, the optimizer's step.
    """
    wide = torch.float64 if config.train.dtype == "float64" else torch.float32
    grads = {name: torch.zeros_like(tensor, dtype=wide) for name, tensor in tensors.items()}
    named = [
        NamedTensor(name, tensor, lambda name=name: grads[name], replicas_of(name))
        for name, tensor in tensors.items()
    ]
    groups = {tensor.replicas: None for tensor in named}
    optimizer = DistributedMuonClip(named, groups, config.optim, ModelShape.of(config.model))
    seconds, begun = [], time.perf_counter()
    while len(seconds) < 1 + UPDATE_REPEATS:  # the first is a warm-up
        if len(seconds) > 1 and time.perf_counter() - begun > max_seconds:
            break
        for grad in grads.values():
            grad.normal_()
        mesh.synchronize()
        start = time.perf_counter()
        optimizer.grad_square_sum()
        optimizer.step(NO_CHANGE).figures()
        for grad in grads.values():
            grad.zero_()
        mesh.synchronize()
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])


def yaml_lines(result: PassCalibration) -> list[str]:
    """Return the costs as lines of the section `dep`, for a config file."""
    sections: dict[str, PassCostConfig | UpdateCostConfig | None] = {
        "pass_cost": result.passes,
        "update_cost": result.update,
    }
    return [
        line
        for name, section in sections.items()
        if section is not None
        for line in (
            f"  {name}:",
            *(f"    {k}: {one_line(v)}" for k, v in section.model_dump().items()),
        )
    ]


def lines(result: PassCalibration) -> Iterator[str]:
    """Yield the result as text, for the terminal."""
    yield (
        f"language model: {result.tokens} tokens, {result.experts} experts in a layer, medians of "
        f"{result.repeats} passes (quartiles {result.spread:.0%} apart)"
    )
    yield "                     forward     backward       update"
    cost, update = result.passes.model_dump(), result.update
    updates = {"dense": "dense_layer", "expert": "expert_layer", "head": "vocabulary"}
    for name, title in PARTS.items():
        own = (
            "" if update is None else f"{getattr(update, updates.get(name, 'vocabulary')):10.4g} s"
        )
        yield (
            f"{title:16s} {cost[f'{name}_forward'] * 1e3:9.2f} ms "
            f"{cost[f'{name}_backward'] * 1e3:9.2f} ms {own}"
        )
    if update is not None:
        yield f"update of an expert {update.expert:.4g} s, of the encoder {update.encoder:.4g} s"
    for name, reason in result.left_out.items():
        yield f"{name}: left out: {reason}"


def as_json(result: PassCalibration) -> dict[str, Any]:
    """Return the result as plain values."""
    found = asdict(result)
    found["passes"] = result.passes.model_dump()
    found["update"] = None if result.update is None else result.update.model_dump()
    return found
