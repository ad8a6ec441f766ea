"""The putting side of a queue: jobs become records of its topic, by an ordinary producer."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, cast

from rayqueue.client.arguments import check_duration, check_text, hinted
from rayqueue.client.producer.columns import is_arrow
from rayqueue.client.producer.partitioners import jump, key_hash
from rayqueue.client.producer.producer import Producer
from rayqueue.client.queue.handles import JobHandle, JobHandles
from rayqueue.client.queue.job import JobId
from rayqueue.client.twins import run_awaiting, run_blocking
from rayqueue.errors import InvalidInputError
from rayqueue.protocol.jobs import JOB_HEADER, JobOptions, encode_options
from rayqueue.protocol.topics import TopicInfo
from rayqueue.records import HeadersIn, KeyT, ValueT

if TYPE_CHECKING:
    from rayqueue.client.queue.queue import JobQueue


class Putting(Generic[ValueT, KeyT]):
    """Of a ``JobQueue``."""

    name: str
    _info: TopicInfo | None
    _producer: Producer[Any, Any] | None

    async def _sending(self) -> Producer[Any, Any]:
        raise NotImplementedError

    @property
    def _this(self) -> JobQueue[Any, Any]:
        return cast("JobQueue[Any, Any]", self)

    @hinted
    def put(
        self,
        value: ValueT | None,
        *,
        key: KeyT | None = None,
        headers: HeadersIn = None,
        priority: int = 0,
        delay_ms: int = 0,
        deliver_at: datetime | int | None = None,
        ttl_ms: int | None = None,
        dedupe_id: str | None = None,
        want_result: bool = False,
        wait: bool = True,
    ) -> JobHandle:
        """Put a job, and wait until it is committed; ``wait=False`` returns at once, and ``flush`` or the handle waits.

        A job is given out from ``delay_ms`` from now, or from ``deliver_at`` on (a datetime, or milliseconds since
        1970), and not later than ``ttl_ms`` from now. Of those with the same ``dedupe_id`` within the queue's
        ``dedupe_window_ms`` only the first is put, and the others get a handle of that one; where a key is given too,
        of those with the same key. A higher ``priority``, below the queue's ``lanes``, comes first. With
        ``want_result`` the handle's ``result`` waits for what the worker gives to ``Job.done``.
        """
        options = job_options(delay_ms, deliver_at, ttl_ms, dedupe_id, want_result)
        producer = self._producer or run_blocking(self._sending())
        delivery = producer.send(
            self.name,
            value,
            key=key,
            headers=with_options(headers, options),
            priority=priority,
            partition=self._place(key, dedupe_id),
        )
        handle = JobHandle(self._this, delivery, dedupe_id)
        if wait:
            handle.wait()
        return handle

    @hinted
    async def put_async(
        self,
        value: ValueT | None,
        *,
        key: KeyT | None = None,
        headers: HeadersIn = None,
        priority: int = 0,
        delay_ms: int = 0,
        deliver_at: datetime | int | None = None,
        ttl_ms: int | None = None,
        dedupe_id: str | None = None,
        want_result: bool = False,
    ) -> JobHandle:
        """``await`` what ``put`` blocks for. Many of these may be under way."""
        options = job_options(delay_ms, deliver_at, ttl_ms, dedupe_id, want_result)
        producer = await run_awaiting(self._sending())
        where = await producer.send_async(
            self.name,
            value,
            key=key,
            headers=with_options(headers, options),
            priority=priority,
            partition=self._place(key, dedupe_id),
        )
        handle = JobHandle(self._this, JobId(where.partition, where.offset or 0), dedupe_id)
        await handle.wait_async()
        return handle

    @hinted
    def put_many(
        self,
        values: Any,
        *,
        keys: Any = None,
        headers: Any = None,
        priority: int = 0,
        delay_ms: int = 0,
        deliver_at: datetime | int | None = None,
        ttl_ms: int | None = None,
        dedupe_ids: Sequence[str] | None = None,
        want_result: bool = False,
        wait: bool = True,
    ) -> JobHandles:
        """Put many jobs, given as columns: lists, or Arrow arrays. What is one value here is for all of them."""
        producer = self._producer or run_blocking(self._sending())
        shares = self._shares(values, keys, headers, delay_ms, deliver_at, ttl_ms, dedupe_ids, want_result)
        parts = [
            (
                rows,
                producer.send_many(
                    self.name, some, keys=their_keys, headers=their_headers, priority=priority, partition=partition
                ),
            )
            for rows, some, their_keys, their_headers, partition in shares
        ]
        handles = JobHandles(self._this, parts, dedupe_ids)
        if wait:
            handles.wait()
        return handles

    @hinted
    async def put_many_async(
        self,
        values: Any,
        *,
        keys: Any = None,
        headers: Any = None,
        priority: int = 0,
        delay_ms: int = 0,
        deliver_at: datetime | int | None = None,
        ttl_ms: int | None = None,
        dedupe_ids: Sequence[str] | None = None,
        want_result: bool = False,
    ) -> JobHandles:
        """``await`` what ``put_many`` blocks for."""
        producer = await run_awaiting(self._sending())
        parts = [
            (
                rows,
                await producer.send_many_async(
                    self.name, some, keys=their_keys, headers=their_headers, priority=priority, partition=partition
                ),
            )
            for rows, some, their_keys, their_headers, partition in self._shares(
                values, keys, headers, delay_ms, deliver_at, ttl_ms, dedupe_ids, want_result
            )
        ]
        return JobHandles(self._this, parts, dedupe_ids)

    def _shares(
        self,
        values: Any,
        keys: Any,
        headers: Any,
        delay_ms: int,
        deliver_at: datetime | int | None,
        ttl_ms: int | None,
        dedupe_ids: Sequence[str] | None,
        want_result: bool,
    ) -> list[tuple[Sequence[int] | None, Any, Any, Any, int | None]]:
        """The columns, as one, or divided by the partitions that the jobs' dedupe ids go to."""
        if dedupe_ids is None:
            options = job_options(delay_ms, deliver_at, ttl_ms, None, want_result)
            if options is not None or headers is not None:
                given = headers if headers is not None else [None] * len(values)
                headers = [with_options(each, options) for each in given]
            return [(None, values, keys, headers, None)]
        count = len(values)
        if len(dedupe_ids) != count:
            raise InvalidInputError(f"dedupe_ids are {len(dedupe_ids)}, and values {count}")
        values, keys = _rows(values), None if keys is None else _rows(keys)
        headers = [
            with_options(
                None if headers is None else headers[row],
                job_options(delay_ms, deliver_at, ttl_ms, dedupe_ids[row], want_result),
            )
            for row in range(count)
        ]
        shares: dict[int | None, list[int]] = {}
        for row in range(count):
            place = self._place(None if keys is None else keys[row], dedupe_ids[row])
            shares.setdefault(place, []).append(row)

        def pick(column: Any, rows: list[int]) -> Any:
            return None if column is None else [column[row] for row in rows]

        return [
            (rows, pick(values, rows), pick(keys, rows), pick(headers, rows), place) for place, rows in shares.items()
        ]

    def _place(self, key: Any, dedupe_id: str | None) -> int | None:
        """Jobs with one ``dedupe_id`` meet in one partition."""
        return None if self._info is None else place_of(self._info, key, dedupe_id)


