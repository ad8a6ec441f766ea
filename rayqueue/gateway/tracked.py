"""Tracked: a session without an id, of a consumer that is known by its topic and its name.

Its caller acknowledges nothing, so positions are committed for him: when his
records have come, and before they are handed out. So no record is handed out
twice. None is passed over, either, as far as a gateway can know: what came for a
caller who has hung up by then, or could not be committed, is the next request's.
An answer that was sent counts as taken.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from rayqueue.errors import RayQueueError
from rayqueue.gateway.sessions import Place, Session
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import Record
from rayqueue.records.room import Room

_log = logging.getLogger(__name__)


class TrackedSession(Session):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._found: list[Record] = []
        """That came, and are not committed yet."""
        self._returned: list[Record] = []
        """That are committed, and that nobody was handed."""
        self._passed = False
        """Others behind those were handed out."""

    async def take(self, max_records: int, wait_ms: int) -> list[Record]:
        """The next records. Cancelled, or with an error, it takes none."""
        if self._returned:
            some = self._returned[:max_records]
            count = Room(self._max_bytes).cut(some)
            del self._returned[:count]
            return some[:count]
        if not self._found:
            self._found = await self.poll(max_records, wait_ms, remember=False)
        taken = self._found[:max_records]
        places = {Place(each.topic, each.partition, each.offset, each.lane): each for each in taken}
        lost = set(await self.commit(list(places))) if places else set()
        del self._found[: len(taken)]  # nothing waits between this and the answer
        self._passed = self._passed or bool(self._returned)
        return [each for place, each in places.items() if place not in lost]

    def not_taken(self, records: Sequence[Record]) -> None:
        """Their caller had gone before he could be answered."""
        self._returned.extend(records)

    async def close(self) -> None:
        if self._returned:
            await self._go_back()
        await super().close()

    async def _go_back(self) -> None:
        """To what nobody was handed, so that it is read again."""
        firsts: dict[TopicPartition, dict[int, int]] = {}
        for each in self._returned:
            lanes = firsts.setdefault(TopicPartition(each.topic, each.partition), {})
            lanes[each.lane] = min(each.offset, lanes.get(each.lane, each.offset))
        try:
            if self._passed:
                raise RayQueueError("others behind them were handed out")
            await self._consumer.commit_async(firsts, rewind=True)
        except RayQueueError as error:
            _log.warning(
                "%d records of consumer %s were not handed out and are not read again: %s",
                *(len(self._returned), self.group, error),
            )
