"""Opens a store from its URI; the one file that knows boto3.

Credentials come only from boto3's own chain (environment, profile, credential process, instance
role); none is an argument, kept in an attribute or written into a message.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import boto3.session
import botocore.loaders
import botocore.session
import urllib3.exceptions
from botocore import exceptions as aws
from botocore.config import Config
from botocore.parsers import ResponseParserError

from data_pipeline.store.addresses import check_endpoint, split_place
from data_pipeline.store.budget import Budget
from data_pipeline.store.memory import MemoryStore
from data_pipeline.store.objects import (
    AccessDenied,
    FolderStore,
    MissingBucket,
    MissingKey,
    ObjectChanged,
    ObjectInfo,
    Span,
    Store,
    StoreError,
    StoreUnavailable,
    Written,
    WrongBytes,
    access_denied,
    get_many,
)
from data_pipeline.store.s3 import S3Store
from data_pipeline.store.s3_answers import Meaning, meaning_of
from data_pipeline.store.s3_read import BrokenBody
from data_pipeline.store.stats import StoreStats

__all__ = [
    "AccessDenied",
    "Budget",
    "FolderStore",
    "MemoryStore",
    "MissingBucket",
    "MissingKey",
    "ObjectChanged",
    "ObjectInfo",
    "S3Store",
    "Span",
    "Store",
    "StoreError",
    "StoreStats",
    "StoreUnavailable",
    "WrongBytes",
    "Written",
    "get_many",
    "open_store",
]

_NO_CREDENTIALS = (aws.NoCredentialsError, aws.PartialCredentialsError)
_NO_NEW_CREDENTIALS = (
    *(aws.CredentialRetrievalError, aws.TokenRetrievalError, aws.MetadataRetrievalError),
    *(aws.SSOError, aws.RefreshWithMFAUnsupportedError),
)
_BROKEN = (BrokenBody, urllib3.exceptions.HTTPError, OSError)
_NETWORK = (aws.HTTPClientError, aws.ConnectionError, ResponseParserError)


# What botocore knows of S3 is some JSON; read once, a new client takes 10 ms and not 60.
_LOADER = botocore.loaders.create_loader()


def _session(profile: str | None) -> boto3.session.Session:
    source = botocore.session.get_session()
    source.register_component("data_loader", _LOADER)
    return boto3.session.Session(botocore_session=source, profile_name=profile)


def _profile_says(profile: str, where: str) -> tuple[str | None, str | None]:
    """Return the endpoint and the region that a profile has for S3."""
    try:
        source = botocore.session.Session(profile=profile)
        said = source.get_scoped_config()
        services = source.full_config.get("services", {})
    except (aws.ProfileNotFound, aws.ConfigParseError) as error:
        raise _no_profile(profile, where, error) from error
    own = services.get(said.get("services"), {}).get("s3", {})
    return own.get("endpoint_url") or said.get("endpoint_url"), said.get("region")


def _no_profile(profile: str | None, where: str, error: Exception) -> AccessDenied:
    named = f" of profile {profile!r}" if profile else ""
    return access_denied(where, f"credentials{named} could not be fetched: {type(error).__name__}")


def _connect(
    endpoint: str | None,
    profile: str | None,
    region: str | None,
    config: Config,
    where: str,
    before_send: Callable[..., None],
) -> Any:
    """A client of S3 with the credentials of this moment; `before_send` is called per request."""
    try:
        session = _session(profile)
        client = session.client(
            "s3",
            endpoint_url=endpoint,
            # Servers other than Amazon's rarely care, but a signature needs some region.
            region_name=region or session.region_name or "us-east-1",
            config=config,
        )
    except (*_NO_NEW_CREDENTIALS, aws.ProfileNotFound, aws.ConfigParseError) as error:
        raise _no_profile(profile, where, error) from error
    client.meta.events.register("before-send.s3", before_send)
    client.meta.events.register("before-parse.s3", _check_length)
    # A body that is an object's has a checksum in a header, which is signed: to sign it as well is
    # a third of an upload's CPU. Bodies that are commands are signed themselves.
    unsigned = client.meta.config.merge(Config(s3={"payload_signing_enabled": False}))
    for operation in ("PutObject", "UploadPart"):
        leave_out = partial(_sign_with, unsigned)
        client.meta.events.register(f"before-sign.s3.{operation}", leave_out)
    return client


def _sign_with(config: Config, request: Any, **_: object) -> None:
    """Have a request signed as a configuration says."""
    request.context["client_config"] = config


def _check_length(response_dict: dict[str, Any], operation_model: Any, **_: object) -> None:
    """Refuse an answer that was cut off: botocore would take an empty list for an empty bucket."""
    body, size = response_dict["body"], response_dict["headers"].get("content-length")
    if not isinstance(body, bytes) or size is None or operation_model.name.startswith("Head"):
        return
    if len(body) != int(size):
        raise BrokenBody(f"{len(body)} of {size} bytes of the answer came")


def _meaning(error: Exception) -> tuple[Meaning, str] | None:
    """What a failure of a request means, and in few words why; None if it is no such failure."""
    if isinstance(error, aws.ClientError):
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        # An answer to HEAD has no body to name an error: the status comes as its code.
        named = "" if code == str(status) else f" {code}"
        return meaning_of(status, code), f"HTTP {status}{named}".rstrip()
    if isinstance(error, _NO_CREDENTIALS):
        return "denied", "no complete credentials found"
    if isinstance(error, _NO_NEW_CREDENTIALS):
        return "expired", f"credentials could not be fetched: {type(error).__name__}"
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return "refused", "the server's certificate is not trusted (AWS_CA_BUNDLE names others)"
    if isinstance(error, _NETWORK):
        return "again", type(error).__name__
    if isinstance(error, _BROKEN):
        return "again", f"the body broke off: {error}"
    return ("refused", str(error)) if isinstance(error, aws.BotoCoreError) else None


def open_store(
    uri: str | os.PathLike[str],
    *,
    endpoint: str | None = None,
    profile: str | None = None,
    connect_timeout: float = 5.0,
    read_timeout: float = 30.0,
    attempts: int | None = None,
    threads: int = 32,
    patience: float = 120.0,
    hedge: bool = True,
    budget: Budget | None = None,
) -> Store:
    """The store rooted at `uri`: "s3://bucket/prefix", "memory://name", or a folder as a path or
    "file://...".

    Args:
        uri: the root; all keys are relative to it.
        endpoint: S3 endpoint; None reads AWS_ENDPOINT_URL, and without that means Amazon's own.
        profile: of boto3's files. Its keys and region count and, unless `endpoint` is given, its
            endpoint; nothing of the environment: keys of one server never go to another.
        connect_timeout: seconds to reach the server, per attempt.
        read_timeout: seconds without a single byte before an attempt counts as broken.
        attempts: failures in a row after which an operation is given up before its time; None: as
            many as fit into `patience`.
        threads: how many threads will read at once; sets the connection pool.
        patience: seconds without progress (1 MiB, or the rest) after which an operation is given
            up; of a folder, a read. An outage that is shorter shows only in the time.
        hedge: send a second request for a read that takes longer than 95 of 100 of its size.
        budget: the node's request budget, which every request asks first; None: no limit. The
            caller closes it.

    Raises:
        ValueError: unknown scheme, no bucket, an endpoint without a scheme, or credentials in
            either.
        AccessDenied: the profile or credential process named by the environment does not work.
    """
    scheme, rest = split_place("the root", os.fspath(uri))
    if scheme in ("", "file"):
        return FolderStore(rest, patience)
    bucket, _, prefix = rest.partition("/")
    if scheme == "memory":
        return MemoryStore(bucket, prefix)
    region, asked = None, "as configured, or by AWS_ENDPOINT_URL"
    if profile is None:
        endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL") or None
        if endpoint is None:  # for messages: who forgot the endpoint has asked Amazon
            asked = "Amazon's own: no endpoint is configured and AWS_ENDPOINT_URL is not set"
    else:
        said, region = _profile_says(profile, os.fspath(uri))
        endpoint = endpoint or said
        given = "as given or as the profile says" if endpoint else "Amazon's own"
        asked = f"{given}, with profile {profile!r}"
    check_endpoint("the S3 endpoint", endpoint)
    config = Config(
        connect_timeout=connect_timeout,
        read_timeout=read_timeout,
        max_pool_connections=2 * threads if hedge else threads,
        retries={"mode": "standard", "total_max_attempts": 1},
        signature_version="s3v4",
        # A bucket as a host name does not resolve on a private endpoint.
        s3={"addressing_style": "path" if endpoint else "auto"},
        # Every read is checked against the index by its reader; a second sum costs CPU.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        # With a profile all endpoints are known by now; AWS_ENDPOINT_URL would win over them.
        ignore_configured_endpoint_urls=profile is not None,
    )
    connect = partial(_connect, endpoint, profile, region, config, os.fspath(uri))
    return S3Store(
        *(bucket, prefix, connect, _meaning),
        attempts=attempts,
        pool=threads,
        patience=patience,
        hedge=hedge,
        budget=budget,
        asked=asked,
    )
