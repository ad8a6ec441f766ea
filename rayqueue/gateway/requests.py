"""Requests: what makes an ``Idempotency-Key`` hold, whichever gateway is asked again.

A request is known by the caller's key, the topic's id and the idempotency key.
Before it is carried out it is claimed, by an event in a topic that all gateways
follow: of two claims the first in the log counts, so of two gateways one carries
it out. When it is done, its answer is written there, too, and is what everybody
gets who asks again, for ``requests_kept_ms`` at least.

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
    RayQueueError,
    RequestConflictError,
    RequestInProgressError,
)
from rayqueue.gateway.follower import Follower
from rayqueue.gateway.numbered import Number, Numbers
from rayqueue.protocol.calls import NewProducerIds
from rayqueue.protocol.topics import GATEWAY
from rayqueue.records import Record

_log = logging.getLogger(__name__)

TOPIC = f"{GATEWAY}requests"
MAX_KEY = 200


class Claimed(msgspec.Struct, frozen=True, tag="claimed"):
    request: bytes
    contents: bytes
    attempt: str
    number: Number | None = None


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    request: bytes
    attempt: str
    answer: bytes


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
    answer: bytes | None = None


CarryOut = Callable[[Known], Awaitable[bytes]]
"""Carries a request out as it was claimed. Its answer."""


class Ledger:
    """What the log of requests means. No I/O."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[bytes, Known] = OrderedDict()

    def get(self, request: bytes) -> Known | None:
        return self._known.get(request)

    def apply(self, event: Event, at_ms: int) -> None:
        known = self._known.get(event.request)
        if isinstance(event, Claimed):
            if known is None:
                self._known[event.request] = Known(event.contents, event.attempt, at_ms, event.number)
                if len(self._known) > self._most:
                    self._known.popitem(last=False)
        elif known is not None and known.attempt == event.attempt:
            if isinstance(event, Answered):
                known.answer = event.answer
            elif known.answer is None:
                del self._known[event.request]


def request_id(caller: str, topic: str, topic_id: int, key: str) -> bytes:
    """What an idempotency key is bound to: who uses it, and for which topic. One made again is another one."""
    if not 0 < len(key) <= MAX_KEY or not key.isprintable():
        raise InvalidInputError(f"an Idempotency-Key has 1 to {MAX_KEY} printable characters")
    return hashlib.sha256(msgspec.msgpack.encode((caller, topic, topic_id, key))).digest()


class Requests:
    """Of one gateway. Follows the log from the first idempotent request on; until then it costs nothing."""

    def __init__(self, rq: RayQueue, settings: GatewaySettings) -> None:
        self._ledger = Ledger(settings.max_requests_kept)
        self._most = settings.max_requests_kept
        self._timeout_s = settings.request_timeout_ms / 1000
        self._follower = Follower(
            rq, TOPIC, self._apply, reset=self._forget, settings={"retention_ms": 2 * settings.requests_kept_ms}
        )
        self._started = False
        self._numbers = Numbers(lambda: asyncio.wrap_future(rq.io.run(rq.routes.coordinator.call(NewProducerIds()))))

    def _forget(self) -> None:
        self._ledger = Ledger(self._most)

    def _apply(self, record: Record) -> None:
        try:
            self._ledger.apply(_DECODER.decode(record.value or b""), record.timestamp)
        except msgspec.MsgspecError as error:
            _log.error("%s: event %d cannot be read: %s", TOPIC, record.offset, error)

    async def close(self) -> None:
        await self._follower.close()

    async def once(
        self,
        request: bytes,
        contents: bytes,
        carry_out: CarryOut,
        *,
        repeatable_ms: int = 0,
        partitions: int = 0,
    ) -> tuple[bytes, bool]:
        """The request's answer, and whether it was carried out before.

        ``repeatable_ms``: for so long a repetition has no other effect than the first, so whoever asks again while
        there is no answer carries it out, too, and gets the same one. ``partitions``: of the topic, if it is numbered.
        """
        if not self._started:
            self._started = True
            await self._follower.start()
        digest = hashlib.sha256(contents).digest()
        known = self._ledger.get(request)
        if known is not None:
            return await self._asked_again(known, request, digest, carry_out, repeatable_ms, bool(partitions))
        attempt = secrets.token_hex(8)
        number = await self._numbers.take(partitions) if partitions else None
        claimed = await self._append(Claimed(request, digest, attempt, number))
        if not await self._follower.reached(claimed, self._timeout_s):
            raise RequestInProgressError("requests cannot be looked up at the moment; nothing was written, ask again")
        known = self._ledger.get(request)
        if known is None:
            raise RequestInProgressError("too many idempotent requests at once: this one was forgotten; ask again")
        if known.attempt != attempt:
            if number is not None:
                self._numbers.put_back(number, used=False)
            return await self._asked_again(known, request, digest, carry_out, repeatable_ms, bool(partitions))
        try:
            answer = await carry_out(known)
        except OutcomeUnknownError:
            raise
        except RayQueueError:
            if number is None:
                await self._append(LetGo(request, attempt))
            raise
        if await self._keep(Answered(request, attempt, answer)) and number is not None:
            self._numbers.put_back(number, used=True)
        return answer, False

    async def _keep(self, answered: Answered) -> bool:
        try:
            await self._append(answered)
        except RayQueueError as error:  # it is written; a retry will be told that this is not known
            _log.warning("the answer to an idempotent request could not be kept: %s", error)
            return False
        return True

    async def _asked_again(
        self, known: Known, request: bytes, digest: bytes, carry_out: CarryOut, repeatable_ms: int, numbered: bool
    ) -> tuple[bytes, bool]:
        # The effect of the first attempt may be as late as its deadline, and is remembered from then on.
        age_ms = time.time() * 1000 - known.at_ms
        repeatable = age_ms < repeatable_ms - 2000 * self._timeout_s and (known.number is not None or not numbered)
        if known.answer is None and known.contents == digest and repeatable:
            answer = await carry_out(known)
            await self._keep(Answered(request, known.attempt, answer))
            return answer, True
        return self._again(known, digest), True

    def _again(self, known: Known, contents: bytes) -> bytes:
        if known.contents != contents:
            raise RequestConflictError(
                "this Idempotency-Key was used for another request; take a new key for a new request"
            )
        if known.answer is not None:
            return known.answer
        if time.time() * 1000 - known.at_ms < 2000 * self._timeout_s:
            raise RequestInProgressError("the same request is being carried out; ask again in a moment")
        raise OutcomeUnknownError(
            "a request with this Idempotency-Key was begun and its gateway failed: its records may be written or not, "
            "and are not written again; look for them, or take a new key"
        )

    async def _append(self, event: Event) -> int:
        return await self._follower.append(msgspec.msgpack.encode(event))
