"""One simulated replica: the real core, engine and state machine on a disk that can lose power.

It takes the turns of ``rayqueue.replica.core`` as the replica's thread does, in virtual
time: a write takes time, and a crash may come before, inside or after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from rayqueue.config import CallSettings, RaftSettings
from rayqueue.errors import DamagedLogError, DiskFullError, InvariantBrokenError, RayQueueError, StorageError
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.log.memory_store import MemoryDisk, MemoryStore
from rayqueue.log.store import Schema
from rayqueue.log.wal import SECTOR_BYTES
from rayqueue.partition import Admission, Partition, read_lanes
from rayqueue.protocol.calls import ReplicaStatus
from rayqueue.protocol.data import Cursor
from rayqueue.raft.engine import Done, RaftEngine
from rayqueue.raft.handshake import SPEAKS
from rayqueue.raft.machine import StateMachine
from rayqueue.raft.messages import Message
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.raft.transport import Event, PeerDown, PeerUp, Received
from rayqueue.replica.answers import Answer, call_each
from rayqueue.replica.clients import Clients
from rayqueue.replica.core import ReplicaCore
from rayqueue.replica.inbox import Inbox
from rayqueue.replica.loop import Written
from rayqueue.replica.scrub import Scrubber
from rayqueue.replica.service import Events
from rayqueue.replica.tail import Tail
from tests.sim.invariants import BrokenError, Invariant
from tests.sim.network import Clock

if TYPE_CHECKING:
    from tests.sim.world import World


class PowerLossError(Exception):
    """Raised inside a write: what it had not finished is lost, and nobody is told."""


SEGMENT_BYTES = 2_000
TRIM_ENTRIES = 8

MAX_FRAME_BYTES = 1 << 20


class NodeWorld(Protocol):
    """What a node needs of the world that it is in."""

    clock: Clock
    rng: Random
    disk_rng: Random
    """Dice of the disks' own: what a write leaves behind changes nothing else in a schedule."""
    raft_settings: RaftSettings

    def new_disk(self, group_id: GroupId, replica_id: ReplicaId) -> MemoryStore: ...
    def crash_disk(self, disk: MemoryStore) -> MemoryStore: ...
    def sync_time(self) -> float: ...
    def send(self, sender: ReplicaId, peer: ReplicaId, event: Event) -> None: ...
    def is_spoiled(self, replica_id: ReplicaId) -> bool: ...


def new_disk(
    world: NodeWorld, group_id: GroupId, replica_id: ReplicaId, schema: Schema, kind: type[MemoryStore] = MemoryStore
) -> MemoryStore:
    """Small enough that caches miss, and that the write-ahead file is full after a few records."""
    rng = world.disk_rng
    return kind(
        group_id,
        replica_id,
        schema,
        disk=MemoryDisk(rng.choice((2, 6, 24)) * SECTOR_BYTES),
        cache_bytes=world.rng.choice((0, 1_000, 1_000_000)),
        wal_record_bytes=rng.choice((100, 1_000, 16_000)),
    )


