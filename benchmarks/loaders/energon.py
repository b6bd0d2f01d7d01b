"""Adapter for megatron-energon, which reads tars with its own index, and S3 through MSC."""

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.loaders.job import Job
from benchmarks.loaders.payload import collate, payload

PACKAGE, HAS_STATE = "megatron-energon", True
BUFFER, SLICE = 1000, 100


def load(modes: Sequence[str]) -> None:
    import megatron.energon  # noqa: F401


def build(job: Job) -> Any:
    from megatron.energon import (
        Cooker,
        DefaultTaskEncoder,
        Sample,
        WorkerConfig,
        basic_sample_keys,
        edataclass,
        get_savable_loader,
        get_train_dataset,
        stateless,
    )

    @edataclass
    class Pair(Sample):
        fields: tuple

    @stateless
    def cook(files: dict[str, Any]) -> Pair:
        number = int(files["__key__"].split("/")[-1])
        fields = (number, payload(files["0.jpg"], job.mode), files["json"])
        return Pair(**basic_sample_keys(files), fields=fields)

    class Encoder(DefaultTaskEncoder):
        cookers = [Cooker(cook)]  # noqa: RUF012
        decoder = None  # the cooker decodes with the same code as every peer

        def batch(self, samples: list[Pair]) -> dict[str, Any]:
            return collate([sample.fields for sample in samples], job.mode)

    samples = get_train_dataset(
        "msc://bench/tar" if job.place == "s3" else f"{job.root}/tar",
        worker_config=WorkerConfig(rank=job.rank, world_size=job.world, num_workers=job.workers),
        batch_size=job.batch, shuffle_buffer_size=BUFFER, max_samples_per_sequence=SLICE,
        task_encoder=Encoder(), repeat=job.extra.get("repeat", False),
    )  # fmt: skip
    return get_savable_loader(samples, checkpoint_every_sec=60)


def batches(loader: Any) -> Iterator[dict[str, Any]]:
    return iter(loader)


def state(loader: Any) -> Any:
    return loader.save_state_rank()


def restore(loader: Any, state: Any) -> None:
    loader.restore_state_rank(state)


def redistribute(states: Sequence[str], job: Job) -> list[str]:
    """Redistribute states with the documented command, `energon checkpoint redist`."""
    import torch

    folder = Path(tempfile.mkdtemp())
    for part in ("in", "out"):
        (folder / part).mkdir()
    for rank, name in enumerate(states):
        torch.save(pickle.loads(Path(name).read_bytes()), folder / "in" / f"state_{rank}.pth")
    given = [str(folder / "in" / f"state_{rank}.pth") for rank in range(len(states))]
    program = str(Path(sys.executable).parent / "energon")
    command = [program, "checkpoint", "redist", *given, str(folder / "out")]
    command += ["--new-world-size", str(job.world)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr).strip().splitlines()[-1])
    files = []
    for rank in range(job.world):
        found = torch.load(folder / "out" / f"state_{rank}.pth", weights_only=False)
        files.append(str(folder / f"{rank}.pickle"))
        Path(files[-1]).write_bytes(pickle.dumps(found))
    return files
