"""Messages as bytes, and bytes as messages.

Owns the frame format between two replicas whose handshake is done (its
version is agreed there; changing a byte here means raising
``handshake.SPEAKS``). Does no I/O: ``encode`` gives buffers for a gathering write,
``FrameReader`` lends out the buffer to receive into.

A frame, little-endian throughout::

    u32 length      bytes after this field
    u32 head_crc    crc32c over kind and head
    u8  kind        which message
        head        fixed fields; for AppendEntries also the table of entries
        payloads    AppendEntries only: the entries' bytes, back to back

Promises:

- An entry's payload is not copied when encoding and copied once when decoding.
- Every byte is covered by a checksum: payloads by the entry's own crc, which
  was computed by whoever created the entry and is stored with it, the rest by
  head_crc. TCP's own 16 bits let one damaged segment in 65,536 through.
- Whatever the bytes, decoding ends in a message or in a ``TransportError``,
  and never allocates more than ``max_frame_bytes`` for it, nor more than twice
  what has come.

Does not authenticate: that is done once per connection by the handshake, and
continuously by TLS where it is switched on.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from struct import Struct
from typing import TypeAlias

from rayqueue.errors import InvariantBrokenError, TransportError
from rayqueue.ids import Index, Term
from rayqueue.log.store import Entry
from rayqueue.protocol.receiving import ReceiveBuffer
from rayqueue.raft.messages import (
    Account,
    AppendEntries,
    AppendReply,
    Inquiry,
    InstallSnapshot,
    Message,
    PreVote,
    PreVoteReply,
    RequestVote,
    TimeoutNow,
    VoteReply,
)
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.records.checksum import crc32c, entry_crc

Buffer: TypeAlias = bytes | memoryview

_PREFIX = Struct("<IIB")  # length, head_crc, kind
_LENGTH = Struct("<I")
_LENGTH_BYTES = 4
_COVERED_FROM = 8  # head_crc covers the kind and what follows it
_HEAD = _PREFIX.size
_MIN_LENGTH = _HEAD - _LENGTH_BYTES

_PRE_VOTE, _PRE_VOTE_REPLY, _REQUEST_VOTE, _VOTE_REPLY = 1, 2, 3, 4
_APPEND, _APPEND_REPLY, _SNAPSHOT, _TIMEOUT_NOW = 5, 6, 7, 8
_INQUIRY, _ACCOUNT = 9, 10

_PRE_VOTE_BODY = Struct("<QQQ")  # term, last_index, last_term
_PRE_VOTE_REPLY_BODY = Struct("<QQB")  # term, for_term, granted
_REQUEST_VOTE_BODY = Struct("<QQQB")  # term, last_index, last_term, transfer
_VOTE_REPLY_BODY = Struct("<QB")  # term, granted
_APPEND_BODY = Struct("<QQQQQI")  # term, prev_index, prev_term, commit, round, count; then the table
_APPEND_REPLY_BODY = Struct("<QBQQQ")  # term, success and full, prev_index, match, round
_SNAPSHOT_BODY = Struct("<QQQQII")  # term, index, index_term, round, bytes of the replica set, bytes of state
_TIMEOUT_NOW_BODY = Struct("<Q")  # term
_INQUIRY_BODY = Struct("<QQ")  # term, nonce
_ACCOUNT_BODY = Struct("<QQQQQ")  # term, nonce, last_index, last_term, members_index; then the replica set

# An entry's index is not sent: entries are consecutive from prev_index + 1.
_ENTRY_ROW = Struct("<QII")  # term, crc, payload bytes

_KIND_CRC = tuple(crc32c(bytes((kind,))) for kind in range(_ACCOUNT + 1))
_MAX_U64 = 2**64 - 1
# Below this, copying a payload is cheaper than one more element in a gathering write.
_JOIN_BELOW_BYTES = 4096


# -- encoding ---------------------------------------------------------------


def encode(message: Message) -> list[Buffer]:
    """The frame, as buffers to be written one after the other. Large payloads are passed through uncopied."""
    try:
        return _encode(message)
    except struct.error as error:
        raise InvariantBrokenError(f"{type(message).__name__} holds a number that does not fit its field") from error


def _encode(m: Message) -> list[Buffer]:
    # Most frequent first.
    if isinstance(m, AppendEntries):
        return _encode_append(m)
    if isinstance(m, AppendReply):
        flags = m.success | m.full << 1
        return _frame(_APPEND_REPLY, _APPEND_REPLY_BODY.pack(m.term, flags, m.prev_index, m.match, m.round))
    if isinstance(m, PreVote):
        return _frame(_PRE_VOTE, _PRE_VOTE_BODY.pack(m.term, m.last_index, m.last_term))
    if isinstance(m, PreVoteReply):
        return _frame(_PRE_VOTE_REPLY, _PRE_VOTE_REPLY_BODY.pack(m.term, m.for_term, m.granted))
    if isinstance(m, RequestVote):
        return _frame(_REQUEST_VOTE, _REQUEST_VOTE_BODY.pack(m.term, m.last_index, m.last_term, m.transfer))
    if isinstance(m, VoteReply):
        return _frame(_VOTE_REPLY, _VOTE_REPLY_BODY.pack(m.term, m.granted))
    if isinstance(m, InstallSnapshot):
        sizes = _SNAPSHOT_BODY.pack(m.term, m.index, m.index_term, m.round, len(m.members), len(m.state))
        return _frame(_SNAPSHOT, sizes + m.members, m.state)
    if isinstance(m, Inquiry):
        return _frame(_INQUIRY, _INQUIRY_BODY.pack(m.term, m.nonce))
    if isinstance(m, Account):
        fields = _ACCOUNT_BODY.pack(m.term, m.nonce, m.last_index, m.last_term, m.members_index)
        return _frame(_ACCOUNT, fields + m.members)
    return _frame(_TIMEOUT_NOW, _TIMEOUT_NOW_BODY.pack(m.term))


def oldest_version(message: Message) -> int:
    """The first version of the protocol (``handshake.SPEAKS``) that has this message."""
    return 3 if isinstance(message, Inquiry | Account) else 2


def _frame(kind: int, body: bytes, rest: bytes = b"") -> list[Buffer]:
    crc = crc32c(body, _KIND_CRC[kind])
    if not rest:
        return [_PREFIX.pack(_MIN_LENGTH + len(body), crc, kind) + body]
    return [_PREFIX.pack(_MIN_LENGTH + len(body) + len(rest), crc32c(rest, crc), kind) + body, rest]


def _encode_append(m: AppendEntries) -> list[Buffer]:
    head = _APPEND_BODY.pack(m.term, m.prev_index, m.prev_term, m.commit, m.round, len(m.entries))
    rows = [head]
    index = int(m.prev_index)
    payload_bytes = 0
    for entry in m.entries:
        index += 1
        if entry.index != index:
            raise InvariantBrokenError("entries of an AppendEntries do not follow its prev_index", index=entry.index)
        size = len(entry.payload)
        payload_bytes += size
        rows.append(_ENTRY_ROW.pack(entry.term, entry.crc, size))
    head = b"".join(rows)
    prefix = _PREFIX.pack(_MIN_LENGTH + len(head) + payload_bytes, crc32c(head, _KIND_CRC[_APPEND]), _APPEND)

    buffers: list[Buffer] = []
    small = [prefix, head]
    for entry in m.entries:
        if len(entry.payload) < _JOIN_BELOW_BYTES:
            small.append(entry.payload)
            continue
        if small:
            buffers.append(b"".join(small))
            small = []
        buffers.append(entry.payload)
    if small:
        buffers.append(b"".join(small))
    return buffers


# -- decoding ---------------------------------------------------------------


def decode(frame: memoryview) -> Message:
    """The message in one whole frame, length field included. Copies what it keeps; ``TransportError`` otherwise."""
    try:
        length, crc, kind = _PREFIX.unpack_from(frame)
        if length + _LENGTH_BYTES != len(frame):
            raise _malformed("length does not match the frame")
        if kind == _APPEND:
            return _decode_append(frame, crc)
        if not 0 < kind <= _ACCOUNT:
            raise _malformed(f"unknown kind {kind}")
        if crc32c(frame[_COVERED_FROM:]) != crc:
            raise _malformed("head checksum does not match")
        return _decode_small(kind, frame[_HEAD:])
    except struct.error as error:
        raise _malformed("fields do not fill the frame") from error


def _decode_small(kind: int, body: memoryview) -> Message:
    # unpack (not unpack_from) refuses a body that is too long as well as one that is too short.
    if kind == _APPEND_REPLY:
        term, flags, prev_index, match, round_ = _APPEND_REPLY_BODY.unpack(body)
        return AppendReply(term, bool(flags & 1), prev_index, match, round_, _flag(flags >> 1))
    if kind == _PRE_VOTE:
        return PreVote(*_PRE_VOTE_BODY.unpack(body))
    if kind == _PRE_VOTE_REPLY:
        term, for_term, granted = _PRE_VOTE_REPLY_BODY.unpack(body)
        return PreVoteReply(term, for_term, _flag(granted))
    if kind == _REQUEST_VOTE:
        term, last_index, last_term, transfer = _REQUEST_VOTE_BODY.unpack(body)
        return RequestVote(term, last_index, last_term, _flag(transfer))
    if kind == _VOTE_REPLY:
        term, granted = _VOTE_REPLY_BODY.unpack(body)
        return VoteReply(term, _flag(granted))
    if kind == _SNAPSHOT:
        term, index, index_term, round_, members_bytes, state_bytes = _SNAPSHOT_BODY.unpack_from(body)
        replica_set_end = _SNAPSHOT_BODY.size + members_bytes
        if replica_set_end + state_bytes != len(body):
            raise _malformed("snapshot sizes do not fill the frame")
        replica_set, state = bytes(body[_SNAPSHOT_BODY.size : replica_set_end]), bytes(body[replica_set_end:])
        return InstallSnapshot(term, index, index_term, round_, replica_set, state)
    if kind == _INQUIRY:
        return Inquiry(*_INQUIRY_BODY.unpack(body))
    if kind == _ACCOUNT:
        replica_set = bytes(body[_ACCOUNT_BODY.size :])
        try:
            ReplicaSet.decode(replica_set)
        except InvariantBrokenError as error:
            raise _malformed("the replica set of an account cannot be read") from error
        term, nonce, last_index, last_term, members_index = _ACCOUNT_BODY.unpack_from(body)
        return Account(term, nonce, last_index, last_term, members_index, replica_set)
    return TimeoutNow(*_TIMEOUT_NOW_BODY.unpack(body))


def _decode_append(frame: memoryview, crc: int) -> AppendEntries:
    term, prev_index, prev_term, commit, round_, count = _APPEND_BODY.unpack_from(frame, _HEAD)
    rows = _HEAD + _APPEND_BODY.size
    start = rows + count * _ENTRY_ROW.size
    if start > len(frame):
        raise _malformed("table of entries does not fit the frame")
    if crc32c(frame[_COVERED_FROM:start]) != crc:
        raise _malformed("head checksum does not match")
    if prev_index + count > _MAX_U64:
        raise _malformed("index out of range")
    entries: list[Entry] = []
    index = prev_index
    for entry_term, entry_checksum, size in _ENTRY_ROW.iter_unpack(frame[rows:start]):
        index += 1
        end = start + size
        if end > len(frame):
            raise _malformed("payload does not fit the frame")
        payload = bytes(frame[start:end])
        if entry_crc(index, entry_term, payload) != entry_checksum:
            raise TransportError("an entry's checksum does not match its payload", index=index, term=entry_term)
        entries.append(Entry(Index(index), Term(entry_term), payload, entry_checksum))
        start = end
    if start != len(frame):
        raise _malformed("bytes after the last payload")
    return AppendEntries(term, prev_index, prev_term, commit, round_, tuple(entries))


def _flag(value: int) -> bool:
    if value > 1:
        raise _malformed(f"a flag is {value}")
    return value == 1


def _malformed(why: str) -> TransportError:
    return TransportError(f"malformed frame: {why}")


# -- receiving --------------------------------------------------------------


class FrameReader:
    """Turns a stream of received bytes into messages, in place.

    ``space`` lends the free part of the buffer to ``recv_into``; ``messages`` decodes what is whole.
    """

    __slots__ = ("_buffer", "_max_frame_bytes")

    def __init__(self, max_frame_bytes: int, buffer_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._buffer = ReceiveBuffer(buffer_bytes)

    @property
    def size_bytes(self) -> int:
        """Memory that it holds."""
        return self._buffer.size_bytes

    def space(self) -> memoryview:
        """The memory for the next bytes. Never empty."""
        unread = self._buffer.unread
        if len(unread) < _LENGTH_BYTES:
            return self._buffer.space(_HEAD)
        frame_bytes = _LENGTH_BYTES + _LENGTH.unpack_from(unread)[0]
        return self._buffer.space(min(frame_bytes, self._max_frame_bytes))

    def messages(self, received_bytes: int) -> Iterator[Message]:
        """The messages that are whole after ``received_bytes`` more bytes. Must be exhausted before the next
        ``space``. A bad frame raises ``TransportError`` after the good ones before it; the stream is lost then."""
        buffer = self._buffer
        buffer.received(received_bytes)
        while buffer.unread_bytes >= _LENGTH_BYTES:
            unread = buffer.unread
            frame_bytes = _LENGTH_BYTES + _LENGTH.unpack_from(unread)[0]
            if not _HEAD <= frame_bytes <= self._max_frame_bytes:
                raise _malformed(f"a frame of {frame_bytes} bytes, {self._max_frame_bytes} are allowed")
            if len(unread) < frame_bytes:
                return
            buffer.take(frame_bytes)
            yield decode(unread[:frame_bytes])
