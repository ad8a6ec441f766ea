"""Values and keys of jobs, as the queue's models read them."""

from __future__ import annotations

from typing import Any, NamedTuple

from rayqueue.client.queue.job import JobId
from rayqueue.errors import DeserializationError
from rayqueue.protocol.jobs import Job as WireJob
from rayqueue.records import Headers
from rayqueue.values import BYTES, Form, shortened


class PeekedJob(NamedTuple):
    """A job as it stands in the queue: nobody's."""

    id: JobId
    value: Any
    key: Any
    headers: Headers
    priority: int
    deliveries: int
    """So far."""
    put_ms: int


class Decoding:
    def __init__(self, queue: str, value: Form[Any], key: Form[Any]) -> None:
        self._queue = queue
        self._value = value
        self._key = key

    def __call__(self, job: WireJob, partition: int) -> tuple[Any, Any]:
        """Value and key. ``DeserializationError`` if they cannot be read."""
        return (
            self._read("value", self._value, job.value, job.id, partition),
            self._read("key", self._key, job.key, job.id, partition),
        )

    def peeked(self, job: WireJob, partition: int) -> PeekedJob:
        """As bytes where they cannot be read."""
        try:
            value, key = self(job, partition)
        except DeserializationError:
            value, key = job.value, job.key
        return PeekedJob(JobId(partition, job.id), value, key, job.headers, job.lane, job.deliveries, job.timestamp)

    def _read(self, what: str, form: Form[Any], data: bytes | None, offset: int, partition: int) -> Any:
        if data is None or form is BYTES:
            return data
        try:
            return form.decode(data)
        except Exception as error:
            raise DeserializationError(
                f"job {partition}-{offset} of {self._queue} cannot be read: its {what} of {len(data)} bytes is no "
                f"{form.name}: {shortened(error)}",
                queue=self._queue,
                job=f"{partition}-{offset}",
            ) from error
