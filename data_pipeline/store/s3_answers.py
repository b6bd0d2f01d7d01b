"""What an S3 server's refusal means: may the request be sent again, and what is wrong if not.

Pure: status and error code in, one word out; the word in, one sentence out. Codes are those of
Amazon's "List of error codes" (S3 API reference); other servers use a part of them, so the status
decides where no code does.
"""

from typing import Any, Literal

from data_pipeline.store.objects import (
    MissingBucket,
    MissingKey,
    StoreError,
    access_denied,
    object_changed,
)

Meaning = Literal[
    "again",  # may succeed when it is sent again
    "throttled",  # too many requests: send again, and fewer
    "expired",  # credentials were good once: fetch them again
    "denied",
    "no_bucket",
    "missing",
    "changed",
    "range",
    "refused",  # anything else: sending it again changes nothing
]

# The status with which a server refuses a header that it does not know.
NOT_IMPLEMENTED = 501

_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired"}
_THROTTLED = {
    *("SlowDown", "Throttling", "ThrottlingException", "ThrottledException", "TooManyRequests"),
    *("TooManyRequestsException", "RequestLimitExceeded", "BandwidthLimitExceeded"),
}
# A body that arrived otherwise than it was sent may arrive as it is the next time.
_AGAIN = {"RequestTimeout", "OperationAborted", "InternalError", "BadDigest"}


def meaning_of(status: int, code: str) -> Meaning:
    """What an error answer means.

    Args:
        status: HTTP status.
        code: the `Code` of the error document; an answer to HEAD has none and comes with the
            status as code, or empty.
    """
    # Amazon answers a HEAD with an expired token by a bare 400.
    if code in _EXPIRED or (status == 400 and code in ("", "400", "Bad Request")):
        return "expired"
    if status in (429, 503) or code in _THROTTLED:
        return "throttled"
    if code == "NoSuchBucket":
        return "no_bucket"
    if code in _AGAIN or status in (408, 409) or (status >= 500 and status not in (501, 505)):
        return "again"
    by_status: dict[int, Meaning] = {
        **{401: "denied", 403: "denied"},
        **{404: "missing", 412: "changed", 416: "range"},
    }
    return by_status.get(status, "refused")


def status_of(error: object) -> int | None:
    """The HTTP status of a client's exception; None if it has none."""
    response: Any = getattr(error, "response", None)
    if not isinstance(response, dict):
        return None
    return response.get("ResponseMetadata", {}).get("HTTPStatusCode")


def failure(meaning: Meaning, where: str, bucket: str, reason: str, etag: str | None) -> StoreError:
    """The error to raise for a request that is not to be sent again.

    Args:
        where: the object.
        bucket: its bucket's name.
        reason: what the server said, in few words.
        etag: the version that was asked for.
    """
    if meaning == "no_bucket":
        return MissingBucket(
            f"{where}: there is no bucket {bucket!r}; create it or correct the root ({reason})"
        )
    if meaning == "missing":
        return MissingKey(f"{where}: no such object; check the name, or ingest it first")
    if meaning == "expired":
        return access_denied(where, f"{reason}, and again with credentials fetched anew")
    if meaning == "denied":
        return access_denied(where, reason)
    if meaning == "changed":
        return object_changed(where, etag or "unknown")
    if meaning == "range":
        return StoreError(
            f"{where}: the byte range lies past the end of the object; the index does not "
            "belong to it, ingest the source again"
        )
    return StoreError(f"{where}: refused: {reason}; correct the name or the configuration")
