"""State of a processing function, by key: a table per partition of the source, kept in a topic beside the offsets.

What a batch changes goes into the state topic in the batch's own transaction,
into the partition of the same number; it counts once that is committed, and is
forgotten if it is aborted. Whoever is given a partition of the source first reads
the state's: all that was written there when it began, also what a transaction of
the owner before has yet to be decided about.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, MutableMapping
from typing import Any

from rayqueue.client.process.results import Result
from rayqueue.errors import InvalidInputError
from rayqueue.net.interfaces import ask
from rayqueue.net.scan import Range, Scan, ScanSettings
from rayqueue.protocol.calls import Bounds, GetBounds
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import RecordBatch


class State(MutableMapping[bytes, bytes]):
    """Of one partition. Keys and values are bytes."""

    def __init__(self, kept: dict[bytes, bytes]) -> None:
        self._kept = kept
        self._changes: dict[bytes, bytes | None] = {}

    def __getitem__(self, key: bytes) -> bytes:
        value = self._changes[key] if key in self._changes else self._kept[key]
        if value is None:
            raise KeyError(key)
        return value

    def __setitem__(self, key: bytes, value: bytes) -> None:
        if any(not isinstance(given, bytes) for given in (key, value)):
            raise InvalidInputError(f"a state's keys and values are bytes, not {key!r} and {value!r}")
        self._changes[key] = value

    def __delitem__(self, key: bytes) -> None:
        self[key]  # or KeyError
        self._changes[key] = None

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

    def mark(self) -> dict[bytes, bytes | None]:
        """What is changed so far, to come back to if a function fails half way."""
        return dict(self._changes)

    def back_to(self, mark: dict[bytes, bytes | None]) -> None:
        self._changes = mark

    def changes(self, topic: str, partition: int) -> list[Result]:
        """What is to be written."""
        return [Result(value, key, topic, partition=partition) for key, value in self._changes.items()]

    def committed(self) -> None:
        for key, value in self._changes.items():
            if value is None:
                self._kept.pop(key, None)
            else:
                self._kept[key] = value
        self._changes = {}

    def aborted(self) -> None:
        self._changes = {}


async def restored(rq: Any, topic: str, number: int) -> State:
    """As it is committed. In the I/O thread.

    The range ends at the end of the log, not at the last stable offset: what the owner before has written and is
    decided about by now, or soon, is waited for.
    """
    routes = rq.routes
    place = TopicPartition(topic, number)
    info = await routes.topic(topic)
    bounds: Bounds = await ask(routes, place, GetBounds(), topic_id=info.topic_id)
    kept: dict[bytes, bytes] = {}
    wanted = Range(topic, info.topic_id, number, bounds.start, bounds.end)
    scan = Scan(routes, wanted, rq.settings, ScanSettings(follower=False, committed=True))
    async for base, _, payload in scan.batches():
        batch = RecordBatch.decode(payload, base_offset=base)
        for key, value in zip(batch.keys(), batch.values(), strict=True):
            if key is not None and value is not None:
                kept[key] = value
            elif key is not None:
                kept.pop(key, None)
        await asyncio.sleep(0)  # other connections have their turn
    return State(kept)
