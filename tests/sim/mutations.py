"""Each remedy of docs/raft.md, switched off: the simulator must notice every time.

``faults`` narrows what goes wrong to what the remedy is for, so that the failure is
found in tens of schedules rather than thousands (``frame.Mutation``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from rayqueue.ids import GroupId, Index, ReplicaId, Term
from rayqueue.log.lmdb_codec import ENTRIES, ENTRY_HEADER
from rayqueue.log.memory_store import MemoryDisk, MemorySnapshot, MemoryStore
from rayqueue.log.ops import LogState, Op, index_key
from rayqueue.log.store import Entry, LogStore
from rayqueue.log.wal import SECTOR_BYTES, Wal
from rayqueue.partition.tables import PARTITION
from rayqueue.raft import follower
from rayqueue.raft.doubt import Doubt, LogEnd, Membership, WaryElections
from rayqueue.raft.engine import RaftEngine
from rayqueue.raft.messages import AppendEntries, AppendReply, Message, PreVote, RequestVote
from rayqueue.raft.progress import Pace, Progress
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.replica.core import ReplicaCore
from tests.sim import frame
from tests.sim.grown import GrownWorld
from tests.sim.invariants import BrokenRule, Invariant
from tests.sim.node import SimNode, new_disk
from tests.sim.world import BUSY, RESTORE, World


class Mutation(frame.Mutation):
    make = World


class GrownMutation(frame.Mutation):
    make = GrownWorld


def _truncate_on_match(store: LogStore, entries: Sequence[Any], commit: Index) -> int | None:
    """As stock: whatever follows prev is dropped and written again."""
    for position, entry in enumerate(entries):
        if entry.index > commit:
            return position
    return None


def _commit_as_told(engine: RaftEngine, message: AppendEntries) -> Index:
    return min(message.commit, engine.store.last_index)


def _refuse_always(progress: Progress, prev: Index, hint: Index) -> None:
    """As stock: every refusal resets, and the pipeline goes on at once."""
    progress._start(Pace.PIPELINE)
    progress.next = Index(hint + 1)


def _send_before_sync(engine: RaftEngine, peer: ReplicaId, message: Message) -> None:
    engine._ready.early.append((peer, message))


def _any_log_will_do(engine: RaftEngine, sender: ReplicaId, message: Message) -> None:
    """Whoever asks for a vote is taken to have the longest log."""
    if isinstance(message, PreVote | RequestVote):
        message = replace(message, last_index=Index(1 << 60), last_term=Term(1 << 60))
    _take(engine, sender, message)


_take = RaftEngine._take


def _no_pre_vote(engine: RaftEngine) -> None:
    engine.leader = None
    engine._campaign = True


def _self_removal(engine: RaftEngine, members: ReplicaSet, context: Any) -> None:
    """A leader may remove itself; whatever else is asked of a change still is."""
    leaves = engine.replica_id not in members.voters
    with patch.object(engine, "replica_id", min(members.voters)) if leaves else nullcontext():
        _change_replicas(engine, members, context)


_change_replicas = RaftEngine.change_replicas


def _confirm_unasked(engine: RaftEngine) -> None:
    confirms, engine._confirms = engine._confirms, []
    for context in confirms:
        engine._answer(context, None)


def _echo_the_round(engine: RaftEngine, sender: ReplicaId, message: AppendEntries) -> None:
    """The answer to an older term as any other: with the round that was asked about."""
    if message.term < engine.term:
        engine.send_after_sync(sender, AppendReply(engine.term, False, message.prev_index, Index(0), message.round))
    else:
        _on_append(engine, sender, message)


_on_append = RaftEngine._on_append


def _advance_unsynced(engine: RaftEngine) -> None:
    engine._prepare_election()
    engine._write_proposals()
    engine.stock_tick()
    engine._finish_confirmations()
    engine._drive_transfer()
    engine._replicate()


def _trim_applied(engine: RaftEngine, segment_bytes: int, max_entries: int) -> bool:
    """As stock compaction: the log goes as soon as it is applied."""
    with patch.object(engine.machine, "first_needed", lambda: Index(engine.applied + 1)):
        return _maintain(engine, segment_bytes, max_entries)


_maintain = RaftEngine.maintain


def _wiped_under_the_old_id(world: World, node: SimNode) -> None:
    node.kill()
    members = node.engine.replica_set
    node.disk = world.new_disk(GroupId("sim-0"), node.replica_id)
    RaftEngine.bootstrap(node.disk, members)
    node.checked_commit = 0
    world.clock.after(world.rng.uniform(0.01, 1), lambda: world.restart(node))


def _nothing_to_replay(wal: Wal, base: int, tables: Any) -> Iterator[list[Op]]:
    wal.restart(base)
    return iter(())


def _torn_record(wal: Wal, sectors: Sequence[tuple[int, int, int, int, bytes]]) -> bytes | None:
    """A record whose first sector is there is taken for whole."""
    first = wal._at // SECTOR_BYTES
    if first == len(sectors):
        return None
    base, sequence, part, parts, _ = sectors[first]
    if not parts or (base, sequence, part) != (wal._base, wal._sequence, 0):
        return None
    wal._at += parts * SECTOR_BYTES
    wal._sequence += 1
    return b"".join(sector[4] for sector in sectors[first : first + parts])[4:]


def _recycle_when_full(wal: Wal, data: bytes) -> bool:
    """The file begins again though the tables have nothing of what is in it."""
    if _wal_write(wal, data):
        return True
    wal.restart(wal._base)
    return _wal_write(wal, data)


_wal_write = Wal.write


def _write_ahead(
    name: str,
    finding: str,
    rule: BrokenRule,
    attribute: str,
    replacement: Callable[..., Any],
    first_seed: int = 0,
) -> Mutation:
    faults = frozenset({"kill", "kill_in_sync", "power_loss"})
    return Mutation(name, finding, rule, Wal, attribute, replacement, faults, first_seed=first_seed)


def _only_marked(engine: RaftEngine, why: str) -> None:
    """Damage is remembered for the next start; who leads goes on leading."""
    engine.store.mark_damaged(why)


def _unverified(snapshot: MemorySnapshot, index: Index) -> Entry:
    """An entry as it is found, whatever its checksum says."""
    disk = snapshot._open_disk()
    rotten = disk._rotten.get((ENTRIES, index_key(index)))
    if rotten is None:
        return disk.read_entry(index)
    term, crc, _, _ = ENTRY_HEADER.unpack_from(rotten)
    return Entry(index, term, rotten[ENTRY_HEADER.size :], crc)


class LyingStore(MemoryStore):
    """A disk behind a write cache that nobody flushes: a crash loses the newest of what was "durable"."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        disk: MemoryDisk = keywords["disk"]
        self.image = disk.copy()
        self.cached: list[Callable[[], None]] = []
        super().__init__(*arguments, **keywords)
        self.image.make_tables(self._schema)

    def _keep(self, ops: Sequence[Op]) -> bool:
        kept = super()._keep(ops)
        if kept:
            content = self.disk.wal.content.copy()
            self.cached.append(lambda: setattr(self.image.wal, "content", content))
        return kept

    def _commit(self, ops: Sequence[Op], state: LogState) -> int:
        txn_id = super()._commit(ops, state)

        def write() -> None:
            for op in ops:
                self.image.apply(op)
            self.image.txn_id = txn_id

        self.cached.append(write)
        return txn_id


