"""Every byte the LMDB store writes, and how it notices that one of them changed.

LMDB has no page checksums, so each value carries its own:

- an entry: term, the entry's crc (which covers index, term and payload),
  length, and a crc of this header, so that a term can be trusted without
  reading the payload;
- a row of any table: a crc over table, key and value, and the length. The
  right bytes under the wrong key or in the wrong table are wrong;
- the state: one row with every single value, rewritten by each transaction
  together with the transaction's id. LMDB falling back to an older version
  of the data is thereby visible.

A length is compared before the value is copied. py-lmdb itself touches every
page of a value it returns, so a damaged length that leads past the end of the
file ends the process (SIGBUS) instead of raising.

Functions here raise ``DamagedLogError`` and never return bytes that were not
written. They know nothing of transactions.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from struct import Struct

from rayqueue.errors import DamagedLogError
from rayqueue.ids import GroupId, Index, NodeId, Term
from rayqueue.log.ops import LogState
from rayqueue.log.store import Checkpoint, Entry, HardState, Table
from rayqueue.records.checksum import crc32c, entry_crc

FORMAT_VERSION = 2
"""2: a write-ahead file beside the data. A store without one has lost what was in it."""

ENTRY_HEADER = Struct("<QIII")  # term, entry crc, payload length, header crc
_ENTRY_POSITION = Struct("<QQII")  # index, term, entry crc, payload length: what the header crc covers

ROW_HEADER = Struct("<II")  # crc, length
_STATE = Struct("<Q8QB")
_SUM = Struct("<QQ")
_CHECKPOINT = Struct("<QQI")
_IDENTITY = Struct("<HHH")
_WAL_BYTES = Struct("<Q")

SUMMED_TABLES = (Table.PRODUCERS, Table.GROUPS, Table.MEMBERS, Table.META)
"""Tables whose rows are counted and summed, so that a missing or an outdated row is noticed when the store is
opened. OFFSETS and LANES are long and have dense keys instead: whoever reads them can see a gap."""

HARD = b"hard"
CHECKPOINTS = b"checkpoints"
ENTRIES = b"entries"


def encode_entry(entry: Entry) -> bytes:
    size = len(entry.payload)
    check = crc32c(_ENTRY_POSITION.pack(entry.index, entry.term, entry.crc, size))
    return ENTRY_HEADER.pack(entry.term, entry.crc, size, check) + entry.payload


def decode_entry_header(index: int, value: memoryview) -> tuple[Term, int]:
    """Term and crc of an entry, without touching its payload."""
    if len(value) >= ENTRY_HEADER.size:
        term, crc, size, check = ENTRY_HEADER.unpack_from(value)
        if size == len(value) - ENTRY_HEADER.size and check == crc32c(_ENTRY_POSITION.pack(index, term, crc, size)):
            return Term(term), crc
    raise DamagedLogError(f"the header of entry {index} does not match its checksum", index=index)


def decode_entry(index: int, value: memoryview) -> Entry:
    term, crc = decode_entry_header(index, value)
    payload = bytes(value[ENTRY_HEADER.size :])
    if entry_crc(index, term, payload) != crc:
        raise DamagedLogError(f"entry {index} does not match its checksum", index=index)
    return Entry(Index(index), term, payload, crc)


def encode_row(space: bytes, key: bytes, value: bytes) -> bytes:
    return ROW_HEADER.pack(crc32c(value, crc32c(key, crc32c(space))), len(value)) + value


def decode_row(space: bytes, key: bytes | memoryview, stored: memoryview) -> bytes:
    if len(stored) >= ROW_HEADER.size:
        crc, size = ROW_HEADER.unpack_from(stored)
        if size == len(stored) - ROW_HEADER.size:
            value = bytes(stored[ROW_HEADER.size :])
            if crc == crc32c(value, crc32c(key, crc32c(space))):
                return value
    raise DamagedLogError(f"a row of {space.decode()} does not match its checksum", key=bytes(key).hex())


def row_crc(stored: memoryview | bytes) -> int:
    """The checksum a stored row claims to have."""
    if len(stored) < ROW_HEADER.size:
        raise DamagedLogError("a row is too short to be one")
    crc: int = ROW_HEADER.unpack_from(stored)[0]
    return crc


@dataclass(frozen=True, slots=True)
class TableSum:
    """How many rows a table has, and the sum of their checksums modulo 2**64.

    A sum and not an exclusive-or: crc is linear, so the same change in two
    rows would cancel out."""

    rows: int = 0
    total: int = 0

    @classmethod
    def of(cls, crcs: Collection[int]) -> TableSum:
        return cls(len(crcs), sum(crcs) % (1 << 64))

    def changed(self, old_crc: int | None, new_crc: int | None) -> TableSum:
        rows = self.rows + (new_crc is not None) - (old_crc is not None)
        return TableSum(rows, (self.total + (new_crc or 0) - (old_crc or 0)) % (1 << 64))


@dataclass(frozen=True, slots=True)
class StoredState:
    """What every transaction writes."""

    txn_id: int
    state: LogState
    sums: dict[Table, TableSum]


def encode_state(stored: StoredState) -> bytes:
    state, vote = stored.state, stored.state.hard.voted_for
    head = _STATE.pack(
        stored.txn_id,
        state.hard.term,
        state.hard.commit,
        state.applied,
        state.base_index,
        state.base_term,
        state.last_index,
        state.last_term,
        state.freed,
        vote is not None,
    )
    sums = b"".join(_SUM.pack(stored.sums[table].rows, stored.sums[table].total) for table in SUMMED_TABLES)
    return head + sums + (vote or "").encode()


def decode_state(value: bytes) -> StoredState:
    txn_id, term, commit, applied, base, base_term, last, last_term, freed, voted = _STATE.unpack_from(value)
    position = _STATE.size
    sums = {}
    for table in SUMMED_TABLES:
        sums[table] = TableSum(*_SUM.unpack_from(value, position))
        position += _SUM.size
    vote = NodeId(value[position:].decode()) if voted else None
    state = LogState(
        hard=HardState(Term(term), vote, Index(commit)),
        applied=Index(applied),
        base_index=Index(base),
        base_term=Term(base_term),
        last_index=Index(last),
        last_term=Term(last_term),
        freed=Index(freed),
    )
    return StoredState(txn_id, state, sums)


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    head = _CHECKPOINT.pack(checkpoint.index, checkpoint.term, len(checkpoint.members))
    return head + checkpoint.members + checkpoint.state


def decode_checkpoint(value: bytes) -> Checkpoint:
    index, term, size = _CHECKPOINT.unpack_from(value)
    split = _CHECKPOINT.size + size
    return Checkpoint(Index(index), Term(term), value[_CHECKPOINT.size : split], value[split:])


def encode_identity(group_id: GroupId, node_id: NodeId, wal_bytes: int) -> bytes:
    group, node = group_id.encode(), node_id.encode()
    return _IDENTITY.pack(FORMAT_VERSION, len(group), len(node)) + group + node + _WAL_BYTES.pack(wal_bytes)


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose store it is. ``wal_bytes``: the size of the write-ahead file, so that one that was cut off is noticed."""

    version: int
    group_id: GroupId
    node_id: NodeId
    wal_bytes: int


def decode_identity(value: bytes) -> Identity:
    version, group_size, node_size = _IDENTITY.unpack_from(value)
    start = _IDENTITY.size
    group = value[start : start + group_size]
    end = start + group_size + node_size
    node = value[start + group_size : end]
    wal_bytes = _WAL_BYTES.unpack_from(value, end)[0] if version == FORMAT_VERSION else 0
    return Identity(version, GroupId(group.decode()), NodeId(node.decode()), wal_bytes)
