"""Serving: how a request is let in, read, carried out and answered; the same for every route.

In this order: the address's share of requests, the key, the body with its
bounds, the key's share, then the handler. Whatever is wrong is answered with a
problem; what nobody foresaw with status 500 and no more words than that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from rayqueue import __version__
from rayqueue.errors import (
    InvalidInputError,
    OutcomeUnknownError,
    RateLimitedError,
    RayQueueError,
    UnauthenticatedError,
    UnsupportedMediaError,
)
from rayqueue.gateway.audit import REFUSALS, asked_from
from rayqueue.gateway.draining import cut_off
from rayqueue.gateway.principals import ANYONE, Caller, shown_key
from rayqueue.gateway.rest import bodies, problems
from rayqueue.gateway.rest.console import add_console
from rayqueue.gateway.rest.handlers import Answer, Call, Events, Handed
from rayqueue.gateway.rest.openapi import document
from rayqueue.gateway.rest.pages import add_pages
from rayqueue.gateway.rest.route import Route
from rayqueue.gateway.rest.routes import ROUTES
from rayqueue.gateway.within import within

_log = logging.getLogger(__name__)

JSON = "application/json"
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def make_app(gateway: Any) -> FastAPI:
    """Of one gateway (``rayqueue.gateway.server.Gateway``)."""
    app = App(
        gateway,
        title="RayQueue",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    for route in ROUTES:
        app.serve(_Serving(gateway, route))
    told = msgspec.json.encode(document())
    add_pages(app, told)
    add_console(app)

    async def refused(_: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
        told = problems.of_status(status, "/openapi.json lists all routes")
        return Response(problems.encoded(told), status, headers, problems.CONTENT_TYPE)

    app.add_exception_handler(HTTPException, refused)
    return app


class App(FastAPI):
    """FastAPI, whose routes of the gateway's own are found without its layers: these cost a request as much as all
    else that is done for it. What is found neither by its method nor its path goes through them, as pages do."""

    def __init__(self, gateway: Any, **options: Any) -> None:
        super().__init__(**options)
        self._gateway = gateway
        self._direct: dict[tuple[str, int], list[tuple[tuple[str, ...], _Serving]]] = {}

    def serve(self, serving: _Serving) -> None:
        route = serving.route
        parts = tuple(route.path.split("/"))
        self._direct.setdefault((route.method, len(parts)), []).append((parts, serving))

        async def endpoint(request: Request) -> Any:
            return await serving.answer(request.scope, request.receive, request.path_params)

        endpoint.__name__ = route.operation_id
        self.add_route(route.path, endpoint, methods=[route.method], include_in_schema=False)

    def find(self, method: str, path: str) -> tuple[_Serving, dict[str, str]] | None:
        """The route, and what stands for its parameters."""
        given = path.split("/")
        for parts, serving in self._direct.get((method, len(given)), ()):
            params = {}
            for part, has in zip(parts, given, strict=True):
                if part[:1] == "{":
                    if not has:
                        break
                    params[part[1:-1]] = has
                elif part != has:
                    break
            else:
                return serving, params
        return None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        found = self.find(scope["method"], scope["path"]) if scope["type"] == "http" else None
        if found is None:
            refusal = self._refusal(scope) if scope["type"] == "http" else None
            await (refusal or super().__call__)(scope, receive, send)
            return
        serving, params = found
        answer = await serving.answer(scope, receive, params)
        await answer(scope, receive, send)

    def _refusal(self, scope: Any) -> Reply | None:
        """Pages, and what is not there, are requests, too."""
        try:
            self._gateway.limits.arrived(_source_of(scope))
        except RateLimitedError as error:
            return of_error(error)
        return None


def _source_of(scope: Any) -> str:
    return scope["client"][0] if scope.get("client") else "unknown"


class _Serving:
    """One route at work."""

    def __init__(self, gateway: Any, route: Route) -> None:
        self._gateway = gateway
        self._settings = gateway.settings
        self.route = route
        self._decoder: Any = None
        if route.body not in (None, bytes):
            self._decoder = msgspec.json.Decoder(route.body)

    async def answer(self, scope: Any, receive: Any, path_params: dict[str, str]) -> Reply | EventStream:
        gateway, route = self._gateway, self.route
        # Of a header that is given twice, the first counts.
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        source = _source_of(scope)
        token = token_of(headers)
        asked_from.set(source)
        try:
            gateway.limits.arrived(source)
            caller = ANYONE if route.public else gateway.keys.caller(token)
            body = await bodies.read(receive, headers, self._settings)
            gateway.limits.take(caller.key_id or f"open {source}", len(body))
            given = _given(scope["query_string"], path_params)
            return await self._carry_out(caller, receive, given, headers, body)
        except RayQueueError as error:
            if gateway.keys.some and isinstance(error, REFUSALS):
                gateway.audit.refused(shown_key(token), f"{route.method} {scope['path']}", error, source)
            return of_error(error)
        except asyncio.CancelledError:
            if not gateway.draining:
                raise
            return of_error(cut_off(changes=route.method != "GET"))
        except bodies.SlowCallerError:
            return Reply(408, b"", {"connection": "close"}, None)
        except Exception:  # noqa: BLE001  # a bug: the log has it, the caller is not told
            _log.exception("%s %s has failed", route.method, route.path)
            return _problem(problems.INTERNAL, {})

    async def _carry_out(
        self, caller: Caller, receive: Any, given: dict[str, str], headers: dict[str, str], raw: bytes
    ) -> Reply | EventStream:
        route = self.route
        call = Call(
            caller,
            bodies.converted(given, route.params),
            self._body(headers, raw),
            raw,
            headers,
            self._gateway.operations,
            self._gateway.queues,
            self._gateway,
            self._settings.max_json_depth,
        )
        most_s = (self._settings.request_timeout_ms + getattr(call.params, "wait_ms", 0)) / 1000
        try:
            handling = route.handler(call)
            found = await within(most_s, _watched(handling, receive) if route.watched else handling)
        except asyncio.TimeoutError:
            raise OutcomeUnknownError(f"this was not done after {most_s:g} s; it may still be") from None
        if isinstance(found, Answer):
            return Reply(found.status or route.status, found.body, found.headers)
        if isinstance(found, Events):
            return EventStream(found, self._settings.slow_timeout_ms / 1000)
        if found is None:
            return Reply(204, b"", {}, None)
        return Reply(route.status, msgspec.json.encode(found), {})

    def _body(self, headers: dict[str, str], raw: bytes) -> Any:
        if self._decoder is None:
            if raw and self.route.body is None:
                raise InvalidInputError("this request takes no body")
            return None
        kind = headers.get("content-type", JSON).partition(";")[0].strip().lower()
        if kind != JSON:
            raise UnsupportedMediaError(f"Content-Type {kind!r} is not known here: {JSON}")
        return bodies.decoded(raw, self._decoder)


def _given(query: bytes, path_params: dict[str, str]) -> dict[str, str]:
    """Parameters of the path and of the query."""
    if not query:
        return path_params
    found = QueryParams(query)
    given = {**found, **path_params}
    if len(found.multi_items()) + len(path_params) != len(given):
        raise InvalidInputError("a parameter is given twice")
    return given


# -- answers --------------------------------------------------------------------------------------


def token_of(headers: dict[str, str]) -> str | None:
    """The key that a request shows."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")


