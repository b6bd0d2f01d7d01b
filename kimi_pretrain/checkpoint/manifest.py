"""manifest.json: state, model and files of a checkpoint; written last, it marks completeness.

These are pure functions between text and values. A manifest is untrusted, so it is checked before
use: file names must be plain names inside the folder, numbers must be numbers, and oversized text
is not parsed at all. The manifest ends with a SHA-256 of its own values, because no other file of a
checkpoint holds the step and the loader's position.
"""

import hashlib
import json
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal

from kimi_pretrain.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    from kimi_pretrain.config import Config

SCHEMA = 3
UNHASHED_SCHEMA = 2  # the same, but without a hash of the values
MANIFEST = "manifest.json"
INDEX = "index.json"
_HASH = "sha256"
# A manifest has one entry per file and an index one per tensor; a million entries fit.
MOST_MANIFEST_BYTES = 64 << 20
MOST_INDEX_BYTES = 512 << 20

_STEP = re.compile(r"step_(\d{8,})")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")

# Packages whose versions a manifest records.
PACKAGES = ("kimi-pretrain", "torch", "megatron-core", "numpy")

Contents = Literal["all", "weights"]


@dataclass(frozen=True)
class RunState:
    """State of a run other than tensors.

    Attributes:
        step: number of completed steps.
        optimizer_steps: number of completed updates (skipped steps do not count).
        loader: the loader's state, as plain values.
        losses: the most recent losses, against which loss spikes are detected.
        skips_in_row: number of consecutive steps up to this one that the guard skipped.
    """

    step: int
    optimizer_steps: int
    loader: dict[str, Any] = field(default_factory=dict)
    losses: tuple[float, ...] = ()
    skips_in_row: int = 0


@dataclass(frozen=True)
class Fingerprint:
    """Size and SHA-256 (64 hexadecimal digits) of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Contents of manifest.json.

    Attributes:
        state: state of the run at the save.
        model: `config.model` as plain values.
        dtype: `config.train.dtype`.
        layout: `config.layout` as plain values; only for information.
        contents: "all" for a checkpoint that a run can resume from, or "weights" for only the
            model's weights.
        versions: package -> version at the save.
        files: name -> fingerprint of every other file of the folder, including index.json.
        training: see `training_of`. None for earlier versions, which did not record it.
        hashed: True if the manifest contained a hash of its values.
    """

    state: RunState
    model: dict[str, Any]
    dtype: str
    layout: dict[str, Any]
    contents: Contents
    versions: dict[str, str | None]
    files: dict[str, Fingerprint]
    training: dict[str, Any] | None = None
    hashed: bool = field(default=True, compare=False)

    def text(self) -> str:
        """Return the JSON text of manifest.json."""
        files = {name: asdict(self.files[name]) for name in sorted(self.files)}
        values = {"schema": SCHEMA, **asdict(self), "files": files}
        del values["hashed"]
        if self.training is None:  # absent in the manifest that was read
            del values["training"]
        return json.dumps(values | {_HASH: digest(values)}, indent=1) + "\n"


def manifest_of(
    config: "Config",
    state: RunState,
    files: Mapping[str, Fingerprint],
    versions: Mapping[str, str | None],
    contents: Contents = "all",
) -> Manifest:
    """Return the manifest of a run's checkpoint."""
    return Manifest(
        state=state,
        model=config.model.model_dump(mode="json"),
        dtype=config.train.dtype,
        layout=config.layout.model_dump(mode="json"),
        contents=contents,
        versions=dict(versions),
        files=dict(files),
        training=training_of(config),
    )


def training_of(config: "Config") -> dict[str, Any]:
    """Return the training settings of a run; a resume must have the same stage and trained parts.

    A resume may change `tokens_per_step` and `optim`. A stage that keeps the optimizer computes its
    position in the schedule and the learning rate from them.
    """
    found = {
        "stage": config.train.stage,
        "frozen": sorted(set(config.train.frozen)),
        "tokens_per_step": config.tokens_per_step(),
        "optim": config.optim.model_dump(mode="json"),
    }
    if (siglip := config.train.siglip) is not None:  # the initial weights do not matter any more
        found["siglip"] = siglip.model_dump(mode="json", exclude={"weights", "texts_per_chunk"})
    return found


