"""Collects the wheels that `make gpu` needs on top of torch, for Python 3.12 on Linux x86-64.

Versions come from constraints.txt. The default names are packages that typical torch images lack;
docs/GPU.md lists the packages that an image must have. Extra names are optional:

    python -m benchmarks.gpu.wheels runs/gpu_wheels
    python -m benchmarks.gpu.wheels runs/gpu_wheels einops xxhash
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
NAMES = (
    "megatron-core", "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "boto3",
    "botocore", "s3transfer", "jmespath", "isal",
)  # fmt: skip
MOST_BYTES = 60 * 10**6
GLIBC = ("2_28", "2_27", "2_24", "2_17")


def command(names: Sequence[str], folder: Path) -> list[str]:
    """Return the command that downloads wheels of these names without their dependencies."""
    tags = [f"manylinux_{glibc}_x86_64" for glibc in GLIBC] + ["manylinux2014_x86_64"]
    return [
        sys.executable, "-m", "pip", "download", "--quiet", "--quiet", "--no-deps",
        "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp",
        *(part for tag in tags for part in ("--platform", tag)),
        "--constraint", str(ROOT / "constraints.txt"), "--dest", str(folder), *names,
    ]  # fmt: skip


def summary(folder: Path) -> tuple[list[str], int]:
    """Return one line for each wheel (name, version, size), and the total bytes."""
    lines, total = [], 0
    for file in sorted(folder.glob("*.whl")):
        name, version = file.name.split("-")[:2]
        lines.append(f"{name:20} {version:12} {file.stat().st_size / 1e6:8.2f} MB")
        total += file.stat().st_size
    return [*lines, f"{'all':20} {'':12} {total / 1e6:8.2f} MB in {folder}"], total


def main(folder: Path, *more: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):  # two versions of a package would conflict
        old.unlink()
    if code := subprocess.run(command([*NAMES, *more], folder), check=False).returncode:
        sys.exit(code)
    lines, total = summary(folder)
    print("\n".join(lines))
    if total > MOST_BYTES:
        sys.exit(f"error: {total / 1e6:.0f} MB, expected at most {MOST_BYTES / 1e6:.0f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
