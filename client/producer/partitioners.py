"""Partitioners: they choose the partition that a record goes to.

    consistent   by key: jump consistent hash (Lamping and Veach, 2014). A partition more moves 1/n of the
                 keys, all of them to the new one
    murmur2      by key: as Kafka's default partitioner does it, so that both agree
    roundrobin   each record to the next partition, whatever its key
    sticky       some records that follow each other to one partition, the next ones to that which has the least
                 on its way then, whatever their keys
    a callable   ``(key, value, partitions) -> partition``

Records without a key go where ``sticky`` puts them, unless the partitioner is
``roundrobin`` or a callable.

The hash of ``consistent`` is fixed for ever: crc32c of the key, spread over 64
bits by the finalizer of splitmix64. It was chosen because it costs 0.15 µs per
key where blake2b costs 1.2 µs; it is no protection against keys that are
chosen to collide, and neither is murmur2.

Measured per key, 60,000 distinct ones, 4 partitions, CPU time on a busy machine: 0.1 µs if the key was seen lately,
0.6 µs if not (with numpy; 2 µs without). murmur2 of a new key costs 2.4 µs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from crc32c import crc32c

from rayqueue.errors import ConfigError

np: Any
try:
    import numpy as np
except ImportError:  # not a dependency: without it new keys cost three times as much
    np = None

CustomPartitioner = Callable[[bytes | None, bytes | None, int], int]

BY_KEY = ("consistent", "murmur2")
ROUND_ROBIN = "roundrobin"
STICKY = "sticky"
NAMES = (*BY_KEY, ROUND_ROBIN, STICKY)

CACHED_KEYS = 65_536
"""Keys whose partition is remembered, per topic. When there are more, all are forgotten."""

_MASK = 2**64 - 1
_VECTOR_FROM = 64
"""New keys from which numpy pays."""


def check_partitioner(partitioner: str | CustomPartitioner) -> str | CustomPartitioner:
    """Itself. ``ConfigError`` if there is none of this name."""
    if isinstance(partitioner, str) and partitioner not in NAMES:
        raise ConfigError(
            f"there is no partitioner {partitioner!r}; there are {', '.join(NAMES)}, or a callable", key="partitioner"
        )
    return partitioner


# -- jump consistent hash ------------------------------------------------------------


def key_hash(key: bytes) -> int:
    """64 bits that depend on the key alone. Fixed for ever: records are where it said."""
    mixed = (crc32c(key) + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def jump(hashed: int, partitions: int) -> int:
    """The bucket of a 64-bit hash among so many."""
    bucket, following = 0, 0
    while following < partitions:
        bucket = following
        hashed = (hashed * 2862933555777941757 + 1) & _MASK
        following = int((bucket + 1) * ((1 << 31) / ((hashed >> 33) + 1)))
    return bucket


def consistent(key: bytes, partitions: int) -> int:
    return jump(key_hash(key), partitions)


def consistent_many(keys: Sequence[bytes], partitions: int) -> list[int]:
    """The same for many keys."""
    if np is None or len(keys) < _VECTOR_FROM:
        return [consistent(key, partitions) for key in keys]
    return _jump_many(_mix_many(np.fromiter(map(crc32c, keys), np.uint64, len(keys))), partitions).tolist()  # type: ignore[no-any-return]


def _mix_many(hashed: Any) -> Any:
    u = np.uint64
    hashed = hashed + u(0x9E3779B97F4A7C15)
    hashed = (hashed ^ (hashed >> u(30))) * u(0xBF58476D1CE4E5B9)
    hashed = (hashed ^ (hashed >> u(27))) * u(0x94D049BB133111EB)
    return hashed ^ (hashed >> u(31))


def _jump_many(hashed: Any, partitions: int) -> Any:
    """All keys jump together; those that have arrived drop out."""
    found = np.empty(len(hashed), np.int64)
    rows = np.arange(len(hashed))
    following = np.zeros(len(hashed), np.int64)
    while len(rows):
        bucket = following
        hashed = hashed * np.uint64(2862933555777941757) + np.uint64(1)
        divisor = ((hashed >> np.uint64(33)) + np.uint64(1)).astype(np.float64)
        following = ((bucket + 1) * (float(1 << 31) / divisor)).astype(np.int64)
        arrived = following >= partitions
        if arrived.any():
            found[rows[arrived]] = bucket[arrived]
            left = ~arrived
            rows, hashed, following = rows[left], hashed[left], following[left]
    return found


# -- murmur2 -------------------------------------------------------------------------


def murmur2(key: bytes) -> int:
    """As ``org.apache.kafka.common.utils.Utils.murmur2``: a signed 32-bit number."""
    mask, multiplier = 0xFFFFFFFF, 0x5BD1E995
    length = len(key)
    hashed = (0x9747B28C ^ length) & mask
    whole = length & ~3
    for at in range(0, whole, 4):
        word = (int.from_bytes(key[at : at + 4], "little") * multiplier) & mask
        word ^= word >> 24
        hashed = ((hashed * multiplier) & mask) ^ ((word * multiplier) & mask)
    if length & 3:
        hashed = ((hashed ^ int.from_bytes(key[whole:], "little")) * multiplier) & mask
    hashed ^= hashed >> 13
    hashed = (hashed * multiplier) & mask
    hashed ^= hashed >> 15
    return hashed - (1 << 32) if hashed & 0x80000000 else hashed


def murmur2_partition(key: bytes, partitions: int) -> int:
    return (murmur2(key) & 0x7FFFFFFF) % partitions


def murmur2_many(keys: Sequence[bytes], partitions: int) -> list[int]:
    return [murmur2_partition(key, partitions) for key in keys]


# -- keys of one topic ---------------------------------------------------------------


class KeyedPartitions(dict[bytes, int]):
    """Key to partition, for one number of partitions. Remembers a bounded number of keys. Safe in several threads.

    ``self[key]`` finds any key: one that is remembered costs no Python code.
    """

    __slots__ = ("_many", "partitions")

    def __init__(self, name: str, partitions: int) -> None:
        super().__init__()
        self.partitions = partitions
        self._many = consistent_many if name == "consistent" else murmur2_many

    def __missing__(self, key: bytes) -> int:
        (found,) = self._many((key,), self.partitions)
        self._remember({key: found})
        return found

    def many(self, keys: Sequence[bytes]) -> list[int]:
        if self.partitions == 1:
            return [0] * len(keys)
        found = list(map(self.get, keys))
        if None not in found:
            return found  # type: ignore[return-value]
        if self._many is consistent_many and 2 * found.count(None) > len(keys):
            every = consistent_many(keys, self.partitions)  # cheaper than to tell the new ones from the others
            self._remember(dict(zip(keys, every, strict=True)))
            return every
        new = list({key for key, known in zip(keys, found, strict=True) if known is None})
        fresh = dict(zip(new, self._many(new, self.partitions), strict=True))
        self._remember(fresh)
        return [fresh[key] if known is None else known for key, known in zip(keys, found, strict=True)]

    def _remember(self, fresh: dict[bytes, int]) -> None:
        if len(self) + len(fresh) > CACHED_KEYS:
            self.clear()
        if len(fresh) <= CACHED_KEYS:
            self.update(fresh)
