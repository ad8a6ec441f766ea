"""Gateway: the listeners, and everything that they share, in one event loop.

``Gateway`` belongs to a loop; ``GatewayThread`` gives it one of its own. Neither
knows Ray: a test runs them on a queue in memory.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import secrets
import ssl
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import uvicorn

from rayqueue.client.handle import RayQueue
from rayqueue.config import GatewaySettings
from rayqueue.errors import ConfigError, RayQueueError
from rayqueue.gateway.audit import Audit
from rayqueue.gateway.draining import Draining
from rayqueue.gateway.keys import KeyStore, KeyWatch
from rayqueue.gateway.limits import Limits
from rayqueue.gateway.operations import Operations
from rayqueue.gateway.overview import Looking
from rayqueue.gateway.queues import Queues
from rayqueue.gateway.requests import Requests
from rayqueue.gateway.rest.connections import TlsServer, protocol_of
from rayqueue.gateway.rest.serving import make_app
from rayqueue.gateway.rpc.serving import RpcServer
from rayqueue.gateway.sessions import Sessions

_log = logging.getLogger(__name__)

_START_S = 30.0
_END_S = 2.0
_LEAVE_S = 15.0
"""For sessions to leave their groups, and for whatever else is closed."""


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_bind(settings: GatewaySettings, *, keys: bool) -> None:
    """``ConfigError`` says what is missing before others than this machine may reach it."""
    if is_loopback(settings.host):
        return
    missing = []
    if settings.tls_cert_path is None:
        missing.append("TLS (gateway.tls_cert_path and gateway.tls_key_path)")
    if not keys:
        missing.append("a key (`rayqueue keys create NAME --grant publish:topic:orders`)")
    if missing:
        raise ConfigError(
            f"the gateway does not listen on {settings.host!r}, where others can reach it, without "
            f"{' and '.join(missing)}; or let it listen on 127.0.0.1"
        )


def tls_of(settings: GatewaySettings) -> ssl.SSLContext | None:
    """``ConfigError`` if its files cannot be used."""
    if settings.tls_cert_path is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.tls_cert_path, settings.tls_key_path)
    except OSError as error:  # ssl.SSLError is one, too
        raise ConfigError(f"{settings.tls_cert_path} and its key cannot be used: {error}") from None
    return context


def stops_within_s(settings: GatewaySettings) -> float:
    """What is under way may take the time to drain, and what was accepted as long again until it is written."""
    return settings.drain_timeout_ms / 1000 * 2 + _LEAVE_S


class Gateway:
    """From ``start`` to ``stop``."""

    def __init__(self, rq: RayQueue, settings: GatewaySettings, *, gateway_id: str | None = None) -> None:
        self.settings = settings
        self.gateway_id = gateway_id or f"g{secrets.token_hex(4)}"
        """Another one for each life of a gateway: sessions of an earlier one are gone."""
        self.drain = Draining()
        self._rq = rq
        self.limits = Limits(settings, time.monotonic)
        self.keys = KeyWatch(rq, stale_s=settings.keys_stale_ms / 1000, open_without=is_loopback(settings.host))
        self.audit = Audit(rq, self.gateway_id)
        self._sessions = Sessions(rq, self.gateway_id, settings, self.limits.streams)
        self._requests = Requests(rq, settings)
        self.operations = Operations(
            rq,
            settings,
            limits=self.limits,
            sessions=self._sessions,
            requests=self._requests,
            audit=self.audit,
            now_ms=lambda: int(time.time() * 1000),
            again=self.keys.again,
            drain=self.drain,
        )
        self.looking = Looking(rq, settings)
        self.queues = Queues(rq, self.gateway_id, self.operations, self._requests, self.audit)
        self._http: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._rpc = RpcServer(self)
        self.rest_port = 0

    async def start(self) -> None:
        """``ConfigError`` if it would be open to others. Returns once it listens, and has read the keys."""
        if not is_loopback(self.settings.host):
            store = KeyStore(self._rq)
            check_bind(self.settings, keys=len(await asyncio.to_thread(store.ring)) > 0)
        await self.keys.start()
        await self._sessions.start()
        await self.audit.start()
        await self.operations.start()
        await self._start_rest()
        await self._rpc.start()
        deadline_s = time.monotonic() + _START_S
        while not self.keys.ready and time.monotonic() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def _start_rest(self) -> None:
        settings = self.settings
        config = uvicorn.Config(
            make_app(self),
            host=settings.host,
            port=settings.rest_port,
            http=protocol_of(settings, self.limits.connections),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=settings.idle_timeout_ms // 1000 or 1,
            timeout_graceful_shutdown=settings.drain_timeout_ms / 1000,  # type: ignore[arg-type]  # it may be less than 1
        )
        tls = tls_of(settings)
        if tls is None:
            server = self._http = uvicorn.Server(config)
        else:
            server = self._http = TlsServer(config, tls, settings.slow_timeout_ms / 1000)
        self._serving = asyncio.get_running_loop().create_task(_serve(server))
        deadline_s = time.monotonic() + _START_S
        while not server.started:
            if self._serving.done() or time.monotonic() > deadline_s:
                raise ConfigError(f"REST cannot listen on {settings.host}:{settings.rest_port}: is the port taken?")
            await asyncio.sleep(0.01)
        self.rest_port = server.servers[0].sockets[0].getsockname()[1]

    @property
    def draining(self) -> bool:
        return self.drain.begun

    @property
    def grpc_port(self) -> int:
        return self._rpc.port

    @property
    def address(self) -> dict[str, Any]:
        scheme = "https" if self.settings.tls_cert_path is not None else "http"
        return {
            "gateway": self.gateway_id,
            "rest": f"{scheme}://{self.settings.host}:{self.rest_port}",
            "grpc": f"{self.settings.host}:{self.grpc_port}",
        }

    async def ended(self, stopping: asyncio.Event) -> None:
        """Until it is to be stopped, or a listener has ended by itself."""
        assert self._serving is not None  # noqa: S101  # it was started
        told = asyncio.ensure_future(stopping.wait())
        await asyncio.wait((told, self._serving), return_when=asyncio.FIRST_COMPLETED)
        told.cancel()

    async def stop(self) -> None:
        """In good order: no new requests; those that wait are answered at once, those at work if they end within
        ``drain_timeout_ms``; sessions leave their groups."""
        self.drain.begin()
        self._sessions.hurry()
        rpc = asyncio.ensure_future(self._rpc.stop())
        if self._http is not None and self._serving is not None:
            self._http.should_exit = True
            with suppress(asyncio.CancelledError):
                await self._serving
        await rpc
        for part in (self._sessions, self._requests, self.operations, self.audit, self.keys):
            try:
                await part.close()
            except RayQueueError as error:
                _log.warning("at the gateway's end: %s", error)


async def _serve(server: uvicorn.Server) -> None:
    """Without uvicorn's signal handlers: the process is not its own."""
    try:
        await server._serve()
    except SystemExit:
        _log.error("REST cannot listen")


