"""Opens a store from its URI; the only module that imports boto3.

Credentials come only from boto3's chain (environment, profile, credential process, instance role).
They are never arguments, attributes or parts of messages.
"""

import os
import time
import traceback
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import boto3.session
import botocore.loaders
import botocore.session
import urllib3.exceptions
from botocore import exceptions as aws
from botocore.config import Config
from botocore.parsers import ResponseParserError

from data_pipeline.store.addresses import (
    check_endpoint,
    endpoints_ignored,
    environment_endpoint,
    split_place,
)
from data_pipeline.store.budget import Budget
from data_pipeline.store.memory import MemoryStore
from data_pipeline.store.objects import (
    AccessDenied,
    FolderStore,
    MissingBucket,
    MissingKey,
    ObjectChanged,
    ObjectInfo,
    RequestRefused,
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
from data_pipeline.store.s3_answers import meaning_of
from data_pipeline.store.s3_form import BrokenBody, WrongAnswer, check_form
from data_pipeline.store.s3_requests import Judgement
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
    "RequestRefused",
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


# Sharing the parsed S3 model reduces the cost of a new client from 60 ms to 10 ms.
_LOADER = botocore.loaders.create_loader()


def _session(profile: str | None) -> boto3.session.Session:
    source = botocore.session.get_session()
    source.register_component("data_loader", _LOADER)
    return boto3.session.Session(botocore_session=source, profile_name=profile)


_STYLES = ("path", "virtual", "auto")


class _Said(NamedTuple):
    """S3 settings of a profile; None for a setting that it does not have."""

    endpoint: str | None
    region: str | None
    style: str | None


def _profile_says(profile: str | None, where: str) -> _Said:
    """Return the S3 settings of a profile; None means the environment's or the default profile."""
    try:
        source = botocore.session.Session(profile=profile)
        said = source.get_scoped_config()
        services = source.full_config.get("services", {})
    except (aws.ProfileNotFound, aws.ConfigParseError) as error:
        raise _no_profile(profile, where, error) from error
    own = services.get(said.get("services"), {}).get("s3", {})
    settings = said.get("s3", {})
    style = settings.get("addressing_style") if isinstance(settings, dict) else None
    if style not in (None, *_STYLES):
        raise ValueError(
            f"s3.addressing_style of the AWS configuration is {style!r:.40}, expected one of "
            f"{', '.join(_STYLES)}"
        )
    return _Said(own.get("endpoint_url") or said.get("endpoint_url"), said.get("region"), style)


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
    """Return an S3 client with the current credentials; it calls `before_send` per request."""
    try:
        session = _session(profile)
        client = session.client(
            "s3",
            endpoint_url=endpoint,
            # Most other servers ignore the region, but a signature needs one.
            region_name=region or session.region_name or "us-east-1",
            config=config,
        )
    except (*_NO_NEW_CREDENTIALS, aws.ProfileNotFound, aws.ConfigParseError) as error:
        raise _no_profile(profile, where, error) from error
    client.meta.events.register("before-send.s3", before_send)
    client.meta.events.register("before-parse.s3", _check_answer)
    client.meta.events.register_first("needs-retry.s3", _follow_no_blind_redirect)
    # Object bodies have a checksum in a signed header, so signing the body too would only cost a
    # third of an upload's CPU time. Bodies with commands are signed.
    unsigned = client.meta.config.merge(Config(s3={"payload_signing_enabled": False}))
    for operation in ("PutObject", "UploadPart"):
        leave_out = partial(_sign_with, unsigned)
        client.meta.events.register(f"before-sign.s3.{operation}", leave_out)
    return client


def _sign_with(config: Config, request: Any, **_: object) -> None:
    """Sign a request with the settings of `config`."""
    request.context["client_config"] = config


def _check_answer(response_dict: dict[str, Any], operation_model: Any, **_: object) -> None:
    headers = {name.lower(): value for name, value in response_dict["headers"].items()}
    status, body = response_dict["status_code"], response_dict["body"]
    check_form(operation_model.name, status, headers, body)


def _follow_no_blind_redirect(request_dict: dict[str, Any], response: Any, **_: object) -> None:
    """Let botocore follow a redirect only if the response names the bucket's region.

    Otherwise it would send a HEAD request and follow its redirect, in an endless loop.
    """
    parsed = {} if response is None else response[1]
    headers = parsed.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    if "x-amz-bucket-region" not in headers and not parsed.get("Error", {}).get("Region"):
        request_dict["context"].setdefault("s3_redirect", {})["redirected"] = True


def _judge(error: Exception) -> Judgement | None:
    """Return the classification of a request's failure; None for other exceptions."""
    if isinstance(error, aws.ClientError):
        return _answered(error.response)
    if isinstance(error, _NO_CREDENTIALS):
        return Judgement("denied", "no complete credentials found")
    if isinstance(error, _NO_NEW_CREDENTIALS):
        told = f"credentials could not be fetched: {type(error).__name__}"
        return Judgement("expired", told)
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        told = "the server's certificate is not trusted (AWS_CA_BUNDLE names others)"
        return Judgement("refused", told)
    if isinstance(error, _NETWORK):
        return Judgement("again", type(error).__name__)
    if isinstance(error, WrongAnswer):
        return Judgement("again", f"a wrong answer: {error}")
    if isinstance(error, _BROKEN):
        return Judgement("again", f"the body broke off: {error}")
    if isinstance(error, aws.ParamValidationError):  # a bad bucket name from the user
        return Judgement("no_bucket", " ".join(str(error).split()))
    if isinstance(error, aws.BotoCoreError):
        return Judgement("refused", str(error))
    if _in_parser(error):
        return Judgement("again", f"a wrong answer: {type(error).__name__} in parsing it")
    return None


def _in_parser(error: Exception) -> bool:
    """Return whether botocore's parser raised the error, as it does for bad numbers and dates."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return any(os.path.join("botocore", "parsers.py") in name for name in frames)


def _answered(response: Any) -> Judgement:
    """Return the classification of an error response."""
    error, metadata = response.get("Error", {}), response.get("ResponseMetadata", {})
    code, status = str(error.get("Code") or ""), metadata.get("HTTPStatusCode", 0)
    headers = metadata.get("HTTPHeaders", {})
    # Without an error document, as for HEAD, botocore uses the status as the code.
    named = code not in ("", str(status), "Bad Request", "Forbidden", "Not Found")
    meaning = meaning_of(status, code if named else "")
    reason = f"HTTP {status} {code:.80}" if named else f"HTTP {status}"
    if meaning == "skewed":
        reason += _clocks(headers)
    elif meaning == "redirect":
        reason += _elsewhere(error, headers)
    elif meaning in ("refused", "unsupported", "full", "again"):
        told = [error.get("Message"), error.get("Header"), error.get("ArgumentName")]
        shown = ", ".join(" ".join(str(one).split()) for one in told if one)
        reason += f": {shown:.200}" if named and shown and shown != code else ""
    return Judgement(meaning, reason, named)


def _clocks(headers: Mapping[str, str]) -> str:
    """Return the message on the difference between this machine's clock and the server's."""
    try:
        there = parsedate_to_datetime(headers.get("date", "")).timestamp()
    except (ValueError, TypeError):
        return ", the clocks of this machine and of the server differ"
    return f", this machine's clock is {time.time() - there:+.0f} s from the server's: set it"


def _elsewhere(error: Mapping[str, Any], headers: Mapping[str, str]) -> str:
    """Return the target of a redirect: address without path and credentials, and region."""
    address = urlsplit(headers.get("location", "") or str(error.get("Endpoint", "")))
    host = address.netloc.rpartition("@")[2] or address.path
    region = headers.get("x-amz-bucket-region") or error.get("Region")
    told = f", to {address.scheme}{'://' if address.scheme else ''}{host:.200}" if host else ""
    return told + (f", region {region!r:.40}" if region else "")


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
    """Open the store rooted at `uri`.

    Args:
        uri: the root, as "s3://bucket/prefix", "memory://name", "file://..." or a folder's path;
            all keys are relative to it.
        endpoint: S3 endpoint. None uses AWS_ENDPOINT_URL_S3, then AWS_ENDPOINT_URL, then the
            profile's file, then Amazon's default.
        profile: profile in boto3's files. Its keys and region are used and, unless `endpoint` is
            given, its endpoint. The environment is ignored, so that keys of one server never go to
            another.
        connect_timeout: seconds to reach the server, per attempt.
        read_timeout: seconds without a single byte after which an attempt fails.
        attempts: failures in a row after which an operation fails early; None allows as many as
            fit into `patience`.
        threads: number of threads that read at once; sets the size of the connection pool.
        patience: seconds without progress (1 MiB, or the rest) after which an operation fails; for
            a folder, it applies to reads. A shorter outage only costs time.
        hedge: send a second request for a read that is slower than 95% of reads of its size.
        budget: the node's request budget, which every request waits for; None means no limit. The
            caller closes it.

    Raises:
        ValueError: the scheme is unknown, the bucket is missing, the endpoint has no scheme, either
            contains credentials, or the addressing style is invalid.
        AccessDenied: the profile or credential process named by the environment does not work.
    """
    scheme, rest = split_place("the root", os.fspath(uri))
    if scheme in ("", "file"):
        return FolderStore(rest, patience)
    bucket, _, prefix = rest.partition("/")
    if scheme == "memory":
        return MemoryStore(bucket, prefix)
    said = _profile_says(profile, os.fspath(uri))
    if profile is None:
        endpoint = endpoint or environment_endpoint()
        endpoint = endpoint or (None if endpoints_ignored() else said.endpoint)
        asked = "as configured, or by AWS_ENDPOINT_URL"
        if endpoint is None:  # helps users who forgot the endpoint
            asked = "Amazon's own: no endpoint is configured and AWS_ENDPOINT_URL is not set"
    else:
        endpoint = endpoint or said.endpoint
        given = "as given or as the profile says" if endpoint else "Amazon's own"
        asked = f"{given}, with profile {profile!r}"
    region = said.region if profile is not None else None
    check_endpoint("the S3 endpoint", endpoint)
    config = Config(
        connect_timeout=connect_timeout,
        read_timeout=read_timeout,
        max_pool_connections=2 * threads if hedge else threads,
        retries={"mode": "standard", "total_max_attempts": 1},
        signature_version="s3v4",
        # A bucket as a host name does not resolve on most private endpoints.
        s3={"addressing_style": said.style or ("path" if endpoint else "auto")},
        # Readers check every read against the index; a second checksum would only cost CPU time.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        # The endpoint is already resolved; AWS_ENDPOINT_URL would override a profile's endpoint.
        ignore_configured_endpoint_urls=True,
    )
    connect = partial(_connect, endpoint, profile, region, config, os.fspath(uri))
    return S3Store(
        *(bucket, prefix, connect, _judge),
        attempts=attempts,
        pool=threads,
        patience=patience,
        hedge=hedge,
        budget=budget,
        asked=asked,
    )
