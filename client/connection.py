"""``rayqueue.connect``: from nothing to a handle of the running queue.

Owns how a process comes to Ray, to the RayQueue that runs on it, and, if there
is none, how one is started. ``RayQueue`` is what an application holds: it may be
passed into Ray tasks and actors, where it connects again when it is first used.
All handles of a process that mean the same queue share its connections.

A forked child of a process that is connected is not, and cannot be: whatever
it asks raises ``ForkedError`` (``rayqueue.client.forks``).

Closing a handle closes nothing but the handle. The queue itself outlives
whoever started it; ``RayQueue.shutdown`` ends it, and its data stays.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RaySystemError
from typing_extensions import Self, Unpack

from rayqueue.actors.names import COORDINATOR_PREFIX, STARTER
from rayqueue.actors.nodes import found_actors
from rayqueue.client import admin, local_ray
from rayqueue.client.arguments import check_path, check_text, hinted
from rayqueue.client.embedded import start_embedded_ray
from rayqueue.client.forks import forked, leave_ray_alone
from rayqueue.client.group_reset import GroupReset, Target, reset
from rayqueue.client.handles import Handles
from rayqueue.client.io import IoThread
from rayqueue.client.joining import check_current, current_ray, find_ray, join_ray
from rayqueue.client.lifecycle import stop_cluster
from rayqueue.client.readiness import Progress
from rayqueue.client.replicas import wait_for_answers
from rayqueue.client.router import ClusterRoutes
from rayqueue.client.waiting import telling
from rayqueue.config import Settings
from rayqueue.errors import (
    ClosedError,
    ClusterNotFoundError,
    ClusterStartError,
    ConfigError,
    InvalidInputError,
    RayQueueError,
)
from rayqueue.protocol.calls import ClusterInfo, DescribeCluster, GroupInfo
from rayqueue.protocol.topics import TopicInfo

if TYPE_CHECKING:
    from rayqueue.client.options import TopicChanges, TopicOptions

_log = logging.getLogger(__name__)

_ANSWERS_S = 5.0
_IO_END_S = 5.0
_LOOK_AGAIN_S = 0.1
_MARGIN_S = 90.0


@hinted
def connect(
    address: str | None = None,
    *,
    namespace: str | None = None,
    data_dir: Path | str | None = None,
    create: bool = True,
    settings: Settings | None = None,
) -> RayQueue:
    """The RayQueue of this Ray cluster; it is started if there is none.

    In a Ray task or actor, or after ``ray.init``: on that Ray. Otherwise on the Ray at ``address``; or on the
    one that ``ray.init()`` would find; or on a new one, that lives as long as this process. ``create=False`` starts
    nothing: ``ClusterNotFoundError``.

    ``data_dir`` is where each node keeps its data, if the queue has to be started. What is found there is continued.
    ``ConfigError`` if it runs already, on another directory.
    """
    _refuse_in_child()
    if address is not None:
        check_text("address", address)
    if settings is not None and not isinstance(settings, Settings):
        raise InvalidInputError(f"settings are rayqueue.Settings(...), not {type(settings).__name__}")
    settings = _merged(settings, namespace, data_dir)
    rq = _joined(address, settings, create=create)
    if data_dir is not None:
        _check_data_dir(settings)
    return rq


@hinted
async def connect_async(
    address: str | None = None,
    *,
    namespace: str | None = None,
    data_dir: Path | str | None = None,
    create: bool = True,
    settings: Settings | None = None,
) -> RayQueue:
    """The same for an async actor: its event loop goes on meanwhile."""
    return await asyncio.to_thread(
        connect, address, namespace=namespace, data_dir=data_dir, create=create, settings=settings
    )


class RayQueue(Handles):
    """A running queue. Made by ``connect``; may be pickled into tasks and actors of the same Ray."""

    def __init__(self, settings: Settings, ray_address: str | None = None) -> None:
        self.settings = settings
        self.namespace = settings.namespace
        self._ray_address = ray_address or current_ray()
        self._shared: _Shared | None = None
        self._closed = False
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return RayQueue, (self.settings, self._ray_address)

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        return f"RayQueue(namespace={self.namespace!r}, ray={self._ray_address!r}{closed})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- for producers, consumers and everything else that is made from this ------------------

    @property
    def io(self) -> IoThread:
        """The thread of this process's connections."""
        return self._connected().io

    @property
    def routes(self) -> ClusterRoutes:
        """The cluster as this process sees it. Belongs to the thread of ``io``."""
        return self._connected().routes

    def _connected(self) -> _Shared:
        shared = self._shared
        if shared is None or not shared.usable:
            _refuse_in_child()
            with self._lock:
                if self._closed:
                    raise ClosedError("this connection was closed; connect again")
                if not ray.is_initialized():
                    found = find_ray(self._ray_address, self.settings.data_dir)
                    if found is None:
                        raise ClusterNotFoundError("no Ray runs here, and none was to be started")
                    join_ray(found)
                shared = self._shared = _Shared.of(self.settings)
        return shared

    def close(self) -> None:
        """Let go of it. The queue goes on, and so do the connections that other handles share."""
        if _in_child:  # they are the parent's, and another thread of it may have held the lock
            self._closed = True
            return
        with self._lock:
            shared, self._shared, self._closed = self._shared, None, True
        if shared is not None:
            shared.let_go()

    @hinted
    def shutdown(self, *, on_progress: Progress | None = None) -> None:
        """End the queue, for everybody: every replica in good order. The data stays; connect again to continue.

        ``on_progress`` is told how many replicas have been closed, of how many.
        """
        _refuse_in_child()
        stop_cluster(self.namespace, on_progress)
        _Shared.end_all(self.namespace)
        self.close()

    # -- topics ---------------------------------------------------------------------------------

    @hinted
    def create_topic(
        self,
        name: str,
        *,
        if_missing: bool = False,
        wait: bool = True,
        on_progress: Progress | None = None,
        **settings: Unpack[TopicOptions],
    ) -> TopicInfo:
        """Make a topic; the settings are those of ``TopicSettings``. Returns once every partition has a leader.

        ``TopicExistsError`` if there is one of this name, unless ``if_missing``: then it is taken as it is, and
        ``TopicDiffersError`` says in which of the settings that were given here it differs.
        """
        return admin.create_topic(self, name, settings, if_missing=if_missing, wait=wait, on_progress=on_progress)

    @hinted
    def topics(self, *, include_internal: bool = False) -> list[TopicInfo]:
        """All topics, by name. Those that RayQueue has made for itself (the bridges' staging topics) if asked for."""
        return admin.topics(self, include_internal=include_internal)

    @hinted
    def alter_topic(
        self,
        name: str,
        *,
        wait: bool = True,
        on_progress: Progress | None = None,
        **changes: Unpack[TopicChanges],
    ) -> TopicInfo:
        """More partitions, other retention, other limits."""
        return admin.alter_topic(self, name, changes, wait=wait, on_progress=on_progress)

    def delete_topic(self, name: str) -> bool:
        """Delete a topic with its records. False if there is none."""
        return admin.delete_topic(self, name)

    # -- groups and brokers -----------------------------------------------------------------------

    def groups(self) -> list[GroupInfo]:
        """All consumer groups, by name."""
        return admin.groups(self)

    def group(self, name: str) -> admin.GroupDescription:
        """A group's members, and how far it is in each partition."""
        return admin.group(self, name)

    def delete_group(self, name: str) -> bool:
        """Forget a group without members, and its positions. False if there is none."""
        return admin.delete_group(self, name)

    @hinted
    def reset_group(
        self,
        name: str,
        *,
        to: Literal["earliest", "latest"] | int | None = None,
        to_time_ms: int | None = None,
        by: int | None = None,
        topic: str | None = None,
        partitions: Iterable[int] | None = None,
        dry_run: bool = False,
    ) -> GroupReset:
        """Move the positions of a group without members (``GroupNotEmptyError``), and say from where to where.

        ``to`` the beginning, the end, or an offset; ``to_time_ms``: to the first record that is not older; ``by`` so
        many offsets, forward or back. Of one topic, also where the group has no position yet, or of all partitions in
        which it has one. What lies outside the log becomes its beginning or end. ``dry_run`` changes nothing.

        If a consumer joins meanwhile, the positions that were not moved by then stay: ``ResetIncompleteError``.
        """
        target = Target.of(to, to_time_ms, by)
        return reset(self, name, target, topic=topic, partitions=partitions, dry_run=dry_run)

    def cluster(self) -> ClusterInfo:
        """Brokers, and how many topics, partitions and groups there are."""
        return self._ask_cluster(self.settings.client.call_timeout_ms)

    def _ask_cluster(self, timeout_ms: int) -> ClusterInfo:
        call = self.routes.coordinator.call(DescribeCluster(), timeout_ms=timeout_ms)
        return self.io.call(call)  # type: ignore[no-any-return]


