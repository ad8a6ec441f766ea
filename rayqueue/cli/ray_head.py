"""A Ray for `rayqueue up`, on this machine, that outlives the command.

Owns the process of that Ray: how it is started (loopback only, token
authentication, the settings of ``rayqueue.client.embedded``), the file in the
data directory that says where it is, and its end. It ends no process but that
one, whose children Ray itself ends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rayqueue.client import local_ray
from rayqueue.client.local_ray import LocalRay, process_started
from rayqueue.errors import ClusterNotFoundError

if TYPE_CHECKING:
    from rayqueue.config import Settings

_START_S = 60.0
_STOP_S = 40.0
_TOKEN_S = 60.0
_LOOK_S = 0.1
_READY = b"block forever"
"""What `ray start --block` says when it has started everything."""


def find(settings: Settings) -> LocalRay | None:
    """The Ray of this machine that serves this data directory, if it still runs: of `rayqueue up`, or a program's."""
    return local_ray.find(settings.data_dir)


def address_of(settings: Settings, address: str | None) -> str | None:
    """The Ray to connect to: as told, or that of this data directory. None lets Ray look."""
    if address is not None:
        return address
    head = find(settings)
    return None if head is None else head.address


def start(settings: Settings, *, dashboard_port: int | None) -> LocalRay:
    """Start it, and return once it answers."""
    from rayqueue.client.embedded import RAY_SYSTEM_SETTINGS
    from rayqueue.client.joining import why_unreachable
    from rayqueue.config import MIB
    from rayqueue.log.private import make_directory, opener

    make_directory(settings.data_dir)
    port, client_port = _free_ports(2)
    log_path = settings.data_dir / "ray.log"
    command = [
        str(Path(sys.executable).with_name("ray")),
        "start",
        "--head",
        "--block",
        "--disable-usage-stats",
        "--node-ip-address=127.0.0.1",
        f"--port={port}",
        f"--ray-client-server-port={client_port}",
        "--min-worker-port=0",
        "--max-worker-port=0",
        "--dashboard-agent-listen-port=0",
        "--dashboard-host=127.0.0.1",
        f"--include-dashboard={str(dashboard_port is not None).lower()}",
        f"--object-store-memory={256 * MIB}",
        f"--system-config={json.dumps(RAY_SYSTEM_SETTINGS)}",
    ]
    if dashboard_port is not None:
        command.append(f"--dashboard-port={dashboard_port}")
    environment = os.environ | {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # see rayqueue.client.embedded: loopback only
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token"),
    }
    if environment["RAY_AUTH_MODE"] == "token":
        see_to_token(environment)
    # Anew: what an earlier Ray said must not be taken for this one's.
    with open(log_path, "wb", opener=opener) as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    dashboard = None if dashboard_port is None else f"http://127.0.0.1:{dashboard_port}"
    head = LocalRay(process.pid, process_started(process.pid) or "", f"127.0.0.1:{port}", dashboard)
    deadline_s = time.monotonic() + _START_S
    while _READY not in log_path.read_bytes() or why_unreachable(head.address) is not None:
        if process.poll() is not None or time.monotonic() > deadline_s:
            stop(settings, head)
            raise ClusterNotFoundError(f"Ray did not start; {log_path} says why", path=str(log_path))
        time.sleep(_LOOK_S)
    local_ray.leave(settings.data_dir, head)
    return head


def see_to_token(environment: Mapping[str, str]) -> None:
    """Ray's token is there. `ray start` takes one and makes none, unlike `ray.init`."""
    if environment.get("RAY_AUTH_TOKEN") or environment.get("RAY_AUTH_TOKEN_PATH"):
        return  # Ray says itself what is wrong with these
    token = Path(environment.get("HOME") or Path.home()) / ".ray" / "auth_token"
    if token.is_file() and token.stat().st_size:
        return
    command = [str(Path(sys.executable).with_name("ray")), "get-auth-token", "--generate"]
    made = subprocess.run(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        umask=0o077,  # Ray itself leaves it readable for everybody
        timeout=_TOKEN_S,
        check=False,
    )
    if made.returncode:
        raise ClusterNotFoundError(f"Ray's token {token} cannot be made: {made.stderr.decode(errors='replace')}")


def stop(settings: Settings, head: LocalRay) -> None:
    """End the Ray that ``start`` started, and all that runs on it."""
    if process_started(head.pid) == head.started:
        os.kill(head.pid, signal.SIGTERM)
    deadline_s = time.monotonic() + _STOP_S
    while process_started(head.pid) == head.started and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)
    local_ray.forget(settings.data_dir, head.pid)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
