"""Adapter for litdata."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.loaders.job import Job
from benchmarks.loaders.payload import collate, payload

PACKAGE, HAS_STATE = "litdata", True


def load(modes: Sequence[str]) -> None:
    import litdata  # noqa: F401


def build(job: Job) -> Any:
    from litdata import StreamingDataLoader, StreamingDataset

    class Pairs(StreamingDataset):
        def __getitem__(self, at: Any) -> tuple[int, Any, Any]:
            sample = super().__getitem__(at)
            return sample["id"], payload(sample["jpg"], job.mode), sample["json"]

    where: dict[str, Any] = {"input_dir": f"{job.root}/lit"}
    if job.place == "s3":
        _allow_http()
        where = {
            "input_dir": f"s3://{job.bucket}/lit", "cache_dir": job.cache,
            "storage_options": {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]},
        }  # fmt: skip
    samples = Pairs(shuffle=True, seed=job.seed, drop_last=False, **where)
    return StreamingDataLoader(
        samples, batch_size=job.batch, num_workers=job.workers,
        collate_fn=lambda batch: collate(batch, job.mode),
    )  # fmt: skip


def _allow_http() -> None:
    """Let litdata's Rust client use addresses without TLS; litdata has no setting for it."""
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True


def batches(loader: Any) -> Iterator[dict[str, Any]]:
    return iter(loader)


def state(loader: Any) -> Any:
    return loader.state_dict()


def restore(loader: Any, state: Any) -> None:
    loader.load_state_dict(state)


def redistribute(states: Sequence[str], job: Job) -> list[str]:
    return [states[0]] * job.world
