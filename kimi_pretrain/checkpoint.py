"""Checkpoints: every tensor under its layout-independent name, committed by a manifest.

Tensors are written with torch's distributed checkpoint format, each by one rank that holds it.
Because a name means the same whole matrix in every layout, a checkpoint of PP2 x DP2 loads into
one process and the other way round. A checkpoint is complete when its folder has its final name
and a manifest.json inside, which lists every file with its SHA-256; a folder named *.partial was
interrupted and is never taken.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from kimi_pretrain.config import Config
from kimi_pretrain.engine.mesh import Mesh

SCHEMA = 1


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: names the file, what was found and what was expected."""


@dataclass(frozen=True)
class RunState:
    """What a run remembers besides tensors.

    Attributes:
        step: steps done.
        optimizer_steps: updates done (skipped steps do not count).
        loader: the loader's state.
    """

    step: int
    optimizer_steps: int
    loader: dict[str, Any]


def step_folder(root: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint under `root`."""
    return root / f"step_{step:08d}"


def save(
    root: Path, config: Config, mesh: Mesh, tensors: dict[str, Tensor], state: RunState
) -> Path:
    """Write a checkpoint from all ranks; it appears under its name only when complete.

    Args:
        root: the run's checkpoint folder, shared by all ranks.
        tensors: what this rank holds, by name; equal names hold equal values on all ranks.

    Returns:
        the folder of the checkpoint.
    """
    final = step_folder(root, state.step)
    partial = final.with_suffix(".partial")
    if mesh.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    mesh.barrier()
    save_sharded(dict(tensors), checkpoint_id=str(partial))
    mine = sorted(partial.glob(f"__{mesh.rank}_*.distcp"))
    if mesh.rank == 0:
        mine.append(partial / ".metadata")
    hashes: dict[str, dict[str, Any]] = {}
    for part in mesh.gather({file.name: _fingerprint(file) for file in mine}):
        hashes.update(part)  # type: ignore[call-overload]
    if mesh.rank == 0:
        manifest = {
            "schema": SCHEMA,
            "state": vars(state),
            "model": config.model.model_dump(mode="json"),
            "dtype": config.train.dtype,
            "layout": config.layout.model_dump(mode="json"),
            "files": dict(sorted(hashes.items())),
        }
        _write_json(partial / "manifest.json", manifest)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
    mesh.barrier()
    return final


def read_manifest(folder: Path, config: Config) -> RunState:
    """Check that a checkpoint is complete and of this model; return what it remembers.

    Raises:
        CheckpointError: no manifest, another schema, another model, or files missing.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such checkpoint folder")
    if not (folder / "manifest.json").is_file():
        raise CheckpointError(
            f"{folder}: no manifest.json, so this checkpoint was never completed; take another"
        )
    manifest = json.loads((folder / "manifest.json").read_text())
    if manifest["schema"] != SCHEMA:
        raise CheckpointError(
            f"{folder}: checkpoint schema {manifest['schema']}, this code reads {SCHEMA}"
        )
    wanted = config.model.model_dump(mode="json")
    if difference := _first_difference(manifest["model"], wanted, "model"):
        raise CheckpointError(f"{folder}: this is a checkpoint of another model: {difference}")
    if manifest["dtype"] != config.train.dtype:
        # Loading would convert silently: masters would be dropped, or missing.
        raise CheckpointError(
            f"{folder}: written with train.dtype={manifest['dtype']}, this run has "
            f"train.dtype={config.train.dtype}"
        )
    for name, fingerprint in manifest["files"].items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != fingerprint["bytes"]:
            found = f"{file.stat().st_size} bytes" if file.is_file() else "missing"
            raise CheckpointError(f"{file}: {found}, expected {fingerprint['bytes']} bytes")
    return RunState(**manifest["state"])


def load(folder: Path, config: Config, mesh: Mesh, tensors: dict[str, Tensor]) -> RunState:
    """Fill this rank's tensors in place from a checkpoint of any layout.

    Every file is verified against its SHA-256 first, each by one rank.

    Raises:
        CheckpointError: see `read_manifest`; or a file whose bytes changed, or a missing tensor.
    """
    state = read_manifest(folder, config)
    files = json.loads((folder / "manifest.json").read_text())["files"]
    problems = [
        f"{folder / name}: sha256 {found[:16]}..., expected {fingerprint['sha256'][:16]}..."
        for number, (name, fingerprint) in enumerate(sorted(files.items()))
        if number % mesh.world_size == mesh.rank
        and (found := _fingerprint(folder / name)["sha256"]) != fingerprint["sha256"]
    ]
    if found := [problem for part in mesh.gather(problems) for problem in part]:  # type: ignore
        raise CheckpointError("; ".join(found))
    held = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    _check_tensors(folder, held, tensors)
    load_sharded(dict(tensors), checkpoint_id=str(folder))
    return state


def _check_tensors(folder: Path, held: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are not there, or of another shape or type, before any is changed."""
    if missing := sorted(set(tensors) - set(held)):
        first, hint = missing[0], ""
        if first.startswith("optim."):
            tensor = first.split(".", 2)[-1]
            kept = sorted(n for n in held if n.startswith("optim.") and n.endswith(f".{tensor}"))
            hint = f"; of this tensor it holds {kept}: written with another optim.matrices?"
        raise CheckpointError(
            f"{folder}: {len(missing)} tensors are missing, first {first!r}{hint}"
        )
    for name, tensor in sorted(tensors.items()):
        found = tuple(held[name].size), held[name].properties.dtype
        if found != (tuple(tensor.shape), tensor.dtype):
            raise CheckpointError(
                f"{folder}: {name!r} is {found[1]} {found[0]}, this run has {tensor.dtype} "
                f"{tuple(tensor.shape)}: a checkpoint of another model or of other settings"
            )


def hash_tensors(tensors: dict[str, Tensor], mesh: Mesh) -> dict[str, str]:
    """Return name -> SHA-256 of every tensor of the whole job, on every rank.

    Raises:
        RuntimeError: replicas of one tensor differ, which must never happen.
    """
    mine = {name: _sha256(tensor) for name, tensor in tensors.items()}
    hashes: dict[str, str] = {}
    for rank, part in enumerate(mesh.gather(mine)):
        for name, digest in part.items():  # type: ignore[union-attr]
            if hashes.setdefault(name, digest) != digest:
                raise RuntimeError(f"rank {rank} holds another {name} than the ranks before it")
    return dict(sorted(hashes.items()))


def _sha256(tensor: Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    head = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return hashlib.sha256(head + raw.tobytes()).hexdigest()


def _fingerprint(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def _write_json(file: Path, value: Any) -> None:
    with file.open("w") as stream:
        json.dump(value, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def _first_difference(found: Any, wanted: Any, where: str) -> str | None:
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in sorted({*found, *wanted}):
            if difference := _first_difference(found.get(key), wanted.get(key), f"{where}.{key}"):
                return difference
        return None
    return None if found == wanted else f"{where} is {found!r}, this run has {wanted!r}"


def digest(value: Any) -> str:
    """Return the SHA-256 of plain values (dicts, lists, numbers, strings), by their JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