def installed_versions(packages: Iterable[str] = PACKAGES) -> dict[str, str | None]:
    """Return package -> version, or None if not installed; Python is included."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def digest(value: Any) -> str:
    """Return the SHA-256 of the JSON of plain values (dicts, lists, numbers, strings)."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def share_of_files(files: Mapping[str, Fingerprint], rank: int, world_size: int) -> list[str]:
    """Return the files that one rank hashes; all ranks hash about the same number of bytes."""
    order = sorted(files, key=lambda name: (-files[name].bytes, name))
    return order[rank::world_size]


def step_name(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step in the name of a checkpoint folder, or None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def check_file_name(name: object, where: str) -> str:
    """Return `name` if it is a plain name, which cannot escape the folder.

    Raises:
        CheckpointError: it contains a separator, begins with a dot, or is not a string.
    """
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise CheckpointError(
            f"{where}: {name!r} is no file name of a checkpoint; expected letters, digits, '_', "
            "'-' and '.', without '/' or a leading '.'; do not use this checkpoint"
        )
    return name


def parse_json(text: str | bytes, where: str, most: int) -> Any:
    """Return the values of an untrusted JSON text.

    Raises:
        CheckpointError: it is larger than `most` bytes, or not JSON.
    """
    if len(text) > most:
        raise CheckpointError(f"{where}: {len(text)} bytes, expected at most {most}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{where}: not JSON ({reason}); the file is damaged, take another checkpoint"
        ) from None


def parse_manifest(text: str | bytes, where: str) -> Manifest:
    """Parse a manifest.json; `where` is its path, for messages.

    Raises:
        CheckpointError: the schema is unknown, the values do not match their hash, or a value is
            invalid in this schema.
    """
    values = parse_json(text, where, MOST_MANIFEST_BYTES)
    schema = values.get("schema") if isinstance(values, dict) else None
    if type(schema) is not int or schema not in (UNHASHED_SCHEMA, SCHEMA):
        raise CheckpointError(
            f"{where}: checkpoint schema {schema!r}, this code reads {UNHASHED_SCHEMA} and {SCHEMA}"
        )
    _check_hash(values, schema, where)
    state = _part(values, "state", dict, where)
    versions = _part(values, "versions", dict, where)
    contents = _part(values, "contents", str, where)
    if contents not in ("all", "weights"):
        raise CheckpointError(f"{where}: contents is {contents!r}, expected 'all' or 'weights'")
    return Manifest(
        state=_parse_state(state, where),
        model=_part(values, "model", dict, where),
        dtype=_part(values, "dtype", str, where),
        layout=_part(values, "layout", dict, where),
        contents=contents,
        versions={str(name): version for name, version in versions.items()},
        files=_parse_files(_part(values, "files", dict, where), where),
        training=_part(values, "training", dict, where) if "training" in values else None,
        hashed=schema == SCHEMA,
    )


def check_step(manifest: Manifest, folder: str, where: str) -> None:
    """Check that the step of a manifest matches the name of its folder, if this names a step.

    Raises:
        CheckpointError: the steps differ; the message gives both.
    """
    step = manifest.state.step
    if step_of(folder) not in (None, step):
        raise CheckpointError(
            f"{where}: state.step is {step}, expected that of its folder, {folder}; the file is "
            "damaged or of another checkpoint, take another checkpoint"
        )


def parse_index(text: str | bytes, where: str, files: Mapping[str, object]) -> dict[str, str]:
    """Return tensor -> file from an index.json; `files` are the files listed in the manifest.

    Raises:
        CheckpointError: there is no weight map, or the manifest does not list a file.
    """
    values = parse_json(text, where, MOST_INDEX_BYTES)
    if not isinstance(values, dict):
        raise CheckpointError(f"{where}: expected an object with a weight_map")
    weight_map = _part(values, "weight_map", dict, where)
    for name, file in weight_map.items():
        if check_file_name(file, where) not in files:
            raise CheckpointError(f"{where}: {name!r} is in {file!r}, which the manifest lacks")
    return weight_map


def check_fits(manifest: Manifest, config: "Config", where: str) -> None:
    """Check that model and precision of a checkpoint match the configuration.

    Raises:
        CheckpointError: they differ; the message names the first key that differs, with both
            values.
    """
    wanted = config.model.model_dump(mode="json")
    if difference := first_difference(manifest.model, wanted, "model"):
        raise CheckpointError(f"{where}: this is a checkpoint of another model: {difference}")
    if manifest.dtype != config.train.dtype:
        # Loading would convert silently and drop or miss the masters.
        raise CheckpointError(
            f"{where}: written with train.dtype={manifest.dtype}, this run has "
            f"train.dtype={config.train.dtype}"
        )


def check_resumes(manifest: Manifest, config: "Config", where: str) -> None:
    """Check that a resume has the same stage and the same frozen parts as the checkpoint.

    A part that was frozen has no optimizer state, and a part that is frozen now would lose its
    state.

    Raises:
        CheckpointError: they differ; the message names the key, with both values.
    """
    if manifest.training is None:
        return
    here = training_of(config)
    for key in ("stage", "frozen", "siglip"):
        found, wanted = manifest.training.get(key), here.get(key)
        if found != wanted:
            raise CheckpointError(
                f"{where}: written with train.{key}={_told(found)}, this run has train.{key}="
                f"{_told(wanted)}: a resume goes on with the same stage; begin the next one in "
                "a --run-dir of its own, with train.start_from"
            )


def _told(value: Any) -> str:
    """Return a plain value in the syntax of the command line."""
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_told(one)}" for key, one in value.items()) + "}"
    return "null" if value is None else str(value)


