"""Requests: what makes an ``Idempotency-Key`` hold, whichever gateway is asked again.

A request is known by the caller's key, the topic's id and the idempotency key.
Before it is carried out it is claimed, by an event in a topic that all gateways
follow: of two claims the first in the log counts, so of two gateways one carries
it out. When it is done, its answer is written there, too, and is what everybody
gets who asks again, for ``requests_kept_ms`` at least, by the clocks of the gateways.

What is kept of an answer are the places of what was written, not its text: a
gateway makes the text anew, as its caller's protocol has it. Nothing younger than
``requests_kept_ms`` is forgotten to make room. When there are ``max_requests_kept``
of them, or ``max_requests_bytes``, a request with a new key is refused before it is
claimed (``RateLimitedError``). That is decided by the gateway that would claim it;
what is in the log counts for all of them alike, so that none forgets a request that
another one knows.

A claim without an answer means that its gateway is at work on it, or has failed on
the way. Whoever asks again carries the request out, too, if that has no other
effect than the first time: records have the numbers of their claim (``numbered``),
jobs have ids by which a queue knows duplicates. That holds for a while only. Later,
whether they are written is not known, nobody writes them again, and a retry is told
so: ``OutcomeUnknownError``, or ``RequestInProgressError`` while it may be under way.
A claim of the release before has no numbers, and is never carried out again.

An attempt without numbers that failed and has certainly written nothing is let go,
so that a retry is carried out. One with numbers needs no such thing, and must not
be: another may be at work on it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

import msgspec

from rayqueue.client.handle import RayQueue
from rayqueue.config import GatewaySettings
from rayqueue.errors import (
    InvalidInputError,
    OutcomeUnknownError,
    RateLimitedError,
    RayQueueError,
    RequestConflictError,
    RequestInProgressError,
)
from rayqueue.gateway.follower import Follower
from rayqueue.gateway.numbered import Number, Numbers, Placement
from rayqueue.protocol.calls import NewProducerIds
from rayqueue.protocol.topics import GATEWAY
from rayqueue.records import Record

_log = logging.getLogger(__name__)

TOPIC = f"{GATEWAY}requests"
MAX_KEY = 200

_ENTRY_BYTES = 800
"""What a request takes in memory beside its answer, about."""
_COME_AGAIN_MS = 60_000
"""A caller is not told to wait for longer than that, whenever there is room again: settings can be changed."""


class Claimed(msgspec.Struct, frozen=True, tag="claimed"):
    request: bytes
    contents: bytes
    attempt: str
    number: Number | None = None
    """Never more fields than these three: a gateway of an earlier release could not read the claim."""
    placement: Placement | None = None
    """None of an earlier release, which placed by its gateway's own settings."""


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    request: bytes
    attempt: str
    answer: bytes | None = None
    """Of an earlier release: the text."""
    places: bytes | None = None
    """What was written where (``written.packed``)."""


class LetGo(msgspec.Struct, frozen=True, tag="let_go"):
    """The attempt has failed, and written nothing."""

    request: bytes
    attempt: str


Event = Claimed | Answered | LetGo
_DECODER = msgspec.msgpack.Decoder(Event)


class Known(msgspec.Struct):
    contents: bytes
    attempt: str
    at_ms: int
    number: Number | None = None
    placement: Placement | None = None
    answer: bytes | None = None
    places: bytes | None = None

    @property
    def answered(self) -> bool:
        return self.answer is not None or self.places is not None

    @property
    def size_bytes(self) -> int:
        return _ENTRY_BYTES + len(self.answer or b"") + len(self.places or b"")


CarryOut = Callable[[Known], Awaitable[bytes]]
"""Carries a request out as it was claimed. The places of what was written (``written.packed``)."""
Encode = Callable[[bytes], bytes]
"""The answer that tells these places."""


