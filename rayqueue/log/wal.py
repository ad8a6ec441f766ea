"""The write-ahead file: small writes become durable in it first, before LMDB has them. It has a fixed size.

A synced LMDB transaction copies every page it touches and waits for the disk
twice, however little changed. A small one is therefore written here first, by
one write that waits for the disk once; LMDB gets many of them at a time.

The file is a row of sectors, all written when it was made, so that writing
one changes no metadata. A sector that holds nothing yet is no record's part,
but has its checksum like any other: zeros are damage. A record is a run of
whole sectors:

    u32 crc         of the rest of the sector, begun with the store's ``salt``
    u64 base        the LMDB transaction that the record follows
    u32 sequence    the record's place among those that follow it
    u16 part, u16 parts, u16 used
        data        the operations, with a crc of their own in front

Records are written one after the other, each durable before the next begins.
A new LMDB transaction makes all of them outdated, since their base is not the
newest any more; then the file is written from its start again. Nothing is
erased.

What a crash leaves: records whose base is LMDB's newest transaction are
replayed, up to the first that is not whole. A disk writes a sector completely
or not at all, so a record that was cut off by a power loss consists of intact
sectors, old and new ones. A sector that fails its own checksum was damaged
later, and so was a record that is missing before another one: both are
``DamagedLogError``, and so is a sector of another store's file, which has another
salt. Nothing that was promised is taken for torn.

Before format 4 of the store, sectors that held nothing were zeros and there was
no salt. ``fill`` is what brings such a file up to date; outdated records of then
stay until they are overwritten.

Owns the format, and when a record is valid. Knows nothing of the log's rules,
and where the bytes are is said by a ``WalFile``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from struct import Struct, error
from typing import Protocol

from rayqueue.errors import DamagedLogError
from rayqueue.ids import Index, ReplicaId, Term
from rayqueue.log.ops import Append, Delete, Op, Put, SetApplied, SetHard
from rayqueue.log.store import Entry, HardState, Table
from rayqueue.records.checksum import crc32c, entry_crc

SECTOR_BYTES = 512

_CRC = Struct("<I")
_SECTOR = Struct("<QIHHH")  # base, sequence, part, parts, used; after the crc
_DATA_BYTES = SECTOR_BYTES - _CRC.size - _SECTOR.size
_WHOLE = Struct(f"{_SECTOR.format}{_DATA_BYTES}s")  # the same with its data, padded with zeros
_ZEROS = bytes(SECTOR_BYTES)

_APPEND, _SET_HARD, _SET_APPLIED, _PUT, _DELETE = range(1, 6)
_APPEND_HEAD = Struct("<BQQII")  # tag, index, term, crc, payload bytes
_SET_HARD_HEAD = Struct("<BQQHB")  # tag, term, commit, bytes of the vote, whether there is one
_SET_APPLIED_HEAD = Struct("<BQ")  # tag, index
_PUT_HEAD = Struct("<BBHI")  # tag, table number, key bytes, value bytes
_DELETE_HEAD = Struct("<BBH")  # tag, table number, key bytes


class WalFile(Protocol):
    """The bytes of a write-ahead file: on a disk (``rayqueue.log.wal_file``), or in the memory of a test."""

    @property
    def name(self) -> str:
        """For errors."""

    @property
    def size_bytes(self) -> int: ...

    def read(self) -> bytes:
        """All of it."""

    def write(self, at: int, sectors: bytes) -> None:
        """Durable when it returns. A loss of power inside it leaves any of the sectors, each as it was or as it is now.

        ``DiskFullError`` leaves all of them as they were. ``StorageError``: what is there now is unknown.
        """

    def close(self) -> None: ...


def blank_sector(salt: int) -> bytes:
    """A sector that holds nothing."""
    body = _WHOLE.pack(0, 0, 0, 0, 0, b"")
    return _CRC.pack(crc32c(body, salt)) + body


class Wal:
    """The records of an open file. ``restart`` says which LMDB transaction the next ones follow."""

    def __init__(self, file: WalFile, salt: int = 0, *, filled: bool = False) -> None:
        """``filled``: every sector was written in the present form, or is of an outdated record."""
        self.file = file
        self._salt = salt
        self._filled = filled
        self.size_bytes = file.size_bytes
        self._base = 0
        self._sequence = 0
        self._at = 0

    def restart(self, base: int) -> None:
        """LMDB has it all, as of transaction ``base``."""
        self._base, self._sequence, self._at = base, 0, 0

    def close(self) -> None:
        self.file.close()

    # -- writing ---------------------------------------------------------------------

    def write(self, data: bytes) -> bool:
        """Make a record durable. False if there is no room; it is not written then.

        ``DiskFullError`` leaves the file as it was for the reader. Any other failure leaves the end of the file
        unknown: ``StorageError``, and no more writes.
        """
        content = _CRC.pack(crc32c(data)) + data
        parts = -(-len(content) // _DATA_BYTES)
        end = self._at + parts * SECTOR_BYTES
        if end > self.size_bytes:
            return False
        sectors: list[bytes] = []
        for part in range(parts):
            piece = content[part * _DATA_BYTES : (part + 1) * _DATA_BYTES]
            body = _WHOLE.pack(self._base, self._sequence, part, parts, len(piece), piece)
            sectors += (_CRC.pack(crc32c(body, self._salt)), body)
        self.file.write(self._at, b"".join(sectors))
        self._at = end
        self._sequence += 1
        return True

    # -- reading ---------------------------------------------------------------------

    def replay(self, base: int, tables: Mapping[int, Table]) -> Iterator[list[Op]]:
        """The records that follow LMDB's transaction ``base``, in order. What is written next follows them."""
        self.restart(base)
        file = self.file.read()
        sectors = [self._read(file, at, base) for at in range(0, len(file), SECTOR_BYTES)]
        for base_found, sequence, *_ in sectors:
            if base_found > base:
                raise DamagedLogError(
                    f"{self.file.name} follows transaction {base_found}, but the newest is {base}", sequence=sequence
                )
        while (data := self._record(sectors)) is not None:
            yield decode_ops(data, tables)
        beyond = [sequence for found, sequence, *_ in sectors if found == base and sequence > self._sequence]
        if beyond:
            raise DamagedLogError(f"{self.file.name} has record {min(beyond)}, but not record {self._sequence}")

    def fill(self) -> None:
        """Write every sector that is zeros, as the format before this one left those that held nothing."""
        file, blank = self.file.read(), blank_sector(self._salt)
        for at in range(0, len(file), SECTOR_BYTES):
            if file[at : at + SECTOR_BYTES] == _ZEROS:
                self.file.write(at, blank)
        self._filled = True

    def _read(self, file: bytes, at: int, newest: int) -> tuple[int, int, int, int, bytes]:
        """Base, sequence, part, parts, data of one sector; all zero for one that holds nothing."""
        sector = file[at : at + SECTOR_BYTES]
        if sector == _ZEROS and not self._filled:
            return 0, 0, 0, 0, b""
        base, sequence, part, parts, used = _SECTOR.unpack_from(sector, _CRC.size)
        body, crc = sector[_CRC.size :], _CRC.unpack_from(sector)[0]
        unsalted = (base < newest or not self._filled) and crc == crc32c(body)
        if crc != crc32c(body, self._salt) and not unsalted:
            raise DamagedLogError(f"{self.file.name} does not match its checksum at byte {at}", path=self.file.name)
        start = SECTOR_BYTES - _DATA_BYTES
        return base, sequence, part, parts, sector[start : start + used]

    def _record(self, sectors: Sequence[tuple[int, int, int, int, bytes]]) -> bytes | None:
        """The next record, if it is whole; moves past it."""
        first = self._at // SECTOR_BYTES
        if first == len(sectors):
            return None
        parts = sectors[first][3]
        found = sectors[first : first + parts]
        wanted = [(self._base, self._sequence, part, parts) for part in range(parts)]
        if not parts or [sector[:4] for sector in found] != wanted:
            return None
        content = b"".join(sector[4] for sector in found)
        data = content[_CRC.size :]
        if len(content) < _CRC.size or crc32c(data) != _CRC.unpack_from(content)[0]:
            return None  # parts of two attempts, neither of which was finished
        self._at += parts * SECTOR_BYTES
        self._sequence += 1
        return data


