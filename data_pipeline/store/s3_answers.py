"""Classifies S3 error responses: a table of error codes, and the exception for each meaning.

The module is pure: it maps status and error code to a meaning, and a meaning to an exception. The
table has the codes of Amazon's "List of error codes" (S3 API reference) that our requests can get,
and the codes that MinIO, Ceph, OSS, B2 and GCS add. `docs/DATA.md` shows it.
"""

from typing import Literal, NamedTuple

from data_pipeline.store.objects import (
    MissingBucket,
    MissingKey,
    NotSupported,
    RequestRefused,
    StoreError,
    access_denied,
    object_changed,
)

Meaning = Literal[
    "again",
    "throttled",
    "skewed",
    "expired",
    "denied",
    "no_bucket",
    "missing",
    "changed",
    "range",
    "redirect",
    "full",
    "unsupported",
    "refused",
]


class Row(NamedTuple):
    """One meaning of an error response.

    Attributes:
        fault: cause: "transient" (no fix needed), "user", "object" or "server".
        action: reaction of the store, for the docs.
        codes: the error codes.
        statuses: HTTP statuses with the same meaning if the response has no code of the table.
    """

    fault: str
    action: str
    codes: tuple[str, ...]
    statuses: tuple[int, ...] = ()


_AGAIN = """
RequestTimeout OperationAborted InternalError InternalServerError InternalFailure ServerBusy
BadDigest IncompleteBody ConditionalRequestConflict ConnectionClosedByRequester ResponseInterrupted
XAmzContentSHA256Mismatch XAmzContentChecksumMismatch ClientDisconnected XMinioServerNotInitialized
"""
_THROTTLED = """
SlowDown SlowDownRead SlowDownWrite ServiceUnavailable Busy Throttling ThrottlingException
ThrottledException Throttled TooManyRequests TooManyRequestsException RequestLimitExceeded
BandwidthLimitExceeded RequestThrottled RequestThrottledException RateLimitExceeded
QpsLimitExceeded DownloadTrafficRateLimitExceeded UploadTrafficRateLimitExceeded
PriorRequestNotComplete EC2ThrottledException KMS.ThrottlingException
"""
_EXPIRED = """
ExpiredToken ExpiredTokenException InvalidToken TokenRefreshRequired InvalidAccessKeyId
SecurityTokenExpired InvalidSecurityToken AccessTokenExpired
"""
_DENIED = """
AccessDenied AllAccessDisabled AccountProblem NotSignedUp SignatureDoesNotMatch InvalidSecurity
InvalidPayer MissingAuthenticationToken UnauthorizedAccess
UnauthorizedAccessError UnexpectedIPError CredentialsNotSupported InvalidSignature
UserProjectAccountProblem UserProjectMissing TransactionCapExceeded KMS.AccessDeniedException
"""
_MISSING = "NoSuchKey NoSuchVersion NoSuchUpload KeyTooLongError KeyTooLong"
_REDIRECT = """
PermanentRedirect TemporaryRedirect Redirect IncorrectEndpoint IllegalLocationConstraintException
AuthorizationHeaderMalformed InvalidRegion EndpointNotFound
"""
_FULL = """
QuotaExceeded StorageFull XMinioStorageFull XMinioAdminBucketQuotaExceeded InsufficientCapacity
StorageCapExceeded
"""
_UNSUPPORTED = """
NotImplemented MethodNotAllowed UnsupportedArgument UnsupportedHeader UnsupportedOperation
"""
_REFUSED = """
InvalidArgument InvalidRequest InvalidDigest InvalidObjectState InvalidPart InvalidPartOrder
InvalidStorageClass InvalidURI InvalidHostHeader InvalidEncryptionAlgorithmError InvalidBucketState
EntityTooLarge EntityTooSmall MalformedXML MetadataTooLarge MissingContentLength MissingContentMD5
MissingSecurityHeader MissingRequestBodyError MaxMessageLengthExceeded UnsupportedSignature
RequestHeaderSectionTooLarge BadRequest UnexpectedContent UserKeyMustBeSpecified BucketAlreadyExists
RestoreAlreadyInProgress ServerSideEncryptionConfigurationNotFoundError
ObjectLockConfigurationNotFoundError NoSuchObjectLockConfiguration KMS.DisabledException
KMS.NotFoundException KMS.InvalidKeyUsageException KMS.KMSInvalidStateException
"""

