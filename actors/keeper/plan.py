"""The keeper's plan: the steps that make reality what the metadata says. Pure: looks at one picture, does nothing.

The picture is what the keeper has seen: brokers and the Ray node each is on
now, actors by name and the Ray node each is pinned to, and what the
coordinator's metadata wants. ``plan`` is asked again and again; a step that
failed, or is still under way (``busy``), needs no memory here.

What Ray 2.60 does with a detached actor that is pinned (hard affinity) to a
node, as tried (``docs/adr/0013``):

- Its process dies: it is restarted there, under its name, for ever.
- Its node dies. For as long as Ray has not noticed (up to 15 s by default), the
  actor counts as alive and its name is taken; calls fail with
  ``ActorUnavailableError``. Once Ray has noticed, it tries to restart the actor,
  finds that no node fits, and the actor is dead for ever, in spite of
  ``max_restarts=-1``; its name is free at once.
- The node comes back: it has another node id. An actor of the old id never
  moves. If it still has its name, ``ray.kill(no_restart=True)`` frees the name
  within milliseconds, even though nothing on the dead node hears it.

So a replica whose actor is pinned to another node than its broker's is
``Restart``-ed: killed and started anew. Two processes never have one replica's
data open at the same time, because the store is locked: the new one waits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rayqueue.ids import GroupId, ReplicaId


class ReplicaKey(NamedTuple):
    group_id: GroupId
    replica_id: ReplicaId


class Wanted(NamedTuple):
    """A replica that should run."""

    key: ReplicaKey
    broker: str
    unmade: bool
    """Its data was never made, so that making it now loses nothing."""


class Doomed(NamedTuple):
    """A replica of a topic that was deleted: neither its actor nor its data should be there."""

    key: ReplicaKey
    broker: str


class Behind(NamedTuple):
    """A partition that was not told its newest settings yet."""

    group_id: GroupId
    version: int


@dataclass(frozen=True, slots=True)
class Picture:
    brokers: Mapping[str, str]
    """Those alive, and the Ray node that each is on."""
    actors: Mapping[ReplicaKey, str | None]
    """Those that have a name in Ray, and the node that each is pinned to; None if that is not known yet."""
    wanted: Sequence[Wanted]
    doomed: Sequence[Doomed] = ()
    behind: Sequence[Behind] = ()
    busy: Collection[object] = ()
    """Keys of steps that are under way: replicas, and groups that are being configured."""


class Start(NamedTuple):
    key: ReplicaKey
    broker: str
    create: bool


class Restart(NamedTuple):
    """Its actor is pinned to a Ray node that is not its broker's any more."""

    key: ReplicaKey
    broker: str
    create: bool


class Confirm(NamedTuple):
    """Its actor is there; ask whether the data is made, and remember that. If it is not, start the actor anew:
    its process died before the data was made, and a restart by Ray may not make it."""

    key: ReplicaKey
    broker: str


class Remove(NamedTuple):
    """End the actor, if there is one; delete the data; remember that."""

    key: ReplicaKey
    broker: str


class Configure(NamedTuple):
    group_id: GroupId
    version: int


Step = Start | Restart | Confirm | Remove | Configure


def plan(picture: Picture) -> list[Step]:
    """The steps that can be taken now, in any order, at the same time."""
    steps: list[Step] = []
    for wanted in picture.wanted:
        step = _step_for(wanted, picture)
        if step is not None:
            steps.append(step)
    # The data of a broker that is away is deleted when it comes back.
    steps += [
        Remove(doomed.key, doomed.broker)
        for doomed in picture.doomed
        if doomed.key not in picture.busy and doomed.broker in picture.brokers
    ]
    steps += [
        Configure(behind.group_id, behind.version)
        for behind in picture.behind
        if behind.group_id not in picture.busy and any(key.group_id == behind.group_id for key in picture.actors)
    ]
    return steps


def _step_for(wanted: Wanted, picture: Picture) -> Step | None:
    here = picture.brokers.get(wanted.broker)
    if wanted.key in picture.busy or here is None:
        return None  # the broker is away: whatever has this name may still run there
    if wanted.key not in picture.actors:
        return Start(wanted.key, wanted.broker, wanted.unmade)
    pinned = picture.actors[wanted.key]
    if pinned is not None and pinned != here:
        return Restart(wanted.key, wanted.broker, wanted.unmade)
    return Confirm(wanted.key, wanted.broker) if wanted.unmade else None
