"""The tables of a partition. Their rows are said in ``rows``, ``producers``, ``groups`` and ``clock``."""

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

PARTITION = Schema("partition", 1, OFFSETS, LANES, PRODUCERS, GROUPS, META)
