"""The tables of a partition. Their rows are said in ``rows``, ``producers``, ``groups``, ``clock``, ``jobs`` and
``transactions``."""

from __future__ import annotations

from rayqueue.log.store import Schema, Table

OFFSETS = Table("offsets", 0, summed=False)
"""base offset (u64 big-endian) -> where that batch is."""
LANES = Table("lanes", 1, summed=False)
"""lane (u8), base offset (u64 big-endian) -> what the lane held before that batch. Only for topics with lanes."""
PRODUCERS = Table("producers", 2)
GROUPS = Table("groups", 3)
META = Table("meta", 5)
"""Single values."""

JOBS = Table("jobs", 6)
"""Of a work queue, as all that follow (``rayqueue.partition.jobs``): 64 ids -> the rows of jobs among them."""
LEASES = Table("leases", 7)
"""token (u64 big-endian) -> lease."""
RESULTS = Table("results", 8)
"""id (u64 big-endian) -> result."""
DEDUPE = Table("dedupe", 9, long=True)
"""hash of a dedupe id -> id of the job, until when."""
JOB_INDEX = Table("job-index", 10, long=True)
"""Orders in which jobs are found."""

TRANSACTIONS = Table("transactions", 11)
"""producer id, epoch (u64, u32 big-endian) -> a transaction that is open, and what it has staged."""
TRANSACTION_RUNS = Table("transaction-runs", 12)
"""state (u8), first offset (u64 big-endian) -> neighbouring batches of one transaction that is open or was aborted."""

PARTITION = Schema(
    "partition",
    3,
    OFFSETS,
    LANES,
    PRODUCERS,
    GROUPS,
    META,
    JOBS,
    LEASES,
    RESULTS,
    DEDUPE,
    JOB_INDEX,
    TRANSACTIONS,
    TRANSACTION_RUNS,
)
