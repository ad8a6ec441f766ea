"""A rolling restart: the replicas of one broker stopped and started again, while the others serve.

One broker at a time. Nothing is stopped before every group that has a replica
there is whole without it: a majority of its voters runs elsewhere and has what
the leader has. Each replica that leads hands over first
(``ReplicaActor.close``), so that its group is without a leader for as long as
one round of votes takes. The broker is done when its replicas are back and
have caught up: then the next one may be stopped.

A group of one replica has nobody to hand over to: it is away for as long as its
process takes to start.

Where the whole node is to be stopped, ``hand_over`` does the first half: Ray ends
the processes of a node without asking them.

It blocks, on Ray; ``RayQueue.restart_broker`` and ``hand_over`` are the public calls.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from rayqueue.actors._ray import pinned_to
from rayqueue.actors.keeper.nodes import found_actors
from rayqueue.actors.names import PREFIX, STARTER
from rayqueue.client.admin.readiness import Progress
from rayqueue.errors import OutcomeUnknownError, RayQueueError, UnknownBrokerError, UnsafeRestartError
from rayqueue.ids import ReplicaId
from rayqueue.protocol.calls import Broker, ClusterInfo
from rayqueue.replica.status import Status

_log = logging.getLogger(__name__)

_ASK_S = 5.0
_STOP_S = 15.0
_AGAIN_S = 0.1
_NEAR_ENTRIES = 64
"""A replica that lacks no more than this of the leader's log has caught up, as far as a moving end can be reached."""


@dataclass(frozen=True, slots=True)
class BrokerRestart:
    """The course of a broker's restart."""

    broker: str
    replicas: int
    handed_over: int
    """Replicas that led a group of several, and of which another one leads now."""
    left_without: tuple[str, ...]
    """Groups that were without a leader until somebody noticed, or until the replica was back."""
    seconds: float


@dataclass(frozen=True, slots=True)
class HandOver:
    """The leaderships that a broker has handed over."""

    broker: str
    handed_over: int
    """Groups that others lead now."""
    still_leads: tuple[str, ...]
    """Groups that have all their copies on this broker: they stop with it."""


def alive_broker(info: ClusterInfo, name: str) -> Broker:
    """``UnknownBrokerError`` if it is not here."""
    here = [each for each in info.brokers if each.alive]
    for each in here:
        if each.broker == name:
            return each
    raise UnknownBrokerError(f"no broker {name!r} is here; {', '.join(each.broker for each in here)} are", broker=name)


def restart_broker(broker: Broker, namespace: str, timeout_s: float, on_progress: Progress | None) -> BrokerRestart:
    """``UnsafeRestartError`` if that is not safe within ``timeout_s``; ``OutcomeUnknownError`` if its replicas were
    stopped and are not back within as long."""
    began_s = time.monotonic()
    names = _on_node(broker.ray_node, namespace)
    handles = {name: ray.get_actor(name, namespace) for name in names}
    before = _wait_until_safe(handles, namespace, began_s + timeout_s, broker.broker)
    led = {name for name, status in before.items() if name in handles and status.role == "leader"}
    handed = _stop(handles)
    many = {name for name in led if len(before[name].voters) > 1}
    deadline_s = time.monotonic() + timeout_s
    _wait_until_back(handles, namespace, deadline_s, broker.broker, on_progress)
    return BrokerRestart(
        broker.broker,
        len(handles),
        sum(handed.get(name, False) for name in many),
        tuple(sorted(before[name].group_id for name in led if name not in many or not handed.get(name, False))),
        time.monotonic() - began_s,
    )


def hand_over(broker: Broker, namespace: str, timeout_s: float) -> HandOver:
    """Let others lead what this broker leads, so that its node can be stopped.

    ``UnsafeRestartError`` if groups cannot spare it, as with ``restart_broker``; ``OutcomeUnknownError`` if it still
    leads one after ``timeout_s`` that somebody else could lead.
    """
    deadline_s = time.monotonic() + timeout_s
    handles = {name: ray.get_actor(name, namespace) for name in _on_node(broker.ray_node, namespace)}
    found: Mapping[str, Status] = _wait_until_safe(handles, namespace, deadline_s, broker.broker)
    handed: set[str] = set()
    while True:
        leading = [name for name in handles if name in found and found[name].role == "leader"]
        # Where all copies are on this broker there is nobody else.
        alone = [name for name in leading if all(f"{_group(name)}/{each}" in handles for each in found[name].voters)]
        left = [name for name in leading if name not in alone]
        if not left:
            return HandOver(broker.broker, len(handed), tuple(sorted(found[name].group_id for name in alone)))
        if time.monotonic() > deadline_s:
            names = ", ".join(name.removeprefix(PREFIX) for name in sorted(left))
            raise OutcomeUnknownError(f"{broker.broker} still leads {names}", broker=broker.broker)
        for name, ref in [(name, handles[name].make_way.remote()) for name in left]:
            try:
                ray.get(ref, timeout=_ASK_S)
                handed.add(_group(name))
            except (RayError, RayQueueError, GetTimeoutError) as error:
                _log.info("%s does not make way yet: %s", name, error)
        found = _statuses(handles, namespace)


