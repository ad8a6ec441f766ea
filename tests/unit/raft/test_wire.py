"""The frames: golden bytes, round trips, and what any other bytes do."""

from __future__ import annotations

import contextlib
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayqueue.errors import InvariantBrokenError, TransportError
from rayqueue.ids import Index, Term
from rayqueue.log.store import Entry
from rayqueue.raft import wire
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

MAX_FRAME_BYTES = 1 << 20

# A busy machine is no finding.
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def entry(index: int, term: int, payload: bytes) -> Entry:
    return Entry(Index(index), Term(term), payload, entry_crc(index, term, payload))


def joined(message: Message) -> bytes:
    return b"".join(wire.encode(message))


u64 = st.integers(0, 2**64 - 1)
terms = u64.map(Term)
indexes = u64.map(Index)
payloads = st.one_of(st.binary(max_size=64), st.integers(4000, 9000).map(lambda n: bytes([n % 251]) * n))


@st.composite
def appends(draw: st.DrawFn) -> AppendEntries:
    contents = draw(st.lists(st.tuples(u64, payloads), max_size=6))
    prev_index = draw(st.integers(0, 2**64 - 1 - len(contents)))
    entries = tuple(entry(prev_index + 1 + i, term, payload) for i, (term, payload) in enumerate(contents))
    return AppendEntries(draw(terms), Index(prev_index), draw(terms), draw(indexes), draw(u64), entries)


messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(PreVote, terms, indexes, terms),
    st.builds(PreVoteReply, terms, terms, st.booleans()),
    st.builds(RequestVote, terms, indexes, terms, st.booleans()),
    st.builds(VoteReply, terms, st.booleans()),
    appends(),
    st.builds(AppendReply, terms, st.booleans(), indexes, indexes, u64),
    st.builds(InstallSnapshot, terms, indexes, terms, u64, st.binary(max_size=200), payloads),
    st.builds(TimeoutNow, terms),
    st.builds(Inquiry, terms, u64),
    st.builds(Account, terms, u64, indexes, terms, indexes, st.just(ReplicaSet.of(["a", "b"]).encode())),
)


