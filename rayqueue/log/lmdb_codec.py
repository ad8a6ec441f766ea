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

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from struct import Struct, error

import msgspec

from rayqueue.errors import DamagedLogError, StoreFormatError
from rayqueue.ids import GroupId, Index, ReplicaId, Term
from rayqueue.log.ops import LogState
from rayqueue.log.store import Checkpoint, Entry, HardState, Schema, Table
from rayqueue.records.checksum import crc32c, entry_crc

FORMAT_VERSION = 4
"""Of the store's own bytes; the tables' rows have the schema's version.

2: a write-ahead file beside the data. Every store had the six tables of that time.
3: the identity names the schema and the tables, the state names the tables that it sums.
4: no sector of the write-ahead file is ever zeros, and its checksums begin with the store's salt."""

FILLED_FORMAT = 4
"""The first in which no sector of the write-ahead file is zeros."""

OLDEST_FORMAT = 2
"""The oldest that is read. Opening a store brings it to ``FORMAT_VERSION``."""

ENTRY_HEADER = Struct("<QIII")  # term, entry crc, payload length, header crc
_ENTRY_POSITION = Struct("<QQII")  # index, term, entry crc, payload length: what the header crc covers

ROW_HEADER = Struct("<II")  # crc, length
_STATE = Struct("<Q8QBB")  # transaction, the single values, whether there is a vote, how many sums follow
_SUM = Struct("<BQQ")  # table number, rows, total
_STATE_2 = Struct("<Q8QB")
_SUM_2 = Struct("<QQ")
_SUMMED_2 = (2, 3, 4, 5)
_TABLES_2 = ((0, "offsets"), (1, "lanes"), (2, "producers"), (3, "groups"), (4, "members"), (5, "meta"))
_CHECKPOINT = Struct("<QQI")
_IDENTITY = Struct("<HHH")  # format, bytes of group and replica. The format stays where it is in all formats
_WAL_BYTES = Struct("<Q")

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
    """The number of rows of a table, and the sum of their checksums modulo 2**64.

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
    """The row that every transaction writes. ``sums``: of the summed tables, by their numbers."""

    txn_id: int
    state: LogState
    sums: dict[int, TableSum]


def encode_state(txn_id: int, state: LogState, sums: Mapping[Table, TableSum]) -> bytes:
    vote = state.hard.voted_for
    head = _STATE.pack(
        txn_id,
        state.hard.term,
        state.hard.commit,
        state.applied,
        state.base_index,
        state.base_term,
        state.last_index,
        state.last_term,
        state.freed,
        vote is not None,
        len(sums),
    )
    summed = b"".join([_SUM.pack(table.number, each.rows, each.total) for table, each in sums.items()])
    return head + summed + (vote or "").encode()


def decode_state(value: bytes, version: int = FORMAT_VERSION) -> StoredState:
    try:
        return _decode_state(value, version)
    except (error, UnicodeDecodeError) as failure:
        raise DamagedLogError(f"the store's state cannot be read: {failure}") from failure


def _decode_state(value: bytes, version: int) -> StoredState:
    if version == 2:
        *numbers, voted = _STATE_2.unpack_from(value)
        at = _STATE_2.size
        sums = {
            number: TableSum(*_SUM_2.unpack_from(value, at + place * _SUM_2.size))
            for place, number in enumerate(_SUMMED_2)
        }
        at += len(_SUMMED_2) * _SUM_2.size
    else:
        *numbers, voted, count = _STATE.unpack_from(value)
        end = _STATE.size + count * _SUM.size
        sums = {number: TableSum(rows, total) for number, rows, total in _SUM.iter_unpack(value[_STATE.size : end])}
        at = end
    txn_id, term, commit, applied, base, base_term, last, last_term, freed = numbers
    state = LogState(
        hard=HardState(Term(term), ReplicaId(value[at:].decode()) if voted else None, Index(commit)),
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


class _Declared(msgspec.Struct, array_like=True, frozen=True):
    """The schema as it is stored. Fields are added at its end, with defaults, and a higher ``FORMAT_VERSION``."""

    schema: str
    version: int
    tables: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose store it is, and what is in it.

    ``wal_bytes``: the size of the write-ahead file, so that one that was cut off is noticed. ``tables``: number and
    name of each table that was made, so that one that is missing is noticed, and told from one that is new."""

    format: int
    group_id: GroupId
    replica_id: ReplicaId
    wal_bytes: int
    schema: str
    version: int
    tables: tuple[tuple[int, str], ...]

    @classmethod
    def of(cls, group_id: GroupId, replica_id: ReplicaId, wal_bytes: int, schema: Schema) -> Identity:
        tables = tuple(sorted((table.number, table.name) for table in schema.tables))
        return cls(FORMAT_VERSION, group_id, replica_id, wal_bytes, schema.name, schema.version, tables)

    @property
    def salt(self) -> int:
        """With which the checksums of its write-ahead file begin, so that another store's is not taken for it."""
        return crc32c(f"{self.group_id}/{self.replica_id}".encode())

    def encode(self) -> bytes:
        group, replica = self.group_id.encode(), self.replica_id.encode()
        head = _IDENTITY.pack(self.format, len(group), len(replica)) + group + replica + _WAL_BYTES.pack(self.wal_bytes)
        return head + msgspec.msgpack.encode(_Declared(self.schema, self.version, self.tables))

    @classmethod
    def decode(cls, value: bytes) -> Identity:
        """``StoreFormatError``, with the number of the format that it has and of those that are known, unless it is
        known. Nothing else is read then: it may mean something else."""
        try:
            found, group_size, replica_size = _IDENTITY.unpack_from(value)
            if not OLDEST_FORMAT <= found <= FORMAT_VERSION:
                raise _unknown_format(found)
            at = _IDENTITY.size
            group, replica = (
                value[at : at + group_size].decode(),
                value[at + group_size : at + group_size + replica_size].decode(),
            )
            at += group_size + replica_size
            (wal_bytes,) = _WAL_BYTES.unpack_from(value, at)
            declared = _Declared("", 0, _TABLES_2)
            if found > 2:
                declared = msgspec.msgpack.decode(value[at + _WAL_BYTES.size :], type=_Declared)
        except (error, UnicodeDecodeError, msgspec.MsgspecError) as failure:
            raise DamagedLogError(f"the store's identity cannot be read: {failure}") from failure
        names = GroupId(group), ReplicaId(replica)
        return cls(found, *names, wal_bytes, declared.schema, declared.version, declared.tables)


def _unknown_format(found: int) -> StoreFormatError:
    if found > FORMAT_VERSION:
        advice = "a newer release wrote it: run that one"
    else:
        advice = "this release cannot read one so old: open it with an earlier release first"
    return StoreFormatError(
        f"the store has format {found}, this release reads {OLDEST_FORMAT} to {FORMAT_VERSION}; {advice}",
        found=found,
        oldest=OLDEST_FORMAT,
        newest=FORMAT_VERSION,
    )
