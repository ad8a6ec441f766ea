"""Keys: the log of API keys in a topic of the queue, and who may write it.

Whoever is in the Ray cluster can make keys (``KeyStore``, `rayqueue keys`); the
gateway only reads them (``KeyWatch``), and no request reaches this topic.
"""

from __future__ import annotations

import getpass
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence

import msgspec

from rayqueue.client.handle import RayQueue
from rayqueue.errors import InvalidInputError, NotLeaderError, UnknownTopicError
from rayqueue.gateway import audit
from rayqueue.gateway.follower import Follower
from rayqueue.gateway.principals import (
    ANYONE,
    Caller,
    Key,
    KeyCreated,
    KeyEvent,
    KeyGranted,
    KeyRevoked,
    KeyRing,
    Token,
    grants_of,
)
from rayqueue.protocol.topics import GATEWAY, check_name
from rayqueue.records import Record

_log = logging.getLogger(__name__)

TOPIC = f"{GATEWAY}keys"
MAX_KEYS = 10_000

_DECODER = msgspec.json.Decoder(KeyEvent)
_READ_MS = 2000


def apply(ring: KeyRing, record: Record) -> None:
    """An event that cannot be read is of no effect, and is told: who wrote it is in the cluster."""
    try:
        ring.apply(_DECODER.decode(record.value or b""))
    except msgspec.MsgspecError as error:
        _log.error("%s: event %d cannot be read: %s", TOPIC, record.offset, error)


class KeyStore:
    """For whoever administers keys; in threads."""

    def __init__(self, rq: RayQueue) -> None:
        self._rq = rq

    def create(self, name: str, grants: Sequence[str]) -> tuple[Token, Key]:
        """A new key. Its token is known to nobody else, and cannot be had again."""
        check_name("key", name)
        ring = self.ring()
        if len(ring) >= MAX_KEYS:
            raise InvalidInputError(f"there are {MAX_KEYS} keys, with the revoked ones: no more can be made")
        token = Token.new()
        key = Key(token.key_id, name, token.digest, grants_of(grants), int(time.time() * 1000))
        self._append(KeyCreated(key.key_id, key.name, key.digest, key.grants, key.created_ms), "create")
        return token, key

    def grant(self, key_id: str, grants: Sequence[str], *, take_back: bool = False) -> Key:
        """More grants, or fewer."""
        key = self._living(key_id)
        given = grants_of(grants)
        kept = tuple(each for each in key.grants if each not in given)
        together = kept if take_back else grants_of(map(str, (*kept, *given)))
        self._append(KeyGranted(key_id, together), "alter")
        return msgspec.structs.replace(key, grants=together)

    def revoke(self, key_id: str) -> Key:
        """It is of no use from now on, and never again."""
        key = self._living(key_id)
        revoked_ms = int(time.time() * 1000)
        self._append(KeyRevoked(key_id, revoked_ms), "delete")
        return msgspec.structs.replace(key, revoked_ms=revoked_ms)

    def ring(self) -> KeyRing:
        """All keys, as they are now."""
        ring = KeyRing()
        try:
            consumer = self._rq.consumer(TOPIC, start="earliest")
        except UnknownTopicError:
            return ring
        with consumer:
            while True:
                records = consumer.poll(max_records=1000, timeout_ms=_READ_MS)
                for record in records:
                    apply(ring, record)
                if not any(consumer.lag().values()):
                    return ring

    def _living(self, key_id: str) -> Key:
        key = self.ring().get(key_id)
        if key is None:
            raise InvalidInputError(f"there is no key {key_id!r}; `rayqueue keys list` shows which there are")
        if key.revoked_ms is not None:
            raise InvalidInputError(f"key {key_id} was revoked, for good; create another one")
        return key

    def _append(self, event: KeyEvent, verb: str) -> None:
        """Also to the audit, first: a key that is there was made by somebody."""
        for topic in (audit.TOPIC, TOPIC):
            self._rq.create_topic(topic, if_missing=True, partitions=1)
        self._rq.alter_topic(audit.TOPIC, retention_ms=audit.RETENTION_MS)
        told = audit.entry("cluster", _operator(), verb, "key", event.key_id, source=socket.gethostname())
        with self._rq.producer() as producer:
            producer.send(audit.TOPIC, msgspec.json.encode(told)).result()
            producer.send(TOPIC, msgspec.json.encode(event)).result()


def _operator() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return f"uid {os.getuid()}"


class KeyWatch:
    """The keys as a gateway knows them: all, and not older than ``keys_stale_ms``, or nobody is let in."""

    def __init__(
        self, rq: RayQueue, *, stale_s: float, open_without: bool, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """``open_without``: while there is no key at all, everybody may do everything. Only on loopback."""
        self._ring = KeyRing()
        self._open_without = open_without
        self._stale_s = stale_s
        self._follower = Follower(
            rq, TOPIC, lambda record: apply(self._ring, record), reset=self._forget, clock_s=clock_s
        )

    def _forget(self) -> None:
        self._ring = KeyRing()

    async def start(self) -> None:
        await self._follower.start()

    async def close(self) -> None:
        await self._follower.close()

    @property
    def ready(self) -> bool:
        return self._follower.fresh(self._stale_s)

    @property
    def some(self) -> bool:
        """Whether a key exists, be it a revoked one: then everybody needs one."""
        return len(self._ring) > 0

    def caller(self, token: str | None) -> Caller:
        """``UnauthenticatedError``; or ``NotLeaderError``, which may be retried, while the keys cannot be looked up."""
        if not self.ready:
            raise NotLeaderError("the keys cannot be looked up at the moment, so nobody is let in; retry", leader=None)
        return self._ring.authenticate(token) if self.some or not self._open_without else ANYONE

    def again(self, caller: Caller) -> Caller:
        """The same caller, as he is known now: a stream asks this from time to time."""
        if not self.ready:
            return caller  # a stream that was let in is not ended because the keys have no leader for a while
        return self._ring.known(caller.key_id) if self.some else caller