class _Shared:
    """The connections of this process to one queue, for all handles that mean the same."""

    _all: dict[tuple[str, Settings], _Shared] = {}  # noqa: RUF012  # the process's own
    _all_lock = threading.Lock()

    def __init__(self, key: tuple[str, Settings]) -> None:
        self._key = key
        self._users = 0
        self._ended = False
        self._pid = os.getpid()
        self.io = IoThread.shared()
        settings = key[1]
        self.routes: ClusterRoutes = self.io.call(_make(settings))

    @classmethod
    def of(cls, settings: Settings) -> _Shared:
        key = (current_ray() or "", settings)
        with cls._all_lock:
            shared = cls._all.get(key)
            if shared is None or not shared.usable:
                shared = cls._all[key] = cls(key)
            shared._users += 1
            return shared

    def let_go(self) -> None:
        with self._all_lock:
            self._users -= 1
            if self._users or self._all.get(self._key) is not self:
                return
            del self._all[self._key]
        self._end()

    @property
    def usable(self) -> bool:
        return not self._ended and self.io.usable and self._pid == os.getpid()

    @classmethod
    def end_all(cls, namespace: str | None = None) -> None:
        """Close what all handles of this process share, of one queue or of all. A handle connects again when used.

        Nothing of it may ask Ray for anything when Ray is shut down: Ray would end the process.
        """
        with cls._all_lock:
            ending = [each for key, each in cls._all.items() if namespace in (None, key[1].namespace)]
            for each in ending:
                del cls._all[each._key]
        for each in ending:
            each._end()

    def _end(self) -> None:
        if self.usable:
            self._ended = True
            self.io.call(self.routes.close())
            wait_for_answers(_ANSWERS_S)


