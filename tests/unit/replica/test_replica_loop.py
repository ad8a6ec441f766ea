"""The replica's loop: what leaves before the disk, what only after it, and what a disk that refuses means."""

from __future__ import annotations

import pytest

from rayqueue.errors import DamagedLogError, DiskFullError, StorageError
from rayqueue.partition.tables import META
from rayqueue.raft.messages import AppendEntries, AppendReply, Message
from rayqueue.raft.transport import Received
from rayqueue.replica.loop import Loop, Written
from rayqueue.replica.retry import MIN_PAUSE_S
from tests.unit.raft.engines import Engines


class Follower:
    """One that has just been sent an entry, with its loop in the test's hands."""

    def __init__(self) -> None:
        engines = Engines("a", "b", "c")
        engines.leader.propose(b"\x20x", "first")
        assert engines.answer("first") == 2
        engines.run(1)
        self.leader = engines.leader.replica_id
        self.node = next(node for node in engines.engines if node != self.leader)
        self.engine, self.store, self.now = engines.engines[self.node], engines.stores[self.node], engines.now
        self.sent: list[Message] = []
        self.troubles: list[StorageError] = []
        self.loop = Loop(
            self.engine,
            self.store,
            send=lambda peer, message: self.sent.append(message),
            take_calls=lambda: False,
            stepped=lambda done: None,
            troubled=self.troubles.append,
        )
        engines.leader.propose(b"\x20" + b"y" * 100, "second")
        engines.step(self.leader)
        message = next(message for _, peer, message in engines.sent if peer == self.node)
        assert isinstance(message, AppendEntries)
        assert message.entries
        self.entry = Received(self.leader, message)


def test_a_promise_leaves_after_the_disk() -> None:
    follower = Follower()
    loop, store = follower.loop, follower.store
    loop.first_half(follower.now, [follower.entry])
    assert loop.must_write
    assert follower.sent == []
    assert loop.write(follower.now, tables=False) is Written.ALL
    assert store.dirty, "small: in the write-ahead file, which a restart finds"
    assert follower.sent == []
    loop.second_half()
    promise = follower.sent[-1]
    assert isinstance(promise, AppendReply)
    assert promise.match == store.last_index
    count = len(follower.sent)
    loop.second_half()
    assert len(follower.sent) == count, "once"
    assert store.reopen().last_index == follower.engine.store.last_index


def test_tables_are_written_if_somebody_wants_to_see_them() -> None:
    follower = Follower()
    follower.loop.first_half(follower.now, [follower.entry])
    assert follower.loop.write(follower.now, tables=True) is Written.ALL
    assert not follower.store.dirty


def test_on_a_full_disk_new_entries_are_given_up_and_the_rest_is_written() -> None:
    follower = Follower()
    loop, store = follower.loop, follower.store
    before = store.last_index
    loop.first_half(follower.now, [follower.entry])
    assert store.last_index == before + 1
    refusals = [DiskFullError("no space"), None]

    def refuse(*_: object) -> None:
        error = refusals.pop(0) if refusals else None
        if error is not None:
            raise error

    store.disk.wal.before_write = refuse
    assert loop.write(follower.now, tables=False) is Written.SMALL
    assert (store.last_index, store.dirty, loop.read_only) == (before, False, False)
    assert follower.troubles == []


def test_a_disk_that_takes_nothing_is_tried_again_later_and_promises_nothing() -> None:
    follower = Follower()
    loop, store, now = follower.loop, follower.store, follower.now
    loop.first_half(now, [follower.entry])
    store.put(META, b"something", b"that is not an entry")

    def refuse(*_: object) -> None:
        raise DiskFullError("no space")

    store.disk.wal.before_write = store.disk.before_commit = refuse
    assert loop.write(now, tables=False) is Written.NOTHING
    assert loop.read_only
    assert loop.must_write
    assert loop.retry_at_s == pytest.approx(now + MIN_PAUSE_S)
    assert not loop.may_write(now + MIN_PAUSE_S / 2)
    assert loop.write(now + MIN_PAUSE_S / 2, tables=False) is Written.NOTHING
    assert loop.write(now + MIN_PAUSE_S, tables=False) is Written.NOTHING
    assert len(follower.troubles) == 1, "it is told once"
    store.disk.wal.before_write = store.disk.before_commit = None
    assert loop.write(loop.retry_at_s, tables=False) is Written.ALL
    assert not loop.read_only


def test_damage_that_is_met_in_writing_is_the_end_of_writing() -> None:
    follower = Follower()
    loop, store = follower.loop, follower.store
    loop.first_half(follower.now, [follower.entry])

    def damaged(*_: object) -> None:
        raise DamagedLogError("not what was written")

    store.disk.wal.before_write = damaged
    assert loop.write(follower.now, tables=False) is Written.NOTHING
    assert follower.engine.halted
    assert [type(error) for error in follower.troubles] == [DamagedLogError]
    store.disk.wal.before_write = None
    assert not loop.may_write(follower.now + 100)
