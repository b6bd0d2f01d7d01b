"""Description and result of one pass of one loader."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

# Names of the sources: pictures with captions, which every loader reads, and text only.
PAIRS, PROSE = "pairs", "prose"
# Treatment of a JPEG: returned as bytes, decoded, reduced to a checksum (to compare runs), or left
# as the loader returns it (possibly a view that was never read).
MODES = ("raw", "pixels", "sums", "views")


@dataclass(frozen=True)
class Job:
    """One pass of one loader.

    Attributes:
        root: folder of the data; with `place` "s3", the sources are in `bucket` instead.
        place: "disk" or "s3".
        mode: one of MODES.
        workers: number of the loader's workers.
        batch: samples per batch of this rank.
        limit: samples after which this rank stops.
        save_at: samples after which the state is saved to `state_out`; 0 for never.
        stop: True to end the pass at `save_at`.
        state_in: file of a state to resume from, "" for none.
        cache: empty private folder in which the loader keeps fetched data.
        urls: URLs of the tars, for loaders that read only URLs.
        timed: True if the pass measures speed.
        epochs: number of passes over all samples.
        extra: further settings by name, specific to a loader.
    """

    root: str
    place: str = "disk"
    mode: str = "raw"
    workers: int = 0
    batch: int = 25
    limit: int = 0
    rank: int = 0
    world: int = 1
    seed: int = 17
    save_at: int = 0
    stop: bool = False
    state_in: str = ""
    state_out: str = ""
    bucket: str = ""
    cache: str = ""
    urls: Sequence[str] = ()
    timed: bool = False
    epochs: int = 1
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Answer:
    """Result of a pass. Seconds count from before the loader is built; None means never reached.

    `cpu_s` covers this process and its threads, without worker processes.
    """

    count: int = 0
    build_s: float | None = None
    first_s: float | None = None
    end_s: float | None = None
    cpu_s: float | None = None
    state_bytes: int | None = None
    ids: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)
    error: str = ""


class Side(Protocol):
    """A loader under test. A batch is {"ids": [int], "x": payloads, "cap": documents}."""

    PACKAGE: str  # distribution name; empty for this checkout
    HAS_STATE: bool  # False: a resume reads everything again

    def load(self, modes: Sequence[str]) -> None:
        """Import everything that these modes need. Imports are not timed."""

    def build(self, job: Job) -> Any:
        """Return the loader, ready to be iterated."""

    def batches(self, loader: Any) -> Iterator[dict[str, Any]]: ...

    def state(self, loader: Any) -> Any: ...

    def restore(self, loader: Any, state: Any) -> None: ...

    def redistribute(self, states: Sequence[str], job: Job) -> list[str]:
        """Return state files for `job.world` ranks, made from states of another world size."""