async def _make(settings: Settings) -> ClusterRoutes:
    return ClusterRoutes(settings.namespace, settings)  # in the thread that it belongs to


_in_child = False
"""This process was forked from one that was connected with Ray."""


def _refuse_in_child() -> None:
    if _in_child:
        raise forked("the connection with Ray")


def _after_fork() -> None:
    global _in_child
    # Another thread may have held the lock.
    _Shared._all_lock = threading.Lock()
    _Shared._all = {}
    if ray.is_initialized():
        _in_child = True
        leave_ray_alone()


os.register_at_fork(after_in_child=_after_fork)


def _at_exit() -> None:
    _Shared.end_all()
    IoThread.end_shared(_IO_END_S)  # a thread in foreign code while the interpreter is taken down may end it by abort()


atexit.register(_at_exit)  # the last registered runs first: before Ray ends, whose were registered at its import


# -- to RayQueue --------------------------------------------------------------------------------


def _merged(settings: Settings | None, namespace: str | None, data_dir: Path | str | None) -> Settings:
    changes: dict[str, Any] = {}
    if namespace is not None:
        if not check_text("namespace", namespace):
            raise ConfigError(f"namespace (argument): should be a text, not {namespace!r}")
        changes["namespace"] = namespace
    if data_dir is not None:
        changes["data_dir"] = check_path("data_dir", data_dir).expanduser().absolute()
    return _with_changes(settings or Settings(), changes)


