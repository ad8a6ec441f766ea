"""The leader's side of consumer groups: joins, heartbeats, leaves, and members that fall silent.

Turns calls into steps of groups. At most one step of a group is under way at a
time; what comes meanwhile is gathered for the next. Nothing is proposed that
would change nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import msgspec

from rayqueue.cluster import commands
from rayqueue.cluster.commands import ChangeGroup, Join, Leave, Release
from rayqueue.cluster.groups import Group, unknown_member
from rayqueue.cluster.machine import ClusterMachine
from rayqueue.cluster.sessions import NEVER, Parked, Reply, Session, Sessions
from rayqueue.config import ClusterSettings
from rayqueue.errors import InvalidInputError, NotLeaderError, RayQueueError
from rayqueue.protocol.calls import Assignment, Heartbeat, JoinGroup, LeaveGroup
from rayqueue.protocol.seals import Seals
from rayqueue.protocol.topics import check_name

MAX_ID_BYTES = 200
MAX_CLIENT = 500
MAX_TOPICS = 1_000
"""That one member wants."""
MAX_WISHES = 50_000
"""Topics that the different wishes of a group's members name, in all. An assignor's work grows with it, and is done
while the log is applied: it must be far below an election timeout."""
MAX_STICKY_MEMBERS = 200
"""Of a group with the assignor ``sticky``, whose work has no other bound."""
MAX_SESSION_MS = 3_600_000
MIN_SESSION_MS = 50
MAX_STEP_BYTES = 1 << 20
"""Of the changes that are one step, roughly."""
MAX_RELEASED = 5_000
"""Partitions that one release names; the others follow with the next heartbeat."""
RETRY_S = 0.2

Propose = Callable[[commands.AnyCommand, Callable[[Any], None]], None]
Confirm = Callable[[Callable[[Any], None]], None]
"""Answers None once a majority has confirmed that this replica leads, or the error that it does not."""


class _Joining:
    """A member on its way into a group, and all who asked for it."""

    __slots__ = ("client", "replies", "wish")

    def __init__(self, wish: Join) -> None:
        self.wish = wish
        self.client: int | None = None
        self.replies: list[Reply] = []


class _Turn:
    """What waits for a group's next step, and what is in the step under way."""

    __slots__ = ("due_s", "joins", "leaves", "releases", "under_way", "wish_topics", "wishes")

    def __init__(self) -> None:
        self.due_s = NEVER
        self.joins: dict[str, _Joining] = {}
        self.leaves: dict[str, list[Reply]] = {}
        self.releases: dict[str, Release] = {}
        self.under_way: _Turn | None = None
        self.wishes: set[tuple[str, ...]] = set()
        self.wish_topics = 0

    def add(self, wish: Join) -> _Joining:
        joining = self.joins.get(wish.member)
        if joining is None:
            joining = self.joins[wish.member] = _Joining(wish)
        joining.wish = wish
        if wish.topics not in self.wishes:
            self.wishes.add(wish.topics)
            self.wish_topics += len(wish.topics)
        return joining

    def __len__(self) -> int:
        return len(self.joins) + len(self.leaves) + len(self.releases)

    def take(self) -> _Turn:
        """The next step: all that waits, or as much of it as one entry of the log should hold."""
        taken = _Turn()
        taken.leaves, self.leaves = self.leaves, {}
        room = MAX_STEP_BYTES - 100 * len(taken.leaves)
        while self.releases and room > 0:
            release = self.releases.pop(next(iter(self.releases)))
            taken.releases[release.member] = release
            room -= 200 + sum(20 + len(each.topic) for each in release.partitions)
        while self.joins and room > 0:
            joining = self.joins.pop(next(iter(self.joins)))
            taken.joins[joining.wish.member] = joining
            room -= 1_000 + sum(5 + len(topic) for topic in joining.wish.topics)
        self.wishes = {joining.wish.topics for joining in self.joins.values()}
        self.wish_topics = sum(map(len, self.wishes))
        return taken

    def changes(self) -> tuple[commands.GroupChange, ...]:
        leaves: list[commands.GroupChange] = [Leave(member) for member in self.leaves]
        return (*leaves, *self.releases.values(), *(each.wish for each in self.joins.values()))