TABLE: dict[Meaning, Row] = {
    "again": Row(
        "transient",
        "sent again until `patience` is over, then exit 75",
        tuple(_AGAIN.split()),
        (408, 409, 425, 500, 502, 504),
    ),
    "throttled": Row(
        "transient",
        "the same, with fewer requests",
        tuple(_THROTTLED.split()),
        (429, 503),
    ),
    "skewed": Row(
        "transient",
        "signed anew and sent again; the message gives both clocks",
        ("RequestTimeTooSkewed", "RequestExpired", "RequestInTheFuture"),
    ),
    "expired": Row(
        "user",
        "credentials are fetched once more; refused again: exit 2",
        tuple(_EXPIRED.split()),
    ),
    "denied": Row("user", "exit 2", tuple(_DENIED.split()), (401, 402, 403)),
    "no_bucket": Row("user", "exit 2", ("NoSuchBucket", "InvalidBucketName")),
    "redirect": Row(
        "user",
        "a region that is named is taken; else exit 2 with the address, from a server that has "
        "answered before as `again`",
        tuple(_REDIRECT.split()),
        (300, 301, 302, 303, 304, 305, 307, 308),
    ),
    "full": Row("user", "exit 2", tuple(_FULL.split()), (507,)),
    "missing": Row("object", "`MissingKey`: the reader decides", tuple(_MISSING.split()), (404,)),
    "changed": Row(
        "object",
        "HEAD is asked: has the object its ETag still, as `again`, else exit 2",
        ("PreconditionFailed",),
        (412,),
    ),
    "range": Row("object", "exit 2: the index is of another object", ("InvalidRange",), (416,)),
    "unsupported": Row(
        "server",
        "done without, where that is possible (below), else exit 2",
        tuple(_UNSUPPORTED.split()),
        (405, 501, 505),
    ),
    "refused": Row(
        "user",
        "done without the header or operation, where that is possible (below), else exit 2",
        tuple(_REFUSED.split()),
        (400, 411, 413, 414, 415, 417, 431),
    ),
}

TRANSIENT: frozenset[Meaning] = frozenset(
    meaning for meaning, row in TABLE.items() if row.fault == "transient"
)


_BY_CODE: dict[str, Meaning] = {
    code: meaning for meaning, row in TABLE.items() for code in row.codes
}
_BY_STATUS: dict[int, Meaning] = {
    status: meaning for meaning, row in TABLE.items() for status in row.statuses
}


def meaning_of(status: int, code: str) -> Meaning:
    """Return the meaning of an error response, from its code or else from its status.

    Args:
        status: HTTP status.
        code: the `Code` of the error document. Without a document, as for HEAD, it is the status
            or empty.
    """
    return _BY_CODE.get(code) or _BY_STATUS.get(status) or ("again" if status >= 500 else "refused")


def failure(meaning: Meaning, where: str, bucket: str, reason: str, etag: str | None) -> StoreError:
    """Return the error to raise for a request that must not be sent again.

    Args:
        meaning: meaning of the failure.
        where: address of the object.
        bucket: name of the bucket.
        reason: short form of the server's message.
        etag: the requested version.
    """
    if meaning == "missing":
        return MissingKey(f"{where}: no such object; check the name, or ingest it first")
    if meaning == "expired":
        return access_denied(where, f"{reason}, and again with credentials fetched anew")
    if meaning == "denied":
        return access_denied(where, reason)
    if meaning == "changed":
        return object_changed(where, etag or "unknown")
    kind, told = {
        "no_bucket": (
            MissingBucket,
            f"there is no bucket {bucket!r}; create it or correct the root ({reason})",
        ),
        "redirect": (
            StoreError,
            f"the server sends this request elsewhere: {reason}; set data.endpoint or "
            "AWS_ENDPOINT_URL, and the region of the AWS configuration, to the bucket's own",
        ),
        "full": (StoreError, f"the store has no room: {reason}; make room or raise the quota"),
        "range": (
            StoreError,
            "the byte range lies past the end of the object; the index does not belong to it, "
            "ingest the source again",
        ),
        "unsupported": (NotSupported, f"the server does not know this request: {reason}"),
    }.get(meaning, (RequestRefused, f"refused: {reason}; correct the name or the configuration"))
    return kind(f"{where}: {told}")


def rows() -> list[str]:
    """Return the table as Markdown lines for docs/DATA.md."""
    head = "| meaning | fault | codes | statuses without a code | what is done |"
    return [head, "|---|---|---|---|---|"] + [
        f"| {meaning} | {row.fault} | {', '.join(row.codes)} | "
        f"{', '.join(map(str, row.statuses))} | {row.action} |"
        for meaning, row in TABLE.items()
    ]
