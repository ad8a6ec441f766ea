"""Messages between the replicas of one group.

Every message carries the sender's term: whoever receives one can tell whether
it belongs to the leadership he knows, to an older one (drop it) or to a newer
one (follow it). ``rayqueue.raft.wire`` turns them into bytes and back.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from rayqueue.ids import Index, Term
from rayqueue.log.store import Entry


class PreVote(Struct, frozen=True, gc=False):
    """Would you vote for me in ``term``? Changes nothing at either side."""

    term: Term
    last_index: Index
    last_term: Term


class PreVoteReply(Struct, frozen=True, gc=False):
    """``term`` is the answerer's own, so that a candidate from the past catches up at once."""

    term: Term
    for_term: Term
    granted: bool


class RequestVote(Struct, frozen=True, gc=False):
    """``transfer``: the leader itself asked for this election, so loyalty to it is no reason to refuse."""

    term: Term
    last_index: Index
    last_term: Term
    transfer: bool


class VoteReply(Struct, frozen=True, gc=False):
    term: Term
    granted: bool


class AppendEntries(Struct, frozen=True, gc=False):
    """``entries`` follow ``prev_index``. Without entries it is a heartbeat, and still a question:
    do you have prev_index of prev_term? ``round`` is echoed, which proves when the leader was still one."""

    term: Term
    prev_index: Index
    prev_term: Term
    commit: Index
    round: int
    entries: tuple[Entry, ...]


class AppendReply(Struct, frozen=True, gc=False):
    """success: the log matches up to ``match``. Otherwise ``prev_index`` names the refused question and
    ``match`` is a hint: the last index that may match. ``full``: there is room for small entries only; larger ones
    are not taken, whatever ``success`` says of those before them."""

    term: Term
    success: bool
    prev_index: Index
    match: Index
    round: int
    full: bool = False


class InstallSnapshot(Struct, frozen=True, gc=False):
    """The checkpoint that the leader's log starts from. The log itself follows by AppendEntries."""

    term: Term
    index: Index
    index_term: Term
    round: int
    members: bytes
    state: bytes


class TimeoutNow(Struct, frozen=True, gc=False):
    """Start an election at once: the leader wants you to take over."""

    term: Term


class Inquiry(Struct, frozen=True, gc=False):
    """A question for the end of a log. The asker's store may be an older copy of itself (``rayqueue.raft.doubt``)."""

    term: Term
    nonce: int


class Account(Struct, frozen=True, gc=False):
    """The end of the answerer's log, durable. ``members``: all who vote by its newest committed membership, which is
    entry ``members_index``, or by one after it."""

    term: Term
    nonce: int
    last_index: Index
    last_term: Term
    members_index: Index
    members: bytes


Message: TypeAlias = (
    PreVote
    | PreVoteReply
    | RequestVote
    | VoteReply
    | AppendEntries
    | AppendReply
    | InstallSnapshot
    | TimeoutNow
    | Inquiry
    | Account
)
