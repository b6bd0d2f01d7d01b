"""Adapter for webdataset in its deterministic configuration.

webdataset has no state, so a resume reads everything again. It cannot sign requests, so it reads S3
through signed URLs.
"""

import glob
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.loaders.job import Job
from benchmarks.loaders.payload import collate, payload

PACKAGE, HAS_STATE = "webdataset", False
SHARDS_SHUFFLED, BUFFER, INITIAL = 100, 1000, 100


def load(modes: Sequence[str]) -> None:
    import torch.utils.data  # noqa: F401
    import webdataset  # noqa: F401


def build(job: Job) -> Any:
    import webdataset as wds
    from torch.utils.data import DataLoader

    def sample(files: dict[str, Any]) -> tuple[int, Any, Any]:
        return int(files["__key__"]), payload(files["0.jpg"], job.mode), files["json"]

    urls = job.urls if job.place == "s3" else sorted(glob.glob(f"{job.root}/tar/*.tar"))
    samples = wds.WebDataset(
        list(urls), shardshuffle=SHARDS_SHUFFLED, detshuffle=True, seed=job.seed,
        nodesplitter=wds.split_by_node, empty_check=False,
    )  # fmt: skip
    samples = samples.compose(wds.detshuffle(BUFFER, INITIAL, seed=job.seed)).map(sample)
    return DataLoader(
        samples, batch_size=job.batch, num_workers=job.workers,
        collate_fn=lambda batch: collate(batch, job.mode),
    )  # fmt: skip


def batches(loader: Any) -> Iterator[dict[str, Any]]:
    return iter(loader)


def state(loader: Any) -> Any:
    raise NotImplementedError("webdataset has no state")


def restore(loader: Any, state: Any) -> None:
    raise NotImplementedError("webdataset has no state")


def redistribute(states: Sequence[str], job: Job) -> list[str]:
    """Return states that skip the same number of samples, divided evenly over the new ranks.

    Users of webdataset have no better option.
    """
    seen = sum(json.loads(Path(name).read_bytes())["skip"] for name in states)
    path = Path(tempfile.mkdtemp()) / "state"
    path.write_text(json.dumps({"skip": seen // job.world}))
    return [str(path)] * job.world