# -- operations as bytes -----------------------------------------------------------------


def encode_ops(ops: Sequence[Op], max_bytes: int) -> bytes | None:
    """The operations, or None if one of them is not for here or they are too many."""
    pieces: list[bytes] = []
    rows: dict[tuple[Table, bytes], bytes | None] = {}
    last: dict[int, bytes] = {}
    size = 0
    for op in ops:
        kind = type(op)
        if kind is Append:
            entry = op.entry  # type: ignore[union-attr]
            payload = entry.payload
            size += len(payload)
            pieces.append(_APPEND_HEAD.pack(_APPEND, entry.index, entry.term, entry.crc, len(payload)))
            pieces.append(payload)
        elif kind is Put:
            rows[op.table, op.key] = op.value  # type: ignore[union-attr]
            size += len(op.value)  # type: ignore[union-attr]
        elif kind is SetApplied:
            last[_SET_APPLIED] = _SET_APPLIED_HEAD.pack(_SET_APPLIED, op.applied)  # type: ignore[union-attr]
        elif kind is SetHard:
            last[_SET_HARD] = _encode_hard(op.hard)  # type: ignore[union-attr]
        elif kind is Delete:
            rows[op.table, op.key] = None  # type: ignore[union-attr]
        else:
            return None
        if size > max_bytes:
            return None
    # Entries first: what is applied must be in the log. Of a row, only the last version counts.
    pieces += last.values()
    for (table, key), value in rows.items():
        if value is None:
            pieces += (_DELETE_HEAD.pack(_DELETE, table.number, len(key)), key)
        else:
            pieces += (_PUT_HEAD.pack(_PUT, table.number, len(key), len(value)), key, value)
    return b"".join(pieces)