def place_of(info: TopicInfo, key: Any, dedupe_id: str | None) -> int | None:
    """The partition in which all jobs with this ``dedupe_id`` meet; None where the key says it, or nothing does. A
    queue that is ordered by key keeps its partitions."""
    if dedupe_id is None or (key is not None and info.settings.ordered_by_key):
        return None
    return jump(key_hash(check_text("dedupe_id", dedupe_id).encode()), info.dedupe_partitions)


def job_options(
    delay_ms: int, deliver_at: datetime | int | None, ttl_ms: int | None, dedupe_id: str | None, want_result: bool
) -> bytes | None:
    """As the header has them; None for a job that wants nothing."""
    if not (delay_ms or deliver_at or ttl_ms is not None or dedupe_id is not None or want_result):
        return None
    if isinstance(deliver_at, datetime):
        if deliver_at.tzinfo is None:
            raise InvalidInputError("deliver_at needs a time zone: datetime.now(timezone.utc), for example")
        deliver_at = round(deliver_at.timestamp() * 1000)
    if ttl_ms is not None and check_duration("ttl_ms", ttl_ms) == 0:
        raise InvalidInputError("ttl_ms is at least 1: a job that may never be given out has no use", option="ttl_ms")
    if dedupe_id is not None and not check_text("dedupe_id", dedupe_id):
        raise InvalidInputError("a dedupe_id is a text that is not empty", option="dedupe_id")
    return encode_options(
        JobOptions(
            delay_ms=check_duration("delay_ms", delay_ms),
            deliver_at_ms=check_duration("deliver_at", deliver_at or 0),
            ttl_ms=ttl_ms or 0,
            dedupe_id=dedupe_id or "",
            want_result=want_result,
        )
    )


def with_options(headers: HeadersIn, options: bytes | None) -> HeadersIn:
    if headers is None and options is None:
        return None
    pairs = () if headers is None else tuple(headers.items() if hasattr(headers, "items") else headers)
    if any(name == JOB_HEADER for name, _ in pairs):
        raise InvalidInputError(f"a header {JOB_HEADER} is the queue's own: use the options of put")
    return pairs if options is None else (*pairs, (JOB_HEADER, options))


def _rows(column: Any) -> Any:
    return column.to_pylist() if is_arrow(column) else column