class Ledger:
    """What the log of requests means: the same to every gateway, for it knows no time but the log's. No I/O."""

    def __init__(self, kept_ms: int) -> None:
        self._kept_ms = kept_ms
        self._known: OrderedDict[bytes, Known] = OrderedDict()
        self._now_ms = 0
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._known)

    def get(self, request: bytes) -> Known | None:
        return self._known.get(request)

    def full_for_ms(self, now_ms: int, most: int, most_bytes: int) -> int:
        """0 if one more may be claimed now; otherwise how long it lasts until the oldest may be forgotten."""
        count, size_bytes = len(self._known), self.size_bytes
        for known in self._known.values():
            if count < most and size_bytes < most_bytes:
                break
            left_ms = known.at_ms + self._kept_ms - now_ms
            if left_ms >= 0:
                return left_ms + 1
            count, size_bytes = count - 1, size_bytes - known.size_bytes  # the claim will make it forgotten
        return 0

    def apply(self, event: Event, at_ms: int) -> None:
        self._pass_to(at_ms)
        known = self._known.get(event.request)
        if isinstance(event, Claimed):
            if known is None:
                made = Known(event.contents, event.attempt, at_ms, event.number, event.placement)
                self._known[event.request] = made
                self.size_bytes += made.size_bytes
        elif known is not None and known.attempt == event.attempt:
            self.size_bytes -= known.size_bytes
            if isinstance(event, Answered):
                known.answer, known.places = event.answer, event.places
            elif not known.answered:
                del self._known[event.request]
                return
            self.size_bytes += known.size_bytes

    def _pass_to(self, now_ms: int) -> None:
        """Forget what is too old."""
        self._now_ms = max(self._now_ms, now_ms)
        while self._known:
            request, oldest = next(iter(self._known.items()))
            if self._now_ms - oldest.at_ms <= self._kept_ms:
                return
            del self._known[request]
            self.size_bytes -= oldest.size_bytes


def request_id(caller: str, topic: str, topic_id: int, key: str, kind: str = "") -> bytes:
    """What an idempotency key is bound to: who uses it, for which topic, and ``kind`` of request. A topic that is made
    again is another one."""
    if not 0 < len(key) <= MAX_KEY or not key.isprintable():
        raise InvalidInputError(f"an Idempotency-Key has 1 to {MAX_KEY} printable characters")
    return hashlib.sha256(msgspec.msgpack.encode((caller, topic, topic_id, kind + key))).digest()