async def _ended(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Calls that were cut off when the time to drain was over: what they hold is closed by themselves."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_END_S)


class GatewayThread:
    """A gateway in a thread with an event loop of its own."""

    def __init__(self, rq: RayQueue, settings: GatewaySettings, *, gateway_id: str | None = None) -> None:
        self._rq = rq
        self._settings = settings
        self._gateway_id = gateway_id
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._started = threading.Event()
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="rayqueue gateway", daemon=True)
        self.gateway: Gateway | None = None

    def start(self) -> Gateway:
        self._thread.start()
        self._started.wait()
        if self._problem is not None:
            raise self._problem
        assert self.gateway is not None  # noqa: S101  # or there is a problem
        return self.gateway

    def stop(self) -> None:
        """Drained; may be repeated."""
        if self._loop is not None and self._stopping is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(stops_within_s(self._settings))

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def __enter__(self) -> Gateway:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _main(self) -> None:
        try:
            import uvloop

            loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        except ImportError:
            loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(self._live())
        except BaseException as error:  # noqa: BLE001  # told by start
            self._problem = error
        finally:
            self._started.set()
            loop.run_until_complete(_ended(asyncio.all_tasks(loop)))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        gateway = Gateway(self._rq, self._settings, gateway_id=self._gateway_id)
        try:
            await gateway.start()
            self.gateway = gateway
            self._started.set()
            await gateway.ended(self._stopping)
        finally:
            await gateway.stop()
