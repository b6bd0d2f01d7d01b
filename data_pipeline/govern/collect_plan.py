"""The plan of a garbage collection: what may be removed, why, and when; and whom it asks.

A plan is a JSON file that is written once and never changed. It names each object with its size and
ETag, so that what is written again meanwhile is not what was meant.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

SCHEMA = 1
KINDS = ("unfinished", "journal", "shard", "upload", "versions", "facts", "source")
"""What may be collected, in the order in which it is."""


class Spot(NamedTuple):
    """An object: its key, bytes and ETag; of an unfinished upload its mark."""

    key: str
    size: int
    etag: str


@dataclass(frozen=True)
class Thing:
    """Objects that go together.

    Attributes:
        kind: one of `KINDS`: a source that is archived; what an ingest or a sync that did not
            finish has left; its notes beside a finished source; shards that no manifest names;
            uploads that were never completed; versions that a bucket keeps of objects that were
            deleted; facts (`inspect.facts`) of contents that are gone.
        name: folder of the source; of facts their content_hash.
        why: for people.
        version: of a source in the catalogue, else "".
        content: its content_hash, else "".
        spots: the objects, by key; of a source without shards that others need.
    """

    kind: str
    name: str
    why: str
    version: str
    content: str
    spots: tuple[Spot, ...]

    @property
    def size(self) -> int:
        """Bytes of all objects."""
        return sum(spot.size for spot in self.spots)


class Retired(NamedTuple):
    """A version that may go by its state: its name, content_hash, and why for people."""

    version: str
    content: str
    why: str


class Records(Protocol):
    """What the catalogue and the run folders say; asked anew by `apply`."""

    def look_again(self) -> None:
        """Read the run folders as they are now."""
        ...

    def retired(self) -> Mapping[str, Retired]:
        """Folder under the root -> the version that may go by its state and age."""
        ...

    def user(self, name: str, contents: frozenset[str]) -> str | None:
        """Which run needs the source of a folder, or one of these contents; None: no one."""
        ...

    def has_facts(self, content: str) -> bool:
        """Whether somebody may want to count a content: it is a version that is not archived."""
        ...

    def taken(self, plan: str) -> Mapping[str, str]:
        """Folder -> content of the sources that the catalogue has let go for a plan."""
        ...

    def take(self, plan: str, thing: Thing) -> None:
        """Let a source go, for good, unless it is needed again by now.

        Raises:
            ValueError: it is; says why.
        """
        ...

    def give_back(self, name: str, content: str, index_sha256: str) -> None:
        """Note that a source lies in its folder after all, if it was let go there."""
        ...

    def note(self, plan: str, thing: Thing, kept: Sequence[tuple[str, str]]) -> None:
        """Note what was removed, and what the store did not let go, (key, reason) each."""
        ...


BootClock = tuple[str, float]
"""Id of a start of the machine, and seconds since then; of none "" and 0."""
NO_CLOCK: BootClock = ("", 0.0)


def boot_clock() -> BootClock:
    """Return this machine's count of seconds, suspended ones too, which nobody can set."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, AttributeError):  # no Linux
        return NO_CLOCK


@dataclass(frozen=True)
class Plan:
    """What may be removed from a root, and when.

    Attributes:
        root, endpoint: of the store, as `Store.uri` and `endpoint_of` tell them.
        seen: UTC, ISO 8601.
        grace_days: so long after `seen` at the earliest.
        audit: head of the catalogue's audit at that time.
        options: of the command, with which `apply` asks again.
        things: in the order of `KINDS` and of names.
        kept: (folder, why) of archived sources that are needed.
        archive: (version, revision, why) of those to be archived by then.
        clock: of the machine that made it (`boot_clock`).
    """

    root: str
    endpoint: str
    seen: str
    grace_days: float
    audit: str
    options: Mapping[str, Any]
    things: tuple[Thing, ...]
    kept: tuple[tuple[str, str], ...]
    archive: tuple[tuple[str, int, str], ...] = ()
    clock: BootClock = NO_CLOCK

    @cached_property
    def id(self) -> str:
        """SHA-256 over all of it."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def due(self) -> datetime:
        """When it may be applied."""
        return datetime.fromisoformat(self.seen) + timedelta(days=self.grace_days)

    def too_early(self, now: datetime, clock: BootClock = NO_CLOCK) -> str | None:
        """Return why the grace is not over; None: it is.

        Where the machine has not been started again since, its own count of seconds decides, too: a
        clock that was set ahead ends no grace.
        """
        rule = "what came into use by then will not be removed; wait"
        if now < self.due:
            return (
                f"the plan was made at {self.seen}, and its grace of {self.grace_days:g} days ends "
                f"at {self.due.isoformat()}: {rule}"
            )
        (boot, then), (boot_now, seconds) = self.clock, clock
        left = timedelta(days=self.grace_days) - timedelta(seconds=seconds - then)
        if boot and boot == boot_now and left > timedelta():
            return (
                f"this machine's clock says {now.isoformat('T', 'seconds')}, but by its count "
                f"since it was started the grace of {self.grace_days:g} days, from {self.seen} on, "
                f"lasts another {left / timedelta(days=1):.2f} days: it was set ahead; {rule}"
            )
        return None

    def save(self, file: Path) -> None:
        """Write it into a file that does not exist yet.

        Raises:
            ValueError: it does.
        """
        text = json.dumps({"schema": SCHEMA, "id": self.id, **asdict(self)}, indent=1)
        try:
            with file.open("x") as out:
                out.write(f"{text}\n")
        except FileExistsError:
            raise ValueError(
                f"{file}: is there already; a plan is never overwritten, because its grace counts "
                "from when it was written: apply it, or give another name"
            ) from None

    @staticmethod
    def read(file: Path) -> "Plan":
        """Return the plan of a file.

        Raises:
            ValueError: it is none, or was changed since it was written.
        """
        expected = "expected a file that `kimi-pretrain data collect ROOT --plan FILE` wrote"
        try:
            given = json.loads(file.read_text())
            schema, id = given.pop("schema"), given.pop("id")
            things = [
                Thing(**{**one, "spots": tuple(Spot(*spot) for spot in one["spots"])})
                for one in given.pop("things")
            ]
            kept = [(name, why) for name, why in given.pop("kept")]
            archive = [(name, revision, why) for name, revision, why in given.pop("archive")]
            boot, seconds = given.pop("clock")
            more = {"archive": tuple(archive), "clock": (str(boot), float(seconds))}
            plan = Plan(**given, things=tuple(things), kept=tuple(kept), **more)
        except FileNotFoundError:
            raise ValueError(f"{file}: no such file; {expected}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{file}: {expected}") from None
        if schema != SCHEMA or plan.id != id:
            raise ValueError(
                f"{file}: schema {schema!r}, or something in it, was changed since it was written; "
                f"{expected}"
            )
        return plan
