"""Principals: API keys, their grants, and the ring that knows them. No I/O, no clock.

A key's text is ``rqk_<id>_<secret>``. The id names it in lists, grants, logs and
the audit; the secret is 256 random bits, of which only a SHA-256 is kept. It is
not stretched: nobody guesses 256 bits. The hash covers the id, so that the hash
of one key is of no use under another id.

The ring is what a log of events means (``keys``). The first event of an id
counts: an id is never given twice, and what was revoked stays so.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

import msgspec

from rayqueue.errors import InvalidInputError, PermissionDeniedError, UnauthenticatedError

Verb = Literal["publish", "consume", "describe", "create", "alter", "delete"]
Kind = Literal["topic", "group", "queue", "cluster"]
VERBS: tuple[str, ...] = get_args(Verb)
KINDS: tuple[str, ...] = get_args(Kind)

MAX_GRANTS = 200
_PREFIX = "rqk"
_ID_BYTES = 9
_SECRET_BYTES = 32
_TOKEN = re.compile(r"rqk_([A-Za-z0-9-]{12})_([A-Za-z0-9_-]{43})")
_NAME = re.compile(r"[A-Za-z0-9._-]{0,120}\*?")
_NOBODY = hashlib.sha256(b"nobody").digest()


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """A right: to do ``verb`` with what has this name, or, with a ``*`` at its end, a name that begins so."""

    verb: str
    kind: str
    name: str

    @staticmethod
    def parse(text: str) -> Grant:
        """From ``publish:topic:orders*``. ``InvalidInputError`` says what is wrong with it."""
        parts = text.split(":")
        if len(parts) != 3:
            raise InvalidInputError(f"a grant is VERB:KIND:NAME, such as publish:topic:orders*, not {text!r}")
        verb, kind, name = parts
        if verb not in (*VERBS, "*"):
            raise InvalidInputError(f"{text!r}: a verb is one of {', '.join(VERBS)}, or *")
        if kind not in (*KINDS, "*"):
            raise InvalidInputError(f"{text!r}: a kind is one of {', '.join(KINDS)}, or *")
        if not name or not _NAME.fullmatch(name):
            raise InvalidInputError(f"{text!r}: a name is letters, digits, dots, underscores, hyphens, and a * at most")
        return Grant(verb, kind, name)

    def __str__(self) -> str:
        return f"{self.verb}:{self.kind}:{self.name}"

    def covers(self, verb: str, kind: str, name: str) -> bool:
        if self.verb not in ("*", verb) or self.kind not in ("*", kind):
            return False
        return name.startswith(self.name[:-1]) if self.name.endswith("*") else name == self.name


def grants_of(texts: Iterable[str]) -> tuple[Grant, ...]:
    """Each once, in the order given."""
    grants = tuple(dict.fromkeys(Grant.parse(text) for text in texts))
    if len(grants) > MAX_GRANTS:
        raise InvalidInputError(f"a key has at most {MAX_GRANTS} grants: use prefixes, such as consume:topic:orders*")
    return grants


# -- the log of keys ------------------------------------------------------------------------------


class KeyCreated(msgspec.Struct, frozen=True, tag="created", forbid_unknown_fields=True):
    key_id: str
    name: str
    digest: bytes
    grants: tuple[Grant, ...]
    created_ms: int

    def __repr__(self) -> str:
        return f"KeyCreated({self.key_id!r})"


class KeyRevoked(msgspec.Struct, frozen=True, tag="revoked", forbid_unknown_fields=True):
    key_id: str
    revoked_ms: int


class KeyGranted(msgspec.Struct, frozen=True, tag="granted", forbid_unknown_fields=True):
    """These are the key's grants from now on, all of them."""

    key_id: str
    grants: tuple[Grant, ...]


KeyEvent = KeyCreated | KeyRevoked | KeyGranted


class Key(msgspec.Struct, frozen=True):
    """A key as it is known: everything but its secret."""

    key_id: str
    name: str
    digest: bytes
    grants: tuple[Grant, ...]
    created_ms: int
    revoked_ms: int | None = None

    def __repr__(self) -> str:
        return f"Key({self.key_id!r}, {self.name!r}{', revoked' if self.revoked_ms is not None else ''})"


