"""Adapter for `stream.stream`, with a window of one shard, as litdata permutes inside one chunk.

Keys of job.extra: "check": False skips the CRC-32 of every file; "shard_window" sets the window;
"blend": True adds the text-only source for half of the draws.
"""

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.loaders.job import PAIRS, PROSE, Job

PACKAGE, HAS_STATE = "", True


def load(modes: Sequence[str]) -> None:
    import pyarrow.dataset  # noqa: F401
    import pyarrow.parquet  # noqa: F401

    import data_pipeline.index.manifest
    import data_pipeline.stream.stream  # noqa: F401

    if "pixels" in modes:
        import torch  # noqa: F401

        import moonvit3d.media  # noqa: F401
    pyarrow.array(["x"])  # the first array imports pandas, if installed


def build(job: Job) -> Any:
    from data_pipeline.index.manifest import read_index
    from data_pipeline.store.open import open_store
    from data_pipeline.stream.stream import SampleStream, StreamConfig

    store = open_store(f"s3://{job.bucket}/ours" if job.place == "s3" else f"{job.root}/ours")
    blended = job.extra.get("blend", False)
    indices = [read_index(store, name) for name in ((PAIRS, PROSE) if blended else (PAIRS,))]
    config = StreamConfig(
        batch_size=job.batch * job.world,
        shares={PAIRS: 1, PROSE: 1} if blended else None,
        seed=job.seed,
        shard_window=job.extra.get("shard_window", 1),
        # The limit makes the pass end with its last sample, so that no unused data is fetched.
        num_samples=job.limit * job.world if job.timed or job.place == "s3" else None,
        check=job.extra.get("check", True),
        workers=job.workers,
    )
    transform = stacked if job.mode == "pixels" else None
    return Pass(SampleStream(store, indices, config, job.rank, job.world, transform), job.mode)


class Pass:
    """A stream and the treatment of its batches."""

    def __init__(self, stream: Any, mode: str) -> None:
        self.stream = stream
        self._finish = MODES[mode]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self._finish, self.stream.batches())


def stacked(batch: Any) -> dict[str, Any]:
    import numpy as np
    import torch

    from moonvit3d.media import read_image

    pixels = torch.from_numpy(np.stack([read_image(media[0]) for media in batch.media]))
    return {"ids": list(map(int, batch.key)), "x": pixels, "cap": batch.document}


def raw(batch: Any) -> dict[str, Any]:
    return {
        "ids": list(map(int, batch.key)), "x": [media[0] for media in batch.media],
        "cap": batch.document,
    }  # fmt: skip


def sums(batch: Any) -> dict[str, Any]:
    """Return CRC-32 sums of the media, or of the documents of text samples.

    Keys that are not numbers are hashed, too.
    """
    found = [media[0] if media else text for media, text in zip(batch.media, batch.document)]
    return {
        "ids": [int(key) if key.isdigit() else zlib.crc32(key.encode()) for key in batch.key],
        "x": list(map(zlib.crc32, found)), "cap": batch.document,
    }  # fmt: skip


MODES = {"raw": raw, "views": raw, "sums": sums, "pixels": lambda batch: batch}


def batches(loader: Pass) -> Iterator[dict[str, Any]]:
    return iter(loader)


def state(loader: Pass) -> Any:
    return loader.stream.state_dict()


def restore(loader: Pass, state: Any) -> None:
    loader.stream.load_state_dict(state)


def redistribute(states: Sequence[str], job: Job) -> list[str]:
    return [states[0]] * job.world