class Requests:
    """Of one gateway. Follows the log from the first idempotent request on; until then it costs nothing."""

    def __init__(self, rq: RayQueue, settings: GatewaySettings) -> None:
        self._settings = settings
        self._ledger = Ledger(settings.requests_kept_ms)
        self._timeout_s = settings.request_timeout_ms / 1000
        self._follower = Follower(
            rq, TOPIC, self._apply, reset=self._forget, settings={"retention_ms": 2 * settings.requests_kept_ms}
        )
        self._started = False
        self._numbers = Numbers(lambda: asyncio.wrap_future(rq.io.run(rq.routes.coordinator.call(NewProducerIds()))))

    def _forget(self) -> None:
        self._ledger = Ledger(self._settings.requests_kept_ms)

    def _apply(self, record: Record) -> None:
        try:
            self._ledger.apply(_DECODER.decode(record.value or b""), record.timestamp)
        except msgspec.MsgspecError as error:
            _log.error("%s: event %d cannot be read: %s", TOPIC, record.offset, error)

    async def close(self) -> None:
        await self._follower.close()

    def knows(self, request: bytes) -> bool:
        return self._ledger.get(request) is not None

    async def once(
        self,
        request: bytes,
        contents: bytes,
        carry_out: CarryOut,
        encode: Encode,
        *,
        repeatable_ms: int = 0,
        partitions: int = 0,
        place: Callable[[], Placement] | None = None,
    ) -> tuple[bytes, bool]:
        """The request's answer, and whether it was carried out before.

        ``repeatable_ms``: for so long a repetition has no other effect than the first, so whoever asks again while
        there is no answer carries it out, too, and gets the same one. ``partitions``: of the topic, if it is numbered;
        then ``place`` raises whatever is wrong with the request before it is claimed.
        """
        if not self._started:
            self._started = True
            await self._follower.start()
        digest = hashlib.sha256(contents).digest()
        known, placement = self._ledger.get(request), None
        if known is None:
            self._check_room()
            try:
                placement = None if place is None else place()
            except RayQueueError:  # nothing was written, unless it was claimed by another gateway just now
                if not await self._follower.caught_up(self._timeout_s):
                    raise _not_looked_up() from None
                known = self._ledger.get(request)
                if known is None:
                    raise
        if known is not None:
            return await self._asked_again(known, request, digest, carry_out, encode, repeatable_ms, bool(partitions))
        attempt = secrets.token_hex(8)
        number = await self._numbers.take(partitions) if partitions else None
        claimed = await self._append(Claimed(request, digest, attempt, number, placement))
        if not await self._follower.reached(claimed, self._timeout_s):
            raise _not_looked_up()
        known = self._ledger.get(request)
        if known is None:
            raise RequestInProgressError("requests are being looked up anew; nothing was written, ask again")
        if known.attempt != attempt:
            if number is not None:
                self._numbers.put_back(number)
            return await self._asked_again(known, request, digest, carry_out, encode, repeatable_ms, bool(partitions))
        try:
            places = await carry_out(known)
        except OutcomeUnknownError:
            raise
        except RayQueueError:
            if number is None:
                await self._append(LetGo(request, attempt))
            raise
        if await self._keep(Answered(request, attempt, places=places)) and number is not None:
            self._numbers.put_back(number)
        return encode(places), False

    def _check_room(self) -> None:
        settings = self._settings
        wait_ms = self._ledger.full_for_ms(
            int(time.time() * 1000), settings.max_requests_kept, settings.max_requests_bytes
        )
        if wait_ms:
            raise RateLimitedError(
                f"{len(self._ledger)} idempotency keys are remembered, in {self._ledger.size_bytes} bytes: no more may "
                f"be. There is room for a new one in {wait_ms / 1000:.0f} s. Nothing was written: ask again then, or "
                "without a key, or raise gateway.max_requests_kept and gateway.max_requests_bytes",
                retry_after_ms=min(wait_ms, _COME_AGAIN_MS),
            )

    async def _keep(self, answered: Answered) -> bool:
        try:
            await self._append(answered)
        except RayQueueError as error:  # it is written; a retry will be told that this is not known
            _log.warning("the answer to an idempotent request could not be kept: %s", error)
            return False
        return True

    async def _asked_again(
        self,
        known: Known,
        request: bytes,
        digest: bytes,
        carry_out: CarryOut,
        encode: Encode,
        repeatable_ms: int,
        numbered: bool,
    ) -> tuple[bytes, bool]:
        # The effect of the first attempt may be as late as its deadline, and is remembered from then on.
        age_ms = time.time() * 1000 - known.at_ms
        repeatable = age_ms < repeatable_ms - 2000 * self._timeout_s and (known.number is not None or not numbered)
        if not known.answered and known.contents == digest and repeatable:
            try:
                places = await carry_out(known)
            except RayQueueError as error:
                if known.number is None or error.retriable or isinstance(error, OutcomeUnknownError):
                    raise
                raise OutcomeUnknownError(
                    f"an earlier attempt of this request may have written some of it, and this one cannot: {error}"
                ) from error
            await self._keep(Answered(request, known.attempt, places=places))
            return encode(places), True
        return self._again(known, digest, encode), True

    def _again(self, known: Known, contents: bytes, encode: Encode) -> bytes:
        if known.contents != contents:
            raise RequestConflictError(
                "this Idempotency-Key was used for another request; take a new key for a new request"
            )
        if known.answer is not None:
            return known.answer
        if known.places is not None:
            return encode(known.places)
        if time.time() * 1000 - known.at_ms < 2000 * self._timeout_s:
            raise RequestInProgressError("the same request is being carried out; ask again in a moment")
        raise OutcomeUnknownError(
            "a request with this Idempotency-Key was begun and its gateway failed: its records may be written or not, "
            "and are not written again; look for them, or take a new key"
        )

    async def _append(self, event: Event) -> int:
        return await self._follower.append(msgspec.msgpack.encode(event))


def _not_looked_up() -> RequestInProgressError:
    return RequestInProgressError("requests cannot be looked up at the moment; nothing was written now, ask again")
