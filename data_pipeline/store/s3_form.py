"""Checks that a successful S3 response has the form expected for its request.

A proxy's page, an empty body or the response to another request may also have status 200, and
botocore parses them as an empty listing, a deletion or an object. A failed check raises
`WrongAnswer` or `BrokenBody`, and the request is sent again.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

# The first element of a document, with any namespace prefix.
_ROOT = re.compile(rb"<(?:[\w.-]+:)?([A-Za-z]\w*)[\s/>]")
_ROOTS = {
    "ListObjectsV2": "ListBucketResult",
    "ListObjectVersions": "ListVersionsResult",
    "ListMultipartUploads": "ListMultipartUploadsResult",
    "CreateMultipartUpload": "InitiateMultipartUploadResult",
    "CompleteMultipartUpload": "CompleteMultipartUploadResult",
    "DeleteObjects": "DeleteResult",
}
_HEADERS = {
    "HeadObject": ("etag", "content-length"),
    "GetObject": ("etag",),
    "PutObject": ("etag",),
    "UploadPart": ("etag",),
}
_MOST_DIGITS = 18  # maximum digits of a number of bytes: Python refuses to parse thousands
_NUMBER = rf"[0-9]{{1,{_MOST_DIGITS}}}"
_RANGE = re.compile(rf"bytes ({_NUMBER})-({_NUMBER})/({_NUMBER}|\*)")
_MOST_EMPTY = 1000  # maximum number of pages in a row without an entry
# Fields of a page that hold entries, and the fields without which an entry names nothing.
_ENTRIES = {
    "Contents": ("Key",),
    "CommonPrefixes": ("Prefix",),
    "Uploads": ("Key", "UploadId"),
    "Versions": ("Key", "VersionId"),
    "DeleteMarkers": ("Key", "VersionId"),
}


class BrokenBody(Exception):
    """Fewer bytes arrived than announced, or they arrived too slowly."""


class WrongAnswer(Exception):
    """The response does not have the form expected for this request."""


def check_form(operation: str, status: int, headers: Mapping[str, str], body: object) -> None:
    """Check a response before it is parsed.

    Args:
        operation: name such as "ListObjectsV2".
        status: HTTP status; headers and document are checked only for successes.
        headers: headers with lower-case names.
        body: bytes, or the stream of an object.

    Raises:
        BrokenBody: the body is truncated; botocore would read an empty list as an empty bucket.
        WrongAnswer: the response has another form.
    """
    size = headers.get("content-length")
    if size is not None and not re.fullmatch(_NUMBER, size):
        raise WrongAnswer(f"Content-Length is {size!r:.40}")
    came = len(body) if isinstance(body, bytes) and not operation.startswith("Head") else None
    if came is not None and size is not None and came != int(size):
        raise BrokenBody(f"{came} of {size} bytes of the answer came")
    if not 200 <= status < 300:
        return
    for name in _HEADERS.get(operation, ()):
        if not headers.get(name, "").strip():
            raise WrongAnswer(f"HTTP {status} without {name}")
    if not isinstance(body, bytes):
        return
    root = match[1].decode() if (match := _ROOT.search(body[:4096])) else ""
    wanted = _ROOTS.get(operation)
    if root == "Error":
        return  # botocore parses it as an error
    if root != wanted and (wanted or root.lower() == "html"):
        shown = f"<{root}>" if root else f"{len(body)} bytes"
        raise WrongAnswer(f"HTTP {status} with {shown}, expected {wanted or 'no document'}")


def check_body(reply: Mapping[str, Any], start: int, length: int | None) -> int:
    """Check the head of a GetObject response and return the size of its body.

    Args:
        reply: the reply of botocore.
        start, length: the requested range; length None means up to the end.

    Raises:
        WrongAnswer: the response does not cover the requested bytes.
    """
    status: int = reply["ResponseMetadata"]["HTTPStatusCode"]
    size: int | None = reply.get("ContentLength")
    packed = reply.get("ContentEncoding", "").replace("aws-chunked", "").replace("identity", "")
    packed = packed.strip(", ")
    if not start and length is None:
        if packed:
            raise WrongAnswer(f"the body is packed on its way ({packed:.20})")
        if status != 200 or size is None:
            told = f"HTTP {status}" if status != 200 else "no Content-Length"
            raise WrongAnswer(f"{told} for a whole object, so its end could not be told")
        return size
    if status == 200 and not start and size is not None and size == length and not packed:
        return size  # the range covers the whole object
    if status != 206:
        raise WrongAnswer(
            f"HTTP {status}: asked for a byte range, the server sent the whole object"
        )
    said = reply.get("ContentRange", "")
    match = _RANGE.fullmatch(said.strip())
    if match is None:
        raise WrongAnswer(f"Content-Range is {said!r:.60}, expected bytes {start}-...")
    first, last = int(match[1]), int(match[2])
    ends = [] if match[3] == "*" else [int(match[3]) - 1]
    ends += [] if length is None else [start + length - 1]
    if first != start or (ends and last != min(ends)) or size not in (None, last - first + 1):
        told = "" if length is None else f"{start + length - 1}"
        raise WrongAnswer(
            f"asked for bytes {start}-{told}, {said:.60} came with Content-Length {size}"
        )
    return last - first + 1


def check_deleted(reply: Mapping[str, Any], asked: Collection[str]) -> None:
    """Check an answer to DeleteObjects.

    Args:
        reply: of botocore.
        asked: names of the objects.

    Raises:
        WrongAnswer: it tells of an object that was not to be removed.
    """
    for error in reply.get("Errors", ()):
        if error.get("Key") not in asked:
            told = f"{error.get('Code')} for {error.get('Key')!r:.80}"
            raise WrongAnswer(f"{told}, which was not to be removed")


class Pages:
    """Checker for the pages of one listing: keys must have its prefix, and the listing must end.

    Args:
        prefix: prefix of all keys.
        marks: parameter of the next request -> page field with its value.
    """

    def __init__(self, prefix: str, marks: Mapping[str, str]) -> None:
        self._prefix, self._marks = prefix, marks
        self._tokens: set[tuple[str, ...]] = set()
        self._firsts: set[tuple[str, ...]] = set()
        self._empty = 0

    def check(self, page: Mapping[str, Any]) -> None:
        """Check a page; a refused page changes nothing and may be requested again.

        Raises:
            WrongAnswer: the page belongs to another listing, or the listing does not advance.
        """
        entries: list[Mapping[str, Any]] = []
        for kind, fields in _ENTRIES.items():
            for one in page.get(kind, ()):
                if lacking := [field for field in fields if field not in one]:
                    raise WrongAnswer(f"{kind} of the listing has an entry without {lacking[0]}")
                entries.append(one)
        for one in entries:
            name = one.get("Key", one.get("Prefix", ""))
            if not name.startswith(self._prefix):
                raise WrongAnswer(f"the listing of {self._prefix!r:.80} holds {name!r:.80}")
        if not page.get("IsTruncated"):
            return
        token = tuple(str(page.get(mark, "")) for mark in self._marks.values())
        first = _identity(entries[0]) if entries else None
        if not token[0] or token in self._tokens or first in self._firsts:
            raise WrongAnswer("the listing is cut off and does not say where it goes on")
        self._empty = 0 if entries else self._empty + 1
        if self._empty > _MOST_EMPTY:
            raise WrongAnswer(f"{_MOST_EMPTY:,} pages of the listing hold nothing")
        self._tokens.add(token)
        if first is not None:
            self._firsts.add(first)


def _identity(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(entry.get(name, "")) for name in ("Key", "Prefix", "VersionId", "UploadId"))
