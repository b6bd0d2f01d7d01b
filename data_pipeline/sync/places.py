"""The two places of a sync, each with its own endpoint and profile: no keys are mixed up."""

import os
from dataclasses import dataclass

from data_pipeline.store.addresses import check_address, split_place
from data_pipeline.store.open import S3Store, Store, open_store


@dataclass(frozen=True)
class Place:
    """A root of sources, as a user names it.

    Args:
        side: "from" or "to", as the options are called.
        uri: of the root.
        endpoint: of its S3 server; None: the profile's, or that of the environment.
        profile: of boto3's files; None: the environment's keys.
    """

    side: str
    uri: str
    endpoint: str | None = None
    profile: str | None = None

    @property
    def scheme(self) -> str:
        """As of the URI: "s3", "memory", "file", or "" for a path."""
        return split_place(f"the place to sync {self.side}", self.uri)[0]

    @property
    def explicit(self) -> bool:
        """Whether it has an endpoint or a profile of its own."""
        return bool(self.endpoint or self.profile)


def open_places(source: Place, target: Place, threads: int) -> tuple[Store, Store]:
    """Open both places; `threads` requests at a time go to each.

    Raises:
        ValueError: they are one place, one of them is misspelt, or only one of two S3 places says
            whose keys are for it.
        AccessDenied: a profile is not there.
    """
    for place, other in ((source, target), (target, source)):
        check_address(f"--{place.side}-endpoint", place.endpoint)
        if place.scheme != "s3" and place.explicit:
            raise ValueError(
                f"{place.uri}: --{place.side}-endpoint and --{place.side}-profile are for s3:// "
                "places alone"
            )
        both = place.scheme == other.scheme == "s3"
        if both and other.explicit and not place.explicit:
            raise ValueError(
                f"{place.uri}: --{place.side}-endpoint or --{place.side}-profile is missing; "
                f"{other.uri} has its own, and the environment's may be meant for either"
            )
    stores = [_open(place, threads) for place in (source, target)]
    if _identity(stores[0]) == _identity(stores[1]):
        raise ValueError(
            f"{stores[0].uri}: is the same place on both sides, expected two; give another "
            "bucket, prefix or endpoint"
        )
    return stores[0], stores[1]


def _open(place: Place, threads: int) -> Store:
    # No hedges: a second request for bytes that come anyway would only take from the line.
    return open_store(
        os.fspath(place.uri),
        endpoint=place.endpoint,
        profile=place.profile,
        threads=threads,
        hedge=False,
    )


def _identity(store: Store) -> tuple[str, str]:
    endpoint = store.endpoint.lower().rstrip("/") if isinstance(store, S3Store) else ""
    return endpoint, store.uri
