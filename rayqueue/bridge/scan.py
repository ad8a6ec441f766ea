"""One range of a partition, read as Arrow. Any thread but the I/O thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from rayqueue.client.handle import RayQueue
from rayqueue.errors import RayQueueError
from rayqueue.net.scan import Range, Scan, ScanSettings
from rayqueue.protocol.data import FetchedBatch
from rayqueue.records import BatchHeader, RecordBatch
from rayqueue.records.table import needs_records, rows_of


def read(rq: RayQueue, wanted: Range, columns: tuple[str, ...], settings: ScanSettings | None = None) -> Iterator[Any]:
    """The records of a range as ``pyarrow.RecordBatch`` of these columns of ``rayqueue.records.table``."""
    settings = settings or ScanSettings()
    scan = Scan(rq.routes, wanted, rq.settings, settings, host=_own_host() if settings.follower else None)
    decode = needs_records(columns)
    ahead = rq.io.run(scan.next())
    try:
        while batches := ahead.result():
            ahead = rq.io.run(scan.next())  # while these become columns
            parts = []
            for batch in batches:
                try:
                    part = _rows(wanted, batch, columns, decode=decode)
                except RayQueueError as error:
                    scan.unreadable(batch, error)
                    continue
                if part is not None:
                    parts.append(part)
            if parts:
                yield parts[0] if len(parts) == 1 else pa.concat_batches(parts)
    finally:
        ahead.cancel()


def _rows(wanted: Range, fetched: FetchedBatch, columns: tuple[str, ...], *, decode: bool) -> Any:
    """What a batch has of the range; None if it has nothing."""
    base, count, payload = fetched
    start, stop = max(base, wanted.start), min(base + count, wanted.end)
    if start >= stop:
        return None
    stored = None
    if decode:
        batch = RecordBatch.decode(payload, base_offset=base)
        header, stored = batch.header, batch.arrow()
        if stop - start != count:
            stored = stored.slice(start - base, stop - start)
    else:  # the checksum of what is not used is not computed
        header = BatchHeader.parse(payload)
    if header.control:
        return None
    topic, partition, lane = wanted.topic, wanted.partition, header.lane
    return rows_of(stored, start, stop, topic=topic, partition=partition, lane=lane, columns=columns)


def _own_host() -> str:
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