def _lying_disk(world: World, group_id: GroupId, replica_id: ReplicaId) -> MemoryStore:
    return new_disk(world, group_id, replica_id, PARTITION, LyingStore)


def _torn(world: World, disk: MemoryStore) -> MemoryStore:
    assert isinstance(disk, LyingStore)
    for write in disk.cached[: world.rng.randint(0, len(disk.cached))]:
        write()
    disk.disk = _readable(disk.image)
    return disk.reopen()


def _readable(disk: MemoryDisk) -> MemoryDisk:
    disk.applied = Index(min(disk.applied, disk.last_index))
    return disk


def _resolve_by_the_mark(doubt: Doubt, me: ReplicaId, own: Membership, own_end: LogEnd) -> Term | None:
    """Who knows of no other voter takes what is remembered beside its disk for all that it has forgotten."""
    if own.voters != {me}:
        return _resolve(doubt, me, own, own_end)
    doubt.floor = Term(doubt.mark.term), Index(doubt.mark.entry)
    return doubt._term


_resolve = Doubt.resolve


def _engine(
    name: str, finding: str, rule: BrokenRule, attribute: str, replacement: Any, *faults: str, **narrowed: Any
) -> Mutation:
    return Mutation(name, finding, rule, RaftEngine, attribute, replacement, faults, **narrowed)


def _breaks(invariant: Invariant, *, also: tuple[Invariant, ...] = ()) -> BrokenRule:
    return BrokenRule(invariant, frozenset(also))