def _with_changes(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    return settings.model_copy(update=dict(changes)) if changes else settings


def _joined(address: str | None, settings: Settings, *, create: bool) -> RayQueue:
    """On a Ray that is there; or else on a new one, which others who want the same data then find."""
    if ray.is_initialized():
        check_current(address)
        return _found_or_started(settings, create=create, own_ray=False)
    found = find_ray(address, settings.data_dir)
    if found is not None:
        join_ray(found)
        return _found_or_started(settings, create=create, own_ray=False)
    if not create:
        raise ClusterNotFoundError("no Ray runs here, and none was to be started")
    patience_ms = settings.cluster.start_timeout_ms + int(_MARGIN_S * 1000)
    with local_ray.starting(settings.data_dir, patience_ms):
        found = find_ray(address, settings.data_dir)  # another process may have started one meanwhile
        if found is not None:
            join_ray(found)
            return _found_or_started(settings, create=create, own_ray=False)
        with telling(lambda: "waiting for Ray to start on this machine"):
            start_embedded_ray()
        rq = _found_or_started(settings, create=create, own_ray=True)
        _leave_note(settings.data_dir)
        return rq


def _leave_note(data_dir: Path) -> None:
    pid = os.getpid()
    started, where = local_ray.process_started(pid), current_ray()
    if started is not None and where is not None:
        local_ray.leave(data_dir, local_ray.LocalRay(pid, started, where, None, command=False))
        atexit.register(_take_note_back, data_dir, pid)


def _take_note_back(data_dir: Path, pid: int) -> None:
    if pid == os.getpid():  # and not a forked child, whose parent's Ray goes on
        local_ray.forget(data_dir, pid)


def _found_or_started(settings: Settings, *, create: bool, own_ray: bool) -> RayQueue:
    rq = RayQueue(settings)
    _find_or_start(rq, create=create, own_ray=own_ray)
    return rq


def _find_or_start(rq: RayQueue, *, create: bool, own_ray: bool) -> None:
    """Until a coordinator answers. It may take a while if the cluster is being started, by us or by somebody else."""
    settings = rq.settings
    patience_ms = settings.cluster.start_timeout_ms
    deadline_s = time.monotonic() + patience_ms / 1000 + _MARGIN_S
    while not any(name.startswith(COORDINATOR_PREFIX) for name in found_actors(settings.namespace)):
        if not create:
            raise ClusterNotFoundError(
                f"no RayQueue runs in namespace {settings.namespace!r} of this Ray, and none was to be started"
            )
        with telling(lambda: f"waiting for the start of the queue in {settings.data_dir}: no coordinator leads yet"):
            if own_ray:
                from rayqueue.actors.starter import start_cluster  # late: most who connect start nothing

                start_cluster(settings)
            else:
                _start_by_actor(settings, deadline_s)
        if time.monotonic() > deadline_s:
            raise ClusterStartError("the cluster was started and is not there", missing=[])
    with telling(lambda: f"waiting for an answer of the coordinator in namespace {settings.namespace!r}"):
        rq._ask_cluster(patience_ms)


def _check_data_dir(settings: Settings) -> None:
    """Whoever names a directory means that one: the records of another would be a surprise."""
    wanted, namespace = settings.data_dir, settings.namespace
    asked = {}
    for name in found_actors(namespace):
        if name.startswith(COORDINATOR_PREFIX):
            with contextlib.suppress(ValueError):  # it went just now
                asked[ray.get_actor(name, namespace).data_dir.remote()] = name
    # One of them answered a moment ago, and all say the same.
    ready, _ = ray.wait(list(asked), timeout=_ANSWERS_S) if asked else ([], [])
    for ref in ready:
        try:
            running = Path(ray.get(ref))
        except RayActorError as error:
            _log.info("%s does not say where its data is: %s", asked[ref], error)
            continue
        if not {running, running.resolve()} & {wanted, wanted.resolve()}:
            raise ConfigError(
                f"the queue in namespace {namespace!r} of this Ray keeps its data in {running}, not in {wanted}: "
                f"leave data_dir out to use it; or end it first (rq.shutdown(), `rayqueue down`); "
                f"or run a second one in another namespace",
                running=str(running),
                wanted=str(wanted),
            )


def _start_by_actor(settings: Settings, deadline_s: float) -> None:
    from rayqueue.actors.starter import StarterActor

    problem: RayQueueError | None
    try:
        starter = StarterActor.options(  # type: ignore[attr-defined]
            name=STARTER, namespace=settings.namespace, get_if_exists=True, lifetime="detached"
        ).remote()
        problem = ray.get(starter.start.remote(settings), timeout=max(1.0, deadline_s - time.monotonic()))
    except GetTimeoutError:
        raise ClusterStartError("the cluster was not started in time", missing=[]) from None
    except (RayActorError, RaySystemError, ValueError) as error:
        # It was somebody else's, and went in this very moment. ValueError: between being found and being asked for.
        _log.info("starting the cluster is tried again: %s", error)
        time.sleep(_LOOK_AGAIN_S)
        return
    if problem is not None:
        raise problem
