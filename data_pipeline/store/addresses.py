"""Parses and checks addresses of stores and endpoints.

Addresses must not contain credentials, because they appear in run folders, logs and messages; an
error names such an address without showing the credential. An address meant for a store must not
become a folder because of a missing slash. The module is pure and does not need boto3, because it
checks configurations.
"""

import os
import re

# "user@" or "user:password@" before the host; a password may contain slashes.
_CREDENTIALS = re.compile(r"(?<=://)[^/@:\s]*(?::[^@]*)?@")


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//)?")
# A path may contain a colon ("run:1/a"), but these prefixes always mean a URI, even if the slashes
# are missing.
_MEANT = {
    *("s3", "s3a", "s3n", "s3p", "gs", "gcs", "az", "abfs", "abfss", "wasb", "wasbs", "adl"),
    *("hdfs", "oss", "cos", "obs", "r2", "b2", "hf", "http", "https", "ftp", "sftp"),
    *("file", "memory"),
}


def split_place(what: str, place: str) -> tuple[str, str]:
    """Return the scheme of an address ("s3", "memory", "file"; "" for a path) and its remainder.

    Args:
        what: name of the address in messages, such as "data.root".
        place: a URI or a path.

    Raises:
        ValueError: the URI has an unknown scheme, is misspelt, or contains a credential.
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
    """Refuse a URI where a local or shared folder is expected.

    Raises:
        ValueError: the path is a URI, also as a `Path`, which drops one of the two slashes.
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
        what: name of the address in messages, such as "data.root".
        address: a URI, a path, or None.

    Raises:
        ValueError: the address contains credentials; the message masks them and says what to do.
    """
    if address and _CREDENTIALS.search(address):
        raise ValueError(
            f"{what} holds a user name or password ({masked(address)}); give the bare address and "
            "put the keys into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"
        )


def check_endpoint(what: str, endpoint: str | None) -> None:
    """Refuse an endpoint with credentials or without a scheme.

    Raises:
        ValueError: the endpoint is not usable; the message says what to write.
    """
    check_address(what, endpoint)
    if endpoint and not re.match(r"https?://[^/]", endpoint):
        host = endpoint.split("://")[-1].lstrip("/") or "HOST:PORT"
        raise ValueError(
            f"{what} is {masked(endpoint)!r}: add http:// or https://, as in http://{masked(host)}"
        )


def endpoint_of(uri: str, endpoint: str | None) -> str:
    """Return the endpoint of a store for records; "" for a folder or Amazon's default.

    Args:
        uri: URI of the store, or the path of a folder.
        endpoint: the configured endpoint; None uses the environment.
    """
    return (endpoint or environment_endpoint() or "") if "://" in uri else ""


def environment_endpoint() -> str | None:
    """Return the S3 endpoint of the environment: AWS_ENDPOINT_URL_S3, else AWS_ENDPOINT_URL.

    It is None if neither is set, or if AWS_IGNORE_CONFIGURED_ENDPOINT_URLS is true.
    """
    if endpoints_ignored():
        return None
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


def endpoints_ignored() -> bool:
    """Return whether AWS_IGNORE_CONFIGURED_ENDPOINT_URLS disables configured endpoints."""
    return os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true"


def masked(address: str) -> str:
    """Return the address with user name and password replaced by stars, for messages."""
    return _CREDENTIALS.sub("***@", address)