MUTATIONS = (
    Mutation(
        "truncate_on_match",
        "acknowledged entries lost",
        # Where nobody is acknowledged meanwhile, leader and follower send and cut the same entries for ever.
        _breaks(Invariant.ON_A_MAJORITY, also=(Invariant.PROGRESS,)),
        follower,
        "first_new",
        _truncate_on_match,
        frozenset({"duplicate", "slow", "reorder", "kill", "power_loss", "drop"}),
    ),
    Mutation(
        "stale_replies",
        "replies carry no term",
        _breaks(Invariant.NO_SELF_STOP),
        RaftEngine,
        "_is_current",
        lambda engine, reply: True,
        frozenset({"transfer"}),
        size=5,
        ending="late_answers",
    ),
    _engine(
        "commit_as_told",
        "commit beyond what was sent",
        _breaks(Invariant.ONE_LOG),
        "_verified_commit",
        _commit_as_told,
        *("partition", "slow", "reorder", "drop", "kill", "one_way", "pause"),
    ),
    Mutation(
        "votes_not_attributed",
        "votes are counted, not attributed",
        _breaks(Invariant.ONE_LEADER),
        RaftEngine,
        "_is_new_vote",
        lambda engine, sender: True,
        frozenset({"duplicate", "kill"}),
        size=5,
        ending="split_vote",
    ),
    Mutation(
        "endless_resets",
        "livelock on pipelined batches",
        _breaks(Invariant.NO_STORM),
        Progress,
        "refused",
        _refuse_always,
        frozenset({"drop", "kill"}),
        ending="lost_message",
    ),
    _engine(
        "send_before_sync",
        "journal not synced before any send",
        _breaks(Invariant.ON_A_MAJORITY),
        "send_after_sync",
        _send_before_sync,
        *("kill_in_sync", "power_loss", "kill"),
    ),
    _engine(
        "overlapping_changes",
        "overlapping membership changes accepted",
        # Two majorities that do not meet: the next leader lacks an entry, or too few acknowledge, or nobody is elected.
        _breaks(Invariant.LEADER_COMPLETENESS, also=(Invariant.ON_A_MAJORITY, Invariant.PROGRESS)),
        "_change_in_progress",
        lambda engine: False,
        *("members", "partition", "kill", "one_way", "slow", "pause"),
        first_seed=180,
    ),
    _engine(
        "leader_removes_itself",
        "the leader cannot remove itself",
        # Those who are left may lack what the leader took along, and then none of them is elected.
        _breaks(Invariant.PROGRESS, also=(Invariant.LEADER_COMPLETENESS,)),
        "change_replicas",
        _self_removal,
        *("members", "kill", "partition", "drop"),
        first_seed=40,
    ),
    _engine(
        "any_log_will_do",
        "votes for a shorter log",
        _breaks(Invariant.LEADER_COMPLETENESS),
        "_take",
        _any_log_will_do,
        *("kill", "partition", "slow", "pause"),
    ),
    _engine(
        "no_pre_vote",
        "no pre-vote",
        _breaks(Invariant.UNDISTURBED),
        "_start_pre_vote",
        _no_pre_vote,
        "partition",
        ending="return",
    ),
    _engine(
        "no_loyalty",
        "no sticky leader",
        _breaks(Invariant.UNDISTURBED),
        "_loyal",
        lambda engine: False,
        "partition",
        ending="return",
        first_seed=40,
    ),
    _engine(
        "trim_applied",
        "stock compaction drops the messages",
        # A replica that does not find what a reader asks for takes itself for damaged: it applies and leads no more.
        # And who needs what was trimmed gets a checkpoint, which has no rows for it.
        _breaks(Invariant.READABLE, also=(Invariant.SAME_STATE, Invariant.PROGRESS)),
        "maintain",
        _trim_applied,
        "trim",
        "kill",
    ),
    Mutation(
        "replay_everything",
        "applies everything again at start",
        _breaks(Invariant.NO_SELF_STOP),
        MemoryStore,
        "applied",
        property(lambda store: store.base_index),
        frozenset({"kill"}),
    ),
    Mutation(
        "old_id_after_wipe",
        "a replica that lost its disk rejoins under a new id",
        # What it had acknowledged is gone, and what it had voted too: it may make a second leader of a term, whose log
        # is another one.
        _breaks(
            Invariant.LEADER_COMPLETENESS,
            also=(Invariant.ONE_LEADER, Invariant.ONE_LOG, Invariant.ON_A_MAJORITY, Invariant.PROGRESS),
        ),
        World,
        "_wipe",
        _wiped_under_the_old_id,
        frozenset({"wipe", "partition", "kill"}),
    ),
    _engine(
        "full_disk_leads",
        "a leader that cannot write counts itself",
        # In a group of one, what it counted goes with the power before anybody was answered.
        _breaks(Invariant.ON_A_MAJORITY, also=(Invariant.LEADER_COMPLETENESS,)),
        "disk_full",
        lambda engine: None,
        *("disk_full", "kill", "power_loss"),
    ),
    _engine(
        "count_before_sync",
        "the leader counts itself before its own sync",
        # What it counted goes with the power. Nobody was answered: a group of one applies only what is durable.
        _breaks(Invariant.LEADER_COMPLETENESS),
        "_advance",
        _advance_unsynced,
        *("kill_in_sync", "power_loss"),
    ),
    _engine(
        "confirm_unasked",
        "leadership confirmed without asking",
        _breaks(Invariant.CONFIRMED),
        "_finish_confirmations",
        _confirm_unasked,
        *("confirm", "partition", "pause", "one_way"),
        ending="deposed",
    ),
    _engine(
        "echo_of_the_past",
        "an answer to an older term confirms a newer leadership",
        _breaks(Invariant.CONFIRMED),
        "_on_append",
        _echo_the_round,
        "confirm",
        ending="echo",
    ),
    _write_ahead(
        "replay_skipped",
        "what was only written ahead is forgotten",
        _breaks(Invariant.ON_A_MAJORITY),
        "replay",
        _nothing_to_replay,
    ),
    _write_ahead(
        "torn_record",
        "a record that power was lost in is taken for whole",
        _breaks(Invariant.OPENS),
        "_record",
        _torn_record,
        first_seed=65,
    ),
    _write_ahead(
        "recycled_early",
        "the write-ahead file begins again before the tables are synced",
        # Of what was overwritten later records may be left, without those before them.
        _breaks(Invariant.ON_A_MAJORITY, also=(Invariant.OPENS,)),
        "write",
        _recycle_when_full,
    ),
    _engine(
        "damaged_leader",
        "a leader that knows of damage goes on leading",
        _breaks(Invariant.DAMAGED_FOLLOWS),
        "damaged",
        _only_marked,
        *("rot", "kill"),
    ),
    Mutation(
        "unverified_entries",
        "an entry is served without a look at its checksum",
        _breaks(Invariant.READS),
        MemorySnapshot,
        "entry",
        _unverified,
        frozenset({"rot", "kill"}),
        first_seed=50,
    ),
    Mutation(
        "copy_trusted",
        "an older copy of a replica's disk goes on without asking anybody",
        _breaks(Invariant.LEADER_COMPLETENESS),
        Doubt,
        "missing",
        lambda doubt, me, own: frozenset(),
        frozenset({RESTORE, "partition", "kill", "slow"}),
        first_seed=35,
    ),
    Mutation(
        "copy_votes_for_short_logs",
        "an older copy has asked everybody, and votes for logs as short as its own",
        _breaks(Invariant.LEADER_COMPLETENESS),
        WaryElections,
        "_is_long_enough",
        lambda engine, last_term, last_index: engine._doubt is None or engine._doubt.floor is not None,
        frozenset({RESTORE, "partition", "kill", "slow"}),
    ),
    GrownMutation(
        "growth_unmarked",
        "a copy from before others joined the only voter leads alone",
        # Beside the leader that the others have: each commits something else. What is seen before may be that it lacks
        # what was acknowledged, or is the second leader of a term.
        _breaks(Invariant.ONE_LOG, also=(Invariant.LEADER_COMPLETENESS, Invariant.ONE_LEADER)),
        RaftEngine,
        "_mark_growth",
        lambda engine: setattr(engine, "_unmarked", None),
        frozenset({"kill", "partition"}),
    ),
    GrownMutation(
        "grown_copy_asks_nobody",
        "a copy from before others joined follows whoever leads, and then votes as if it had forgotten nothing",
        _breaks(Invariant.LEADER_COMPLETENESS),
        Doubt,
        "resolve",
        _resolve_by_the_mark,
        frozenset({"kill", "partition", "slow", "pause"}),
        first_seed=90,
    ),
    Mutation(
        "looks_after_calls",
        "a call proposes before the service is told of the leadership that a message began",
        _breaks(Invariant.TOLD),
        ReplicaCore,
        "_begin",
        lambda core: core.clients.new_turn(),
        frozenset({BUSY, "transfer"}),
    ),
)


# Entries, votes, and which of the write-ahead file's records the tables have, are all lost alike. What is seen first is
# chance: a leader that lacks an entry most often, a second leader of a term, another entry in the place of one that was
# committed, a file that does not fit its tables, or a group that nobody can lead.
LYING_DISK = _breaks(
    Invariant.LEADER_COMPLETENESS,
    also=(
        Invariant.ONE_LEADER,
        Invariant.ONE_LOG,
        Invariant.ON_A_MAJORITY,
        Invariant.NO_SELF_STOP,
        Invariant.OPENS,
        Invariant.PROGRESS,
    ),
)


@contextmanager
def lying_disk() -> Iterator[None]:
    """No fsync at all: the write cache of every replica is volatile."""
    with patch.object(World, "new_disk", _lying_disk), patch.object(World, "crash_disk", _torn):
        yield
