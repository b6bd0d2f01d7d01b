"""Reads the file of a chain: its stages in order, and their inputs. Pure except for reading files.

    run_dir: runs/k25                       # parent of the stages' run folders
    set: {data.root: s3://bucket/corpus}    # for all stages
    stages:
    - stage: captions
      config: captions_moonlight            # a preset, or a YAML file
      set: {train.steps: 1000}
      take: {weights: /models/Moonlight-16B-A3B, vision: /models/siglip}
    - stage: projector
      config: projector_kimi_k25
      take: {weights: /models/Kimi-K2-Base, vision: captions, part: tower}

A source with the name of an earlier stage means that stage's last checkpoint.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from kimi_pretrain.config import (
    Config,
    ConfigError,
    find_config,
    parse_section,
    read_yaml,
)
from launch.local.versions import load_pinned
from launch.slurm.request import SlurmRequest
from typed_config.section import Section
from typed_config.yaml_text import one_line

_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*")


class Take(Section):
    """Inputs of a stage; each source is an earlier stage, a path or an s3:// URI.

    A key that is not set here keeps its value in the stage's config.
    """

    weights: str | None = None
    """`train.start_from` of the stage. [-; launch/chain/stages_file.py]"""
    vision: str | None = None
    """`train.vision_weights`. [-; launch/chain/stages_file.py]"""
    part: Literal["tower", "projector", "both"] | None = None
    """`train.vision_part`. [-; launch/chain/stages_file.py]"""
    optimizer: Literal["fresh", "keep"] | None = None
    """`train.start_optimizer`. [-; launch/chain/stages_file.py]"""


class Stage(Section):
    """One stage, which is one run."""

    stage: str
    """Name of the stage (`train.stage`) and of its run folder. [-; launch/chain/stages_file.py]"""
    config: str
    """A preset, or a YAML file. [-; launch/chain/stages_file.py]"""
    set: dict[str, Any] = Field(default_factory=dict)
    """Keys of the config, such as data.root, and their values.
    [-; launch/chain/stages_file.py]"""
    take: Take | None = None
    """Inputs of the stage; null: as in its config. [-; launch/chain/stages_file.py]"""
    slurm: SlurmRequest = SlurmRequest()
    """Options of its SLURM job, which override the chain's. [-; launch/slurm/request.py]"""


class Chain(Section):
    """The file of a chain."""

    run_dir: str | None = None
    """Parent folder of the stages' run folders; --run-dir overrides it.
    [-; launch/chain/stages_file.py]"""
    set: dict[str, Any] = Field(default_factory=dict)
    """`set` for all stages; each stage can override it. [-; launch/chain/stages_file.py]"""
    slurm: SlurmRequest = SlurmRequest()
    """Options of every stage's SLURM job. [-; launch/slurm/request.py]"""
    stages: list[Stage] = Field(min_length=1)
    """The stages, in the order in which they run. [-; launch/chain/stages_file.py]"""


# Keys that `take` and the name of a stage determine.
TAKEN = {
    "train.start_from": "take.weights",
    "train.vision_weights": "take.vision",
    "train.vision_part": "take.part",
    "train.start_optimizer": "take.optimizer",
    "train.stage": "stage",
}


@dataclass(frozen=True)
class PlannedStage:
    """A stage with its complete config.

    Attributes:
        name: name of the stage.
        number, count: position from 1, and number of stages.
        folder: run folder; absolute.
        config: config including the inputs; an earlier stage appears as its run folder.
        sources: config key -> name of the earlier stage that provides it.
        slurm: options of its SLURM job.
    """

    name: str
    number: int
    count: int
    folder: Path
    config: Config
    sources: Mapping[str, str]
    slurm: SlurmRequest

    def __str__(self) -> str:
        return f"stage {self.number} of {self.count} {self.name}"


