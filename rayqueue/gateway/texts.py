"""Texts: what an error says to a caller. It may repeat what he has sent, so it has an end."""

from __future__ import annotations

MAX_BYTES = 1000
"""gRPC tells it twice in a call's trailers, in up to three bytes for each, and clients take 8 KiB of those."""
_MORE = "…"


def text_of(error: Exception) -> str:
    """As UTF-8, and not more bytes of it than that."""
    text = str(error).encode("utf-8", "replace")
    if len(text) <= MAX_BYTES:
        return text.decode()
    return text[: MAX_BYTES - len(_MORE.encode())].decode("utf-8", "ignore") + _MORE
