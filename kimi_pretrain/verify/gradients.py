"""Gradients of a whole job in files: every rank writes its own, a reader sees one mapping.

Nothing is gathered: a tensor goes from the rank that owns it into one of that rank's safetensors
files, a few hundred megabytes at a time, and is read back alone.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

FILE_BYTES = 256 << 20


def write_gradients(
    folder: Path, rank: int, gradients: Iterable[tuple[str, Tensor]], limit: int = FILE_BYTES
) -> None:
    """Write one rank's gradients as `gradients_RANK_NUMBER.safetensors`.

    Args:
        folder: of the run, shared by its ranks; made if need be.
        rank: of the writer, so that names of files do not meet.
        gradients: name and tensor, made one at a time; names differ over all ranks.
        limit: bytes after which a file is closed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parcel: dict[str, Tensor] = {}
    number = size = 0
    for name, gradient in gradients:
        parcel[name] = gradient.detach().cpu().contiguous()
        size += gradient.nbytes
        if size >= limit:
            save_file(parcel, folder / f"gradients_{rank}_{number}.safetensors")
            parcel, number, size = {}, number + 1, 0
    if parcel:
        save_file(parcel, folder / f"gradients_{rank}_{number}.safetensors")


class GradientFiles(Mapping[str, Tensor]):
    """The gradients that all ranks wrote into a folder; a tensor is read when it is asked for.

    Raises:
        ValueError: two files hold the same name.
    """

    def __init__(self, folder: Path):
        self._file_of: dict[str, Path] = {}
        for file in sorted(folder.glob("gradients_*.safetensors")):
            with safe_open(file, framework="pt") as content:
                for name in content.keys():  # noqa: SIM118 (it is no mapping)
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
