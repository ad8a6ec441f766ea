"""The adapter's configuration, and how it finds its queues."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from rayqueue.client.connect import connect
from rayqueue.client.handle import RayQueue
from rayqueue.client.queue.queue import JobQueue
from rayqueue.errors import InvalidInputError
from rayqueue.values import MSGPACK


class RayQueueAdapterConfig(BaseModel):
    """``TaskProcessorConfig.adapter_config``. Where a queue exists already its settings stay as they are."""

    model_config = ConfigDict(extra="forbid")

    namespace: str | None = Field(default=None, description="of the RayQueue on this Ray; None: as configured")
    partitions: int = Field(default=1, ge=1, description="shards of a queue that is made")
    replication: int = Field(default=3, ge=1, description="copies of each")
    lease_ms: int = Field(default=30_000, ge=1, description="how soon another gets the task of a worker that hangs")
    max_lease_ms: int = Field(default=43_200_000, ge=1, description="how long one attempt may take at most")
    retry_backoff_ms: int = Field(default=1000, ge=0, description="before the first retry; then doubled each time")
    retry_backoff_max_ms: int = Field(default=60_000, ge=0, description="at most")
    lanes: int = Field(default=1, ge=1, description="priorities of tasks: from 0 to this, exclusive")
    ordered_by_key: bool = Field(default=False, description="tasks of one key are done one at a time, in order")
    fair_by_key: bool = Field(default=False, description="keys take turns, however many tasks each has")
    result_ttl_ms: int = Field(default=86_400_000, ge=1, description="how long a task's result and state are kept")
    max_results_bytes: int | None = Field(
        default=None,
        ge=1_048_576,
        description="how many of them, per shard, on disk; None: 16 MiB, oldest tasks' go first",
    )

    @classmethod
    def of(cls, given: Any) -> RayQueueAdapterConfig:
        """What ``TaskProcessorConfig`` was given: one of these, a mapping of its fields, or None for the defaults."""
        if isinstance(given, cls):
            return given
        if given is None or isinstance(given, dict):
            return cls(**(given or {}))
        raise TypeError(
            f"TaskProcessorConfig.adapter_config must be a RayQueueAdapterConfig or a dict, not {type(given).__name__}"
        )

    def connected(self) -> RayQueue:
        return connect(namespace=self.namespace)

    def queue(self, rq: RayQueue, name: str, max_deliveries: int | None, **more: Any) -> JobQueue[Any, Any]:
        """The queue of this name, made if there is none, with ``more`` settings. Values are bytes: a task that cannot
        be read is the adapter's to deal with."""
        if any(topic.name == name for topic in rq.topics()):
            return rq.queue(name, create=False, result_model=MSGPACK)
        results: dict[str, Any] = (
            {} if self.max_results_bytes is None else {"max_results_bytes": self.max_results_bytes}
        )
        return rq.queue(
            name,
            result_model=MSGPACK,
            partitions=self.partitions,
            replication=self.replication,
            lease_ms=self.lease_ms,
            max_lease_ms=self.max_lease_ms,
            max_deliveries=max_deliveries,
            retry_backoff_ms=self.retry_backoff_ms,
            retry_backoff_max_ms=self.retry_backoff_max_ms,
            lanes=self.lanes,
            ordered_by_key=self.ordered_by_key,
            fair_by_key=self.fair_by_key,
            result_ttl_ms=self.result_ttl_ms,
            **results,
            **more,
        )


class Task(msgspec.Struct, forbid_unknown_fields=True):
    """A task as it is in the queue: MessagePack."""

    task: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


_decoder = msgspec.msgpack.Decoder(Task)


def encode_task(task: Task) -> bytes:
    """``InvalidInputError`` for arguments that MessagePack does not have."""
    try:
        return msgspec.msgpack.encode(task)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(
            f"task {task.task!r} cannot be written: {error}; arguments are numbers, texts, bytes, lists and mappings"
        ) from error


def decode_task(data: bytes | None) -> Task:
    """Raises ``ValueError`` if it is none."""
    try:
        return _decoder.decode(data or b"")
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a task: {error}") from error
