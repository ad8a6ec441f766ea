"""RecordService: writing and reading over gRPC.

A stream of batches is written with many of them under way; each is answered as
soon as it is acknowledged. A subscription is a session of its stream: it ends
with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import Any

import msgspec

from rayqueue.errors import InvalidInputError, RayQueueError, SessionGoneError
from rayqueue.gateway.operations import Operations
from rayqueue.gateway.rpc.calls import Rpc
from rayqueue.gateway.rpc.messages import columns_of, places_of, records_of, written_of
from rayqueue.gateway.rpc.statuses import problem_of
from rayqueue.gateway.rpc.v1 import records_pb2 as pb
from rayqueue.gateway.rpc.v1.records_pb2_grpc import RecordServiceServicer
from rayqueue.gateway.sessions import Session

MAX_PRODUCE_UNDER_WAY = 256
_SEND_RECORDS = 1000
_POLL_MS = 500
_MAX_CREDIT = 1_000_000
_DEFAULT_RECORDS = 500


class Records(RecordServiceServicer):
    def __init__(self, gateway: Any) -> None:
        self._gateway = gateway
        self._operations: Operations = gateway.operations

    # -- one at a time ------------------------------------------------------------------------------

    async def Append(self, request: pb.AppendRequest, rpc: Rpc) -> pb.AppendResponse:  # noqa: N802
        head = pb.AppendRequest(topic=request.topic, idempotency_key=request.idempotency_key)
        size_bytes = request.ByteSize() - head.ByteSize()

        async def carry_out() -> bytes:
            written = await self._operations.publish(rpc.caller, request.topic, columns_of(request.records, size_bytes))
            return pb.AppendResponse(records=written_of(written)).SerializeToString()

        if not request.idempotency_key:
            return pb.AppendResponse.FromString(await carry_out())
        contents = msgspec.msgpack.encode([each.SerializeToString(deterministic=True) for each in request.records])
        told, before = await self._operations.once(
            rpc.caller, request.topic, f"grpc:{request.idempotency_key}", contents, carry_out
        )
        answer = pb.AppendResponse.FromString(told)
        answer.replayed = before
        return answer

    async def Poll(self, request: pb.PollRequest, rpc: Rpc) -> pb.PollResponse:  # noqa: N802
        session = request.session
        if not session:
            start = "latest" if request.start_at_end else "earliest"
            opened = await self._operations.open_session(
                rpc.caller,
                request.group,
                list(request.topics),
                start=start,  # type: ignore[arg-type]
            )
            session = opened.session_id
        found, cursor = await self._operations.poll(
            rpc.caller,
            session,
            max_records=request.max_records or _DEFAULT_RECORDS,
            wait_ms=request.wait_ms,
            cursor=request.cursor if request.HasField("cursor") else None,
        )
        return pb.PollResponse(session=session, records=records_of(found), cursor=cursor)

    async def Ack(self, request: pb.AckRequest, rpc: Rpc) -> pb.AckResponse:  # noqa: N802
        places, through = places_of(request.places), request.through if request.HasField("through") else None
        count = await self._operations.ack(rpc.caller, request.session, places, through=through)
        return pb.AckResponse(acknowledged=count)

    async def CloseSession(self, request: pb.CloseSessionRequest, rpc: Rpc) -> pb.CloseSessionResponse:  # noqa: N802
        await self._operations.close_session(rpc.caller, request.session)
        return pb.CloseSessionResponse()

    # -- streams -------------------------------------------------------------------------------------

    async def Produce(self, requests: AsyncIterator[pb.ProduceRequest], rpc: Rpc) -> None:  # noqa: N802
        room = asyncio.Semaphore(MAX_PRODUCE_UNDER_WAY)
        turn = asyncio.Lock()
        tasks: set[asyncio.Task[None]] = set()
        topic = ""

        async def one(number: int, topic: str, records: Any, size_bytes: int) -> None:
            try:
                try:
                    caller = self._gateway.keys.again(rpc.caller)
                    written = await self._operations.publish(caller, topic, columns_of(records, size_bytes))
                    answer = pb.ProduceResponse(number=number, records=written_of(written))
                except RayQueueError as error:
                    answer = pb.ProduceResponse(number=number, problem=problem_of(error))
                async with turn:
                    await rpc.context.write(answer)
            finally:
                room.release()

        try:
            async for request in requests:
                topic = request.topic or topic
                size_bytes = request.ByteSize()
                self._gateway.limits.more(rpc.who, size_bytes)
                await room.acquire()
                size_bytes -= pb.ProduceRequest(number=request.number, topic=request.topic).ByteSize()
                task = asyncio.ensure_future(one(request.number, topic, request.records, size_bytes))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def Fetch(self, request: pb.FetchRequest, rpc: Rpc) -> None:  # noqa: N802
        batches = self._operations.tail(
            rpc.caller,
            request.topic,
            partition=request.partition if request.HasField("partition") else None,
            offset=request.offset if request.HasField("offset") else None,
            start="latest" if request.start_at_end else "earliest",
        )
        async with aclosing(batches):  # type: ignore[type-var]
            async for batch in batches:
                if batch:
                    await self._write(rpc, pb.FetchResponse(records=records_of(batch)))

    async def Subscribe(self, requests: AsyncIterator[pb.SubscribeRequest], rpc: Rpc) -> None:  # noqa: N802
        reading = aiter(requests)
        first = await next_message(reading, self._gateway.settings.slow_timeout_ms / 1000)
        if first is None or first.WhichOneof("message") != "join":
            raise InvalidInputError("the first message of a subscription is a join")
        join = first.join
        session = await self._operations.open_session(
            rpc.caller,
            join.group,
            list(join.topics),
            start="latest" if join.start_at_end else "earliest",
            timeout_ms=join.timeout_ms or None,
        )
        subscription = _Subscription(self, rpc, session, join.credit)
        try:
            timeout_ms = int(session.timeout_s * 1000)
            await subscription.write(pb.SubscribeResponse(joined=pb.Joined(group=join.group, timeout_ms=timeout_ms)))
            await subscription.run(reading)
        finally:
            with suppress(RayQueueError):
                await self._operations.close_session(rpc.caller, session.session_id)

    async def _write(self, rpc: Rpc, answer: Any) -> None:
        """Who takes nothing for too long is hung up on."""
        await asyncio.wait_for(rpc.context.write(answer), self._gateway.settings.slow_timeout_ms / 1000)


class _Subscription:
    """One stream's session: two tasks, of which either's end is the other's."""

    def __init__(self, service: Records, rpc: Rpc, session: Session, credit: int) -> None:
        self._service = service
        self._rpc = rpc
        self._session = session
        self._turn = asyncio.Lock()
        self._credit = min(credit, _MAX_CREDIT)
        self._more = asyncio.Event()

    async def write(self, answer: pb.SubscribeResponse) -> None:
        async with self._turn:
            await self._service._write(self._rpc, answer)

    async def run(self, reading: AsyncIterator[pb.SubscribeRequest]) -> None:
        tasks = [asyncio.ensure_future(self._listen(reading)), asyncio.ensure_future(self._send())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._session.wakeup()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self, reading: AsyncIterator[pb.SubscribeRequest]) -> None:
        operations = self._service._operations
        while True:
            request = await next_message(reading, self._session.timeout_s)
            if request is None:
                return
            operations.session(self._rpc.caller, self._session.session_id)
            kind = request.WhichOneof("message")
            if kind == "credit":
                self._credit = min(self._credit + request.credit.records, _MAX_CREDIT)
                self._more.set()
            elif kind == "ack":
                await self._ack(request.ack)
            elif kind != "heartbeat":
                raise InvalidInputError("after the join come credit, ack and heartbeat")

    async def _ack(self, ack: pb.AckRecords) -> None:
        self._service._gateway.limits.more(self._rpc.who, ack.ByteSize())
        places, through = places_of(ack.places), ack.through if ack.HasField("through") else None
        try:
            count = await self._service._operations.ack(
                self._rpc.caller, self._session.session_id, places, through=through
            )
            answer = pb.Acked(number=ack.number, acknowledged=count)
        except SessionGoneError:
            raise
        except RayQueueError as error:
            answer = pb.Acked(number=ack.number, problem=problem_of(error))
        await self.write(pb.SubscribeResponse(acked=answer))

    async def _send(self) -> None:
        operations, rpc, session = self._service._operations, self._rpc, self._session
        while True:
            if self._credit <= 0:
                self._more.clear()
                await self._more.wait()
                continue
            caller = self._service._gateway.keys.again(rpc.caller)
            most = min(self._credit, _SEND_RECORDS)
            found, cursor = await operations.poll(
                caller, session.session_id, max_records=most, wait_ms=_POLL_MS, cursor=session.cursor
            )
            if found:
                self._credit -= len(found)
                answer = pb.Records(records=records_of(found), cursor=cursor)
                await self.write(pb.SubscribeResponse(records=answer))


async def next_message(reading: AsyncIterator[Any], within_s: float) -> Any:
    """None at the end of the stream. ``SessionGoneError`` if nothing is heard for so long."""
    try:
        return await asyncio.wait_for(anext(reading), within_s)
    except StopAsyncIteration:
        return None
    except asyncio.TimeoutError:
        raise SessionGoneError(f"nothing was heard of the caller for {within_s:g} s: send heartbeats") from None
