"""Keys, grants and the ring: what each event means, and what a caller may do."""

from __future__ import annotations

import pytest

from rayqueue.errors import InvalidInputError, PermissionDeniedError, UnauthenticatedError
from rayqueue.gateway.principals import (
    Grant,
    Key,
    KeyCreated,
    KeyGranted,
    KeyRevoked,
    KeyRing,
    Token,
    grants_of,
)


def made(ring: KeyRing, *grants: str) -> Token:
    token = Token.new()
    ring.apply(KeyCreated(token.key_id, "test", token.digest, grants_of(grants), 1))
    return token


@pytest.mark.parametrize(
    ("grant", "wanted", "covered"),
    [
        ("publish:topic:orders", ("publish", "topic", "orders"), True),
        ("publish:topic:orders", ("publish", "topic", "orders2"), False),
        ("publish:topic:orders*", ("publish", "topic", "orders.eu"), True),
        ("publish:topic:orders*", ("publish", "topic", "order"), False),
        ("publish:topic:orders*", ("consume", "topic", "orders"), False),
        ("consume:group:*", ("consume", "topic", "orders"), False),
        ("*:*:*", ("delete", "topic", "orders"), True),
    ],
)
def test_what_a_grant_covers(grant: str, wanted: tuple[str, str, str], covered: bool) -> None:
    assert Grant.parse(grant).covers(*wanted) is covered


@pytest.mark.parametrize(
    "text",
    [
        "",
        "publish",
        "publish:topic",
        "read:topic:x",
        "publish:thing:x",
        "publish:topic:",
        "publish:topic:a*b",
        "publish:topic:x:y",
        "publish:topic:a b",
        "publish:topic:**",
    ],
)
def test_a_grant_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError):
        Grant.parse(text)


def test_a_key_is_known_by_its_text_and_nothing_less() -> None:
    ring = KeyRing()
    token = made(ring, "publish:topic:orders")
    assert ring.authenticate(token.text).key_id == token.key_id
    other = made(ring)
    for wrong in (
        None,
        "",
        "rqk_",
        token.text[:-1],
        token.text + "a",
        token.text.upper(),
        Token.new().text,
        f"rqk_{token.key_id}_{other.secret}",
        f"rqk_{other.key_id}_{token.secret}",
    ):
        with pytest.raises(UnauthenticatedError):
            ring.authenticate(wrong)


def test_a_revoked_key_stays_revoked_whatever_comes() -> None:
    ring = KeyRing()
    token = made(ring, "*:*:*")
    ring.authenticate(token.text)
    ring.apply(KeyRevoked(token.key_id, 2))
    ring.apply(KeyGranted(token.key_id, grants_of(["*:*:*"])))
    ring.apply(KeyCreated(token.key_id, "again", token.digest, grants_of(["*:*:*"]), 3))
    with pytest.raises(UnauthenticatedError):
        ring.authenticate(token.text)
    assert len(ring) == 1


def test_a_caller_loses_what_his_key_loses() -> None:
    ring = KeyRing()
    token = made(ring, "publish:topic:a*")
    caller = ring.authenticate(token.text)
    caller.check("publish", "topic", "ab")
    ring.apply(KeyGranted(token.key_id, grants_of(["publish:topic:b"])))
    with pytest.raises(PermissionDeniedError, match="keys grant"):
        ring.authenticate(token.text).check("publish", "topic", "ab")


def test_nothing_that_is_shown_has_a_secret() -> None:
    token = Token.new()
    key = Key(token.key_id, "n", token.digest, (), 1)
    created = KeyCreated(token.key_id, "n", token.digest, (), 1)
    for shown in (repr(token), str(token), f"{token}", repr(key), repr(created)):
        assert token.secret not in shown
        assert repr(token.digest) not in shown


def test_every_token_can_be_parsed() -> None:
    for _ in range(500):
        token = Token.new()
        assert Token.parse(token.text) == token
