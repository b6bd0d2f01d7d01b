"""Plan of a garbage collection: what may be removed, why and when. Interface to the catalogue.

A plan is a JSON file that is written once and never changed. It lists each object with its size and
ETag, so that an object rewritten in the meantime is not removed.
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
"""Kinds of things that may be collected, in order of removal."""


class Spot(NamedTuple):
    """An object: its key, size in bytes and ETag (for an unfinished upload, its upload mark)."""

    key: str
    size: int
    etag: str


@dataclass(frozen=True)
class Thing:
    """Objects that are removed together.

    Attributes:
        kind: one of `KINDS`: an archived source; the remains of an unfinished ingest or sync; the
            journal of a finished ingest or sync; shards that no manifest names; incomplete uploads;
            old versions that a bucket keeps of deleted objects; facts (`inspect.facts`) of contents
            that no longer exist.
        name: folder of the source; for facts, their content_hash.
        why: reason for the removal, for people.
        version: the source's version in the catalogue, else "".
        content: the source's content_hash, else "".
        spots: the objects, by key; for a source, without shards that other sources need.
    """

    kind: str
    name: str
    why: str
    version: str
    content: str
    spots: tuple[Spot, ...]

    @property
    def size(self) -> int:
        """Total bytes of the objects."""
        return sum(spot.size for spot in self.spots)


class Retired(NamedTuple):
    """A version whose catalogue state allows removal: its name, content_hash and the reason."""

    version: str
    content: str
    why: str


class Records(Protocol):
    """Interface to the catalogue and the run folders; `apply` queries it again."""

    def look_again(self) -> None:
        """Read the run folders again."""
        ...

    def retired(self) -> Mapping[str, Retired]:
        """Return folder under the root -> the version that may be removed by its state and age."""
        ...

    def user(self, name: str, contents: frozenset[str]) -> str | None:
        """Return why a run needs a folder's source or one of these contents; None if none does."""
        ...

    def has_facts(self, content: str) -> bool:
        """Return True if facts of a content may be needed: an unarchived version has it."""
        ...

    def taken(self, plan: str) -> Mapping[str, str]:
        """Return folder -> content of sources that the catalogue marked as removed for a plan."""
        ...

    def take(self, plan: str, thing: Thing) -> None:
        """Mark a source as removed for good, unless it is needed again.

        Raises:
            ValueError: the source is needed; the message gives the reason.
        """
        ...

    def give_back(self, name: str, content: str, index_sha256: str) -> None:
        """Record that a source is present in its folder, if it was marked as removed there."""
        ...

    def note(self, plan: str, thing: Thing, kept: Sequence[tuple[str, str]]) -> None:
        """Record the removed objects, and (key, reason) of objects that the store kept."""
        ...


BootClock = tuple[str, float]
"""Boot id of the machine and seconds since boot; ("", 0) if unknown."""
NO_CLOCK: BootClock = ("", 0.0)


def boot_clock() -> BootClock:
    """Return this machine's boot id and seconds since boot, which no user can set.

    The seconds include time in suspend.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, AttributeError):  # not Linux
        return NO_CLOCK


@dataclass(frozen=True)
class Plan:
    """Objects that may be removed from a root, and the time from which they may be.

    Attributes:
        root, endpoint: of the store, as returned by `Store.uri` and `endpoint_of`.
        seen: time of the proposal, UTC, ISO 8601.
        grace_days: minimum time between `seen` and removal.
        audit: head of the catalogue's audit log at that time.
        options: command options, which `apply` uses again.
        things: ordered by `KINDS`, then by name.
        kept: (folder, reason) of archived sources that are needed.
        archive: (version, revision, reason) of versions to be archived before the plan is applied.
        clock: boot clock of the machine that made the plan (`boot_clock`).
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
        """SHA-256 of all fields."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def due(self) -> datetime:
        """Earliest time at which the plan may be applied."""
        return datetime.fromisoformat(self.seen) + timedelta(days=self.grace_days)

    def too_early(self, now: datetime, clock: BootClock = NO_CLOCK) -> str | None:
        """Return why the grace period is not over, or None if it is over.

        If the machine has not rebooted since, its boot clock must agree, too: setting the wall
        clock ahead does not end the grace period.
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
        """Write the plan to a new file.

        Raises:
            ValueError: the file exists.
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
        """Return the plan in a file.

        Raises:
            ValueError: the file is not a plan, or it was changed after it was written.
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