def _on_node(ray_node: str, namespace: str) -> list[str]:
    return [name for name in _replicas(namespace) if pinned_to(ray.get_actor(name, namespace)) == ray_node]


def _replicas(namespace: str) -> list[str]:
    return sorted(name for name in found_actors(namespace) if name.startswith(PREFIX) and name != STARTER)


def _group(name: str) -> str:
    return name.rpartition("/")[0]


def _statuses(names: Iterable[str], namespace: str) -> dict[str, Status]:
    """Of those that answer."""
    asked: dict[str, Any] = {}
    for name in names:
        try:
            asked[name] = ray.get_actor(name, namespace).status.remote()
        except ValueError:
            continue
    found: dict[str, Status] = {}
    deadline_s = time.monotonic() + _ASK_S
    for name, ref in asked.items():
        try:
            found[name] = ray.get(ref, timeout=max(0.0, deadline_s - time.monotonic()))
        except (RayError, RayQueueError, GetTimeoutError) as error:
            _log.debug("%s does not say how it is: %s", name, error)
    return found


def _wait_until_safe(
    handles: Mapping[str, Any], namespace: str, deadline_s: float, broker: str
) -> Mapping[str, Status]:
    """The statuses of all replicas of this broker's groups, once every such group can do without it."""
    groups = {_group(name) for name in handles}
    while True:
        found = _statuses([name for name in _replicas(namespace) if _group(name) in groups], namespace)
        unsafe: dict[str, str] = {}
        for group in sorted(groups):
            gone = {ReplicaId(name.rpartition("/")[2]) for name in handles if _group(name) == group}
            why = why_unsafe([each for name, each in found.items() if _group(name) == group], gone)
            if why is not None:
                unsafe[group.removeprefix(PREFIX)] = why
        if not unsafe:
            return found
        if time.monotonic() > deadline_s:
            told = "; ".join(f"{group}: {why}" for group, why in list(unsafe.items())[:5])
            raise UnsafeRestartError(
                f"{len(unsafe)} groups cannot do without broker {broker} now: {told}. Nothing was stopped",
                broker=broker,
                groups=list(unsafe),
            )
        time.sleep(_AGAIN_S)


def why_unsafe(statuses: Sequence[Status], leaving: Collection[ReplicaId]) -> str | None:
    """Why a group, whose replicas say this, cannot spare those that are ``leaving``; None if it can.

    Where most of its copies are on one broker, or it has only one, it can never: that is its operator's choice.
    """
    leader = max((each for each in statuses if each.role == "leader"), key=lambda each: each.term, default=None)
    if leader is None:
        return "nobody leads"
    voters = set(leader.voters)
    if 2 * len(voters - set(leaving)) <= len(voters):
        return None
    able = [
        each.replica_id
        for each in statuses
        if each.replica_id in voters.difference(leaving)
        and each.damaged is None
        and leader.commit - each.commit <= _NEAR_ENTRIES
    ]
    if 2 * len(able) > len(voters):
        return None
    return f"only {', '.join(sorted(able)) or 'none'} of {', '.join(sorted(voters))} would be left with everything"


def _stop(handles: Mapping[str, Any]) -> dict[str, bool]:
    """All of them at the same time; each hands over, closes, and is ended. Whether nobody was left without a leader."""
    closing = {handle.close.remote(hand_over=True): name for name, handle in handles.items()}
    handed: dict[str, bool] = {}
    deadline_s = time.monotonic() + _STOP_S
    while closing and time.monotonic() < deadline_s:
        for ref in ray.wait(list(closing), timeout=max(0.0, deadline_s - time.monotonic()))[0]:
            name = closing.pop(ref)
            try:
                handed[name] = ray.get(ref)
            except (RayError, RayQueueError) as error:
                _log.warning("%s was not closed in good order: %s", name, error)
            # It is started again at once, not only when the last one has closed.
            ray.kill(handles[name], no_restart=False)
    for name in closing.values():
        _log.warning("%s was not closed in time", name)
        ray.kill(handles[name], no_restart=False)
    return handed


def _wait_until_back(
    handles: Mapping[str, Any], namespace: str, deadline_s: float, broker: str, on_progress: Progress | None
) -> None:
    groups = {_group(name) for name in handles}
    while True:
        found = _statuses([name for name in _replicas(namespace) if _group(name) in groups], namespace)
        commits: dict[str, int] = {}
        for name, status in found.items():
            if status.role == "leader":
                commits[_group(name)] = max(commits.get(_group(name), 0), status.commit)
        back = [
            name
            for name in handles
            if name in found and _group(name) in commits and commits[_group(name)] - found[name].commit <= _NEAR_ENTRIES
        ]
        if on_progress is not None:
            on_progress(len(back), len(handles))
        if len(back) == len(handles):
            return
        if time.monotonic() > deadline_s:
            missing = sorted(handles.keys() - set(back))
            raise OutcomeUnknownError(
                f"{len(missing)} of the {len(handles)} replicas of broker {broker} were stopped and are not back yet: "
                f"{', '.join(name.removeprefix(PREFIX) for name in missing[:5])}; they are started again and again",
                broker=broker,
            )
        time.sleep(_AGAIN_S)
