"""Imports a Hugging Face folder as a checkpoint of this project that holds only weights.

All checks run before anything is written. One file at a time is in memory. The files are written
like those of a checkpoint: to a folder or an object store, with hashes, and the manifest last.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from kimi_pretrain.checkpoint.disk_write import StagedFile, staged_file
from kimi_pretrain.checkpoint.errors import CheckpointError
from kimi_pretrain.checkpoint.manifest import (
    INDEX,
    Fingerprint,
    RunState,
    installed_versions,
    manifest_of,
    step_name,
)
from kimi_pretrain.checkpoint.sharding import file_name, index_text, split_into_files
from kimi_pretrain.checkpoint.staging import StagingBuffers
from kimi_pretrain.checkpoint.storage_read import open_place
from kimi_pretrain.checkpoint.storage_write import StorageWriter, open_storage_writer
from kimi_pretrain.config import Config
from kimi_pretrain.weights.compatibility import open_compatible
from kimi_pretrain.weights.matching import Weights, match
from kimi_pretrain.weights.shapes import BIAS, VISION, Shapes, model_shapes
from kimi_pretrain.weights.weight_reader import and_more, open_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
MOST_FILE_MIB = 1024  # a whole file is held in memory


@dataclass(frozen=True)
class ImportPlan:
    """Plan of an import that has passed all checks.

    Attributes:
        vision: weights of the encoder from a different folder.
        sizes: tensor -> bytes.
        absent: parts of the model that are left out.
    """

    config: Config
    weights: Weights
    vision: Weights | None
    sizes: Mapping[str, int]
    absent: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Total bytes of all tensors."""
        return sum(self.sizes.values())

    def read(self, name: str) -> Tensor:
        """Return a tensor in the precision of the run."""
        weights = self.weights if name in self.weights.sources else self.vision
        assert weights is not None, name
        return weights.read(name, dtype_of(name, self.config))


def dtype_of(name: str, config: Config) -> torch.dtype:
    """Return the dtype in which a run holds a tensor."""
    return torch.float32 if name.endswith(BIAS) else DTYPES[config.train.dtype]


def plan(uri: str | os.PathLike[str], config: Config, vision: str | None = None) -> ImportPlan:
    """Match a folder with a config; only headers are read.

    Args:
        uri: folder or s3:// URI of safetensors.
        config: config of the runs that will start from the import.
        vision: folder with the encoder's weights under Kimi K2.5's names, if `uri` has none.

    Raises:
        FileNotFoundError: there is nothing at the URI.
        ValueError: the weights do not fit, or config.json and the config disagree on settings.
    """
    weights, settings = open_compatible(uri, config.model)
    if weights.reader.manifest is not None:
        raise CheckpointError(f"{weights.reader.where} is a checkpoint already")
    if settings:
        differing = settings[0] + and_more(len(settings) - 1)
        raise CheckpointError(f"{differing}: set the configuration's keys to agree")
    shapes = model_shapes(config.model)
    encoder = None
    if vision is not None:
        if not weights.absent:
            raise ValueError(f"--vision {vision}: {uri} has an encoder of its own")
        encoder = _encoder(vision, shapes)
    names = [*weights.sources, *(encoder.sources if encoder else ())]
    sizes = {n: dtype_of(n, config).itemsize * prod(shapes[n]) for n in sorted(names)}
    return ImportPlan(config, weights, encoder, sizes, () if encoder else weights.absent)


def _encoder(uri: str, shapes: Shapes) -> Weights:
    """Match only the encoder; a language model in the same folder is ignored."""
    reader = open_weights(uri)
    headers = {name: at for name, at in reader.headers.items() if name.startswith(VISION)}
    if not headers:
        raise CheckpointError(f"--vision {uri}: no {' or '.join(VISION)} there")
    wanted = {name: shape for name, shape in shapes.items() if name.startswith(VISION)}
    return match(replace(reader, headers=headers), wanted)


def write(found: ImportPlan, place: str, progress: Callable[[int], None] = lambda _: None) -> str:
    """Write the checkpoint of step 0 below a location; return its URI.

    Raises:
        CheckpointError: a checkpoint exists already, writing fails, or a number is not finite.
    """
    target = open_place(place)
    if target.steps():
        raise CheckpointError(f"{place} holds checkpoints already: choose another place")
    if begun := [name for name in target.folders() if name.startswith(step_name(0))]:
        raise CheckpointError(
            f"{place}/{begun[0]} is there already, left by an import that was killed or still at "
            "work: remove it, or choose another place"
        )
    writer = open_storage_writer(target)
    writer.open_step(0)
    try:
        limit = min(found.config.checkpoint.file_mib, MOST_FILE_MIB) << 20
        weight_map: dict[str, str] = {}
        prints: dict[str, Fingerprint] = {}
        for number, names in enumerate(split_into_files(found.sizes, limit)):
            file = file_name(0, number)
            prints[file] = _write_file(found, writer, file, names, progress)
            weight_map |= dict.fromkeys(names, file)
        index = index_text(dict(sorted(weight_map.items())), found.nbytes).encode()
        prints[INDEX] = writer.write(0, INDEX, staged_file(index), lambda _: None)
        versions = installed_versions()
        manifest = manifest_of(found.config, RunState(0, 0), prints, versions, "weights")
        return writer.commit(0, manifest.text(), prints)
    except BaseException:
        writer.remove_torn(0)
        raise


def _write_file(
    found: ImportPlan,
    writer: StorageWriter,
    file: str,
    names: list[str],
    progress: Callable[[int], None],
) -> Fingerprint:
    shapes, config = model_shapes(found.config.model), found.config
    shaped = {
        name: torch.empty(shapes[name], dtype=dtype_of(name, config), device="meta")
        for name in names
    }
    staging = StagingBuffers({file: names}, shaped, {}, torch.device("cpu"))
    try:
        for name in names:  # only one tensor at a time is in memory twice
            staging.copy({name: found.read(name)}, name.__eq__)
        return writer.write(0, file, StagedFile(staging.fds[file], staging.sizes[file]), progress)
    finally:
        staging.close()
