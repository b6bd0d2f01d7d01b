"""Sends S3 requests until they are answered, or their failure is understood.

botocore counts attempts and not time, knows nothing of the other processes of a node and asks no
second time about an odd answer. Here it sends each request once, and `S3Requests` does the rest:
when to send it again, what a refusal means, and what the store does without.
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

_CALM_S = 5.0  # no hedges for so long after the server asked for fewer requests
_REMARK_S = 10.0  # a failing server is worth a line in the log this often


class Judgement(NamedTuple):
    """What a failed request means.

    Attributes:
        meaning: see `s3_answers`.
        reason: in few words, for messages.
        formed: it is known for certain: not from a status alone, as of a proxy's page.
    """

    meaning: Meaning
    reason: str
    formed: bool = True


class S3Requests(Counted):
    """Requests to a bucket, or a prefix of one; `S3Store` makes a store of them.

    Args:
        bucket, prefix: the root.
        connect: makes a boto3 client that sends each request once and calls the function it is
            given before each; reads the credentials anew.
        judge: what an exception of the client or of a body means; None if it is not one of those.
        attempts, pool (threads), patience, hedge, budget: see `open_store`.
        asked: how the endpoint came to be, for messages.
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
        self._draw = random.Random()  # of jitter only: seeded by the system, apart from any other
        self._here = threading.local()
        self._renewing = threading.Lock()
        self._closing = threading.Event()
        self._calm_at = self._remark_at = 0.0
        self._knows: dict[str, bool] = {}  # what not every server knows -> does this one?
        self._answers = False  # whether it has ever answered as an S3 server does
        self._connect = partial(connect, self._before_send)
        self._client = self._connect()
        self.endpoint: str = self._client.meta.endpoint_url
        self._asked = f"asked {self.endpoint}, {asked}"

    def close(self) -> None:
        """See `Store.close`. Reads under way are left to end; the budget is not closed."""
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
        """Do what not every server knows; once one has refused it, and never before, `instead`."""
        if self._knows.get(feature, True):
            try:
                done = do()
            except RequestRefused as refused:
                if feature in self._knows:
                    raise
                done = instead()  # what fails, too, was not refused for the feature
                self._knows[feature] = False
                log.warning("%s: does without %s from now on: %s", self.uri, feature, refused)
            else:
                self._knows[feature] = True
            return done
        return instead()

    def _pages(
        self, operation: str, prefix: str, marks: dict[str, str], **more: str
    ) -> Iterator[Any]:
        """Ask for all pages of a listing; `marks`: parameter -> its next value's name in a page."""
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
        """Send a request without a streamed answer until it succeeds or is given up."""
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
        """Send one request, once."""
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
        """Wait until a failed request may be sent again, or raise what the failure means.

        Args:
            key, error: of the request.
            tries: its attempts.
            client: that sent it.
            mark: when it was sent.
            etag: the version that was asked for.
            bare: it was a HEAD, whose answer has no body to tell the reason.
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
            if meaning not in ("missing", "changed", "range"):  # by these it is the right server
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
        """Take the credentials from boto3's chain anew, once for all threads that use `client`."""
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
        """What a failure means once what can be asked about it was asked."""
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
            # It spoke S3 a moment ago: somebody else answers in its place.
            return "again", found.reason
        self._answers |= found.formed and found.meaning in ("missing", "changed", "range")
        return found.meaning, found.reason

    def _reason_of(self, key: str, client: Any, found: Judgement) -> Judgement:
        """Ask for a byte of an object whose HEAD was refused: that answer says why."""
        try:
            more = {"Key": self._key(key), "Range": "bytes=0-0"}
            self._ask(client, "get_object", more, Sent())["Body"].close()
        except Exception as error:
            if (told := self._judge(error)) is None:
                raise
            # A range that is none: the object is there, and empty.
            return Judgement("again", found.reason) if told.meaning == "range" else told
        return Judgement("again", f"{found.reason}, though the object is there")

    def _still_has(self, key: str, client: Any, etag: str) -> bool:
        """Whether a HEAD says that an object has its ETag after all, or cannot say."""
        try:
            reply = self._ask(client, "head_object", {"Key": self._key(key)}, Sent())
        except Exception as error:
            if (told := self._judge(error)) is None:
                raise
            return told.meaning in TRANSIENT
        return same_version(reply["ETag"], etag)
