"""Frames on a stream: however the bytes come, the same frames, and nothing else ever comes out."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayqueue.errors import TransportError
from rayqueue.protocol.frames import HEAD, Frame, FrameReader, Kind, head

# A busy machine is no finding.
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

LIMIT = 5000


def feed(reader: FrameReader, data: bytes, sizes: list[int]) -> list[tuple[int, int, bytes]]:
    """Let the bytes come in pieces of these sizes, then the rest as they fit."""
    found: list[tuple[int, int, bytes]] = []
    pieces = iter(sizes)
    while data:
        space = reader.space()
        assert len(space) > 0
        size = min(len(space), len(data), next(pieces, len(data)))
        space[:size] = data[:size]
        data = data[size:]
        found += [(kind, request, bytes(body)) for kind, request, body in reader.frames(size)]
    return found


frames = st.lists(
    st.tuples(st.integers(0, 255), st.integers(0, 2**32 - 1), st.binary(max_size=LIMIT - 10)), min_size=1, max_size=8
)


@relaxed
@given(frames, st.lists(st.integers(1, 3000), max_size=40), st.integers(1, 9000))
@pytest.mark.slow
def test_however_it_is_cut_the_same_frames_come_out(
    sent: list[tuple[int, int, bytes]], sizes: list[int], buffer_bytes: int
) -> None:
    stream = b"".join(head(kind, request, len(body)) + body for kind, request, body in sent)
    assert feed(FrameReader(LIMIT, buffer_bytes), stream, sizes) == sent


@relaxed
@given(st.binary(min_size=1, max_size=20_000), st.lists(st.integers(1, 3000), max_size=20))
def test_garbage_is_refused_or_is_frames_within_the_limit(data: bytes, sizes: list[int]) -> None:
    try:
        found = feed(FrameReader(LIMIT), data, sizes)
    except TransportError:
        return
    assert sum(HEAD.size + len(body) for _, _, body in found) <= len(data)


@pytest.mark.parametrize("length", [0, 4, LIMIT + 1, 2**32 - 1])
def test_a_length_that_cannot_be_is_refused_before_anything_is_read(length: int) -> None:
    reader = FrameReader(LIMIT)
    reader.space()[: HEAD.size] = HEAD.pack(length, Kind.CALL, 1)
    with pytest.raises(TransportError):
        list(reader.frames(HEAD.size))


def test_memory_grows_with_what_has_come_and_not_with_what_was_announced() -> None:
    limit = 1 << 26
    reader = FrameReader(limit)
    reader.space()[: HEAD.size] = HEAD.pack(limit, Kind.APPEND, 1)
    assert list(reader.frames(HEAD.size)) == []
    came = HEAD.size
    while came < 1 << 20:
        space = reader.space()
        assert reader.size_bytes <= max(2 * came, 4096)
        assert list(reader.frames(len(space))) == []
        came += len(space)
    assert reader.size_bytes <= 2 * came


def test_the_buffer_grows_to_the_limit_and_not_further() -> None:
    reader = FrameReader(LIMIT, 16)
    stream = HEAD.pack(LIMIT, Kind.APPEND, 1) + bytes(LIMIT - 5)
    assert [len(frame.body) for frame in feed_whole(reader, stream)] == [LIMIT - 5]
    assert reader.size_bytes == LIMIT + 4


def feed_whole(reader: FrameReader, stream: bytes) -> list[Frame]:
    found: list[Frame] = []
    while stream:
        space = reader.space()
        piece, stream = stream[: len(space)], stream[len(space) :]
        space[: len(piece)] = piece
        found += reader.frames(len(piece))
    return found


def test_an_idle_reader_gives_its_memory_back() -> None:
    reader = FrameReader(1 << 20)
    stream = HEAD.pack(1 << 20, Kind.APPEND, 1) + bytes((1 << 20) - 5)
    feed_whole(reader, stream)
    assert reader.size_bytes > 1 << 20
    reader.release()
    assert reader.size_bytes <= 4096
    feed_whole(reader, stream[:5000])
    kept = reader.size_bytes
    reader.release()  # not what is in it
    assert reader.size_bytes == kept
    assert len(feed_whole(reader, stream[5000:])) == 1