class EngineNode:
    """The turns of a core. What the log means, who serves and who watches, is a subclass's."""

    def __init__(self, world: NodeWorld, group_id: GroupId, replica_id: ReplicaId, members: ReplicaSet | None) -> None:
        self._world = world
        self.replica_id = replica_id
        self.disk_is_full = False
        self.reserve_is_full = False
        """Not even what is small can be written while the disk is full."""
        self.broken = False
        """Its disk is damaged so that it cannot be started."""
        self.disk = world.new_disk(group_id, replica_id)
        self.disk.disk.wal.before_write, self.disk.disk.before_commit = self._check_space_ahead, self._check_space
        self.disk.disk.before_mark = self._check_space_beside
        if members is not None:
            RaftEngine.bootstrap(self.disk, members)
        self.alive = False
        self.paused = False
        self.removed = False
        self.life = 0
        self.checked_commit = 0
        self.start()

    # -- for subclasses -------------------------------------------------------------

    def open_machine(self) -> StateMachine:
        raise NotImplementedError

    def make_service(self, core: ReplicaCore[Any]) -> Events:
        raise NotImplementedError

    def busy_s(self) -> float:
        """How long the thread has something else to do, so that its next turn finds more than one thing."""
        return 0.0

    @property
    def call_settings(self) -> CallSettings:
        return CallSettings()

    def started(self) -> None:
        """The core is there, on a machine that was just opened."""

    def after_step(self) -> None:
        """The engine has stepped; nothing was answered yet."""

    @property
    def versions(self) -> Mapping[ReplicaId, int]:
        """Of the replicas' protocol, by replica; who is missing has the newest."""
        return {}

    def killed(self) -> None:
        pass

    @property
    def is_spoiled(self) -> bool:
        """Bits of its disk have flipped."""
        return self._world.is_spoiled(self.replica_id)

    # -- being killed and coming back ----------------------------------------------

    def start(self) -> None:
        world = self._world
        self.life += 1
        self.alive = True
        self.in_turn = False
        self.events: list[Event] = []
        self.syncing = False
        self.doom: Callable[[], None] | None = None
        """What happens in the middle of the next write."""
        self.settle = False
        """Somebody waits to see the tables, not only for what is durable."""
        self.wake_at = float("inf")
        dice = Random(world.rng.random())
        try:
            machine = self.open_machine()
            self.core = SimCore(self, machine, dice)
        except DamagedLogError as error:
            self._cannot_start(error)
            return
        self.engine, self.loop = self.core.engine, self.core._loop
        self.checked_commit = min(self.checked_commit, self.engine.commit)
        self.started()
        self._run()

    def kill(self, *, committed: bool | None = None) -> None:
        """Kill -9 or power loss. ``committed``: whether a write that is under way still reached the disk, or a part."""
        if not self.alive:
            return
        self.alive = False
        if committed and self.syncing and not self.disk_is_full:
            with suppress(PowerLossError):
                self._write_until_power_is_lost()
        self.disk = self._open_again()
        self.killed()

    def restore(self, older: MemoryDisk) -> None:
        """It stops, and an older copy is in the place of its disk."""
        self.kill()
        older.copied, older.waymark = "restored from a backup", self.disk.waymark
        self.disk.disk = older
        self.disk = self._open_again()

    # -- the disk ------------------------------------------------------------------------

    def _check_space(self) -> None:
        if self.disk_is_full and (self.reserve_is_full or self.disk._takes_space()):
            raise DiskFullError("simulated")

    def _check_space_ahead(self, at: int, sectors: bytes) -> None:
        """Some file systems need space to write in place, the others do not."""
        if self.disk_is_full and self._world.disk_rng.random() < 0.5:
            raise DiskFullError("simulated")

    def _check_space_beside(self) -> None:
        """Of what is written beside the disk. It has no reserve."""
        if self.disk_is_full and self._world.disk_rng.random() < 0.5:
            raise DiskFullError("simulated")

    def _write_until_power_is_lost(self) -> None:
        """Somewhere inside the write. Of the write-ahead file's sectors any may have reached the disk; the tables'
        transaction all or nothing, and before the write-ahead file is outdated."""
        rng, disk = self._world.disk_rng, self.disk.disk

        def tear(at: int, sectors: bytes) -> None:
            for offset in range(0, len(sectors), SECTOR_BYTES):
                if rng.random() < 0.5:
                    disk.wal.content[at + offset : at + offset + SECTOR_BYTES] = sectors[offset : offset + SECTOR_BYTES]
            raise PowerLossError

        match rng.choice(("torn", "torn", "committed", "done")):
            case "torn":
                disk.wal.before_write, disk.before_commit = tear, _lose_power
            case "committed":
                disk.wal.before_write, disk.after_commit = None, _lose_power
        self.loop.put(tables=self.settle)

    def _open_again(self) -> MemoryStore:
        """What a restart finds. Now and then power is lost once more, while it takes over what was written ahead."""
        disk = self.disk.disk
        disk.wal.before_write, disk.before_commit, disk.after_commit = self._check_space_ahead, self._check_space, None
        disk.before_mark = self._check_space_beside
        try:
            if self._world.disk_rng.random() < 0.1:
                disk.after_commit = _lose_power
                with suppress(PowerLossError):
                    self._world.crash_disk(self.disk)
                disk.after_commit = None
            return self._world.crash_disk(self.disk)
        except DamagedLogError as error:
            self._cannot_start(error)
            return self.disk

    def _cannot_write(self, error: StorageError) -> None:
        if not isinstance(error, DiskFullError) and not self.is_spoiled:
            raise BrokenError(Invariant.OPENS, f"{self.replica_id} cannot be written: {error}") from error

    def _cannot_start(self, error: DamagedLogError) -> None:
        if not self._world.is_spoiled(self.replica_id):
            raise BrokenError(Invariant.OPENS, f"{self.replica_id} cannot be opened: {error}") from error
        self.alive = False
        self.broken = True

    # -- turns ------------------------------------------------------------------------

    def take(self, event: Event) -> None:
        if self.alive:
            self.events.append(event)
            self._run()

    def call(self, action: Callable[[], None]) -> None:
        if self.alive:
            self.core.run(action)

    def pause(self, duration: float) -> None:
        self.paused = True
        self._world.clock.after(duration, self._resume)

    def _resume(self) -> None:
        self.paused = False
        if self.alive:
            self._run()

    def _wake_up(self) -> None:
        if not self.in_turn:  # which takes what is put meanwhile, or has another one follow
            self._run()

    def _run(self) -> None:
        if self.in_turn:
            raise AssertionError("the simulator began a turn inside a turn: nothing was synced between two steps")
        if self.alive and not self.paused and not self.syncing:
            if busy_s := self.busy_s():
                self.pause(busy_s)
                return
            self.in_turn = True
            try:
                self._turn()
            except InvariantBrokenError as error:
                raise BrokenError(Invariant.NO_SELF_STOP, f"{self.replica_id} stopped: {error}") from error
            finally:
                self.in_turn = False

    def _turn(self) -> None:
        world, core = self._world, self.core
        events, self.events = self.events, []
        core.first_half(events)
        if not self.engine.is_leader or world.rng.random() < 0.3:
            self.engine.maintain(SEGMENT_BYTES, TRIM_ENTRIES)
        self.settle = world.disk_rng.random() < 0.1 or core.must_settle
        if core.must_write or (self.disk.dirty and world.rng.random() < 0.2):
            self.syncing = True
            life, took_s = self.life, world.sync_time()
            world.clock.after(took_s, lambda: self._synced(life))
            if self.doom is not None:
                world.clock.after(world.disk_rng.random() * took_s, self.doom)
                self.doom = None
        else:
            self._end_turn(promised=True)

    def _synced(self, life: int) -> None:
        if life != self.life or not self.alive:
            return
        if self.paused:
            self._world.clock.after(0.01, lambda: self._synced(life))
            return
        self.syncing = False
        self._end_turn(promised=self.core.write(tables=self.settle) is Written.ALL)

    def _end_turn(self, *, promised: bool) -> None:
        if promised:
            self.core.promise()
        self.core.publish()
        self._sleep()

    def _sleep(self) -> None:
        now = self._world.clock.now
        if self.loop.read_only:
            self._wake(self.loop.retry_at_s)
        elif self.core.busy or self.events:
            self._wake(now)
        else:
            self._wake(max(self.core.next_deadline_s, now) + 0.001)

    def _wake(self, when: float) -> None:
        life = self.life
        self.wake_at = when

        def fire() -> None:
            if life == self.life and self.wake_at == when:
                self._run()

        self._world.clock.at(when, fire)

    def _send(self, peer: ReplicaId, message: Message) -> None:
        self._world.send(self.replica_id, peer, Received(self.replica_id, message))

    # -- what clients and operators ask -----------------------------------------------------

    def propose(self, payload: bytes, answer: Answer) -> None:
        if self.alive:
            self.core.command(payload, answer)

    def confirm(self, answer: Answer) -> None:
        if self.alive:
            self.core.confirm_leadership(answer)

    def change(self, how: Callable[[ReplicaSet], ReplicaSet], answer: Answer) -> None:
        if self.alive:
            self.core.change_replicas(how, answer)

    def transfer(self, target: ReplicaId, answer: Answer) -> None:
        if self.alive:
            self.core.transfer_leadership(target, answer)


