"""Wrong bytes, made from right ones: flipped, cut, doubled, nested, with lengths that lie and text that is none.

Everything is drawn from the generator that is handed in: the same seed gives the same bytes.
"""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec

_NUMBERS = [0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
_PIECES = [
    b"\xff",
    b"\xc1",  # no msgpack value begins so
    b"\xa1\xff",  # text that is not UTF-8
    b"\xa3\xed\xa0\x80",  # half of a surrogate pair
    b"\xdd\xff\xff\xff\xff",  # an array, a map, bytes and text of 4 GiB
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc7\x01\x05\x00",  # an extension
    b"\xd6\xff\xff\xff\xff\xff",  # a time
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",  # not a number
    b"\x91" * 50,
    b"\x91" * 3000,  # deeper than any stack
    b"\x81\xa1x" * 1500,
    b"[" * 3000,
    b"\x00" * 64,
]
_NAMES = ["self", "cls", "message", "type", "__class__", "name", "changes", "args", "group", "partitions", "lanes"]
_NAMES += ["", "a" * 300, "größe", "\0"]


def random_bytes(rng: Random) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 3, 8, 40, 200, 1500)))


def mutated(rng: Random, data: bytes) -> bytes:
    """Some bytes of it are others, or elsewhere, or not there."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(9):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << rng.randrange(8)
            case 1 if changed:
                changed[at % len(changed)] = rng.randrange(256)
            case 2:
                del changed[at:]
            case 3:
                del changed[at : at + rng.randrange(1, 16)]
            case 4:
                changed[at:at] = rng.choice(_PIECES)
            case 5:
                piece = rng.choice(_PIECES)
                changed[at : at + len(piece)] = piece
            case 6:
                size = rng.choice((1, 2, 4, 8))
                number = rng.choice(_NUMBERS) & ((1 << 8 * size) - 1)
                changed[at : at + size] = number.to_bytes(size, rng.choice(("little", "big")))
            case 7:
                stop = min(len(changed), at + rng.randrange(1, 64))
                changed[at:at] = changed[at:stop] * rng.choice((1, 2, 50))
            case _:
                changed[at:at] = random_bytes(rng)
    return bytes(changed)


def mutated_value(rng: Random, value: Any, depth: int = 0) -> Any:
    """A tree like this one, with other leaves, names or branches."""
    if rng.random() < 0.15 or depth > 20:
        return random_value(rng)
    if isinstance(value, dict) and value:
        changed = dict(value)
        key = rng.choice(list(changed))
        match rng.randrange(4):
            case 0:
                del changed[key]
            case 1:
                changed[rng.choice(_NAMES)] = random_value(rng)
            case _:
                changed[key] = mutated_value(rng, changed[key], depth + 1)
        return changed
    if isinstance(value, list) and value:
        copied = list(value)
        at = rng.randrange(len(copied))
        match rng.randrange(4):
            case 0:
                del copied[at]
            case 1:
                copied[at:at] = [copied[at]] * rng.choice((1, 3, 500))
            case _:
                copied[at] = mutated_value(rng, copied[at], depth + 1)
        return copied
    return random_value(rng)


def random_value(rng: Random, depth: int = 0) -> Any:
    match rng.randrange(11 if depth < 4 else 8):
        case 0:
            return rng.choice((None, True, False))
        case 1 | 2:
            number = rng.choice(_NUMBERS)
            return -number if rng.random() < 0.3 and number <= 2**63 else number
        case 3:
            return rng.choice((0.5, -1e308, float("inf"), float("nan")))
        case 4 | 5:
            return rng.choice(_NAMES)
        case 6:
            return "x" * rng.choice((1, 120, 121, 5000))
        case 7:
            return random_bytes(rng)
        case 8:
            return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
        case 9:
            return {rng.choice(_NAMES): random_value(rng, depth + 1) for _ in range(rng.randrange(4))}
        case _:
            return {rng.choice(_NUMBERS): rng.choice(_NUMBERS) for _ in range(rng.randrange(300))}


def packed(rng: Random, seeds: list[bytes]) -> bytes:
    """Msgpack: one of the seeds with another shape, or with bytes in it that are none."""
    seed = rng.choice(seeds)
    if rng.random() < 0.5:
        value = mutated_value(rng, msgspec.msgpack.decode(seed))
        if rng.random() < 0.3:
            value = mutated_value(rng, value)
        seed = msgspec.msgpack.encode(value)
    return mutated(rng, seed) if rng.random() < 0.5 else seed


def plain(rng: Random, seeds: list[bytes]) -> bytes:
    """Any bytes: one of the seeds, changed, or two of them run together, or none."""
    match rng.randrange(10):
        case 0:
            return random_bytes(rng)
        case 1:
            return mutated(rng, rng.choice(seeds) + rng.choice(seeds))
        case _:
            return mutated(rng, rng.choice(seeds))
