"""Joining a Ray: the one that this process has, one at an address, one that runs here, or a new one.

Whoever names an address where no Ray answers is told so within seconds: Ray's
own attempt takes minutes. What Ray leaves in the environment of a process that
it starts or joins is taken back, so that nothing which that process starts
inherits it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import ray

from rayqueue.actors import _ray
from rayqueue.client import local_ray
from rayqueue.client.embedded import loopback_only, own_environment
from rayqueue.errors import ClusterNotFoundError, ConfigError

_log = logging.getLogger(__name__)

_DIAL_S = 2.0
_GREETING_S = 5.0
# What a gRPC client says first, and the kind of frame that every gRPC server answers it with (RFC 9113, 3.4).
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_FRAME_HEAD_BYTES, _KIND, _SETTINGS = 9, 3, 4


def find_ray(address: str | None, data_dir: Path | None) -> str | None:
    """The address of the Ray that is meant: ``address``, or the one that ``ray.init()`` would find, or the one that a
    program has started for this directory. None if a new one is meant, or none runs.
    """
    if address == "local":
        return None
    if address not in (None, "auto"):
        return address
    found = _running_ray() or _of_directory(data_dir)
    if found is None and address == "auto":
        raise ClusterNotFoundError("no Ray runs on this machine, and RAY_ADDRESS names none", address=address)
    return found


def check_current(address: str | None) -> None:
    """This process is connected with a Ray: ``ConfigError`` if another one is meant."""
    current = current_ray()
    if address not in (None, "auto", "local", current) and _ray.canonical_address(address) != current:
        raise ConfigError(f"this process is connected with the Ray at {current} already, not with {address}")


def current_ray() -> str | None:
    return ray.get_runtime_context().gcs_address if ray.is_initialized() else None


def own_node() -> str:
    """The id of the Ray node that this process is on; "" without a Ray."""
    return ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""


def join_ray(address: str) -> None:
    """Connect with the Ray at this address. ``ClusterNotFoundError`` says why not, within seconds."""
    problem = why_unreachable(address)
    if problem is not None:
        raise ClusterNotFoundError(
            f"no Ray answers at {address}: {problem}. `ray start --head` and `rayqueue up` print where theirs is; "
            "without address= (and RAY_ADDRESS) the one that runs here is used, or a new one is started",
            address=address,
        )
    with own_environment():
        _ray.forget_token_mode()
        if not _ray.lets_in(address):
            _ray.show_token()
            if not _ray.lets_in(address):
                raise _another_token(address)
        try:
            with _by_loopback(address):
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            _joined.append(address)
        except (ConnectionError, OSError, ValueError, RuntimeError) as error:
            raise ClusterNotFoundError(f"no Ray can be reached at {address}: {error}", address=address) from error


_joined: list[str] = []


def leave_joined_ray() -> None:
    """Let go of the Ray that ``join_ray`` has joined, if any. Nothing of this process may ask Ray meanwhile."""
    if _joined:
        _joined.clear()
        ray.shutdown()


def _running_ray() -> str | None:
    """The one that ``ray.init()`` would find: of RAY_ADDRESS, or started by ``ray start`` on this machine."""
    told = os.environ.get("RAY_ADDRESS")
    if told and told not in ("auto", "local"):
        return told
    found = _ray.running_address()
    if found is None or why_unreachable(found) is not None:
        return None  # the file outlives a Ray that was killed
    return found


def _of_directory(data_dir: Path | None) -> str | None:
    found = None if data_dir is None else local_ray.find(data_dir)
    if found is None or why_unreachable(found.address) is not None:
        return None
    _log.info("joining the Ray of process %d, which has the data in %s", found.pid, data_dir)
    return found.address


def why_unreachable(address: str) -> str | None:
    """None if a gRPC server answers there, as every Ray's does. Takes some seconds at most, also for a name."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return "an address is HOST:PORT"
    outcome: list[str | None] = []
    asking = threading.Thread(target=lambda: outcome.append(_greet(host.strip("[]"), int(port))), daemon=True)
    asking.start()  # in a thread, because looking up a name has no timeout
    asking.join(_DIAL_S + _GREETING_S)
    return outcome[0] if outcome else f"no answer within {_DIAL_S + _GREETING_S:.0f} s"


def _greet(host: str, port: int) -> str | None:
    try:
        with socket.create_connection((host, port), _DIAL_S) as dialled:
            if os.environ.get("RAY_USE_TLS", "0") not in ("0", "false"):
                return None  # it greets only those who can prove who they are
            dialled.settimeout(_GREETING_S)
            dialled.sendall(_HTTP2_HELLO)
            answer = b""
            while len(answer) < _FRAME_HEAD_BYTES:
                got = dialled.recv(_FRAME_HEAD_BYTES - len(answer))
                if not got:
                    return "what listens there is no Ray"
                answer += got
            return None if answer[_KIND] == _SETTINGS else "what listens there is no Ray"
    except (OSError, OverflowError, UnicodeError) as error:
        return str(error) or type(error).__name__


@contextlib.contextmanager
def shown_token() -> Iterator[None]:
    """Let processes that are started in this block join the Ray of this process: they get its token."""
    with own_environment():
        if _ray.asks_for_token():
            os.environ["RAY_AUTH_MODE"] = "token"
        yield


def _another_token(address: str) -> ClusterNotFoundError:
    return ClusterNotFoundError(
        f"the Ray at {address} does not let this process in: it has another token, and may be another user's. "
        f'Say which Ray is meant (address=; "local" is a new one), or where its token is (RAY_AUTH_TOKEN_PATH)',
        address=address,
    )


def _by_loopback(address: str) -> contextlib.AbstractContextManager[None]:
    """Ray takes a loopback address for this machine's other one. A Ray like ours listens on loopback only."""
    outside = _ray.canonical_address(address)
    if outside not in (None, address) and why_unreachable(outside) is not None:
        return loopback_only()
    return contextlib.nullcontext()