class SimCore(ReplicaCore[Any]):
    """The core of one life of a replica."""

    def __init__(self, node: EngineNode, machine: StateMachine, rng: Random) -> None:
        self._node = node
        clock = node._world.clock
        clients = Clients(node.call_settings, MAX_FRAME_BYTES, damaged=self._damaged, clock=lambda: clock.now)
        super().__init__(
            node.disk,
            machine,
            node._world.raft_settings,
            rng,
            node.make_service,
            inbox=Inbox(node.replica_id, node._wake_up, call_each),
            clients=clients,
            send=node._send,
            deliver=call_each,
            clock=lambda: clock.now,
        )

    @property
    def versions(self) -> Mapping[ReplicaId, int]:
        return self._node.versions

    @property
    def oldest_version(self) -> int:
        """A leader of the release before offers no news, either."""
        return min(super().oldest_version, self.versions.get(self.replica_id, SPEAKS.highest))

    def client_status(self) -> ReplicaStatus:
        engine = self.engine
        role = "leader" if engine.is_leader else "follower"
        start, end = self.service.bounds()
        return ReplicaStatus(self.replica_id, role, engine.leader, engine.term, start, end, size_bytes=0)

    def _cannot_write(self, error: StorageError) -> None:
        self._node._cannot_write(error)

    def _stepped(self, done: list[Done]) -> None:
        self._node.after_step()
        super()._stepped(done)