class Token(NamedTuple):
    """A key's text, in its parts. Its repr has no secret."""

    key_id: str
    secret: str

    @property
    def text(self) -> str:
        """What is shown once, to whom it is for."""
        return f"{_PREFIX}_{self.key_id}_{self.secret}"

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(f"{self.key_id}:{self.secret}".encode()).digest()

    def __repr__(self) -> str:
        return f"Token({self.key_id!r})"

    def __str__(self) -> str:
        return repr(self)

    @staticmethod
    def new() -> Token:
        key_id = secrets.token_urlsafe(_ID_BYTES).replace("_", "-")
        return Token(key_id, secrets.token_urlsafe(_SECRET_BYTES))

    @staticmethod
    def parse(text: str) -> Token | None:
        found = _TOKEN.fullmatch(text)
        return None if found is None else Token(found[1], found[2])


def shown_key(text: str | None) -> str:
    """A key's id, which may be told, if this may be a key at all."""
    token = None if text is None else Token.parse(text)
    return "none" if token is None else token.key_id


class KeyRing:
    """All keys that ever were."""

    def __init__(self) -> None:
        self._keys: dict[str, Key] = {}
        self._callers: dict[str, Caller] = {}

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def keys(self) -> list[Key]:
        return sorted(self._keys.values(), key=lambda key: (key.created_ms, key.key_id))

    def get(self, key_id: str) -> Key | None:
        return self._keys.get(key_id)

    def apply(self, event: KeyEvent) -> None:
        """In the order of the log. What cannot be is of no effect: all rings have the same keys."""
        known = self._keys.get(event.key_id)
        if isinstance(event, KeyCreated):
            if known is None:
                key = Key(event.key_id, event.name, event.digest, event.grants, event.created_ms)
                self._keys[event.key_id] = key
            return
        if known is None or known.revoked_ms is not None:
            return
        self._callers.pop(event.key_id, None)
        if isinstance(event, KeyRevoked):
            self._keys[event.key_id] = msgspec.structs.replace(known, revoked_ms=event.revoked_ms)
        else:
            self._keys[event.key_id] = msgspec.structs.replace(known, grants=event.grants)

    def authenticate(self, text: str | None) -> Caller:
        """Who shows this key. ``UnauthenticatedError`` does not say what was wrong with it, nor take another time."""
        token = None if text is None else Token.parse(text)
        key = None if token is None else self._keys.get(token.key_id)
        digest = _NOBODY if key is None else key.digest
        same = hmac.compare_digest(digest, _NOBODY[::-1] if token is None else token.digest)
        if key is None or not same:
            raise _unknown()
        return self.known(key.key_id)

    def known(self, key_id: str | None) -> Caller:
        """Who has this key, as it is now. ``UnauthenticatedError`` if it is revoked."""
        key = None if key_id is None else self._keys.get(key_id)
        if key is None or key.revoked_ms is not None:
            raise _unknown()
        caller = self._callers.get(key.key_id)
        if caller is None:
            caller = self._callers[key.key_id] = Caller(key.key_id, key.grants)
        return caller


def _unknown() -> UnauthenticatedError:
    return UnauthenticatedError(
        "an API key is needed, in the header `Authorization: Bearer rqk_...`, and this request has none that is known; "
        "`rayqueue keys create` makes one"
    )


class Caller:
    """Who asks for something, and what he may. Made anew whenever his key changes."""

    __slots__ = ("_known", "grants", "key_id")

    _MAX_KNOWN = 4096

    def __init__(self, key_id: str | None, grants: tuple[Grant, ...]) -> None:
        self.key_id = key_id
        """None: nobody needs a key here."""
        self.grants = grants
        self._known: set[tuple[str, str, str]] = set()

    @property
    def name(self) -> str:
        return self.key_id or "anonymous"

    def may(self, verb: Verb, kind: Kind, name: str) -> bool:
        wanted = (verb, kind, name)
        if wanted in self._known:
            return True
        if not any(grant.covers(*wanted) for grant in self.grants):
            return False
        if len(self._known) < self._MAX_KNOWN:
            self._known.add(wanted)
        return True

    def check(self, verb: Verb, kind: Kind, name: str) -> None:
        """``PermissionDeniedError`` unless he may."""
        if not self.may(verb, kind, name):
            raise PermissionDeniedError(
                f"key {self.name} may not {verb} {kind} {name!r}; "
                f"`rayqueue keys grant {self.name} {verb}:{kind}:{name}` would allow it",
                needs=f"{verb}:{kind}:{name}",
            )

    def __repr__(self) -> str:
        return f"Caller({self.name!r})"


EVERYTHING = (Grant("*", "*", "*"),)
ANYONE = Caller(None, EVERYTHING)
"""Whoever reaches a gateway on loopback, while there are no keys."""
