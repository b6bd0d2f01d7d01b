"""Parts of `make gpu`. Each part runs in a separate process with a time limit.

The limits add up to less than nine minutes. Every part has a short form for the CPU, so that wrong
arguments are found without a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MOST_SECONDS = 540


@dataclass(frozen=True)
class Part:
    """One process of `make gpu`.

    Attributes:
        name: name of the part and of its result file, NAME_<device>.json.
        about: description.
        seconds: time limit.
        command: arguments of Python on CUDA; "{out}" is the result file.
        short: arguments of Python on a CPU.
    """

    name: str
    about: str
    seconds: float
    command: Sequence[str]
    short: Sequence[str]

    def arguments(self, device: str, folder: Path) -> list[str]:
        """Return the arguments of Python for a device."""
        given = self.command if device == "cuda" else self.short
        return [each.format(out=self.result(device, folder)) for each in given]

    def result(self, device: str, folder: Path) -> Path:
        """Return the path of the result file."""
        return folder / f"{self.name}_{device}.json"


def _benchmark(name: str, *short: str, long: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    module = ["-m", f"benchmarks.bench_{name}", "--out", "{out}"]
    return [*module, "--device", "cuda", *long], [*module, *(short or ("--quick",))]


PARTS = [
    Part("offload", "copies between device and host", 30, *_benchmark("offload")),
    Part("attention", "attention in three forms", 90, *_benchmark("attention")),
    Part("memory", "a layer's step under each memory policy", 100,
         *_benchmark("memory", "--quick", "--only", "policies")),
    Part(
        "tests", "all tests marked gpu", 180,
        ["-m", "benchmarks.gpu.marked_tests", "--out", "{out}", "--device", "cuda"],
        ["-m", "benchmarks.gpu.marked_tests", "--out", "{out}"],
    ),
    Part(
        "calibration", "what encoder, passes and update cost", 50,
        ["-m", "launch.cli", "plan", "--config", "kimi_k25_1t", "--calibrate", "--max-seconds",
         "16", "--out", "{out}", "train.threads=null"],
        ["-m", "launch.cli", "plan", "--config", "tiny_cpu", "--calibrate", "--max-seconds", "5",
         "--out", "{out}", "data.limits.image=64"],
    ),
    Part(
        "vit", "MoonViT-3D against transformers", 40,
        *_benchmark(
            "vit", "--device", "cpu", "--width", "tiny", "--layers", "1", "--patches", "200",
            "--largest", "64", "--repeats", "1", "--mix", "digits",
            long=("--patches", "65536", "--mix", "heavy_tailed"),
        ),
    ),
    Part(
        "muon", "Muon against torch.optim.Muon", 30,
        *_benchmark("muon", "--quick", long=("--only", "k2", "--rounds", "5")),
    ),
]  # fmt: skip
