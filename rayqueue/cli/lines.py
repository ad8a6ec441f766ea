"""Records out of a stream of bytes, cut at a delimiter. Every other byte survives."""

from __future__ import annotations

import codecs

from rayqueue.errors import InvalidInputError

MAX_LINE_BYTES = 64 * 1024 * 1024
"""What is held back while its delimiter has not come. No topic takes a larger record."""


class Lines:
    """Feed it what was read; it hands out the records that this completed."""

    def __init__(self, delimiter: bytes = b"\n") -> None:
        if not delimiter:
            raise InvalidInputError("a delimiter has at least one byte")
        self._delimiter = delimiter
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        rest, delimiter = self._rest, self._delimiter
        looked_at = max(0, len(rest) - len(delimiter) + 1)  # the delimiter may have been cut in two
        rest += data
        if rest.find(delimiter, looked_at) < 0:
            if len(rest) > MAX_LINE_BYTES:
                raise InvalidInputError(
                    f"no delimiter within {MAX_LINE_BYTES} bytes; --file sends a whole file as one record"
                )
            return []
        *complete, last = bytes(rest).split(delimiter)
        self._rest = bytearray(last)
        return complete

    def end(self) -> list[bytes]:
        """The last record, if the input did not end with a delimiter."""
        rest, self._rest = bytes(self._rest), bytearray()
        return [rest] if rest else []


def delimiter_of(option: str, text: str) -> bytes:
    r"""A delimiter as it is written on a command line: ``\0``, ``\t`` and ``\x1e`` are one byte each."""
    found = unescaped(option, text)
    if not found:
        raise InvalidInputError(f"{option} has at least one byte", option=option)
    return found


def unescaped(option: str, text: str) -> bytes:
    r"""The bytes that a text with Python's escapes (``\n``, ``\x1e``) stands for."""
    try:
        return codecs.escape_decode(text.encode(errors="surrogateescape"))[0]
    except ValueError as error:
        raise InvalidInputError(f"{option} {text!r}: {error}", option=option) from None
