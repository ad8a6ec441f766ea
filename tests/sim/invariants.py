"""The invariants of the simulated worlds, by name, and the error that says which of them does not hold.

A mutation names the one that it must break (``mutations``), and beside it those
that may be seen broken in its stead. Whatever else goes wrong under it, a
``TypeError`` above all, proves nothing and fails its test.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Invariant(Enum):
    # Of every group's log.
    ONE_LEADER = "a term has one leader"
    LEADER_COMPLETENESS = "a new leader has everything that was committed before its term"
    ONE_LOG = "what one replica committed at an index is what every replica commits there"
    NO_SELF_STOP = "no replica meets a state that it takes for impossible"
    OPENS = "a store opens after any loss of power"
    SAME_STATE = "a replica has the state that the log gives"
    TOLD = "a service is told of a leadership before anything is proposed in it"
    UPGRADABLE = "nothing is written that a replica of the release before, if there is one, could not apply"
    # Of a partition.
    ON_A_MAJORITY = "an acknowledged batch is committed, and on the disks of a majority"
    ONE_ANSWER = "a batch has one place"
    CONFIRMED = "who confirms to lead knows what was acknowledged before"
    IN_PLACE = "each acknowledged batch is there once, where its answer said, in its producer's order"
    READABLE = "nothing is trimmed that readers may still ask for"
    ADMITTED = "no producer is refused for good"
    READS = "a reader gets what was committed: no other bytes, nothing uncommitted, no gap"
    DAMAGED_FOLLOWS = "a replica that knows of damage does not lead"
    FENCED = "no commit of an older generation succeeds after a newer one's claim"
    POSITIONS = "a group's position is the one that the log gives"
    BOUNDED = "a partition's backlog is never longer than its bound"
    RETAINED = "no trim passes a record that a group has not committed, or has pinned"
    # Of the cluster.
    GENERATIONS = "a generation of a group is one state, and they never go back"
    IDENTITY = "nothing that was meant for a topic that is gone counts for the one that has its name now"
    NEW_LIFE = "nothing of a group that was deleted counts for the one that has its name now"
    FORGOTTEN = "a group that was given up is forgotten by every partition, whoever loses power meanwhile"
    ONE_OWNER = "a generation of a partition is one member's; nobody takes what another has not let go of"
    TRUE_ANSWERS = "whatever a coordinator answers is what the log says, once"
    UNIQUE_IDS = "no producer id is handed out twice"
    KEPT = "no data is deleted of a replica that belongs to its group, or will"
    SHARES = "each partition is read by one member, and the shares are even"
    # Of applications.
    ACKNOWLEDGED = "what a producer was told is written is there, where it was told"
    TRUE_OUTCOME = "what a producer was told is not written is not there"
    ONCE = "no record of a producer is there twice"
    IN_ORDER = "records of one producer are written, and those of one assignment handed out, in order and once"
    NONE_SKIPPED = "no record is passed over, by what is handed out or by what is committed"
    ASSIGNED = "a consumer is handed records only of what it was told that it reads"
    COMMITTED = "what a consumer was told is committed is"
    AT_MOST_ONCE = "a record that was handed out at most once is handed out to nobody again"
    SOUND_CLIENT = "no client meets a state that it takes for impossible"
    # Of work queues.
    JOB_STATE = "a queue's jobs are in the states that its rules give"
    JOB_ANSWERS = "what a worker is told of jobs is what the log says"
    JOBS_KEPT = "every job that was put comes to one end: done or dead"
    # Of transactions.
    ATOMIC = "a transaction ends everywhere as the coordinator has decided, and is decided once"
    COMMITTED_READS = "who reads what is committed gets nothing open or aborted, and misses nothing"
    EXACTLY_ONCE = "each input has one result, and the position says which have theirs"
    TRUE_FATE = "what a producer is told of its transaction is its fate"
    FATE_KEPT = "as long as somebody has not been told of a commit, its producer can ask for it"
    WRITTEN_ONCE = "a batch of a writer is written once, however many drivers try"
    WRITE_WHOLE = "of a write there is all that was named, or nothing"
    DROPPED = "the end of a write ends all of its tasks, also those that come later, and nothing of the others is seen"
    ONE_TASK = "a transaction is lent to one task, and nothing that is late of another one gets into it"
    JOBS_PUT = "a job that was put in a transaction is given out once that is committed, and never if it is aborted"
    JOBS_DONE_ONCE = "a job that was done in a transaction has one result, and nobody else gets it from its staging on"
    JOBS_COME_AGAIN = "a job whose transaction was aborted comes again"
    # Liveness.
    PROGRESS = "after healing, everything that was asked for is done"
    NO_STORM = "one lost message is not answered by sending everything again and again"
    UNDISTURBED = "what comes back, and time that passes, take nothing from a healthy group"

    @property
    def kind(self) -> str:
        """What the campaign counts it as."""
        return "stuck" if self in _LIVENESS else "lost"


_LIVENESS = {Invariant.PROGRESS, Invariant.NO_STORM, Invariant.UNDISTURBED, Invariant.SHARES}


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """What is expected of a schedule in which a rule of the product is switched off."""

    breaks: Invariant
    """This one must be seen broken."""
    also: frozenset[Invariant] = frozenset()
    """These may be, in other schedules: consequences, by which the rule alone would not be recognised."""


class BrokenError(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: Invariant, text: str) -> None:
        super().__init__(f"{invariant.name}: {text}")
        self.invariant = invariant


def first_broken(world: Callable[[int], Any], seeds: Collection[int], rule: BrokenRule) -> int | None:
    """The first of these seeds whose schedule breaks what the rule is for. One of its other consequences is passed
    over; anything else that goes wrong is raised."""
    for seed in seeds:
        try:
            world(seed).run()
        except BrokenError as broken:
            if broken.invariant is rule.breaks:
                return seed
            if broken.invariant not in rule.also:
                raise
    return None
