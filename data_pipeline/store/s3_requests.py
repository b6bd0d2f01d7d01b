"""Sends S3 requests with retries, and classifies failures.

botocore limits attempts instead of time, does not know the other processes of a node, and does not
verify odd responses. Here it sends each request once, and `S3Requests` decides when to send it
again, what a refusal means, and which optional features the store does without.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

from data_pipeline.store.budget import Budget
from data_pipeline.store.hedge import Hedger
from data_pipeline.store.objects import (
    ObjectChanged,
    RequestRefused,
    StoreError,
    StoreUnavailable,
    Versions,
    check_key,
    same_version,
)
from data_pipeline.store.retry import Tries
from data_pipeline.store.s3_answers import TRANSIENT, Meaning, failure
from data_pipeline.store.s3_form import Pages
from data_pipeline.store.s3_read import Sent
from data_pipeline.store.stats import Counted

T = TypeVar("T")
log = logging.getLogger(__name__)

_CALM_S = 5.0  # no hedges for this long after the server throttled a request
_REMARK_S = 10.0  # minimum interval between log lines about a failing server


class Judgement(NamedTuple):
    """Classification of a failed request.

    Attributes:
        meaning: see `s3_answers`.
        reason: short text for messages.
        formed: True if the meaning is certain; False if it comes only from a status, which may be
            a proxy's.
    """

    meaning: Meaning
    reason: str
    formed: bool = True


class S3Requests(Counted):
    """Requests to a bucket, or to a prefix in a bucket; base class of `S3Store`.

    Args:
        bucket, prefix: the root.
        connect: makes a boto3 client with fresh credentials. The client sends each request once
            and calls the given function before each request.
        judge: returns the meaning of an exception from the client or a body; None for others.
        attempts, pool (threads), patience, hedge, budget: see `open_store`.
        asked: origin of the endpoint, for messages.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str,
        connect: Callable[[Callable[..., None]], Any],
        judge: Callable[[Exception], Judgement | None],
        *,
        attempts: int | None,
        pool: int,
        patience: float,
        hedge: bool,
        budget: Budget | None,
        asked: str,
    ) -> None:
        super().__init__()
        self.bucket, self._prefix = bucket, prefix.strip("/")
        self.uri = f"s3://{bucket}/{self._prefix}".rstrip("/")
        self._judge, self._patience, self._attempts = judge, patience, attempts
        self._versions = Versions()
        self._hedger = Hedger(pool) if hedge else None
        self._budget = budget
        self._draw = random.Random()  # for jitter only; seeded by the system
        self._here = threading.local()
        self._renewing = threading.Lock()
        self._closing = threading.Event()
        self._calm_at = self._remark_at = 0.0
        self._knows: dict[str, bool] = {}  # optional feature -> True if this server supports it
        self._answers = False  # True once the server has answered like an S3 server
        self._connect = partial(connect, self._before_send)
        self._client = self._connect()
        self.endpoint: str = self._client.meta.endpoint_url
        self._asked = f"asked {self.endpoint}, {asked}"

    def close(self) -> None:
        """See `Store.close`. Reads in progress may finish; the budget is not closed."""
        self._closing.set()
        if self._hedger:
            self._hedger.close()
        self._client.close()

    def _before_send(self, **_: object) -> None:
        waited = 0.0
        if self._budget is not None:
            waited = self._budget.take(self.uri, self._patience, self._closing)
        self.count(requests=1, budget_wait_s=waited)
        mark: Sent = self._here.mark
        mark.waited, mark.sent = mark.waited + waited, time.monotonic()

    def _key(self, key: str) -> str:
        return self._base + check_key(key)

    def _optional(self, feature: str, do: Callable[[], T], instead: Callable[[], T]) -> T:
        """Call `do`, which needs an optional feature; call `instead` once the server refuses it."""
        if self._knows.get(feature, True):
            try:
                done = do()
            except RequestRefused as refused:
                if feature in self._knows:
                    raise
                done = instead()  # if this fails too, the feature was not the cause
                self._knows[feature] = False
                log.warning("%s: does without %s from now on: %s", self.uri, feature, refused)
            else:
                self._knows[feature] = True
            return done
        return instead()

    def _pages(
        self, operation: str, prefix: str, marks: dict[str, str], **more: str
    ) -> Iterator[Any]:
        """Yield all pages of a listing; `marks`: parameter -> page field with its next value."""
        wanted = {"Prefix": self._base + prefix, **more}
        pages, at = Pages(self._base + prefix, marks), {}
        while True:
            reply = self._request(operation, prefix, wanted | at, check=pages.check)
            yield reply
            if not reply.get("IsTruncated"):
                return
            at = {name: reply[mark] for name, mark in marks.items() if reply.get(mark)}

    @property
    def _base(self) -> str:
        return f"{self._prefix}/" if self._prefix else ""

    def _call(self, operation: str, key: str, *, patience: float | None = None, **more: Any) -> Any:
        return self._request(operation, key, {"Key": self._key(key), **more}, patience)

    def _request(
        self,
        operation: str,
        key: str,
        parameters: dict[str, Any],
        patience: float | None = None,
        check: Callable[[Any], None] | None = None,
    ) -> Any:
        """Send a request with an unstreamed response until it succeeds or finally fails."""
        with self._tries(key, patience) as tries:
            while True:
                client, mark = self._client, Sent()
                try:
                    reply = self._ask(client, operation, parameters, mark)
                    if check is not None:
                        check(reply)
                    self._answers = True
                    return reply
                except Exception as error:
                    bare = operation == "head_object"
                    self._again(key, error, tries, client, mark, bare=bare)

    def _ask(self, client: Any, operation: str, parameters: dict[str, Any], mark: Sent) -> Any:
        """Send one request once."""
        self._here.mark = mark
        return getattr(client, operation)(Bucket=self.bucket, **parameters)

    def _ask_for(self, client: Any, name: str, mark: Sent, more: dict[str, Any]) -> Any:
        return self._ask(client, "get_object", {"Key": name, **more}, mark)

    def _tries(self, key: str, patience: float | None = None) -> Tries:
        patience = self._patience if patience is None else patience
        what = f"{self.uri}/{key} ({self._asked})"
        return Tries(what, patience, self._attempts, self._draw)

    def _again(
        self,
        key: str,
        error: Exception,
        tries: Tries,
        client: Any,
        mark: Sent,
        etag: str | None = None,
        *,
        bare: bool = False,
    ) -> None:
        """Wait until a failed request may be sent again, or raise the error for its failure.

        Args:
            key, error: key and error of the request.
            tries: attempts of the operation.
            client: client that sent the request.
            mark: time of sending.
            etag: the requested version.
            bare: True for a HEAD request, whose response has no body with the reason.
        """
        meaning, reason = self._meaning_of(key, error, client, etag, bare=bare)
        waited = mark.waited
        if meaning == "expired" and not tries.renewed:
            tries.renewed = True
            self._renew(client)
            return
        if meaning == "throttled":
            self._throttled()
        if meaning not in TRANSIENT:
            if isinstance(error, StoreError):
                raise error
            if meaning not in ("missing", "changed", "range"):  # these prove it is the right server
                reason = f"{reason}; {self._asked}"
            raise failure(meaning, f"{self.uri}/{key}", self.bucket, reason, etag) from error
        tries.excuse(waited)
        delay = tries.failed()
        if delay is None:
            raise StoreUnavailable(
                f"{self.uri}/{key}: gave up after {tries.failures} attempts ({reason}; no progress "
                f"for {tries.seconds:.0f} s; {self._asked}); check that the endpoint answers "
                "and is not throttling, then run again"
            ) from error
        self._remark(key, tries, reason)
        if self._closing.wait(delay):
            raise StoreUnavailable(
                f"{self.uri}/{key}: the store was closed while this waited to be tried again "
                f"({reason})"
            ) from error
        self.count(retries=1)

    def _throttled(self) -> None:
        self.count(throttled=1)
        self._calm_at = time.monotonic() + _CALM_S
        if self._budget is not None:
            self._budget.throttled()

    def _renew(self, client: Any) -> None:
        """Renew the credentials from boto3's chain, once for all threads that use `client`."""
        with self._renewing:
            if self._client is client:
                self._client = self._connect()

    def _remark(self, key: str, tries: Tries, reason: str) -> None:
        now = time.monotonic()
        if min(tries.seconds, now - self._remark_at) > _REMARK_S:
            self._remark_at = now
            log.warning(
                "%s/%s: no progress for %.0f s (%s), trying on; giving up after %.0f s",
                *(self.uri, key, tries.seconds, reason, self._patience),
            )

    def _meaning_of(
        self, key: str, error: Exception, client: Any, etag: str | None, *, bare: bool
    ) -> tuple[Meaning, str]:
        """Return meaning and reason of a failure, after asking the server for details if needed."""
        if isinstance(error, ObjectChanged):
            found, etag = Judgement("changed", "another ETag came"), error.etag
        elif isinstance(error, StoreError) or (judged := self._judge(error)) is None:
            raise error
        else:
            found = judged
        if bare and not found.formed and found.meaning not in TRANSIENT:
            found = self._reason_of(key, client, found)
        if found.meaning == "changed" and etag and self._still_has(key, client, etag):
            found = Judgement("again", f"{found.reason}, the object still has ETag {etag}")
        if found.meaning in TRANSIENT:
            return found.meaning, found.reason
        if self._answers and (not found.formed or found.meaning == "redirect"):
            # The server has spoken S3 before, so this response comes from something in between.
            return "again", found.reason
        self._answers |= found.formed and found.meaning in ("missing", "changed", "range")
        return found.meaning, found.reason

    def _reason_of(self, key: str, client: Any, found: Judgement) -> Judgement:
        """Return why a HEAD was refused, from a GET of one byte, whose response has a body."""
        try:
            more = {"Key": self._key(key), "Range": "bytes=0-0"}
            self._ask(client, "get_object", more, Sent())["Body"].close()
        except Exception as error:
            if (told := self._judge(error)) is None:
                raise
            # An invalid range means that the object exists and is empty.
            return Judgement("again", found.reason) if told.meaning == "range" else told
        return Judgement("again", f"{found.reason}, though the object is there")

    def _still_has(self, key: str, client: Any, etag: str) -> bool:
        """Return whether a HEAD confirms an object's ETag, or fails with a transient error."""
        try:
            reply = self._ask(client, "head_object", {"Key": self._key(key)}, Sent())
        except Exception as error:
            if (told := self._judge(error)) is None:
                raise
            return told.meaning in TRANSIENT
        return same_version(reply["ETag"], etag)
