"""Adapter for mosaicml-streaming."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.loaders.imports import import_streaming
from benchmarks.loaders.job import Job
from benchmarks.loaders.payload import collate, payload

PACKAGE, HAS_STATE = "mosaicml-streaming", True


def load(modes: Sequence[str]) -> None:
    import_streaming()


def build(job: Job) -> Any:
    from streaming import StreamingDataLoader, StreamingDataset

    class Pairs(StreamingDataset):
        def __getitem__(self, at: int) -> tuple[int, Any, Any]:
            sample = super().__getitem__(at)
            return sample["id"], payload(sample["jpg"], job.mode), sample["json"]

    class Batches(StreamingDataLoader):
        def _get_batch_size(self, batch: dict[str, Any]) -> int:
            return len(batch["ids"])

    if job.place == "s3":
        where = {"remote": f"s3://{job.bucket}/mds", "local": job.cache}
    else:
        where = {"local": f"{job.root}/mds"}
    # The sample order depends on the number of canonical nodes, so it is pinned, as the manual
    # advises.
    samples = Pairs(
        **where, batch_size=job.batch, shuffle=True, shuffle_seed=job.seed, num_canonical_nodes=2
    )
    return Batches(
        samples, batch_size=job.batch, num_workers=job.workers,
        collate_fn=lambda batch: collate(batch, job.mode),
    )  # fmt: skip


def batches(loader: Any) -> Iterator[dict[str, Any]]:
    return iter(loader)


def state(loader: Any) -> Any:
    return loader.state_dict()


def restore(loader: Any, state: Any) -> None:
    loader.load_state_dict(state)


def redistribute(states: Sequence[str], job: Job) -> list[str]:
    return [states[0]] * job.world
