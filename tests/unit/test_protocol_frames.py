"""Frames on a stream: however the bytes come, the same frames, and nothing else ever comes out."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayqueue.errors import TransportError
from rayqueue.protocol.frames import HEAD, FrameReader, Kind, head

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


def test_the_buffer_grows_to_the_limit_and_not_further() -> None:
    reader = FrameReader(LIMIT, 16)
    reader.space()[: HEAD.size] = HEAD.pack(LIMIT, Kind.APPEND, 1)
    assert list(reader.frames(HEAD.size)) == []
    assert len(reader.space()) == LIMIT + 4 - HEAD.size
