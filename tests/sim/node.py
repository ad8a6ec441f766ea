"""One simulated replica: the real engine and partition on a disk that can lose power.

It does what the replica's thread does, in virtual time: take events, step,
send early, sync, send late. A sync takes time, and a crash may come before,
inside or after it.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from rayqueue.errors import DiskFullError, RayQueueError
from rayqueue.ids import GroupId, NodeId
from rayqueue.partition import Admission, Partition
from rayqueue.raft.engine import RaftEngine
from rayqueue.raft.members import Members
from rayqueue.raft.messages import Message
from rayqueue.raft.transport import Event, PeerDown, PeerUp, Received

if TYPE_CHECKING:
    from tests.sim.world import World

SEGMENT_BYTES = 2_000
TRIM_ENTRIES = 8

Answer = Callable[[Any], None]


class SimNode:
    def __init__(self, world: World, node_id: NodeId, members: Members | None) -> None:
        self.world = world
        self.node_id = node_id
        self.disk = world.new_disk(GroupId("sim-0"), node_id)
        if members is not None:
            RaftEngine.bootstrap(self.disk, members)
        self.alive = False
        self.paused = False
        self.removed = False
        self.disk_is_full = False
        self.life = 0
        self.checked_commit = 0
        self.start()

    # -- being killed and coming back ----------------------------------------------

    def start(self) -> None:
        world = self.world
        self.life += 1
        self.alive = True
        self.inbox: list[Event] = []
        self.calls: list[Callable[[], None]] = []
        self.syncing = False
        self.wake_at = float("inf")
        self.machine = Partition(self.disk, world.partition_settings)
        self.admission = Admission(self.machine)
        self.was_leader = False
        self.engine = RaftEngine(
            self.disk, self.machine, world.raft_settings, Random(world.rng.random()), world.clock.now
        )
        self.checked_commit = min(self.checked_commit, self.engine.commit)
        world.checker.watch_commit(self)
        self._run()

    def kill(self, *, committed: bool | None = None) -> None:
        """Kill -9 or power loss. ``committed``: whether a sync that is under way still reached the disk."""
        if not self.alive:
            return
        self.alive = False
        if committed and self.syncing and not self.disk_is_full:
            self.disk.sync()
        self.disk = self.world.crash_disk(self.disk)
        self.world.on_killed(self)

    # -- the loop -----------------------------------------------------------------------

    def take(self, event: Event) -> None:
        if self.alive:
            self.inbox.append(event)
            self._run()

    def call(self, action: Callable[[], None]) -> None:
        if self.alive:
            self.calls.append(action)
            self._run()

    def pause(self, duration: float) -> None:
        self.paused = True
        self.world.clock.after(duration, self._resume)

    def _resume(self) -> None:
        self.paused = False
        if self.alive:
            self._run()

    def _run(self) -> None:
        if not self.alive or self.paused or self.syncing:
            return
        world, engine = self.world, self.engine
        now = world.clock.now
        inbox, self.inbox = self.inbox, []
        calls, self.calls = self.calls, []
        for event in inbox:
            engine.receive(now, event)
        for action in calls:
            action()
        ready = engine.step(now)
        if self.was_leader != engine.is_leader:
            self.was_leader = engine.is_leader
            self.admission.reset()
        world.checker.after_step(self)
        for peer, message in ready.early:
            self._send(peer, message)
        for done in ready.done:
            done.context(done.result)
        if not engine.is_leader or world.rng.random() < 0.3:
            engine.maintain(SEGMENT_BYTES, TRIM_ENTRIES)
        if self.disk.must_sync or (self.disk.dirty and world.rng.random() < 0.2):
            self.syncing = True
            life = self.life
            world.clock.after(world.sync_time(), lambda: self._synced(life, ready.late))
        else:
            self._finish(ready.late)

    def _synced(self, life: int, late: list[tuple[NodeId, Message]]) -> None:
        if life != self.life or not self.alive:
            return
        if self.paused:
            self.world.clock.after(0.01, lambda: self._synced(life, late))
            return
        self.syncing = False
        try:
            if self.disk_is_full:
                raise DiskFullError("simulated")
            self.disk.sync()
        except DiskFullError:
            self.engine.disk_full()
            self._wake(self.world.clock.now + 0.05)
            return
        self.engine.synced()
        self._finish(late)

    def _finish(self, late: list[tuple[NodeId, Message]]) -> None:
        for peer, message in late:
            self._send(peer, message)
        now = self.world.clock.now
        if self.inbox or self.calls or self.engine.busy:
            self._wake(now)
        else:
            self._wake(max(self.engine.next_deadline, now) + 0.001)

    def _wake(self, when: float) -> None:
        life = self.life
        self.wake_at = when

        def fire() -> None:
            if life == self.life and self.wake_at == when:
                self._run()

        self.world.clock.at(when, fire)

    def _send(self, peer: NodeId, message: Message) -> None:
        self.world.send(self.node_id, peer, Received(self.node_id, message))

    # -- what clients and operators ask -----------------------------------------------------

    def append(self, payload: bytes, answer: Answer) -> None:
        def admit() -> None:
            known = self.admission.admit(payload) if self.engine.is_leader else None
            if known is None:
                self.engine.propose(payload, answer)
            else:
                answer(known)

        self._ask(admit, answer)

    def propose(self, payload: bytes, answer: Answer) -> None:
        self._ask(lambda: self.engine.propose(payload, answer), answer)

    def confirm(self, answer: Answer) -> None:
        self._ask(lambda: self.engine.confirm_leadership(answer), answer)

    def change(self, how: Callable[[Members], Members], answer: Answer) -> None:
        self._ask(lambda: self.engine.change_members(how(self.engine.members), answer), answer)

    def transfer(self, target: NodeId, answer: Answer) -> None:
        self._ask(lambda: self.engine.transfer_leadership(target, self.world.clock.now, answer), answer)

    def _ask(self, action: Callable[[], None], answer: Answer) -> None:
        def attempt() -> None:
            try:
                action()
            except RayQueueError as error:
                answer(error)

        self.call(attempt)


def peer_gone(node: SimNode, dead: bool) -> PeerDown:
    return PeerDown(node.node_id, dead)


def peer_back(node: SimNode) -> PeerUp:
    return PeerUp(node.node_id)
