"""RayQueue: a fault-tolerant, Kafka-like message queue made of Ray actors.

    import rayqueue

    rq = rayqueue.connect()

Importing this package is cheap: it loads neither Ray nor Arrow. What is named
here is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayqueue import errors as errors
    from rayqueue.client.connect import connect as connect
    from rayqueue.client.connect import connect_async as connect_async
    from rayqueue.client.consumer.consumer import Consumer as Consumer
    from rayqueue.client.handle import RayQueue as RayQueue
    from rayqueue.client.process.handle import Processing as Processing
    from rayqueue.client.process.results import Result as Result
    from rayqueue.client.producer.delivery import RecordMetadata as RecordMetadata
    from rayqueue.client.producer.producer import Producer as Producer
    from rayqueue.client.producer.transactions.transaction import Transaction as Transaction
    from rayqueue.client.queue.drop_in import Empty as Empty
    from rayqueue.client.queue.drop_in import Full as Full
    from rayqueue.client.queue.drop_in import Queue as Queue
    from rayqueue.client.queue.job import Job as Job
    from rayqueue.client.queue.queue import JobQueue as JobQueue
    from rayqueue.config import Settings as Settings
    from rayqueue.protocol.topics import TopicPartition as TopicPartition
    from rayqueue.records import Record as Record

__version__ = "0.1.0.dev0"

_WHERE = {
    "Consumer": "rayqueue.client.consumer.consumer",
    "Empty": "rayqueue.client.queue.drop_in",
    "Full": "rayqueue.client.queue.drop_in",
    "Job": "rayqueue.client.queue.job",
    "JobQueue": "rayqueue.client.queue.queue",
    "Processing": "rayqueue.client.process.handle",
    "Producer": "rayqueue.client.producer.producer",
    "Queue": "rayqueue.client.queue.drop_in",
    "RayQueue": "rayqueue.client.handle",
    "Record": "rayqueue.records",
    "RecordMetadata": "rayqueue.client.producer.delivery",
    "Result": "rayqueue.client.process.results",
    "Settings": "rayqueue.config",
    "TopicPartition": "rayqueue.protocol.topics",
    "Transaction": "rayqueue.client.producer.transactions.transaction",
    "connect": "rayqueue.client.connect",
    "connect_async": "rayqueue.client.connect",
}

__all__ = [  # names that __getattr__ finds
    "Consumer",
    "Empty",
    "Full",
    "Job",
    "JobQueue",
    "Processing",
    "Producer",
    "Queue",
    "RayQueue",
    "Record",
    "RecordMetadata",
    "Result",
    "Settings",
    "TopicPartition",
    "Transaction",
    "__version__",
    "connect",
    "connect_async",
    "errors",
]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("rayqueue.errors")
    try:
        module = _WHERE[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    found = globals()[name] = getattr(import_module(module), name)
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