def of_error(error: RayQueueError) -> Reply:
    headers = {}
    after_s = problems.retry_after_s(error)
    if after_s is not None:
        headers["Retry-After"] = str(after_s)
    if isinstance(error, UnauthenticatedError):
        headers["WWW-Authenticate"] = 'Bearer realm="rayqueue"'
    return _problem(problems.problem_of(error), headers)


def _problem(problem: problems.Problem, headers: dict[str, str]) -> Reply:
    return Reply(problem.status, problems.encoded(problem), headers, problems.CONTENT_TYPE)


class Reply:
    """A whole answer, as ASGI has it."""

    __slots__ = ("_body", "_headers", "_status")

    def __init__(self, status: int, body: bytes, headers: dict[str, str], kind: str | None = JSON) -> None:
        self._status = status
        self._body = body
        made = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        if kind is not None:
            made += ((b"content-type", kind.encode()), (b"content-length", b"%d" % len(body)))
        self._headers = made

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        await send({"type": "http.response.start", "status": self._status, "headers": self._headers})
        await send({"type": "http.response.body", "body": self._body})


class EventStream:
    """Server-sent events, until the caller goes, or takes nothing for too long."""

    def __init__(self, events: Events, slow_s: float) -> None:
        self._events = events.events
        self._slow_s = slow_s

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, gone):
                task.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        try:
            async for part in self._events:
                more = {"type": "http.response.body", "body": part, "more_body": True}
                await asyncio.wait_for(send(more), self._slow_s)
        except RayQueueError as error:
            told = problems.encoded(problems.problem_of(error))
            await send({"type": "http.response.body", "body": b"event: error\ndata: %s\n\n" % told})
        finally:
            await self._events.aclose()  # type: ignore[attr-defined]


async def _watched(handling: Coroutine[Any, Any, Any], receive: Any) -> Any:
    """What it answers. ``SlowCallerError`` if the caller goes before: it is cancelled, and what it has taken for him
    is given back."""
    work = asyncio.ensure_future(handling)
    gone = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not gone.done():
            found = work.result()
            return found.answer if isinstance(found, Handed) else found
        if work.done() and work.exception() is None and isinstance(work.result(), Handed):
            work.result().not_taken()
        raise bodies.SlowCallerError
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _until_gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
