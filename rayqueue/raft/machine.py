"""The interface of a state machine, which the Raft engine drives: deterministic, and without I/O.

``apply`` gets each committed entry exactly once, in order, on every replica.
It must depend on nothing but the machine's state and the payload: no clock,
no dice. Its effects go into the store's tables by ``store.put``; the engine
syncs them together with the applied index, which is why a restart applies
nothing twice.
"""

from __future__ import annotations

from typing import Any, Protocol

from rayqueue.ids import Index


class StateMachine(Protocol):
    def apply(self, index: Index, payload: bytes) -> Any:
        """Apply a committed entry and return its answer. A refusal is an answer (an error *returned*);
        an exception *raised* here stops the replica."""

    def first_needed(self) -> Index:
        """The log before this index holds nothing that a reader may still ask for."""

    def checkpoint(self) -> bytes:
        """The whole state, small: everything but the log."""

    def restore(self, state: bytes) -> None:
        """Become the state of a checkpoint, and write it to the store's (now empty) tables."""
