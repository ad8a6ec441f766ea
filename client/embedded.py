"""A Ray of our own on this machine, for whoever has none running.

Owns how that Ray is started: on loopback only, without dashboard, with its own
temporary directory, and with the few of Ray's internal settings that only the
one who starts it can choose. On a Ray that somebody else started everything
works too, only slower where these settings matter.

It does not know what runs on that Ray.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray

from rayqueue.actors._ray import forget_token_mode, one_machine
from rayqueue.config import MIB
from rayqueue.errors import ClusterStartError

RAY_SYSTEM_SETTINGS = {
    # Arguments and results up to this size travel inside the call. Ray's default, 100 KB, is just below a batch of
    # 1,000 records of 100 bytes; what is larger makes a detour through the object store, which doubles its cost.
    "max_direct_call_object_size": MIB + MIB // 4,
    # Ray tells the caller of a process that died only after it has waited this long for the cause of death,
    # and looks at its list of such calls at this interval: 1 to 2 seconds by default.
    "timeout_ms_task_wait_for_death_info": 10,
    "core_worker_internal_heartbeat_ms": 100,
    # Ray's workers, and so the replicas, give way to every other process of the machine (nice 15). A log that everybody
    # waits for must not be the last to run.
    "worker_niceness": 0,
}

_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_USAGE_STATS = "RAY_USAGE_STATS_ENABLED"


@contextlib.contextmanager
def embedded_ray(
    *, cpus: int = 2, object_store_bytes: int = 128 * MIB, system_settings: Mapping[str, Any] = RAY_SYSTEM_SETTINGS
) -> Iterator[None]:
    """Ray, for as long as the block lasts: the one this process is connected with, or else a new one."""
    if ray.is_initialized():
        yield
        return
    temporary, pid = _start(cpus, object_store_bytes, system_settings), os.getpid()
    try:
        yield
    finally:
        _stop(temporary, pid)


def start_embedded_ray(
    *, cpus: int | None = None, object_store_bytes: int = 128 * MIB, namespace: str | None = None
) -> None:
    """A new Ray, for as long as this process lives."""
    temporary = _start(cpus or max(2, os.cpu_count() or 1), object_store_bytes, RAY_SYSTEM_SETTINGS, namespace)
    _until_exit.append((temporary, os.getpid()))


_until_exit: list[tuple[Path, int]] = []


def _at_exit() -> None:
    for temporary, pid in _until_exit:
        _stop(temporary, pid)


# When this module is imported, not when a Ray is started: the last registered runs first, and whoever asks Ray imports
# this one before it registers how it ends.
atexit.register(_at_exit)


def _start(
    cpus: int, object_store_bytes: int, system_settings: Mapping[str, Any], namespace: str | None = None
) -> Path:
    # Short, because the paths of Ray's sockets must stay below 108 bytes.
    temporary = Path(tempfile.mkdtemp(prefix="rayqueue-"))
    inner = temporary / "r"  # Ray opens its directory to everybody; mkdtemp's is ours alone, and stays around it
    try:
        with own_environment(), loopback_only():
            ray.init(
                address="local",
                num_cpus=cpus,
                namespace=namespace,
                object_store_memory=object_store_bytes,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(inner),
                _system_config=dict(system_settings),
            )
    except Exception as error:
        _stop(temporary, os.getpid())
        raise ClusterStartError(f"Ray could not be started on this machine: {error}", missing=[]) from error
    except BaseException:
        _stop(temporary, os.getpid())
        raise
    return temporary


def _stop(temporary: Path, pid: int) -> None:
    if pid != os.getpid():
        return  # a forked child ends; its parent's Ray does not
    ray.shutdown()
    forget_token_mode()
    shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def own_environment() -> Iterator[None]:
    """Take back, after the block, the variables that Ray sets in this process while it is started or joined.

    The processes of the Ray that was started have it; whatever else this process starts must not.
    """
    before = {name: value for name, value in os.environ.items() if _is_rays(name)}
    try:
        yield
    finally:
        for name in [name for name in os.environ if _is_rays(name) and name not in before]:
            del os.environ[name]
        os.environ.update(before)


def _is_rays(name: str) -> bool:
    return name.startswith("RAY_") or name == "PYTHONBREAKPOINT"


@contextlib.contextmanager
def loopback_only() -> Iterator[None]:
    """A Ray that is started in this block is reachable from this machine only, and reports to nobody.

    This process learns it from a variable of Ray's, the processes that it starts from the environment.
    """
    wanted = {_LOOPBACK: "0", _USAGE_STATS: "0"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        with one_machine():
            yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
