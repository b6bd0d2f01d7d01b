"""Opens the two stores of a sync; each has its own endpoint and profile, so keys cannot be mixed
up.
"""

import os
from dataclasses import dataclass

from data_pipeline.store.addresses import check_address, split_place
from data_pipeline.store.open import S3Store, Store, open_store


@dataclass(frozen=True)
class Place:
    """A root of sources, as specified by the user.

    Args:
        side: "from" or "to", as in the option names.
        uri: of the root.
        endpoint: of its S3 server; None: from the profile or the environment.
        profile: in boto3's files; None: the keys from the environment.
    """

    side: str
    uri: str
    endpoint: str | None = None
    profile: str | None = None

    @property
    def scheme(self) -> str:
        """Scheme of the URI: "s3", "memory", "file", or "" for a path."""
        return split_place(f"the place to sync {self.side}", self.uri)[0]

    @property
    def explicit(self) -> bool:
        """True if the place sets an endpoint or a profile."""
        return bool(self.endpoint or self.profile)


def open_places(source: Place, target: Place, threads: int) -> tuple[Store, Store]:
    """Open both stores with up to `threads` concurrent requests each.

    Raises:
        ValueError: both are the same store, an address is malformed, or only one of two S3 stores
            has an explicit endpoint or profile.
        AccessDenied: a profile does not exist.
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
    # No hedged requests: they would only take bandwidth from the transfer.
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
