"""The leader's view of a follower: every answer is taken once, and only if it answers what was asked."""

from __future__ import annotations

from rayqueue.config import RaftSettings
from rayqueue.ids import GroupId, Index, ReplicaId, Term
from rayqueue.log.memory_store import MemoryStore
from rayqueue.log.store import Checkpoint, Entry
from rayqueue.partition.tables import PARTITION
from rayqueue.raft.leadership import Leadership
from rayqueue.raft.messages import AppendEntries, AppendReply, InstallSnapshot, Message
from rayqueue.raft.progress import Pace, Progress
from rayqueue.records.checksum import entry_crc

PEER = ReplicaId("b")
TERM = Term(3)


def _store(entries: int) -> MemoryStore:
    store = MemoryStore(GroupId("g"), ReplicaId("a"), PARTITION)
    store.append([_entry(index) for index in range(1, entries + 1)])
    return store


def _entry(index: int) -> Entry:
    payload = b"x" * 100
    return Entry(Index(index), TERM, payload, entry_crc(index, TERM, payload))


def _leadership(store: MemoryStore) -> Leadership:
    settings = RaftSettings(append_batch_bytes=250, window_bytes=1000, max_uncommitted_bytes=10_000)
    return Leadership(TERM, store, [PEER], settings)


def _send(leadership: Leadership, now: float = 0.0, heartbeat: bool = False) -> list[Message]:
    return [message for _, message in leadership.outgoing(Index(0), now, heartbeat, set())]


def _reply(success: bool, prev: int, match: int) -> AppendReply:
    return AppendReply(TERM, success, Index(prev), Index(match), 0)


def test_one_question_at_a_time_until_the_first_yes() -> None:
    leadership = _leadership(_store(6))
    leadership.progress[PEER].next = Index(4)
    assert _send(leadership) == [AppendEntries(TERM, Index(3), TERM, Index(0), 0, ())]
    assert _send(leadership) == []
    leadership.take_reply(PEER, _reply(True, 3, 3))
    (message,) = [message for message in _send(leadership) if isinstance(message, AppendEntries)][:1]
    assert [entry.index for entry in message.entries] == [4, 5]


def test_the_window_bounds_what_is_sent_ahead() -> None:
    leadership = _leadership(_store(50))
    leadership.take_reply(PEER, _reply(True, 0, 0))
    sent = [message for message in _send(leadership) if isinstance(message, AppendEntries)]
    assert sum(len(message.entries) for message in sent) == 10
    leadership.take_reply(PEER, _reply(True, 0, 4))
    again = [message for message in _send(leadership) if isinstance(message, AppendEntries)]
    assert [entry.index for message in again for entry in message.entries] == [11, 12, 13, 14]


def test_two_refusals_of_two_messages_in_flight_reset_once() -> None:
    leadership = _leadership(_store(10))
    leadership.take_reply(PEER, _reply(True, 0, 2))
    _send(leadership)
    leadership.take_reply(PEER, _reply(False, 4, 2))
    assert leadership.progress[PEER].pace is Pace.PROBE
    (probe,) = _send(leadership)
    leadership.take_reply(PEER, _reply(False, 6, 2))
    assert _send(leadership) == []
    assert isinstance(probe, AppendEntries)
    assert probe.prev_index == 2


def test_a_follower_that_says_yes_and_takes_nothing_is_asked_at_the_heartbeats_pace() -> None:
    """Found by the simulator (seed 8023): a damaged entry, and the same entries sent at the network's pace."""
    leadership = _leadership(_store(10))
    leadership.take_reply(PEER, _reply(True, 0, 2))
    sent = []
    for _ in range(5):
        sent.append(len(_send(leadership)))
        leadership.take_reply(PEER, _reply(False, 4, 2))
        sent.append(len(_send(leadership)))
        leadership.take_reply(PEER, _reply(True, 2, 2)) if sent[-1] else None
    assert sent[2:] == [sent[0], 0] + [0] * (len(sent) - 4)
    (question,) = _send(leadership, heartbeat=True)
    assert isinstance(question, AppendEntries)
    assert (question.prev_index, question.entries) == (2, ())


def test_a_refusal_backs_up_to_the_hint_and_never_below_the_match() -> None:
    progress = Progress(100, 1000)
    progress.asked = True
    progress.refused(Index(99), Index(40))
    assert progress.next == 41
    progress.confirmed(Index(30))
    progress.lost()
    assert progress.next == 31
    progress.refused(Index(30), Index(3))
    assert progress.next == 31


def test_a_trim_turns_an_open_probe_into_a_snapshot() -> None:
    """Found by the simulator: the question was open when the log moved past it, and nobody asked again."""
    store = _store(6)
    leadership = _leadership(store)
    leadership.progress[PEER].next = Index(2)
    assert len(_send(leadership)) == 1
    store.set_applied(Index(5))
    store.save_checkpoint(Checkpoint(Index(5), TERM, b"{}", b"state"))
    store.trim_to(Index(5), 10)
    (snapshot,) = _send(leadership, now=1.0)
    assert isinstance(snapshot, InstallSnapshot)
    assert snapshot.index == 5
    # Not confirmed: sent again only after a while, while heartbeats keep the follower loyal.
    (heartbeat,) = _send(leadership, now=1.1, heartbeat=True)
    assert isinstance(heartbeat, AppendEntries)
    assert isinstance(_send(leadership, now=2.5)[0], InstallSnapshot)
    leadership.take_reply(PEER, _reply(True, 5, 5))
    (message,) = _send(leadership, now=2.6)
    assert isinstance(message, AppendEntries)
    assert [entry.index for entry in message.entries] == [6]


def test_in_sync_is_who_is_near_the_end_and_answers() -> None:
    store = _store(10)
    leadership = _leadership(store)
    window_s = RaftSettings().in_sync_ms / 1000

    def beat(now: float, match: int | None) -> bool:
        if match is not None:
            leadership.take_reply(PEER, _reply(True, 0, match))
        leadership.on_heartbeat(now)
        return PEER in leadership.in_sync(now)

    assert not beat(0.0, None)
    assert leadership.lags() == {}, "nothing is known of it yet"
    assert not beat(0.1, 10), "where it is now is known, not yet whether it stays"
    assert beat(0.2, 10)
    assert leadership.lags() == {PEER: 0}
    assert beat(0.2 + window_s / 2, None)
    assert not beat(0.3 + window_s, None), "it answers no more"
    beat(0.4 + window_s, 10)
    now = 0.5 + window_s
    assert beat(now, 10)
    for _ in range(20):  # it answers, and falls behind: each time it has what it had
        store.append([_entry(store.last_index + 1)])
        now += window_s / 10
        beat(now, 10)
    assert not beat(now, 10)
    assert leadership.lags() == {PEER: 20}
    beat(now + 0.1, 30)
    assert beat(now + 0.2, 30)


def test_an_unreachable_peer_is_sent_nothing() -> None:
    leadership = _leadership(_store(3))
    assert list(leadership.outgoing(Index(0), 0.0, True, {PEER})) == []
