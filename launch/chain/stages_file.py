"""The file of a chain: its stages in order, and what each takes over. Pure but for reading files.

    run_dir: runs/k25                       # each stage's run folder lies in it, under its name
    set: {data.root: s3://bucket/corpus}    # of all stages
    stages:
    - stage: captions
      config: captions_moonlight            # a preset, or a YAML file
      set: {train.steps: 1000}
      take: {weights: /models/Moonlight-16B-A3B, vision: /models/siglip}
    - stage: projector
      config: projector_kimi_k25
      take: {weights: /models/Kimi-K2-Base, vision: captions, part: tower}

A source that is the name of an earlier stage stands for that one's last checkpoint.
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
    """What a stage takes over; each source is an earlier stage, a path or an s3:// URI.

    What is not written here stays as the stage's configuration says.
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
    """One stage: a run."""

    stage: str
    """Its name: `train.stage`, and the name of its run folder. [-; launch/chain/stages_file.py]"""
    config: str
    """A preset, or a YAML file. [-; launch/chain/stages_file.py]"""
    set: dict[str, Any] = Field(default_factory=dict)
    """Keys of the configuration, such as data.root, and their values.
    [-; launch/chain/stages_file.py]"""
    take: Take | None = None
    """What it takes over; null: what its configuration says. [-; launch/chain/stages_file.py]"""
    slurm: SlurmRequest = SlurmRequest()
    """Of its SLURM job, in place of the chain's. [-; launch/slurm/request.py]"""


class Chain(Section):
    """The whole file."""

    run_dir: str | None = None
    """Where the stages' run folders lie; --run-dir comes before it.
    [-; launch/chain/stages_file.py]"""
    set: dict[str, Any] = Field(default_factory=dict)
    """As that of a stage, for all; a stage's own come after it. [-; launch/chain/stages_file.py]"""
    slurm: SlurmRequest = SlurmRequest()
    """Of every stage's SLURM job. [-; launch/slurm/request.py]"""
    stages: list[Stage] = Field(min_length=1)
    """In the order in which they run. [-; launch/chain/stages_file.py]"""


# Keys that `take` and the name of a stage decide.
TAKEN = {
    "train.start_from": "take.weights",
    "train.vision_weights": "take.vision",
    "train.vision_part": "take.part",
    "train.start_optimizer": "take.optimizer",
    "train.stage": "stage",
}


@dataclass(frozen=True)
class PlannedStage:
    """A stage with its whole configuration.

    Attributes:
        name: of the stage.
        number, count: its place, from 1, among so many.
        folder: its run folder; absolute.
        config: with what it takes over: an earlier stage as that one's run folder.
        sources: the names of the earlier stages that it takes from, by the key.
        slurm: of its job.
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
    """Read a chain's file and the configurations of its stages, and check each by itself.

    Args:
        path: a file, or the name of a shipped one.
        overrides: `section.key=value`, for all stages, after the file's own.
        run_dir: in place of the file's.

    Raises:
        ConfigError: names the stage and every key that is wrong.
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
    """Yield the key and the name of each earlier stage that a stage takes from."""
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
    """Return the values as overrides."""
    return [f"{key}={one_line(value)}" for key, value in values.items()]


def _check_places(stages: Sequence[PlannedStage], file: Path) -> None:
    """Refuse two stages that save to one place, and one that hands on and saves nothing."""
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
