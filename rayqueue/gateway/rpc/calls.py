"""Calls: how every gRPC call is let in and how it ends. An interceptor, so that no method can be without it.

A call's deadline is gRPC's own: when it passes, or the caller goes, the method
is cancelled. Errors of ours are told with their details; what nobody foresaw is
``INTERNAL`` without more words.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from rayqueue.errors import (
    InvalidInputError,
    RateLimitedError,
    RayQueueError,
    SessionGoneError,
)
from rayqueue.gateway.audit import REFUSALS, asked_from
from rayqueue.gateway.draining import closing, cut_off
from rayqueue.gateway.principals import Caller, shown_key
from rayqueue.gateway.rpc.statuses import status_of
from rayqueue.gateway.within import within

_log = logging.getLogger(__name__)

_HEALTH = "/grpc.health.v1.Health/"
PUBLIC = (_HEALTH, "/grpc.reflection.")
"""Need no key: they say what can be asked, nothing of the queue."""


class Letting(grpc.aio.ServerInterceptor):
    """Of one gateway."""

    def __init__(self, gateway: Any) -> None:
        self._gateway = gateway

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method: str = handler_call_details.method
        metadata = dict(handler_call_details.invocation_metadata or ())
        calls = _Calls(self._gateway, method, token_of(metadata), handler.request_deserializer)
        behaviour = handler.stream_stream or handler.unary_stream or handler.stream_unary or handler.unary_unary
        if handler.response_streaming:
            call, make = calls.streaming(behaviour, handler.request_streaming), grpc.stream_stream_rpc_method_handler
        else:
            call, make = calls.unary(behaviour, handler.request_streaming), grpc.stream_unary_rpc_method_handler
        # Requests are read by us, as bytes: once the caller is let in, and not for longer than he may take.
        return make(call, None, partial(_serialised, handler.response_serializer))


def _serialised(serialise: Callable[[Any], bytes], answer: Any) -> bytes:
    """A message, or one whose bytes a method has made itself."""
    return answer if isinstance(answer, bytes) else serialise(answer)


def token_of(metadata: dict[str, Any]) -> str | None:
    scheme, _, token = str(metadata.get("authorization", "")).partition(" ")
    return token.strip() if scheme.lower() == "bearer" else metadata.get("x-api-key")


@dataclass(frozen=True, slots=True)
class Rpc:
    """One call that was let in: what a method gets in place of gRPC's context."""

    caller: Caller
    who: str
    """Whose share of bytes it takes."""
    context: Any
    size_bytes: int = 0
    """Of the request, as it came. Of a stream: ``Messages.size_bytes``."""


class Messages:
    """The messages of a stream, decoded."""

    def __init__(self, raw: AsyncIterator[bytes], decode: Callable[[bytes], Any]) -> None:
        self._raw = aiter(raw)
        self._decode = decode
        self.size_bytes = 0
        """Of the last one, as it came."""

    def __aiter__(self) -> Messages:
        return self

    async def __anext__(self) -> Any:
        raw = await anext(self._raw)
        self.size_bytes = len(raw)
        return self._decode(raw)


async def paced(take: Callable[[], None]) -> None:
    """Take a share once there is one: a stream is slowed down, for its caller waits while nobody reads it."""
    while True:
        try:
            take()
            return
        except RateLimitedError as error:
            await asyncio.sleep(error.details["retry_after_ms"] / 1000)


