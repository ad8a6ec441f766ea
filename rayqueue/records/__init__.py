"""Records and batches: the one representation of messages from producer to disk to Spark.

``RecordBatch`` is the way in; ``header.py`` and ``message.py`` define the bytes.
Importing this package does not load Arrow.
"""

from __future__ import annotations

from rayqueue.records.batch import RecordBatch, validate
from rayqueue.records.columns import HeadersIn
from rayqueue.records.header import BATCH_TAG, HEADER_BYTES, BatchHeader, Compression, with_base_offset, with_producer
from rayqueue.records.record import Headers, KeyT, Record, ValueT

__all__ = [
    "BATCH_TAG",
    "HEADER_BYTES",
    "BatchHeader",
    "Compression",
    "Headers",
    "HeadersIn",
    "KeyT",
    "Record",
    "RecordBatch",
    "ValueT",
    "validate",
    "with_base_offset",
    "with_producer",
]