def read_all(stream: bytes, chunk_bytes: int, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> list[Message]:
    """Through a small buffer, in chunks: what a socket may do."""
    reader = wire.FrameReader(max_frame_bytes, 256)
    received: list[Message] = []
    at = 0
    while at < len(stream):
        space = reader.space()
        assert len(space) > 0
        chunk = stream[at : at + min(chunk_bytes, len(space))]
        space[: len(chunk)] = chunk
        received.extend(reader.messages(len(chunk)))
        at += len(chunk)
    return received


# If one of these changes, replicas of two releases no longer understand each other: raise handshake.SPEAKS.
GOLDEN: list[tuple[Message, str]] = [
    (PreVote(Term(7), Index(99), Term(6)), "1d000000f64917ce01070000000000000063000000000000000600000000000000"),
    (PreVoteReply(Term(7), Term(8), True), "160000008adbbd07020700000000000000080000000000000001"),
    (
        RequestVote(Term(7), Index(99), Term(6), True),
        "1e00000098474a2e0307000000000000006300000000000000060000000000000001",
    ),
    (VoteReply(Term(7), False), "0e000000f64bd00704070000000000000000"),
    (
        AppendEntries(Term(7), Index(99), Term(6), Index(98), 3, ()),
        ("31000000732fcba7050700000000000000630000000000000006000000000000006200000000000000030000000000000000000000"),
    ),
    (
        AppendEntries(Term(7), Index(99), Term(6), Index(98), 3, (entry(100, 6, b"one"), entry(101, 7, b""))),
        (
            "54000000c4a0fafc05070000000000000063000000000000000600000000000000620000000000000003000000000000"
            "000200000006000000000000004cde3acd03000000070000000000000079cdf5f8000000006f6e65"
        ),
    ),
    (
        AppendReply(Term(7), True, Index(99), Index(101), 3),
        "2600000095fdf03406070000000000000001630000000000000065000000000000000300000000000000",
    ),
    (
        InstallSnapshot(Term(7), Index(50), Term(5), 3, b"members", b"state"),
        (
            "39000000437ae9ef07070000000000000032000000000000000500000000000000030000000000000007000000050000"
            "006d656d626572737374617465"
        ),
    ),
    (TimeoutNow(Term(7)), "0d000000309fcff9080700000000000000"),
    (Inquiry(Term(7), 5), "15000000fe432acc0907000000000000000500000000000000"),
    (
        Account(Term(7), 5, Index(99), Term(6), Index(3), ReplicaSet.of(["a"]).encode()),
        (
            "4e000000219f284a0a070000000000000005000000000000006300000000000000060000000000000003000000000000"
            "007b22766f74657273223a205b2261225d2c20226c6561726e657273223a205b5d7d"
        ),
    ),
]


@pytest.mark.parametrize(
    ("message", "golden"), GOLDEN, ids=[f"{i}-{type(m).__name__}" for i, (m, _) in enumerate(GOLDEN)]
)
def test_golden_bytes(message: Message, golden: str) -> None:
    frame = bytes.fromhex(golden)
    assert joined(message).hex(" ") == frame.hex(" ")
    assert wire.decode(memoryview(frame)) == message


@relaxed
@given(messages)
def test_round_trip(message: Message) -> None:
    assert wire.decode(memoryview(joined(message))) == message


@pytest.mark.slow
@relaxed
@given(st.lists(messages, max_size=8), st.integers(1, 5000))
def test_a_stream_in_any_chunks(sent: list[Message], chunk_bytes: int) -> None:
    assert read_all(b"".join(map(joined, sent)), chunk_bytes) == sent


@relaxed
@given(st.binary(max_size=300), st.integers(1, 300))
def test_arbitrary_bytes_give_a_message_or_a_typed_error(data: bytes, chunk_bytes: int) -> None:
    with contextlib.suppress(TransportError):
        read_all(data, chunk_bytes)


@relaxed
@given(st.integers(0, 9), st.binary(max_size=120))
def test_arbitrary_bodies_give_a_typed_error(kind: int, body: bytes) -> None:
    """Past the checksum, which an arbitrary body would hardly ever match by itself."""
    covered = bytes([kind]) + body
    frame = (4 + len(covered)).to_bytes(4, "little") + crc32c(covered).to_bytes(4, "little") + covered
    try:
        message = wire.decode(memoryview(frame))
    except TransportError:
        return
    assert joined(message) == frame


@relaxed
@given(messages, st.data())
def test_one_flipped_bit_is_always_noticed(message: Message, data: st.DataObject) -> None:
    frame = bytearray(joined(message))
    bit = data.draw(st.integers(0, len(frame) * 8 - 1))
    frame[bit // 8] ^= 1 << bit % 8
    with pytest.raises(TransportError):
        wire.decode(memoryview(frame))


@relaxed
@given(messages, st.data())
def test_a_truncated_frame_is_noticed(message: Message, data: st.DataObject) -> None:
    frame = joined(message)
    with pytest.raises(TransportError):
        wire.decode(memoryview(frame)[: data.draw(st.integers(0, len(frame) - 1))])


def test_a_checksum_of_another_index_is_refused() -> None:
    right = AppendEntries(Term(1), Index(4), Term(1), Index(0), 0, (entry(5, 1, b"payload"),))
    moved = bytearray(joined(right))
    moved[9 + 8] = 3  # prev_index, and a head checksum that fits it
    head = memoryview(moved)[8 : len(moved) - len(b"payload")]
    moved[4:8] = crc32c(head).to_bytes(4, "little")
    with pytest.raises(TransportError, match="checksum"):
        wire.decode(memoryview(moved))


def test_good_messages_before_a_bad_one_are_delivered() -> None:
    good = VoteReply(Term(3), True)
    bad = bytearray(joined(good))
    bad[-1] ^= 1
    reader = wire.FrameReader(MAX_FRAME_BYTES, 4096)
    stream = joined(good) * 2 + bytes(bad)
    reader.space()[: len(stream)] = stream
    iterator = reader.messages(len(stream))
    assert [next(iterator), next(iterator)] == [good, good]
    with pytest.raises(TransportError):
        next(iterator)


@pytest.mark.parametrize("length", [0, 4, MAX_FRAME_BYTES - 3, 2**32 - 1])
def test_a_frame_too_short_or_too_long_is_refused_by_its_length_alone(length: int) -> None:
    with pytest.raises(TransportError, match="frame of"):
        read_all(length.to_bytes(4, "little"), 4)


def test_a_huge_count_of_entries_allocates_nothing() -> None:
    covered = b"\x05" + bytes(40) + (2**32 - 1).to_bytes(4, "little")
    frame = (4 + len(covered)).to_bytes(4, "little") + crc32c(covered).to_bytes(4, "little") + covered
    tracemalloc.start()
    with pytest.raises(TransportError):
        wire.decode(memoryview(frame))
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def test_a_large_payload_is_not_copied_to_encode_and_once_to_decode() -> None:
    payload = bytes(1 << 20)
    message = AppendEntries(Term(1), Index(0), Term(0), Index(0), 0, (entry(1, 1, payload), entry(2, 1, b"small")))
    buffers = wire.encode(message)
    assert any(buffer is payload for buffer in buffers)
    frame = memoryview(b"".join(buffers))
    tracemalloc.start()
    decoded = wire.decode(frame)
    assert tracemalloc.get_traced_memory()[1] < len(payload) + 20_000
    tracemalloc.stop()
    assert decoded == message


def test_many_small_payloads_are_few_buffers() -> None:
    entries = tuple(entry(i + 1, 1, b"x" * 100) for i in range(2000))
    assert len(wire.encode(AppendEntries(Term(1), Index(0), Term(0), Index(0), 0, entries))) == 1


def receive(reader: wire.FrameReader, frame: bytes) -> list[Message]:
    received: list[Message] = []
    while frame:
        space = reader.space()
        chunk, frame = frame[: len(space)], frame[len(space) :]
        space[: len(chunk)] = chunk
        received += reader.messages(len(chunk))
    return received


def test_the_buffer_grows_for_a_large_frame_and_shrinks_later() -> None:
    large, small = InstallSnapshot(Term(1), Index(1), Term(1), 0, b"", bytes(100_000)), TimeoutNow(Term(1))
    reader = wire.FrameReader(MAX_FRAME_BYTES, 1024)
    for _ in range(3):
        assert receive(reader, joined(large)) == [large]
        assert len(joined(large)) <= len(reader.space()) < 2 * len(joined(large))
    for _ in range(100):
        assert receive(reader, joined(small)) == [small]
    assert len(reader.space()) == 1024
    assert receive(reader, joined(large)) == [large]


def test_a_frame_that_is_announced_takes_no_memory() -> None:
    reader = wire.FrameReader(1 << 26, 4096)
    reader.space()[:9] = (1 << 26).to_bytes(4, "little")[:4] + bytes(5)
    with pytest.raises(TransportError):
        list(reader.messages(9))
    reader = wire.FrameReader(1 << 26, 4096)
    reader.space()[:9] = ((1 << 26) - 4).to_bytes(4, "little") + bytes(5)
    assert list(reader.messages(9)) == []
    assert len(reader.space()) < 5000
    assert reader.size_bytes < 5000


def test_entries_must_follow_prev_index() -> None:
    with pytest.raises(InvariantBrokenError):
        wire.encode(AppendEntries(Term(1), Index(5), Term(1), Index(0), 0, (entry(7, 1, b""),)))


@pytest.mark.parametrize(
    "message", [TimeoutNow(Term(-1)), TimeoutNow(Term(2**64)), AppendReply(Term(1), True, Index(-1), Index(0), 0)]
)
def test_a_number_that_does_not_fit_is_a_bug_of_ours(message: Message) -> None:
    with pytest.raises(InvariantBrokenError):
        wire.encode(message)


@pytest.mark.slow
@relaxed
@given(st.integers(1, 40), st.integers(1, 700))
def test_byte_by_byte(count: int, payload_bytes: int) -> None:
    message = InstallSnapshot(Term(1), Index(1), Term(1), 0, b"", bytes(payload_bytes))
    assert read_all(joined(message) * count, 1) == [message] * count
