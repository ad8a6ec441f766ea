"""``rayqueue.connect``: from nothing to a handle of the running queue.

Owns how a process comes to Ray, to the RayQueue that runs on it, and, if there
is none, how one is started.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RaySystemError

from rayqueue.actors.keeper.nodes import found_actors
from rayqueue.actors.names import COORDINATOR_PREFIX, STARTER
from rayqueue.client import local_ray
from rayqueue.client.arguments import check_path, check_text
from rayqueue.client.embedded import start_embedded_ray
from rayqueue.client.handle import RayQueue
from rayqueue.client.joining import check_current, current_ray, find_ray, join_ray
from rayqueue.client.shared import refuse_in_child
from rayqueue.client.twins import awaiting, beside, blocking
from rayqueue.client.waiting import telling
from rayqueue.config import Settings
from rayqueue.errors import (
    ClusterNotFoundError,
    ClusterStartError,
    ConfigError,
    InvalidInputError,
    RayQueueError,
)

_log = logging.getLogger(__name__)

_ANSWERS_S = 5.0
_LOOK_AGAIN_S = 0.1
_MARGIN_S = 90.0


@blocking
async def connect(
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
    refuse_in_child()
    if address is not None:
        check_text("address", address)
    if settings is not None and not isinstance(settings, Settings):
        raise InvalidInputError(f"settings are rayqueue.Settings(...), not {type(settings).__name__}")
    settings = _merged(settings, namespace, data_dir)
    rq = await beside(_joined, address, settings, create=create)
    if data_dir is not None:
        await beside(_check_data_dir, settings)
    return rq


connect_async = awaiting(connect)


def _merged(settings: Settings | None, namespace: str | None, data_dir: Path | str | None) -> Settings:
    changes: dict[str, Any] = {}
    if namespace is not None:
        if not check_text("namespace", namespace):
            raise ConfigError(f"namespace (argument): should be a text, not {namespace!r}")
        changes["namespace"] = namespace
    if data_dir is not None:
        changes["data_dir"] = check_path("data_dir", data_dir).expanduser().absolute()
    settings = settings or Settings()
    return settings.model_copy(update=changes) if changes else settings


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
    """Once a coordinator answers. It may take a while if the cluster is being started, by us or by somebody else."""
    rq = RayQueue(settings)
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
        rq._wait_for_coordinator(patience_ms)
    return rq


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