def _encode_hard(hard: HardState) -> bytes:
    vote = b"" if hard.voted_for is None else hard.voted_for.encode()
    return _SET_HARD_HEAD.pack(_SET_HARD, hard.term, hard.commit, len(vote), hard.voted_for is not None) + vote


def decode_ops(data: bytes, tables: Mapping[int, Table]) -> list[Op]:
    """The operations of one record. Entries are verified."""
    ops: list[Op] = []
    at = 0

    def take(size: int) -> bytes:
        nonlocal at
        piece = data[at : at + size]
        if len(piece) != size:
            raise DamagedLogError("a record of the write-ahead file is cut off")
        at += size
        return piece

    try:
        while at < len(data):
            match data[at]:
                case 1:
                    _, index, term, crc, size = _APPEND_HEAD.unpack(take(_APPEND_HEAD.size))
                    payload = take(size)
                    if entry_crc(index, term, payload) != crc:
                        raise DamagedLogError(f"entry {index} does not match its checksum", index=index)
                    ops.append(Append(Entry(Index(index), Term(term), payload, crc)))
                case 2:
                    _, term, commit, size, voted = _SET_HARD_HEAD.unpack(take(_SET_HARD_HEAD.size))
                    vote = take(size).decode()
                    ops.append(SetHard(HardState(Term(term), ReplicaId(vote) if voted else None, Index(commit))))
                case 3:
                    ops.append(SetApplied(Index(_SET_APPLIED_HEAD.unpack(take(_SET_APPLIED_HEAD.size))[1])))
                case 4:
                    _, table, key_bytes, value_bytes = _PUT_HEAD.unpack(take(_PUT_HEAD.size))
                    ops.append(Put(tables[table], take(key_bytes), take(value_bytes)))
                case 5:
                    _, table, key_bytes = _DELETE_HEAD.unpack(take(_DELETE_HEAD.size))
                    ops.append(Delete(tables[table], take(key_bytes)))
                case tag:
                    raise DamagedLogError(f"a record of the write-ahead file holds an operation {tag}")
    except (error, KeyError, UnicodeDecodeError) as failure:
        raise DamagedLogError(f"a record of the write-ahead file cannot be read: {failure}") from failure
    return ops