class Memberships:
    def __init__(
        self,
        machine: ClusterMachine,
        settings: ClusterSettings,
        seals: Seals,
        propose: Propose,
        confirm: Confirm,
        wall_ms: Callable[[], int],
        make_room: Callable[[], bool],
    ) -> None:
        """``make_room`` lets groups expire; False if none is due."""
        self._wall_ms = wall_ms
        self._make_room = make_room
        self._machine = machine
        self._settings = settings
        self._seals = seals
        self._propose = propose
        self._confirm = confirm
        self._now_s = 0.0
        self._leading = False
        self._reset()

    def _reset(self) -> None:
        self._sessions = Sessions(self._settings.disconnect_grace_ms / 1000)
        self._turns: dict[str, _Turn] = {}
        self._due: list[tuple[float, str]] = []
        self._changed: dict[str, None] = {}

    # -- being driven ------------------------------------------------------------------------

    @property
    def next_deadline_s(self) -> float:
        if self._changed:
            return self._now_s
        due_s = self._due[0][0] if self._due else NEVER
        return min(due_s, self._sessions.next_deadline_s)

    def group_changed(self, group: str) -> None:
        """Told by the machine, in the middle of an entry: only noted here."""
        if self._leading:
            self._changed[group] = None

    def lead(self, now_s: float) -> None:
        """Everybody who is a member has a whole session from now on, to find the new leader."""
        self._reset()
        self._now_s = now_s
        self._leading = True
        for name in sorted(self._machine.groups):
            self._open_missing(self._machine.groups[name])

    def unlead(self, refusal: NotLeaderError) -> None:
        waiting = [session.parked.reply for session in self._sessions if session.parked is not None]
        for turn in self._turns.values():
            for each in (turn, turn.under_way):
                if each is not None:
                    waiting += [reply for joining in each.joins.values() for reply in joining.replies]
                    waiting += [reply for replies in each.leaves.values() for reply in replies]
        self._reset()
        self._leading = False
        for reply in waiting:
            reply(refusal)

    def has_members(self, client: int) -> bool:
        return self._sessions.has_client(client)

    def disconnected(self, now_s: float, client: int) -> None:
        self._now_s = now_s
        self._sessions.disconnected(now_s, client)
        for turn in self._turns.values():
            for each in (turn, turn.under_way):
                for joining in each.joins.values() if each is not None else ():
                    if joining.client == client:
                        joining.client = None

    def tick(self, now_s: float) -> None:
        self._now_s = now_s
        self.settle(now_s)
        for session in self._sessions.due(now_s):
            self._due_session(session)
        while self._due and self._due[0][0] <= now_s:
            _, group = heapq.heappop(self._due)
            turn = self._turns.get(group)
            if turn is not None and turn.due_s <= now_s:
                self._step(group, turn)

    def _due_session(self, session: Session) -> None:
        if session.end_s <= self._now_s:
            self._end(session)
        parked = session.parked
        if parked is not None and parked.until_s <= self._now_s:
            session.parked = None
            parked.reply(self._assignment(self._machine.groups[session.group], session.member))

    def _end(self, session: Session) -> None:
        """Throw its member out, unless it is this coordinator that lets it wait: for the answer to a join."""
        self._sessions.retry_end(session, self._now_s + RETRY_S)
        turn = self._turns.get(session.group)
        for each in (turn, turn.under_way) if turn is not None else ():
            joining = each.joins.get(session.member) if each is not None else None
            if joining is not None and joining.client is not None:
                return
        self._turn(session.group).leaves.setdefault(session.member, [])
        self._hurry(session.group, self._now_s)

    # -- calls -------------------------------------------------------------------------------

    def heartbeat(self, now_s: float, client: int, call: Heartbeat, reply: Reply) -> None:
        self._now_s = now_s
        group = self._machine.groups.get(call.group)
        member = None if group is None else group.members.get(call.member)
        session = self._sessions.get(call.group, call.member)
        if group is None or member is None or session is None:
            self._deny(call, reply, lambda: self.heartbeat(self._now_s, client, call, reply))
            return
        self._sessions.heard(now_s, session, client)
        self._spare(self._turns.get(call.group), call.member)
        if session.parked is not None:  # it has asked again: the older question is void
            older, session.parked = session.parked, None
            older.reply(self._assignment(group, call.member))
        released = member.releases(call.reading, call.generation)
        if released:
            self._release(call.group, Release(call.member, call.generation, released[:MAX_RELEASED]))
        if call.wait_ms <= 0 or member.changed_at > call.generation:
            reply(self._assignment(group, call.member))
            return
        # A member cannot speak while it waits for an answer; it must have time to speak again.
        wait_s = min(call.wait_ms / 1000, session.timeout_s / 3)
        self._sessions.park(session, Parked(reply, call.generation, now_s + wait_s))

    def _spare(self, turn: _Turn | None, member: str) -> None:
        """It was about to be thrown out, and is alive after all."""
        if turn is not None and turn.leaves.get(member) == []:
            del turn.leaves[member]

    def _deny(self, call: JoinGroup | Heartbeat | LeaveGroup, reply: Reply, known: Callable[[], None]) -> None:
        """Say that there is no such member, which only a leader may. A deposed one would throw it out of its group."""

        def confirmed(result: Any) -> None:
            group = self._machine.groups.get(call.group)
            if isinstance(result, RayQueueError):
                reply(result)
            elif group is not None and self._sessions.get(call.group, call.member) and call.member in group.members:
                known()
            elif isinstance(call, LeaveGroup):
                reply(None)
            else:
                reply(unknown_member(call.group, call.member))

        self._confirm(confirmed)

    def _release(self, group: str, release: Release) -> None:
        turn = self._turn(group)
        if turn.under_way is not None and turn.under_way.releases.get(release.member) == release:
            return
        turn.releases[release.member] = release
        self._hurry(group, self._now_s)

    def join(self, now_s: float, client: int, call: JoinGroup, reply: Reply) -> None:
        self._now_s = now_s
        wish = self._wish(call, call.generation > 0)
        group = self._machine.groups.get(call.group)
        self._check_room(call, wish, group)
        known = None if group is None else group.members.get(call.member)
        session = self._sessions.get(call.group, call.member)
        if session is not None:
            self._sessions.heard(now_s, session, client)
        turn = self._turns.get(call.group)
        self._spare(turn, call.member)
        if wish.again and known is None and turn is None:
            self._deny(call, reply, lambda: self.join(self._now_s, client, call, reply))
            return
        if group is not None and known is not None and known.wish == self._wish(call, False) and turn is None:
            reply(self._assignment(group, call.member))
            return
        joining = self._turn(call.group).add(wish)
        joining.client = client
        joining.replies.append(reply)
        forming = group is None or not group.members
        self._hurry(call.group, now_s + self._settings.join_window_ms / (1000 if forming else 3000))

    def _check_room(self, call: JoinGroup, wish: Join, group: Group | None) -> None:
        settings = self._settings
        turn = self._turns.get(call.group)
        groups = self._machine.groups
        if group is None and turn is None and len(groups) >= settings.max_groups and not self._make_room():
            empty = sum(not each.members for each in groups.values())
            raise InvalidInputError(
                f"there are {len(groups)} groups, which is the limit (cluster.max_groups), {empty} of them without "
                "members: delete those that nobody needs (rayqueue groups delete), or let them expire sooner "
                "(cluster.group_retention_ms)",
                groups=len(groups),
                empty=empty,
            )
        coming = 0 if turn is None else len(turn.joins)
        there = 0 if group is None else len(group.members)
        new = group is None or call.member not in group.members
        if new and there + coming >= settings.max_group_members:
            raise InvalidInputError(
                f"group {call.group!r} has {there} members; the limit is {settings.max_group_members} "
                "(cluster.max_group_members)"
            )
        if new and wish.assignor == "sticky" and there + coming >= MAX_STICKY_MEMBERS:
            raise InvalidInputError(
                f"group {call.group!r} has {there} members; with the assignor 'sticky' {MAX_STICKY_MEMBERS} are the "
                "limit: use 'balanced'",
                key="assignor",
            )
        wishes = (() if group is None else group.wishes), (() if turn is None else turn.wishes)
        if not any(wish.topics in each for each in wishes):
            named = (0 if group is None else group.wish_topics) + (0 if turn is None else turn.wish_topics)
            if named + len(wish.topics) > MAX_WISHES:
                raise InvalidInputError(
                    f"the members of group {call.group!r} want different things and name {named} topics in all; "
                    f"{len(wish.topics)} more would pass {MAX_WISHES}: let members want the same topics, or fewer",
                    key="topics",
                )

    def _wish(self, call: JoinGroup, again: bool) -> Join:
        check_name("group", call.group)
        _check_id("member", call.member)
        if call.instance is not None:
            _check_id("instance", call.instance)
        if len(call.topics) > MAX_TOPICS:
            raise InvalidInputError(f"a member wants at most {MAX_TOPICS} topics, not {len(call.topics)}", key="topics")
        topics = tuple(sorted({check_name("topic", topic) for topic in call.topics}))
        if not MIN_SESSION_MS <= call.session_timeout_ms <= MAX_SESSION_MS:
            raise InvalidInputError(
                f"session_timeout_ms must be from {MIN_SESSION_MS} to {MAX_SESSION_MS}, not {call.session_timeout_ms}",
                key="session_timeout_ms",
            )
        client = call.client[:MAX_CLIENT]
        return Join(call.member, topics, call.instance, client, call.assignor, call.session_timeout_ms, again)

    def leave(self, now_s: float, call: LeaveGroup, reply: Reply) -> None:
        self._now_s = now_s
        group = self._machine.groups.get(call.group)
        turn = self._turns.get(call.group)
        known = group is not None and call.member in group.members
        if turn is not None:
            coming = turn.joins.pop(call.member, None)
            if coming is not None:
                for each in coming.replies:
                    each(unknown_member(call.group, call.member))
            known = known or (turn.under_way is not None and call.member in turn.under_way.joins)
        if not known:
            self._deny(call, reply, lambda: self.leave(self._now_s, call, reply))
            return
        self._turn(call.group).leaves.setdefault(call.member, []).append(reply)
        self._hurry(call.group, now_s)

    def _assignment(self, group: Group, member: str) -> Assignment:
        topics = self._machine.topics
        told = group.assignment(member, topics)
        sealed = tuple(
            self._seals.grant(group.name, topics[each.topic].partitions[each.partition].group_id, each.generation)
            for each in told.grants
        )
        return msgspec.structs.replace(told, seals=sealed)

    # -- steps -------------------------------------------------------------------------------

    def _turn(self, group: str) -> _Turn:
        turn = self._turns.get(group)
        if turn is None:
            turn = self._turns[group] = _Turn()
        return turn

    def _hurry(self, group: str, due_s: float) -> None:
        """Let the group's next step be no later than this."""
        turn = self._turns[group]
        if due_s < turn.due_s:
            turn.due_s = due_s
            if turn.under_way is None:
                if due_s <= self._now_s:
                    self._step(group, turn)
                else:
                    heapq.heappush(self._due, (due_s, group))

    def _step(self, group: str, turn: _Turn) -> None:
        if turn.under_way is not None:
            return
        step = turn.under_way = turn.take()
        turn.due_s = self._now_s if len(turn) else NEVER
        if len(step):
            change = ChangeGroup(group, step.changes(), above=True, now_ms=self._wall_ms())
            self._propose(change, lambda answers: self._stepped(group, turn, step, answers))
        else:
            self._stepped(group, turn, step, ())

    def _stepped(self, name: str, turn: _Turn, step: _Turn, answers: Any) -> None:
        turn.under_way = None
        if isinstance(answers, RayQueueError):
            # Evictions and releases come again by themselves; whoever called is told.
            for reply in _waiting(step):
                reply(answers)
        else:
            self._take_answers(name, step, answers)
            self.settle(self._now_s)
        if not len(turn):
            self._turns.pop(name, None)
        elif turn.due_s <= self._now_s:
            self._step(name, turn)
        else:
            turn.due_s = min(turn.due_s, self._now_s + RETRY_S)
            heapq.heappush(self._due, (turn.due_s, name))

    def _take_answers(self, name: str, step: _Turn, answers: tuple[RayQueueError | None, ...]) -> None:
        group = self._machine.groups.get(name)
        refusals = dict(zip(step.joins, answers[len(step.leaves) + len(step.releases) :], strict=True))
        for replies in step.leaves.values():
            for reply in replies:
                reply(None)
        for member, joining in step.joins.items():
            answer: Any = refusals[member]
            if answer is None and (group is None or member not in group.members):
                answer = unknown_member(name, member)
            if answer is None and group is not None:
                self._enter(group, member, joining)
                answer = self._assignment(group, member)
            for reply in joining.replies:
                reply(answer)

    def _enter(self, group: Group, member: str, joining: _Joining) -> None:
        session = self._open(group, member)
        if joining.client is None:
            self._sessions.lost(self._now_s, session)
        else:
            self._sessions.heard(self._now_s, session, joining.client)

    def _open(self, group: Group, member: str) -> Session:
        wish = group.members[member].wish
        timeout_s = wish.session_timeout_ms / 1000
        return self._sessions.open(self._now_s, group.name, member, timeout_s, wish.instance is not None)

    def _open_missing(self, group: Group) -> None:
        for member in group.members:
            if self._sessions.get(group.name, member) is None:
                self._open(group, member)

    def settle(self, now_s: float) -> None:
        """Tell the members of groups that changed, as far as it concerns them."""
        self._now_s = now_s
        changed, self._changed = self._changed, {}
        for name in changed:
            group = self._machine.groups.get(name)
            if group is not None:
                self._open_missing(group)
            for session in self._sessions.of_group(name):
                member = None if group is None else group.members.get(session.member)
                if group is None or member is None:
                    parked = self._sessions.close(session)
                    if parked is not None:
                        parked.reply(unknown_member(name, session.member))
                elif session.parked is not None and member.changed_at > session.parked.generation:
                    parked, session.parked = session.parked, None
                    parked.reply(self._assignment(group, session.member))


def _waiting(step: _Turn) -> list[Reply]:
    joins = [reply for joining in step.joins.values() for reply in joining.replies]
    return joins + [reply for replies in step.leaves.values() for reply in replies]


def _check_id(kind: str, text: str) -> None:
    if not 1 <= len(text.encode("utf-8", "replace")) <= MAX_ID_BYTES or "\0" in text:
        raise InvalidInputError(f"a {kind} has 1 to {MAX_ID_BYTES} bytes and none of them is 0", key=kind)
