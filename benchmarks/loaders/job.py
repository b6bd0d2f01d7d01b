"""One pass of one loader: what is asked of it, and what it answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

# The sources: pictures with captions, which every loader reads, and text alone.
PAIRS, PROSE = "pairs", "prose"
# What becomes of a JPEG: handed out as bytes, decoded, reduced to a checksum (to compare runs), or
# left as what the loader gives (which may be a view that nobody has read).
MODES = ("raw", "pixels", "sums", "views")


@dataclass(frozen=True)
class Job:
    """A pass.

    Attributes:
        root: folder of the data; with `place` "s3", the sources lie in `bucket` instead.
        place: "disk" or "s3".
        mode: one of MODES.
        workers: the loader's own count of workers.
        batch: samples of one batch of this rank.
        limit: samples after which this rank stops.
        save_at: samples after which the state is saved to `state_out`; 0 for never.
        stop: end the pass there.
        state_in: a state to begin from, "" for none.
        cache: a folder of its own, empty, where the loader keeps what it fetched.
        urls: of the tars, for who can read nothing but URLs.
        timed: the pass is there for its speed.
        epochs: how often all samples are gone through.
        extra: further settings by name, for one loader alone.
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
    """What happened. Seconds count from before the loader was built; None where it never came.

    `cpu_s` is of this process and its threads, without worker processes.
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

    PACKAGE: str  # what importlib.metadata calls it; empty: this checkout
    HAS_STATE: bool  # without, resuming means to go through everything again

    def load(self, modes: Sequence[str]) -> None:
        """Import everything that these modes need; not timed."""

    def build(self, job: Job) -> Any:
        """The loader, ready to be iterated."""

    def batches(self, loader: Any) -> Iterator[dict[str, Any]]: ...

    def state(self, loader: Any) -> Any: ...

    def restore(self, loader: Any, state: Any) -> None: ...

    def redistribute(self, states: Sequence[str], job: Job) -> list[str]:
        """Files of the states for `job.world` ranks, from those of another number of ranks."""