def read_stages(
    path: str | Path, overrides: Sequence[str] = (), run_dir: Path | None = None
) -> list[PlannedStage]:
    """Read a chain's file and the configs of its stages, and check each stage separately.

    Args:
        path: a file, or the name of a shipped file.
        overrides: `section.key=value` for all stages, applied after the file's values.
        run_dir: overrides the file's `run_dir`.

    Raises:
        ConfigError: names the stage and every wrong key.
    """
    file = find_config(path, "stages")
    chain = parse_section(Chain, read_yaml(file, "stages"), str(file))
    if run_dir is None and chain.run_dir is None:
        raise ConfigError(f"{file}: run_dir is missing; say where the stages' runs are kept")
    root = (run_dir or Path(str(chain.run_dir))).expanduser().resolve()
    _check_names(chain, file)
    stages = [_planned(chain, i, root, overrides, file) for i in range(len(chain.stages))]
    _check_places(stages, file)
    return stages


def _check_names(chain: Chain, file: Path) -> None:
    before: set[str] = set()
    for stage in chain.stages:
        if not _NAME.fullmatch(stage.stage):
            raise ConfigError(
                f"{file}: stage {stage.stage!r}: expected a name for its folder, of letters, "
                "digits and ._-"
            )
        if stage.stage.lower() in before:
            raise ConfigError(
                f"{file}: stage {stage.stage!r} stands twice: both would have one run folder"
            )
        before.add(stage.stage.lower())


def _planned(
    chain: Chain, index: int, root: Path, overrides: Sequence[str], file: Path
) -> PlannedStage:
    stage, where = chain.stages[index], f"{file}: stage {chain.stages[index].stage}"
    given = {**chain.set, **stage.set}
    for key in (*given, *(text.partition("=")[0] for text in overrides)):
        for taken, instead in TAKEN.items():
            if key == taken or taken.startswith(f"{key}."):
                raise ConfigError(f"{where}: {key} is not for `set`: write {instead} for {taken}")
    sources = dict(_sources(chain, index, where))
    values: dict[str, Any] = {"train.stage": stage.stage}
    for key, name in TAKEN.items():
        field = name.removeprefix("take.")
        if stage.take is not None and field in stage.take.model_fields_set:
            values[key] = getattr(stage.take, field)
    values |= {key: str(root / source) for key, source in sources.items()}
    try:
        keys = [*_texts(given), *overrides, *_texts(values)]
        config, _ = load_pinned(stage.config, keys, root / stage.stage)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    slurm = chain.slurm.over(stage.slurm)
    return PlannedStage(
        stage.stage, index + 1, len(chain.stages), root / stage.stage, config, sources, slurm
    )


def _sources(chain: Chain, index: int, where: str) -> Iterator[tuple[str, str]]:
    """Yield the config key and the name of each earlier stage that a stage uses."""
    take = chain.stages[index].take or Take()
    names = [stage.stage for stage in chain.stages]
    for key, source in (("weights", take.weights), ("vision", take.vision)):
        if source in names[index:]:
            raise ConfigError(
                f"{where}: take.{key}={source} is no earlier stage; these are "
                f"{', '.join(names[:index]) or 'none'}"
            )
        if source in names:
            yield ("train.start_from" if key == "weights" else "train.vision_weights"), source
        elif source is not None and _NAME.fullmatch(source) and not Path(source).exists():
            raise ConfigError(
                f"{where}: take.{key}={source} is neither an earlier stage "
                f"({', '.join(names[:index]) or 'there is none'}) nor a file or folder"
            )


def _texts(values: Mapping[str, Any]) -> list[str]:
    """Return the values in the form of overrides."""
    return [f"{key}={one_line(value)}" for key, value in values.items()]


def _check_places(stages: Sequence[PlannedStage], file: Path) -> None:
    """Refuse stages that share a checkpoint location, and a source stage that saves nothing."""
    places: dict[str, str] = {}
    for stage in stages:
        place = stage.config.checkpoint.place or str(stage.folder / "checkpoints")
        one = place.rstrip("/") if "://" in place else str(Path(place).resolve())
        if (other := places.setdefault(one, stage.name)) != stage.name:
            raise ConfigError(
                f"{file}: stages {other} and {stage.name} would both save to {place}; give each a "
                "checkpoint.place of its own"
            )
    for stage in stages:
        for source in stage.sources.values():
            giver = next(one for one in stages if one.name == source)
            if giver.config.checkpoint.every is None:
                raise ConfigError(
                    f"{file}: stage {source}: checkpoint.every is null, so it would end without "
                    f"the checkpoint that stage {stage.name} takes over; set checkpoint.every, for "
                    f"example {giver.config.train.steps}"
                )
