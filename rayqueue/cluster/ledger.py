"""The ledger of a writer: the batch ids that it has decided. Bounded, and never wrong. Pure.

It is changed by the entry that decides a batch (``writes``), so it says of each id

    that it was decided             it is in a span: skip it, if it is of the same contents
    that it was not                 it is in no span and not below the floor: write it
    nothing                         it is below the floor: refuse it

Ids that follow each other and are of one identity share a span. A stream's ids
are one span; ids that jump about take one each, and when there are too many,
the lowest span is forgotten and the floor rises above it.

The identity of a batch is what its id stands for: a checkpoint, or the ranges of
a part. An id that comes back with another one is another batch under the same
name, which must not be taken for the first.
"""

from __future__ import annotations

import msgspec

from rayqueue.errors import BatchConflictError, BatchForgottenError

MAX_SPANS = 1000


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Decided ids, all of one identity."""

    first: int
    last: int
    identity: bytes


class Ledger(msgspec.Struct, frozen=True, array_like=True):
    floor: int | None = None
    """Of ids below this, only those in a span are known."""
    spans: tuple[Span, ...] = ()
    """In the order of their ids."""

    def has(self, batch_id: int, identity: bytes, *, writer: str) -> bool:
        """Whether this batch was decided. ``BatchConflictError``, ``BatchForgottenError``: see the module."""
        span = self.span_of(batch_id)
        if span is not None:
            if span.identity != identity:
                raise BatchConflictError(
                    f"batch {batch_id} of writer {writer!r} was written before, with other contents: another "
                    "checkpoint, or another part, has the same writer. Nothing was written. Give this one a writer of "
                    "its own, or continue the one that wrote it",
                    batch_id=batch_id,
                    writer=writer,
                )
            return True
        if self.floor is not None and batch_id < self.floor:
            raise BatchForgottenError(
                f"whether writer {writer!r} has written batch {batch_id} is forgotten: of ids below {self.floor} it "
                "only knows the last ones. Nothing was written. Number batches upwards; to write this one for "
                "certain, look whether its records are there, and use another writer",
                batch_id=batch_id,
                floor=self.floor,
                writer=writer,
            )
        return False

    def span_of(self, batch_id: int) -> Span | None:
        """The decided ids that this one is among."""
        return next((span for span in self.spans if span.first <= batch_id <= span.last), None)

    def add(self, batch_id: int, identity: bytes) -> Ledger:
        """The ledger after one more decision, of an id that ``has`` does not know."""
        fresh = Span(batch_id, batch_id, identity)
        spans: list[Span] = []
        for span in self.spans:
            if span.identity == identity and span.last + 1 == batch_id:
                fresh = Span(span.first, fresh.last, identity)
            elif span.identity == identity and batch_id + 1 == span.first:
                fresh = Span(fresh.first, span.last, identity)
            else:
                spans.append(span)
        floor = self.floor
        if len(spans) >= MAX_SPANS:  # the new one stays, wherever it is: its driver may die now and ask again
            forgotten = spans.pop(0)
            floor = forgotten.last + 1 if floor is None else max(floor, forgotten.last + 1)
        return Ledger(floor, tuple(sorted([*spans, fresh], key=lambda span: span.first)))
