"""A few engines in one process, on a network that does nothing wrong, stepped by hand."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from rayqueue.config import RaftSettings
from rayqueue.ids import GroupId, Index, ReplicaId
from rayqueue.log.memory_store import MemoryStore
from rayqueue.partition.tables import META, PARTITION
from rayqueue.raft.engine import Done, RaftEngine
from rayqueue.raft.messages import Message
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.raft.transport import Received
from rayqueue.replica.loop import Loop, Written

SETTINGS = RaftSettings(append_batch_bytes=1_000, window_bytes=4_000, max_uncommitted_bytes=2_000)


class Adder:
    """The smallest state machine there is: it counts the bytes it has seen."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.needed = Index(1)
        self.total = int(store.get(META, b"total") or b"0")

    def apply(self, index: Index, payload: bytes) -> int:
        if payload == b"\x20fail":
            raise ValueError("told to fail")
        self.total += len(payload)
        self._store.put(META, b"total", b"%d" % self.total)
        return self.total

    def first_needed(self) -> Index:
        return self.needed

    def checkpoint(self) -> bytes:
        return b"%d" % self.total

    def restore(self, state: bytes) -> None:
        self.total = int(state)
        self._store.put(META, b"total", state)


class Engines:
    """Virtual time, and a network whose only fault is ``cut``."""

    def __init__(self, *node_ids: str, settings: RaftSettings = SETTINGS) -> None:
        self.now = 0.0
        self.settings = settings
        self.stores: dict[ReplicaId, MemoryStore] = {}
        self.machines: dict[ReplicaId, Adder] = {}
        self.engines: dict[ReplicaId, RaftEngine] = {}
        self.loops: dict[ReplicaId, Loop] = {}
        self.cut: set[ReplicaId] = set()
        self.answers: dict[Any, Any] = {}
        self.sent: list[tuple[ReplicaId, ReplicaId, Message]] = []
        for replica_id in node_ids:
            self.add(replica_id, ReplicaSet.of(node_ids))

    def add(self, replica_id: str, members: ReplicaSet | None = None) -> ReplicaId:
        node = ReplicaId(replica_id)
        self.stores[node] = MemoryStore(GroupId("g"), node, PARTITION)
        if members is not None:
            RaftEngine.bootstrap(self.stores[node], members)
        self._start(node)
        return node

    def restart(self, node: ReplicaId) -> None:
        """As after kill -9: what was not synced is gone."""
        self.stores[node] = self.stores[node].reopen()
        self._start(node)

    def _start(self, node: ReplicaId) -> None:
        self.machines[node] = Adder(self.stores[node])
        seed = sum(node.encode())
        self.engines[node] = RaftEngine(self.stores[node], self.machines[node], self.settings, Random(seed), self.now)

        def stepped(done: list[Done]) -> None:
            self.answers.update((each.context, each.result) for each in done)

        self.loops[node] = Loop(
            self.engines[node],
            self.stores[node],
            send=lambda peer, message: self.sent.append((node, peer, message)),
            take_calls=lambda: False,
            stepped=stepped,
            troubled=lambda error: None,
        )

    def step(self, node: ReplicaId) -> None:
        loop = self.loops[node]
        loop.first_half(self.now, ())
        if loop.write(self.now, tables=True) is Written.ALL:
            loop.second_half()

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Let time pass, a hundredth of a second at a time; stop early once ``until`` holds."""
        end = self.now + seconds
        while self.now < end and not until():
            for node in list(self.engines):
                self.step(node)
            messages, self.sent = self.sent, []
            self.now += 0.01
            for sender, peer, message in messages:
                if peer in self.engines and not self.cut & {sender, peer}:
                    self.engines[peer].receive(self.now, Received(sender, message))

    @property
    def leader(self) -> RaftEngine:
        self.run(10, lambda: self._leader() is not None)
        leader = self._leader()
        assert leader is not None
        return leader

    def _leader(self) -> RaftEngine | None:
        leaders = [engine for engine in self.engines.values() if engine.is_leader and engine.replica_id not in self.cut]
        return max(leaders, key=lambda engine: engine.term) if leaders else None

    def answer(self, context: Any) -> Any:
        self.run(10, lambda: context in self.answers)
        return self.answers[context]
