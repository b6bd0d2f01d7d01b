"""A run's first weights from a checkpoint or a Hugging Face folder: `train.start_from`.

Weights alone: optimizer, schedule and data start from zero. Under any layout each rank reads a part
of what it holds, and receives the rest from others. Master copies of the optimizer, where the run
has some, take the most exact numbers that are stored: another run's masters, or the weights in a
wider type.
"""

import logging
from collections.abc import Callable, Mapping
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
from kimi_pretrain.checkpoint.manifest import MANIFEST, share_of_files
from kimi_pretrain.checkpoint.storage_read import open_checkpoint
from kimi_pretrain.config import Config
from kimi_pretrain.weights.compatibility import open_compatible
from kimi_pretrain.weights.matching import MASTER, Weights
from kimi_pretrain.weights.shapes import VISION

if TYPE_CHECKING:
    from kimi_pretrain.engine.mesh import Mesh

log = logging.getLogger("kimi_pretrain.weights")


@dataclass(frozen=True)
class InitialWeights:
    """Where a fresh run's weights come from, matched with its model.

    Attributes:
        settings: messages about settings that differ there.
        keep_encoder: `train.vision_weights`, which the encoder has then.
    """

    weights: Weights
    settings: tuple[str, ...]
    keep_encoder: str | None

    def lines(self) -> list[str]:
        """Return what to log of it."""
        reader = self.weights.reader
        kind = "a Hugging Face folder"
        if reader.manifest is not None:
            kind = f"the checkpoint of step {reader.manifest.state.step}"
        lines = [f"weights from {kind}, {reader.where}; optimizer, schedule and data begin anew"]
        if self.keep_encoder is not None:
            lines.append(f"the encoder from train.vision_weights={self.keep_encoder}")
        elif self.weights.absent:
            lines.append(f"no {' or '.join(self.weights.absent)} there: the encoder from the seed")
        return lines + [f"set otherwise than there: {text}" for text in self.settings]

    def fill(
        self,
        mesh: "Mesh",
        tensors: Mapping[str, Tensor],
        copies: Mapping[str, str],
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        """Fill a run's tensors in place; all ranks call it.

        Args:
            mesh: of the run.
            tensors: what this rank holds by checkpoint name, of the model and of the optimizer: of
                this the master copies are filled.
            copies: name -> group of ranks that hold identical copies; see `tensors_to_read`.
            alive: called whenever something was read.

        Raises:
            CheckpointError: a file of the checkpoint is damaged (on all ranks), or a number is not
                finite.
        """
        _check_hashes(self.weights, mesh, alive)
        self.weights.reader.mark_verified()
        if mesh.rank == 0:
            for line in self.lines():
                log.info("%s", line)
        wanted = {name: tensor for name, tensor in tensors.items() if self._takes(name)}
        sources, headers = self.weights.sources, self.weights.reader.headers

        def place(name: str) -> tuple[str, tuple[str, ...]]:
            source = sources[name.removeprefix(MASTER)]
            return headers[source[0]].file, source

        @torch.no_grad()
        def read(name: str) -> None:
            tensor = wanted[name]
            tensor.copy_(self.weights.read(name.removeprefix(MASTER), tensor.dtype))
            alive()

        read_and_broadcast(wanted, copies, mesh, read, place)

    def _takes(self, name: str) -> bool:
        """Whether a tensor of the run, a weight or its master copy, is filled."""
        weight = name.removeprefix(MASTER)
        if self.keep_encoder is not None and weight.startswith(VISION):
            return False
        return weight in self.weights.sources


def open_initial_weights(config: Config, mesh: "Mesh | None" = None) -> InitialWeights | None:
    """Match `train.start_from` with the model, by headers alone; None: it is not set. Collective.

    Rank 0 reads the headers, and decides which checkpoint is the newest of a run, for all.

    Args:
        mesh: None: this process alone.

    Raises:
        FileNotFoundError, CheckpointError: it is not there, or does not fit.
    """
    uri, encoder = config.train.start_from, config.train.vision_weights
    if uri is None:
        return None
    try:
        weights, settings = broadcast_from_rank0(partial(open_compatible, uri, config.model), mesh)
        return InitialWeights(weights, settings, encoder)
    except (CheckpointError, FileNotFoundError) as error:
        raise type(error)(f"train.start_from: {error}") from None


def _check_hashes(weights: Weights, mesh: "Mesh", alive: Callable[[], None]) -> None:
    """Compare a checkpoint's files with its manifest, each on one rank."""
    manifest = weights.reader.manifest
    if manifest is None:
        return
    checkpoint = open_checkpoint(weights.reader.where)
    checkpoint.know({MANIFEST: manifest.text().encode()})  # as rank 0 has read it
    mine = share_of_files(manifest, mesh.rank, mesh.world_size)
    everyone = on_all_ranks(lambda: checkpoint.verify(mine, lambda _: alive()), mesh)
    if problems := [problem for part in everyone for problem in part]:
        raise CheckpointError(f"train.start_from: {'; '.join(problems)}")
