"""What a stage keeps of the optimizer of the stage before it: `train.start_optimizer: keep`.

K2's learning rate falls across the border from 4k to 32k context (arXiv:2507.20534, section 2.5):
one optimizer, one schedule, other rows. So momentum, moments, master copies, the count of updates
and that of steps go on. All that could not is found by headers, before a process is started.
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
# The one setting of a model that a longer context changes: attention goes on from near its old one.
_YARN = "model.language.yarn "
# Of an update's formula; the learning rate is compared as it comes out.
_UPDATE = ("momentum", "nesterov", "adam_betas", "adam_eps", "weight_decay", "groups")
_JUMP = 0.01  # of the learning rate


def check_kept(weights: Weights, config: Config, settings: Sequence[str] = ()) -> tuple[str, ...]:
    """Refuse weights whose optimizer cannot go on in this run; headers are read, no tensor.

    Args:
        settings: messages about settings of the model that differ there (`match_compatible`).

    Returns:
        messages about a learning rate that jumps at the border, and about what else of the
        optimizer is set otherwise.

    Raises:
        CheckpointError: names what cannot be kept.
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
    """Refuse another batch where the schedule counts tokens: its places would be other steps."""
    here = config.tokens_per_step()
    there = (manifest.training or {}).get("tokens_per_step")
    # Of a checkpoint that does not say it: any other number moves what is counted in tokens.
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
    """Yield what differs of the optimizer's settings, and the learning rate where it jumps."""
    training = manifest.training or {}
    try:
        there = OptimConfig(**training["optim"])
    except (KeyError, ValueError):  # of another version
        return
    here, updates = config.optim, manifest.state.optimizer_steps
    if updates:  # 0 of a checkpoint that is not written yet and whose last step the data decide
        tokens = training["tokens_per_step"]
        last, unbroken = (learning_rate(n, there, tokens) for n in (updates - 1, updates))
        begin = learning_rate(updates, here, config.tokens_per_step())
        if not any(math.isclose(begin, rate, rel_tol=_JUMP) for rate in (last, unbroken)):
            yield f"learning rate {last:g} in its last update, {begin:g} in the first one here"
    for key in _UPDATE:
        if (was := getattr(there, key)) != (now := getattr(here, key)):
            yield f"optim.{key} was {was!r}, here it is {now!r}"


def _places(config: Config, tokens: int) -> list[tuple[float, float]]:
    """Return first and last step of each stretch of the schedule, in steps of so many tokens."""
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
    """Yield name, type and shape of the whole state of a run's optimizer."""
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
    """Whether the tensor of this state has one, of another kind."""
    name = missing.split(".", 2)[2]
    moments = [moment for kind in MOMENTS.values() for moment in kind]
    return any(f"{OPTIMIZER}{moment}.{name}" in headers for moment in moments)
