"""Initial weights of a run: `train.start_from`, and `train.vision_weights` for the encoder.

Under any layout, each rank reads a part of its tensors and receives the rest from other ranks. If
the run has master copies in the optimizer, they get the most exact numbers stored: another run's
master copies, or weights in a wider dtype. Optimizer, schedule and data start from zero unless
`train.start_optimizer` keeps them (`weights.kept_optimizer`).
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kimi_pretrain.checkpoint.collective_read import (
    broadcast_from_rank0,
    on_all_ranks,
    read_and_broadcast,
)
from kimi_pretrain.checkpoint.errors import CheckpointError
from kimi_pretrain.checkpoint.manifest import INDEX, MANIFEST, share_of_files
from kimi_pretrain.checkpoint.storage_read import Checkpoint, open_checkpoint
from kimi_pretrain.config import Config
from kimi_pretrain.reliability.run_history import check_ended
from kimi_pretrain.weights.compatibility import match_compatible, open_compatible
from kimi_pretrain.weights.kept_optimizer import check_kept
from kimi_pretrain.weights.matching import MASTER, Weights
from kimi_pretrain.weights.shapes import VISION
from kimi_pretrain.weights.siglip_heads import match_heads, open_heads
from kimi_pretrain.weights.vision_weights import VisionWeights, match_vision, open_vision_weights
from kimi_pretrain.weights.weight_reader import WeightReader

if TYPE_CHECKING:
    from kimi_pretrain.engine.mesh import Mesh

log = logging.getLogger("kimi_pretrain.weights")


@dataclass(frozen=True)
class InitialWeights:
    """Sources of a fresh run's weights, matched with its model.

    Attributes:
        weights: weights of `train.start_from`; None if it is not set.
        settings: messages about settings that differ in these weights.
        vision: weights of `train.vision_weights`, which take precedence over `weights`.
        heads: weights of `train.siglip.weights`.
        keep: True if the optimizer state is also loaded from the source of `weights`.
    """

    weights: Weights | None
    settings: tuple[str, ...]
    vision: VisionWeights | None
    keep: bool = False
    heads: Weights | None = None

    def lines(self) -> list[str]:
        """Return the log lines about these sources."""
        lines: list[str] = []
        taken = set[str]()
        if self.vision is not None:
            taken = {f"{name.split('.')[0]}." for name in self.vision.sources}
        if self.weights is not None:
            reader = self.weights.reader
            begin = "" if self.keep else "; optimizer, schedule and data begin anew"
            lines.append(f"weights from {_kind(reader)}, {reader.where}{begin}")
        if self.vision is not None:
            reader, parts = self.vision.reader, _listed(part for part in VISION if part in taken)
            lines.append(f"the {parts} from {_kind(reader)}, {reader.where}")
        if self.heads is not None:
            reader = self.heads.reader
            lines.append(f"SigLIP's heads and text tower from {_kind(reader)}, {reader.where}")
        here = () if self.weights is None else self.weights.sources
        seeded = [p for p in VISION if p not in taken and not any(n.startswith(p) for n in here)]
        if seeded:
            lines.append(f"the {_listed(seeded)} from the seed: not there")
        return lines + [f"set otherwise than there: {text}" for text in self.settings]

    def began_from(self) -> dict[str, dict[str, str]]:
        """Return key -> this project's checkpoint that it names, with its manifest's SHA-256."""
        named = {"train.start_from": self.weights, "train.vision_weights": self.vision}
        readers = {key: weights.reader for key, weights in named.items() if weights is not None}
        return {
            key: {"checkpoint": reader.where, "manifest_sha256": reader.manifest_sha256}
            for key, reader in readers.items()
            if reader.manifest_sha256 is not None
        }

    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint that `train.start_from` names; `fill` has verified it."""
        assert self.weights is not None
        return _checkpoint_of(self.weights)

    def fill(
        self,
        mesh: "Mesh",
        tensors: Mapping[str, Tensor],
        copies: Mapping[str, str],
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        """Fill a run's tensors in place; collective over all ranks.

        Args:
            mesh: mesh of the run.
            tensors: this rank's model and optimizer tensors by checkpoint name. Of the optimizer,
                only the master copies are filled.
            copies: name -> group of ranks with identical copies; see `tensors_to_read`.
            alive: called after each read.

        Raises:
            CheckpointError: a file of the checkpoint is damaged (on all ranks), or a number is not
                finite.
        """
        if mesh.rank == 0:
            for line in self.lines():
                log.info("%s", line)
        left = dict(tensors)
        for key, weights in (
            ("vision_weights", self.vision),
            ("siglip.weights", self.heads),
            ("start_from", self.weights),
        ):
            if weights is None:
                continue
            wanted = {n: t for n, t in left.items() if n.removeprefix(MASTER) in weights.sources}
            left = {name: tensor for name, tensor in left.items() if name not in wanted}
            whole = self.keep and weights is self.weights
            _check_hashes(f"train.{key}", weights, whole, mesh, alive)
            _fill(weights, wanted, mesh, copies, alive)


def _fill(
    weights: Weights,
    wanted: Mapping[str, Tensor],
    mesh: "Mesh",
    copies: Mapping[str, str],
    alive: Callable[[], None],
) -> None:
    """Fill weights and master copies in place."""
    sources, headers = weights.sources, weights.reader.headers

    def place(name: str) -> tuple[str, tuple[str, ...]]:
        source = sources[name.removeprefix(MASTER)]
        return headers[source[0]].file, source

    @torch.no_grad()
    def read(name: str) -> None:
        tensor = wanted[name]
        tensor.copy_(weights.read(name.removeprefix(MASTER), tensor.dtype))
        alive()

    read_and_broadcast(wanted, copies, mesh, read, place)


def open_initial_weights(config: Config, mesh: "Mesh | None" = None) -> InitialWeights | None:
    """Match the sources of a fresh run's weights with its model, from headers only. Collective.

    Rank 0 reads the headers and decides for all ranks which checkpoint of a run is the newest.

    Args:
        mesh: None for a single process.

    Returns:
        None if none of `train.start_from`, `vision_weights` and `siglip.weights` is set.

    Raises:
        FileNotFoundError, CheckpointError: a source is missing or does not fit.
    """
    train = config.train
    named = train.start_from, train.vision_weights, train.siglip and train.siglip.weights
    if not any(named):
        return None
    return broadcast_from_rank0(partial(_opened, config, {}), mesh)


def check_initial_weights(config: Config, planned: Mapping[str, WeightReader]) -> tuple[str, ...]:
    """Check the sources of a fresh run by headers; some may not be written yet.

    Args:
        planned: maps the folder of a run without a checkpoint to the headers of its final
            checkpoint, from `weights.planned`. All other sources are opened.

    Returns:
        messages about model settings that differ in the sources.

    Raises:
        FileNotFoundError, CheckpointError: as `open_initial_weights`.
    """
    return _opened(config, planned).settings


def _opened(config: Config, planned: Mapping[str, WeightReader]) -> InitialWeights:
    train, model = config.train, config.model
    weights, settings, vision, heads = None, (), None, None
    if (uri := train.vision_weights) is not None:
        with _named("train.vision_weights"):
            if (reader := planned.get(uri)) is not None:
                vision = match_vision(reader, uri, train.vision_part, model.vision)
            else:
                check_ended(uri)
                vision = open_vision_weights(uri, train.vision_part, model.vision)
    if (uri := train.start_from) is not None:
        with _named("train.start_from"):
            if (reader := planned.get(uri)) is not None:
                weights, settings = match_compatible(reader, model)
            else:
                check_ended(uri)
                weights, settings = open_compatible(uri, model)
            if train.start_optimizer == "keep":
                settings += check_kept(weights, config, settings)
    if train.siglip is not None and (uri := train.siglip.weights) is not None:
        with _named("train.siglip.weights"):
            if (reader := planned.get(uri)) is not None:
                heads = match_heads(reader, train.siglip, model.vision.width)
            else:
                check_ended(uri)
                heads = open_heads(uri, train.siglip, model.vision.width)
    return InitialWeights(weights, settings, vision, train.start_optimizer == "keep", heads)


@contextmanager
def _named(key: str) -> Iterator[None]:
    try:
        yield
    except (CheckpointError, FileNotFoundError) as error:
        raise type(error)(f"{key}: {error}") from None


def _kind(reader: WeightReader) -> str:
    if reader.manifest is None:
        return "safetensors"
    return f"the checkpoint of step {reader.manifest.state.step}"


def _listed(parts: Iterable[str]) -> str:
    return " and ".join(part.rstrip(".") for part in parts)


def _checkpoint_of(weights: Weights) -> Checkpoint:
    assert weights.reader.manifest is not None
    found = open_checkpoint(weights.reader.where)
    found.know({MANIFEST: weights.reader.manifest.text().encode()})  # the manifest that rank 0 read
    return found


def _check_hashes(
    key: str, weights: Weights, whole: bool, mesh: "Mesh", alive: Callable[[], None]
) -> None:
    """Compare a checkpoint's files with its manifest; each file is hashed on one rank.

    Args:
        whole: check all files, rather than only the files that hold weights.
    """
    manifest, headers = weights.reader.manifest, weights.reader.headers
    if manifest is None:
        return
    checkpoint = _checkpoint_of(weights)
    held = {source for sources in weights.sources.values() for source in sources}
    held |= {MASTER + name for name in weights.sources}
    files = {INDEX, *(headers[name].file for name in held if name in headers)}
    files |= set(manifest.files) if whole else set()
    named = {file: manifest.files[file] for file in files}
    mine = share_of_files(named, mesh.rank, mesh.world_size)
    everyone = on_all_ranks(lambda: checkpoint.verify(mine, lambda _: alive()), mesh)
    if problems := [problem for part in everyone for problem in part]:
        raise CheckpointError(f"{key}: {'; '.join(problems)}")
    weights.reader.mark_verified(files)