def first_difference(found: Any, wanted: Any, where: str) -> str | None:
    """Return the first difference between two plain values, with both sides, or None."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in sorted({*found, *wanted}):
            if difference := first_difference(found.get(key), wanted.get(key), f"{where}.{key}"):
                return difference
        return None
    return None if found == wanted else f"{where} is {found!r}, this run has {wanted!r}"


def _part(values: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    value = values.get(key)
    if not isinstance(value, kind):
        raise CheckpointError(
            f"{where}: {key} is {type(value).__name__}, expected {kind.__name__}; the file is "
            "damaged, take another checkpoint"
        )
    return value


def _check_hash(values: dict[str, Any], schema: int, where: str) -> None:
    """Check the hash of the values.

    The schema must agree with the presence of a hash, so that no single bit flip turns a hashed
    manifest into one of the earlier schema without a hash.
    """
    found = values.pop(_HASH, None)
    if schema == UNHASHED_SCHEMA and found is None:
        return
    wanted = digest(values)
    if schema == UNHASHED_SCHEMA or found != wanted:
        raise CheckpointError(
            f"{where}: schema {schema} with {_HASH} {str(found)[:16]}, its values have "
            f"{wanted[:16]}...; the file is damaged, take another checkpoint"
        )


def _parse_state(values: Mapping[str, Any], where: str) -> RunState:
    counts: dict[str, Any] = {key: values.get(key) for key in ("step", "optimizer_steps")}
    counts["skips_in_row"] = values.get("skips_in_row", 0)
    for key, value in counts.items():
        if type(value) is not int or value < 0:
            raise CheckpointError(f"{where}: state.{key} is {value!r}, expected a whole number")
    losses = values.get("losses", [])
    if not isinstance(losses, list) or not all(type(loss) in (int, float) for loss in losses):
        raise CheckpointError(f"{where}: state.losses is {losses!r}, expected a list of numbers")
    loader = _part(values, "loader", dict, where)
    if loader.get("step", counts["step"]) != counts["step"]:
        raise CheckpointError(
            f"{where}: state.step is {counts['step']}, the loader's is {loader['step']!r}; the "
            "file is damaged, take another checkpoint"
        )
    return RunState(**counts, loader=loader, losses=tuple(float(loss) for loss in losses))


def _parse_files(values: Mapping[str, Any], where: str) -> dict[str, Fingerprint]:
    files = {}
    for name, found in values.items():
        check_file_name(name, where)
        size = found.get("bytes") if isinstance(found, dict) else None
        digest = found.get("sha256") if isinstance(found, dict) else None
        if type(size) is not int or size < 0 or not isinstance(digest, str):
            raise CheckpointError(f"{where}: {name!r} is {found!r}, expected bytes and sha256")
        if not _SHA256.fullmatch(digest):
            raise CheckpointError(f"{where}: {name!r} has sha256 {digest!r}, expected 64 digits")
        files[name] = Fingerprint(size, digest)
    if INDEX not in files or MANIFEST in files:
        raise CheckpointError(f"{where}: expected {INDEX} among the files, and not {MANIFEST}")
    return files
