"""Files that the ranks of `verify dep` write and the comparison reads.

FOLDER/clean/    the step without a fault; FOLDER/FAULT/ for the step with a fault
  facts.json                     losses, counts and the vision plan, or why a fault is impossible
  gradients_RANK_N.safetensors   gradients of the tensors that a rank owns

Nothing is gathered. Each rank writes the tensors that it owns into files of a few hundred
megabytes, and tensors are read back one at a time.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from kimi_pretrain.verify.dep_compare import (
    StepComparison,
    StepFacts,
    StepRoutes,
    Tolerance,
    compare,
)
from kimi_pretrain.verify.result import Result

CLEAN = "clean"
FACTS = "facts.json"
FILE_BYTES = 256 << 20


def write_gradients(
    folder: Path, rank: int, gradients: Iterable[tuple[str, Tensor]], limit: int = FILE_BYTES
) -> None:
    """Write one rank's gradients as `gradients_RANK_NUMBER.safetensors`.

    Args:
        folder: folder shared by the ranks of a job; created if missing.
        rank: rank of the writer.
        gradients: name and tensor, produced one at a time; names are unique over all ranks.
        limit: bytes after which a file is closed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    held: dict[str, Tensor] = {}
    number = size = 0
    for name, gradient in gradients:
        held[name] = gradient.detach().cpu().contiguous()
        size += gradient.nbytes
        if size >= limit:
            save_file(held, folder / f"gradients_{rank}_{number}.safetensors")
            held, number, size = {}, number + 1, 0
    if held:
        save_file(held, folder / f"gradients_{rank}_{number}.safetensors")


class GradientFiles(Mapping[str, Tensor]):
    """Gradients that all ranks wrote into a folder; a tensor is read when it is accessed.

    Raises:
        ValueError: two files hold the same name.
    """

    def __init__(self, folder: Path):
        self._file_of: dict[str, Path] = {}
        for file in sorted(folder.glob("gradients_*.safetensors")):
            with safe_open(file, framework="pt") as content:
                for name in content.keys():  # noqa: SIM118 (not a mapping)
                    if name in self._file_of:
                        raise ValueError(f"{name} is in {self._file_of[name]} and in {file}")
                    self._file_of[name] = file

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._file_of[name], framework="pt") as content:
            return content.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def read_facts(folder: Path) -> tuple[StepFacts, dict[str, Any]] | str:
    """Return a job's facts of a step and its vision plan, or why a fault was not planted.

    Raises:
        FileNotFoundError: the job ended before it wrote the facts.
    """
    content = json.loads((folder / FACTS).read_text())
    if "obstacle" in content:
        return content["obstacle"]
    routes = tuple(StepRoutes(**step) for step in content["step"].get("routes", ()))
    return StepFacts(**{**content["step"], "routes": routes}), content["plan"]


def compare_jobs(dep: Path, reference: Path, tolerance: Tolerance, faults: Sequence[str]) -> Result:
    """Compare the files of the job with DEP and of the reference."""

    def compared(name: str) -> StepComparison | str:
        found = read_facts(dep / name)
        if isinstance(found, str):
            return found
        own = reference / name
        beside = own if own.is_dir() else reference / CLEAN
        wanted = read_facts(beside)
        assert not isinstance(wanted, str)  # only faults have obstacles
        files = GradientFiles(dep / name), GradientFiles(beside)
        return compare(*files, found[0], wanted[0], tolerance)

    clean, facts = compared(CLEAN), read_facts(dep / CLEAN)
    assert not isinstance(clean, str)
    assert not isinstance(facts, str)
    return Result(clean, {name: compared(name) for name in faults}, facts={"plan": facts[1]})