class _Calls:
    """One method, called by one caller."""

    def __init__(self, gateway: Any, method: str, token: str | None, decode: Callable[[bytes], Any]) -> None:
        self._gateway = gateway
        self._method = method
        self._token = token
        self._decode = decode

    def unary(self, behaviour: Any, streamed: bool) -> Any:
        async def call(requests: AsyncIterator[bytes], context: Any) -> Any:
            return await self._ending(context, lambda: self._one(behaviour, streamed, requests, context))

        return call

    async def _request(self, requests: AsyncIterator[bytes], streamed: bool) -> Any:
        """The one message of a call, or the stream of them. Who does not send it in time is hung up on."""
        if streamed:
            return requests
        within_s = self._gateway.settings.slow_timeout_ms / 1000
        try:
            return await asyncio.wait_for(anext(aiter(requests)), within_s)
        except StopAsyncIteration:
            raise InvalidInputError(f"{self._method} takes one message, and none came") from None
        except asyncio.TimeoutError:
            raise InvalidInputError(f"{self._method} was begun, and no message came for {within_s:g} s") from None

    def _decoded(self, request: Any) -> Any:
        """A message, or a stream of them."""
        if not isinstance(request, bytes):
            return Messages(request, self._decoded)
        try:
            return self._decode(request)
        except DecodeError as error:
            raise InvalidInputError(f"these bytes are no message of {self._method}: {error}") from None

    async def _one(self, behaviour: Any, streamed: bool, requests: AsyncIterator[bytes], context: Any) -> Any:
        caller, who = self._let_in(context)
        raw = await self._request(requests, streamed)
        self._take(who, raw)
        request = self._decoded(raw)
        if caller is None:
            return await behaviour(request, context)
        most_s = (self._gateway.settings.request_timeout_ms + getattr(request, "wait_ms", 0)) / 1000
        return await within(most_s, behaviour(request, Rpc(caller, who, context, len(raw))))

    def streaming(self, behaviour: Any, streamed: bool) -> Any:
        async def call(requests: AsyncIterator[bytes], context: Any) -> Any:
            async def all_of() -> None:
                caller, who = self._let_in(context)
                raw = await self._request(requests, streamed)
                self._take(who, raw)
                request = self._decoded(raw)
                if caller is not None:
                    await behaviour(request, Rpc(caller, who, context))
                    return
                with self._gateway.limits.streams.held(who):
                    telling = self._public(who, behaviour(request, context), context)
                    if not await self._gateway.drain.unless_begun(telling, False):
                        raise closing()

            await self._ending(context, all_of)

        return call

    async def _public(self, source: str, answers: Any, context: Any) -> bool:
        """A stream that needs no key. Nobody says that he still wants it, so it ends if there is nothing to say."""
        idle_s = self._gateway.settings.idle_timeout_ms / 1000
        try:
            if not hasattr(answers, "__aiter__"):
                await asyncio.wait_for(answers, idle_s)
                return True
            while (answer := await asyncio.wait_for(anext(answers, None), idle_s)) is not None:
                self._gateway.limits.arrived(source)  # each question in a stream is one more request
                await asyncio.wait_for(context.write(answer), idle_s)
        except asyncio.TimeoutError:
            raise SessionGoneError(f"nothing came or was told for {idle_s:g} s: open the stream again") from None
        return True

    def _let_in(self, context: Any) -> tuple[Caller | None, str]:
        """None: everybody is."""
        gateway = self._gateway
        source = source_of(context.peer())
        gateway.limits.arrived(source)
        if self._method.startswith(PUBLIC):
            return None, source
        caller: Caller = gateway.keys.caller(self._token)
        return caller, caller.key_id or f"open {source}"

    def _take(self, who: str, request: Any) -> None:
        """His share of requests and bytes."""
        if not self._method.startswith(PUBLIC):
            self._gateway.limits.take(who, len(request) if isinstance(request, bytes) else 0)

    async def _ending(self, context: Any, work: Callable[[], Awaitable[Any]]) -> Any:
        peer = context.peer()
        source, limits = source_of(peer), self._gateway.limits
        asked_from.set(source)
        # Who looks whether a gateway lives connects anew each time, and is no caller.
        checks = self._method.startswith(_HEALTH)
        drain, task = self._gateway.drain, asyncio.current_task()
        drain.under_way.add(task)
        try:
            with nullcontext() if checks else limits.peers.held(source, peer), limits.calls.held(source):
                return await work()
        except RayQueueError as error:
            if self._gateway.keys.some and isinstance(error, REFUSALS):
                self._gateway.audit.refused(shown_key(self._token), self._method, error, source)
            await context.abort_with_status(status_of(error))
        except asyncio.TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "this was not done in time; it may still be")
        except asyncio.CancelledError:
            if not drain.over:
                raise
            await context.abort_with_status(status_of(cut_off(changes=not _reads(self._method))))
        except grpc.aio.AbortError:
            raise
        except grpc.aio.InternalError as error:  # what is written to a caller who has gone
            _log.debug("%s: the caller has gone: %s", self._method, error)
        except Exception:  # noqa: BLE001  # a bug: the log has it, the caller is not told
            _log.exception("%s has failed", self._method)
            await context.abort(grpc.StatusCode.INTERNAL, "the gateway has failed; its log says why")
        finally:
            drain.under_way.discard(task)


def _reads(method: str) -> bool:
    """It changes nothing, so it may be asked again."""
    name = method.rpartition("/")[2]
    return name.startswith(("List", "Describe", "Get", "Peek", "Poll", "Fetch")) and name != "GetJobs"


def source_of(peer: str) -> str:
    """The address of ``ipv4:127.0.0.1:4711``."""
    return peer.partition(":")[2].rpartition(":")[0] or peer
