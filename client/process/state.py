"""State of a processing function, by key: a table per partition of the source, kept in a topic beside the offsets.

What a batch changes goes into the state topic in the batch's own transaction,
into the partition of the same number; it counts once that is committed, and is
forgotten if it is aborted. Whoever is given a partition of the source first reads
the state's: all that was written there when it began, also what a transaction of
the owner before has yet to be decided about.

The topic is kept short: once it has several times as many records as the state has
keys, each batch also writes again as many of the keys that were written longest
ago as it changes, and what is before the last record of every key is trimmed. So
it stays within a few times the state's size, and no batch has much more to do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, MutableMapping, Sequence
from itertools import islice
from typing import Any

from rayqueue.client.process.results import Result
from rayqueue.errors import DataLossError, InvalidInputError, RayQueueError
from rayqueue.net.interfaces import ask
from rayqueue.net.scan import Range, Scan, ScanSettings
from rayqueue.protocol.calls import Bounds, GetBounds, Trim
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import RecordBatch

_log = logging.getLogger(__name__)

SPARE_RECORDS = 1000
"""A log that is longer than the state by no more than this is left alone, and not trimmed by less than a part of it."""
_RECORDS_PER_KEY = 4
_ATTEMPTS = 5
_UNCHANGED = object()


class State(MutableMapping[bytes, bytes]):
    """Of one partition. Keys and values are bytes."""

    def __init__(self, place: TopicPartition, topic_id: int, start: int = 0) -> None:
        self._place = place
        self._topic_id = topic_id
        self._start = self._end = start
        """Of the partition's log, as far as it is known here: what it was asked to begin at, and where it ends."""
        self._kept: dict[bytes, bytes] = {}
        """In the order in which they were written."""
        self._at: dict[bytes, int] = {}
        """Where each was written, or before that."""
        self._changes: dict[bytes, bytes | None] = {}
        self._undo: list[tuple[bytes, Any]] = []
        """Since the mark: keys, and what the change before it was, the newest last."""
        self._sent: tuple[dict[bytes, bytes | None], Sequence[Any]] | None = None

    def __getitem__(self, key: bytes) -> bytes:
        value = self._changes[key] if key in self._changes else self._kept[key]
        if value is None:
            raise KeyError(key)
        return value

    def __setitem__(self, key: bytes, value: bytes) -> None:
        if any(not isinstance(given, bytes) for given in (key, value)):
            raise InvalidInputError(f"a state's keys and values are bytes, not {key!r} and {value!r}")
        self._change(key, value)

    def __delitem__(self, key: bytes) -> None:
        self[key]  # or KeyError
        self._change(key, None)

    def _change(self, key: bytes, value: bytes | None) -> None:
        self._undo.append((key, self._changes.get(key, _UNCHANGED)))
        self._changes[key] = value

    def __iter__(self) -> Iterator[bytes]:
        for key in self._kept:
            if self._changes.get(key, b"") is not None:
                yield key
        for key, value in self._changes.items():
            if value is not None and key not in self._kept:
                yield key

    def __len__(self) -> int:
        return sum(1 for _ in self)

    # -- for the loop --------------------------------------------------------------------------

    def mark(self) -> None:
        """Where to come back to if a function fails half way: one place at a time, for one call of it."""
        self._undo.clear()

    def back(self) -> None:
        """To the mark."""
        while self._undo:
            key, before = self._undo.pop()
            if before is _UNCHANGED:
                del self._changes[key]
            else:
                self._changes[key] = before

    def to_write(self) -> list[Result]:
        """What has changed since the mark, as what will be written of it."""
        changed = {key: self._changes[key] for key, _ in self._undo}
        place = self._place
        return [Result(value, key, place.topic, partition=place.partition) for key, value in changed.items()]

    def send(self, tx: Any) -> None:
        """What is changed, and some of what was written long ago, if there is much before it that nobody needs."""
        self._sent = None
        if not self._changes:
            return
        written = dict(self._changes)
        if self._end - self._start > SPARE_RECORDS + _RECORDS_PER_KEY * len(self._kept):
            oldest = (each for each in self._kept.items() if each[0] not in self._changes)
            written.update(islice(oldest, len(written)))
        sent = tx.send_many(
            self._place.topic, list(written.values()), keys=list(written), partition=self._place.partition
        )
        self._sent = written, sent

    def committed(self) -> None:
        """All of it is written, and counts."""
        if self._sent is None:
            return
        written, sent = self._sent
        first, last = sent[0].result().offset, sent[-1].result().offset
        for key, value in written.items():
            self.put(key, value, self._end if first is None else first)
        if last is not None:
            self._end = last + 1
        self._forget_changes()

    def put(self, key: bytes, value: bytes | None, offset: int) -> None:
        """A record of the log, the newest of its key."""
        self._kept.pop(key, None)
        self._at.pop(key, None)
        if value is not None:
            self._kept[key], self._at[key] = value, offset

    def reach(self, end: int) -> None:
        """All before this has been put."""
        self._end = end

    def to_trim(self) -> int | None:
        """Where the log may begin, if it is worth it to say so."""
        needed = self._end if not self._at else self._at[next(iter(self._kept))]
        return needed if needed - self._start > SPARE_RECORDS // 2 else None

    async def trim(self, routes: Any, before: int) -> None:
        """In the I/O thread. If it does not work out, the next time does what this one has not."""
        self._start = before
        try:
            await ask(routes, self._place, Trim(before=before), topic_id=self._topic_id)
        except RayQueueError as error:
            _log.info("%s is not trimmed now: %s", self._place, error)

    def aborted(self) -> None:
        self._forget_changes()

    def _forget_changes(self) -> None:
        self._changes, self._undo, self._sent = {}, [], None


async def restored(rq: Any, topic: str, number: int) -> State:
    """As it is committed. In the I/O thread.

    The range ends at the end of the log, not at the last stable offset: what the owner before has written and is
    decided about by now, or soon, is waited for.
    """
    info = await rq.routes.topic(topic)
    place = TopicPartition(topic, number)
    for _ in range(_ATTEMPTS - 1):
        try:
            return await _read(rq, place, info.topic_id)
        except DataLossError as error:  # the owner before has trimmed what it has just written again
            _log.info("%s is read again: %s", place, error)
    return await _read(rq, place, info.topic_id)


async def _read(rq: Any, place: TopicPartition, topic_id: int) -> State:
    bounds: Bounds = await ask(rq.routes, place, GetBounds(), topic_id=topic_id)
    state = State(place, topic_id, bounds.start)
    wanted = Range(place.topic, topic_id, place.partition, bounds.start, bounds.end)
    scan = Scan(rq.routes, wanted, rq.settings, ScanSettings(follower=False, committed=True))
    async for base, _, payload in scan.batches():
        batch = RecordBatch.decode(payload, base_offset=base)
        for key, value in zip(batch.keys(), batch.values(), strict=True):
            if key is not None:
                state.put(key, value, base)
        await asyncio.sleep(0)  # other connections have their turn
    state.reach(bounds.end)
    return state
