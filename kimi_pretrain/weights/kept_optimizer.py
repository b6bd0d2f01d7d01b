"""Optimizer state that a stage keeps from the previous stage: `train.start_optimizer: keep`.

K2's learning rate falls across the change from 4k to 32k context (arXiv:2507.20534, section 2.5):
one optimizer and one schedule with longer rows. So momentum, moments, master copies, the update
count and the step count continue. Headers reveal every conflict before a process starts.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from kimi_pretrain.checkpoint.errors import CheckpointError
from kimi_pretrain.checkpoint.manifest import Manifest
from kimi_pretrain.config import Config
from kimi_pretrain.optim.config import OptimConfig
from kimi_pretrain.optim.groups import MOMENTS, ModelShape
from kimi_pretrain.optim.schedule import learning_rate, stretches
from kimi_pretrain.weights.matching import MASTER, OPTIMIZER, Weights
from kimi_pretrain.weights.shapes import BIAS, PARTS, model_shapes
from kimi_pretrain.weights.siglip_shapes import siglip_shapes
from kimi_pretrain.weights.weight_reader import TensorHeader, and_more

_FRESH = "; set train.start_optimizer=fresh"
# A longer context changes only this model setting; attention starts close to its previous function.
_YARN = "model.language.yarn "
# Settings of the update rule; the learning rate is compared by its resulting value.
_UPDATE = ("momentum", "nesterov", "adam_betas", "adam_eps", "weight_decay", "groups")
_JUMP = 0.01  # relative change of the learning rate


def check_kept(weights: Weights, config: Config, settings: Sequence[str] = ()) -> tuple[str, ...]:
    """Refuse weights whose optimizer cannot continue in this run; only headers are read.

    Args:
        settings: messages about model settings that differ in the weights (`match_compatible`).

    Returns:
        messages about a jump of the learning rate between the stages, and about other optimizer
        settings that differ.

    Raises:
        CheckpointError: names the state that cannot be kept.
    """
    where, manifest = weights.reader.where, weights.reader.manifest
    if manifest is None or manifest.contents != "all":
        raise CheckpointError(
            f"{where} holds weights alone, train.start_optimizer=keep needs an optimizer{_FRESH}"
        )
    if manifest.dtype != config.train.dtype:
        raise CheckpointError(
            f"{where}: written with train.dtype={manifest.dtype}, this run has train.dtype="
            f"{config.train.dtype}: its master copies cannot be kept{_FRESH}"
        )
    if manifest.state.step >= config.train.steps:
        raise CheckpointError(
            f"{where} has done {manifest.state.step} steps, which train.start_optimizer=keep "
            f"counts on from, and train.steps={config.train.steps}: nothing would be trained; give "
            "the steps of both stages together"
        )
    if others := [text for text in settings if not text.startswith(_YARN)]:
        raise CheckpointError(
            f"{where}: {others[0]}{and_more(len(others) - 1)}: moments of another function of the "
            f"weights; set it as it was, or train.start_optimizer=fresh"
        )
    _check_schedule(manifest, config, where)
    _check_state(weights, manifest, config)
    return tuple(_set_otherwise(manifest, config))


def _check_schedule(manifest: Manifest, config: Config, where: str) -> None:
    """Refuse a different batch size if the schedule counts tokens, because its steps would move."""
    here = config.tokens_per_step()
    there = (manifest.training or {}).get("tokens_per_step")
    # An older checkpoint lacks the number: test whether any other number would move the schedule.
    if _places(config, here) == _places(config, there or 2 * here):
        return
    told = f"had {there:,}" if there else "had nobody knows how many"
    keep = "keep their product, or " if there else "it is of an earlier version; "
    raise CheckpointError(
        f"{where}: its steps {told} tokens, those of this run have {here:,} (data.rows_per_step x "
        "data.seq_len): the place in a schedule that counts tokens cannot be kept; "
        f"{keep}write optim.schedule in steps{_FRESH[1:]}"
    )


def _set_otherwise(manifest: Manifest, config: Config) -> Iterator[str]:
    """Yield differences in the optimizer's settings, and the learning rate if it jumps."""
    training = manifest.training or {}
    try:
        there = OptimConfig(**training["optim"])
    except (KeyError, ValueError):  # written by another version
        return
    here, updates = config.optim, manifest.state.optimizer_steps
    if updates:  # 0 if the checkpoint is only planned and the data decides its last step
        tokens = training["tokens_per_step"]
        last, unbroken = (learning_rate(n, there, tokens) for n in (updates - 1, updates))
        begin = learning_rate(updates, here, config.tokens_per_step())
        if not any(math.isclose(begin, rate, rel_tol=_JUMP) for rate in (last, unbroken)):
            yield f"learning rate {last:g} in its last update, {begin:g} in the first one here"
    for key in _UPDATE:
        if (was := getattr(there, key)) != (now := getattr(here, key)):
            yield f"optim.{key} was {was!r}, here it is {now!r}"


def _places(config: Config, tokens: int) -> list[tuple[float, float]]:
    """Return the first and last step of each schedule stretch, given the tokens per step."""
    found = stretches(config.optim, tokens)
    return [(stretch.start / tokens, stretch.end / tokens) for stretch in found]


def _check_state(weights: Weights, manifest: Manifest, config: Config) -> None:
    where, headers = weights.reader.where, weights.reader.headers
    wanted = dict(optimizer_state(config))
    if missing := [name for name in wanted if name not in headers]:
        frozen = (manifest.training or {}).get("frozen", [])
        hint = f": there train.frozen=[{', '.join(frozen)}]" if frozen else ""
        if _other_rule(missing[0], headers):
            hint = ": written with another optim.matrices"
        raise CheckpointError(
            f"{where}: {len(missing):,} tensors of the optimizer's state are missing, first "
            f"{missing[0]!r}{hint}{_FRESH}"
        )
    wrong = [
        f"{name!r} is {found.dtype} {list(found.shape)}, this run has {dtype} {list(shape)}"
        for name, (dtype, shape) in wanted.items()
        if ((found := headers[name]).dtype, found.shape) != (dtype, shape)
    ]
    if wrong:
        raise CheckpointError(f"{where}: {wrong[0]}{and_more(len(wrong) - 1)}{_FRESH}")


def optimizer_state(config: Config) -> Iterator[tuple[str, tuple[torch.dtype, tuple[int, ...]]]]:
    """Yield name, dtype and shape of a run's complete optimizer state."""
    rules, own = ModelShape.of(config.model), getattr(torch, config.train.dtype)
    wide = torch.promote_types(own, torch.float32)
    frozen = tuple(PARTS[part] for part in config.train.frozen)
    heads = siglip_shapes(config.train.siglip, config.model.vision.width)
    for name, shape in (model_shapes(config.model) | heads).items():
        if name.startswith(frozen) or name.endswith(BIAS):
            continue
        for moment in MOMENTS[rules.rule_of(name, shape, config.optim.matrices).kind]:
            yield f"{OPTIMIZER}{moment}.{name}", (wide, shape)
        if own != wide:
            yield MASTER + name, (wide, shape)


def _other_rule(missing: str, headers: Mapping[str, TensorHeader]) -> bool:
    """Return True if the tensor of this missing state has state of another kind."""
    name = missing.split(".", 2)[2]
    moments = [moment for kind in MOMENTS.values() for moment in kind]
    return any(f"{OPTIMIZER}{moment}.{name}" in headers for moment in moments)
