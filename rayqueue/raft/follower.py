"""The follower's append rule, of Raft §5.3, and nothing else.

Two things the stock engine gets wrong are right here. Entries that match are
kept, whatever the message says after them: an old message, sent again, must
not cut off what was acknowledged since. And the answer claims a match only as
far as this very message proves it.
"""

from __future__ import annotations

from msgspec import Struct

from rayqueue.errors import LostHistoryError
from rayqueue.ids import Index
from rayqueue.log.store import Entry, LogStore
from rayqueue.raft.messages import AppendEntries


class Accepted(Struct, frozen=True, gc=False):
    """The log matches the leader's up to ``match``. Entries from ``truncated_from`` on were replaced."""

    match: Index
    appended: tuple[Entry, ...]
    truncated_from: Index | None


class Refused(Struct, frozen=True, gc=False):
    """The entry before the message's first is not ours. ``hint``: the last index that may match."""

    hint: Index


def accept(store: LogStore, message: AppendEntries, commit: Index) -> Accepted | Refused:
    """Write what the leader of the current term sent. The caller has checked the term."""
    match = Index(message.prev_index + len(message.entries))
    if message.prev_index > commit:
        term = store.term_at(message.prev_index)
        if term is None:
            return Refused(store.last_index)
        if term != message.prev_term:
            return Refused(_before_term(store, message.prev_index, commit))

    new = first_new(store, message.entries, commit)
    if new is None:
        return Accepted(match, (), None)
    appended = message.entries[new:]
    truncated_from = None
    if appended[0].index <= store.last_index:
        truncated_from = appended[0].index
        store.truncate_from(truncated_from)
    store.append(appended)
    return Accepted(match, appended, truncated_from)


def first_new(store: LogStore, entries: tuple[Entry, ...], commit: Index) -> int | None:
    """Position of the first entry that is not in the log as it is; None if all are."""
    for position, entry in enumerate(entries):
        if entry.index <= store.base_index:
            continue
        term = store.term_at(entry.index)
        if term == entry.term:
            continue
        if entry.index <= commit:
            raise LostHistoryError(
                f"the leader would overwrite committed entry {entry.index} (term {term}) with one of term {entry.term}:"
                f" this replica alone has the committed entries {entry.index} to {commit}. They are kept here, and it"
                " takes part in nothing. Save its directory, then have it replaced (docs/operations.md)",
                first=entry.index,
                last=commit,
            )
        return position
    return None


def _before_term(store: LogStore, index: Index, commit: Index) -> Index:
    """The index before the first entry of the term that ``index`` has: one round trip skips a whole term."""
    term = store.term_at(index)
    first = index
    while first - 1 > commit and store.term_at(Index(first - 1)) == term:
        first = Index(first - 1)
    return Index(first - 1)
