"""Addresses of stores and endpoints as people write them: what they mean, and what is refused.

None may carry a credential: an address ends up in run folders, logs and messages, so what is
refused for that is named, never shown. And none that was meant for a store may become a folder
because a slash was forgotten. Pure, and without boto3: configurations are checked with it.
"""

import os
import re

# What stands before the host: "user@", "user:password@"; a password may hold slashes.
_CREDENTIALS = re.compile(r"(?<=://)[^/@:\s]*(?::[^@]*)?@")


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//)?")
# A path may hold a colon ("run:1/a"). These mean an object store or a server, or a folder as a URI,
# even if the slashes are missing.
_MEANT = {
    *("s3", "s3a", "s3n", "s3p", "gs", "gcs", "az", "abfs", "abfss", "wasb", "wasbs", "adl"),
    *("hdfs", "oss", "cos", "obs", "r2", "b2", "hf", "http", "https", "ftp", "sftp"),
    *("file", "memory"),
}


def split_place(what: str, place: str) -> tuple[str, str]:
    """Return the scheme of a place ("s3", "memory", "file"; "" for a path), and what follows it.

    Args:
        what: names it in the message, such as "data.root".
        place: a URI or a path.

    Raises:
        ValueError: a URI of another kind, or one that is misspelt; or it holds a credential.
    """
    check_address(what, place)
    match = _SCHEME.match(place)
    if match is None or not (match[2] or match[1].lower() in _MEANT):
        return "", place
    scheme, rest = match[1], place[match.end() :]
    bucket = scheme in ("s3", "memory") and not rest.startswith("/") and rest
    if match[2] and (bucket or (scheme == "file" and rest.startswith("/"))):
        return scheme, rest
    raise ValueError(
        f"{what} {place}: expected s3://bucket/prefix, memory://name, file:///folder or a path "
        f"(of a folder with this name: ./{place})"
    )


def check_local(what: str, path: str | os.PathLike[str]) -> None:
    """Refuse a URI where a folder of this machine or of a shared file system is meant.

    Raises:
        ValueError: says what to do; a path object has lost one of the two slashes.
    """
    text = os.fspath(path)
    match = _SCHEME.match(text)
    if match is not None and match[1].lower() in _MEANT:
        raise ValueError(
            f"{what} {text}: expected a folder of this machine or of a shared file system, no URI "
            f"(for a folder with this name: ./{text})"
        )


def check_address(what: str, address: str | None) -> None:
    """Refuse an address with a user name or password in it.

    Args:
        what: names it in the message, such as "data.root".
        address: a URI, a path, or None.

    Raises:
        ValueError: says what to do; the address is not part of it.
    """
    if address and _CREDENTIALS.search(address):
        raise ValueError(
            f"{what} holds a user name or password ({masked(address)}); give the bare address and "
            "put the keys into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"
        )


def check_endpoint(what: str, endpoint: str | None) -> None:
    """Refuse an endpoint with credentials in it, or without a scheme, which no client could ask.

    Raises:
        ValueError: says what to write.
    """
    check_address(what, endpoint)
    if endpoint and not re.match(r"https?://[^/]", endpoint):
        host = endpoint.split("://")[-1].lstrip("/") or "HOST:PORT"
        raise ValueError(
            f"{what} is {masked(endpoint)!r}: add http:// or https://, as in http://{masked(host)}"
        )


def endpoint_of(uri: str, endpoint: str | None) -> str:
    """Return the endpoint of a store as it is noted down: "" for a folder or Amazon's own.

    Args:
        uri: of the store, a folder as a path.
        endpoint: as given; None: as the environment says.
    """
    return (endpoint or environment_endpoint() or "") if "://" in uri else ""


def environment_endpoint() -> str | None:
    """Return the S3 endpoint of the environment: AWS_ENDPOINT_URL_S3, else AWS_ENDPOINT_URL.

    None where neither is set, or AWS_IGNORE_CONFIGURED_ENDPOINT_URLS is true.
    """
    if endpoints_ignored():
        return None
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


def endpoints_ignored() -> bool:
    """Whether the environment says that no endpoint of the environment or of a file counts."""
    return os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true"


def masked(address: str) -> str:
    """The address with stars in place of a user name and password, for messages."""
    return _CREDENTIALS.sub("***@", address)