class SimNode(EngineNode):
    """A replica of a partition."""

    def __init__(self, world: World, replica_id: ReplicaId, members: ReplicaSet | None) -> None:
        self.world = world
        super().__init__(world, GroupId("sim-0"), replica_id, members)

    def open_machine(self) -> Partition:
        self.machine = Partition(self.disk, self.world.partition_settings)
        tail_bytes = self.world.disk_rng.choice((0, 500, 1_000_000))
        self.tail = Tail.opened(self.machine, tail_bytes)
        self.machine.watch(self.tail)
        self.scrubber = Scrubber(self.disk.tables)
        return self.machine

    def make_service(self, core: ReplicaCore[Any]) -> Events:
        self.admission = Admission(self.machine)
        return _Admitting(self)

    def started(self) -> None:
        self.world.checker.watch_commit(self)

    def after_step(self) -> None:
        self.world.checker.after_step(self)

    def killed(self) -> None:
        self.world.on_killed(self)

    def noting_damage(self, work: Callable[[], None]) -> None:
        """Do what may read the disk beside the engine's step, as ``Replica`` does."""
        try:
            work()
        except DamagedLogError as error:
            self.engine.damaged(str(error))

    def scrub(self) -> None:
        """A piece, in another thread, as ``rayqueue.replica.scrub`` does."""
        if not self.alive or self.disk.damaged is not None:
            return
        try:
            with self.disk.snapshot() as snapshot:
                self.scrubber.piece(snapshot, 2_000)
        except DamagedLogError as error:
            why = str(error)
            self.call(lambda: self.engine.damaged(why))

    def _ask(self, action: Callable[[], None], answer: Answer) -> None:
        def attempt() -> None:
            try:
                action()
            except RayQueueError as error:
                if type(error) is DamagedLogError:
                    self.engine.damaged(str(error))
                answer(error)

        self.call(attempt)

    def busy_s(self) -> float:
        dice = self.world.busy_rng
        return 0.0 if dice is None or dice.random() < 0.6 else dice.uniform(0.001, 0.05)

    # -- reading, as ``PartitionService`` does -----------------------------------------------

    def fetch(self, cursors: Sequence[Cursor], max_bytes: int, answer: Answer) -> None:
        """Batches after the cursors; [] if there is nothing yet. Followers answer, too."""
        self._ask(lambda: self._fetch(cursors, max_bytes, answer), answer)

    def _fetch(self, cursors: Sequence[Cursor], max_bytes: int, answer: Answer) -> None:
        if any(offset > self.tail.end for _, offset in cursors):
            answer([])
            return
        found = self.tail.read_lanes(cursors, max_bytes)
        if found is not None:
            answer(found)
            return
        life, tail_start = self.life, self.tail.start

        def from_disk() -> None:
            """In another thread: the engine goes on meanwhile."""
            if not self.alive or self.life != life:
                return
            try:
                with self.disk.snapshot() as snapshot:
                    found = read_lanes(snapshot, cursors, max_bytes, high_watermark=self.tail.end)
            except RayQueueError as error:
                refusal = error  # which the engine's thread hears of first
                self._ask(lambda: _raise(refusal), answer)
                return
            if found:
                answer(found)
            else:
                moved = [Cursor(lane, max(offset, tail_start)) for lane, offset in cursors]
                self._ask(lambda: self._fetch(moved, max_bytes, answer), answer)

        self.world.clock.after(self.world.disk_rng.uniform(0.0001, 0.05), from_disk)

    def _keep_time(self) -> None:
        now_ms = int(1_000_000_000 + self.world.clock.now * 60_000)  # a minute is a second here
        tick = self.admission.tick(now_ms)
        if tick is not None and self.engine.is_leader:
            self.core.tell_log(tick)
            self.admission.ticked(now_ms)

    def append(self, payload: bytes, answer: Answer) -> None:
        def admit() -> None:
            known = self.admission.admit(payload) if self.engine.is_leader else None
            if known is None:
                self._keep_time()
                self.core.propose(payload, answer)
                if not self.core.service.leads:
                    raise BrokenError(Invariant.TOLD, f"{self.replica_id} has proposed, and was not told that it leads")
            else:
                answer(known)

        self._ask(admit, answer)


class _Admitting(Events):
    """What ``PartitionService`` does for admission and the tail."""

    def __init__(self, node: SimNode) -> None:
        self._node = node
        self.leads = False

    def won(self) -> None:
        self.leads = True
        self._node.admission.reset()

    def lost(self, now_s: float) -> None:
        self.leads = False
        self._node.admission.reset()

    def tables_synced(self) -> None:
        self._node.tail.synced()


def _raise(error: RayQueueError) -> None:
    raise error


def _lose_power() -> None:
    raise PowerLossError


def peer_gone(node: EngineNode, dead: bool) -> PeerDown:
    return PeerDown(node.replica_id, dead)


def peer_back(node: EngineNode) -> PeerUp:
    return PeerUp(node.replica_id)
