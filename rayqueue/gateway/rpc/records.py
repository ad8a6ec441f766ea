"""RecordService: writing and reading over gRPC.

A stream of batches is written with many of them under way; each is answered as
soon as it is acknowledged. A subscription is a session of its stream: it ends
with it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

import msgspec

from rayqueue.errors import InvalidInputError, RayQueueError, SessionGoneError
from rayqueue.gateway.draining import closing
from rayqueue.gateway.operations import Operations
from rayqueue.gateway.principals import Caller
from rayqueue.gateway.rpc.calls import Messages, Rpc, paced
from rayqueue.gateway.rpc.messages import columns_of, isolation_of, places_of, records_of
from rayqueue.gateway.rpc.statuses import problem_of
from rayqueue.gateway.rpc.v1 import records_pb2 as pb
from rayqueue.gateway.rpc.v1.records_pb2_grpc import RecordServiceServicer
from rayqueue.gateway.sessions import Session
from rayqueue.gateway.written import as_protobuf

MAX_PRODUCE_UNDER_WAY = 256
_SEND_RECORDS = 1000
_POLL_MS = 500
_MAX_CREDIT = 1_000_000
_DEFAULT_RECORDS = 500
_OF_DEADLINE = 0.75
"""So much of a caller's time may go by before he is told of his session: else he would ask for another, and the first
would keep his partitions."""
_OF_DRAIN = 0.5
LOOK_EVERY_S = 1.0
"""How long a stream that is owed nothing is left alone: then its caller's key is looked at again."""
_APPENDED = pb.AppendResponse.RECORDS_FIELD_NUMBER
_PRODUCED = pb.ProduceResponse.RECORDS_FIELD_NUMBER


class Records(RecordServiceServicer):
    def __init__(self, gateway: Any) -> None:
        self._gateway = gateway
        self._operations: Operations = gateway.operations

    # -- one at a time ------------------------------------------------------------------------------

    async def Append(self, request: pb.AppendRequest, rpc: Rpc) -> bytes:  # noqa: N802
        head = pb.AppendRequest(topic=request.topic, idempotency_key=request.idempotency_key)
        columns = columns_of(request.records, rpc.size_bytes - head.ByteSize())
        if not request.idempotency_key:
            return as_protobuf(await self._operations.publish(rpc.caller, request.topic, columns), _APPENDED)
        contents = msgspec.msgpack.encode([each.SerializeToString(deterministic=True) for each in request.records])
        told, before = await self._operations.publish_once(
            rpc.caller,
            request.topic,
            request.idempotency_key,
            contents,
            columns,
            partial(as_protobuf, field=_APPENDED),
            kind="grpc:",
        )
        return told + pb.AppendResponse(replayed=before).SerializeToString()

    async def Poll(self, request: pb.PollRequest, rpc: Rpc) -> pb.PollResponse:  # noqa: N802
        session = request.session
        most = request.max_records or _DEFAULT_RECORDS
        if session:
            found, cursor = await self._operations.poll(
                rpc.caller,
                session,
                max_records=most,
                wait_ms=request.wait_ms,
                cursor=request.cursor if request.HasField("cursor") else None,
            )
            return pb.PollResponse(session=session, records=records_of(found), cursor=cursor)
        if request.cursor:
            raise InvalidInputError("a cursor is of a session that there is: name it")
        left_s = rpc.context.time_remaining()
        session, found, cursor = await self._operations.open_and_poll(
            rpc.caller,
            request.group,
            list(request.topics),
            max_records=most,
            wait_ms=request.wait_ms,
            within_s=math.inf if left_s is None else left_s * _OF_DEADLINE,
            start="latest" if request.start_at_end else "earliest",
            isolation=isolation_of(request.isolation),
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

    async def Produce(self, requests: Messages, rpc: Rpc) -> None:  # noqa: N802
        room = asyncio.Semaphore(MAX_PRODUCE_UNDER_WAY)
        turn = asyncio.Lock()
        tasks: set[asyncio.Task[None]] = set()
        topic = ""
        quiet = Quiet(self._gateway.settings.idle_timeout_ms / 1000)

        async def one(number: int, topic: str, records: Any, size_bytes: int) -> None:
            try:
                try:
                    caller = self._gateway.keys.again(rpc.caller)
                    written = await self._operations.publish(caller, topic, columns_of(records, size_bytes))
                    answer: Any = pb.ProduceResponse(number=number).SerializeToString() + as_protobuf(
                        written, _PRODUCED
                    )
                except RayQueueError as error:
                    self._gateway.audit.refused_within(rpc.caller, f"Produce {topic}", error)
                    answer = pb.ProduceResponse(number=number, problem=problem_of(error))
                async with turn:
                    await rpc.context.write(answer)
                quiet.heard()
            except Exception as error:  # noqa: BLE001  # nobody foresaw it: his answer is the end of the stream
                if not rpc.context.done():
                    quiet.fail(error)
            finally:
                room.release()

        limits = self._gateway.limits

        async def read() -> bool:
            nonlocal topic
            async for request in requests:
                topic = request.topic or topic
                quiet.heard()
                size_bytes = requests.size_bytes
                await paced(partial(limits.request, rpc.who))
                await paced(partial(limits.more, rpc.who, size_bytes))
                quiet.heard()
                await room.acquire()
                size_bytes -= pb.ProduceRequest(number=request.number, topic=request.topic).ByteSize()
                task = asyncio.ensure_future(one(request.number, topic, request.records, size_bytes))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            return True

        try:
            with self._gateway.limits.streams.held(rpc.caller.name):
                through = await self._gateway.drain.unless_begun(read(), False)
                await asyncio.gather(*tasks)
            if not through:
                raise closing()
        except asyncio.CancelledError:
            quiet.check()
            raise
        finally:
            quiet.close()
            for task in tasks:
                task.cancel()

    async def Fetch(self, request: pb.FetchRequest, rpc: Rpc) -> None:  # noqa: N802
        batches = self._operations.tail(
            rpc.caller,
            request.topic,
            partition=request.partition if request.HasField("partition") else None,
            offset=request.offset if request.HasField("offset") else None,
            start="latest" if request.start_at_end else "earliest",
            isolation=isolation_of(request.isolation),
        )
        async with aclosing(batches):  # type: ignore[type-var]
            async for batch, _ in batches:
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
            isolation=isolation_of(join.isolation),
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
            caller = self._service._gateway.keys.again(self._rpc.caller)
            operations.session(caller, self._session.session_id)
            kind = request.WhichOneof("message")
            if kind == "credit":
                self._credit = min(self._credit + request.credit.records, _MAX_CREDIT)
                self._more.set()
            elif kind == "ack":
                await self._ack(caller, request.ack)
            elif kind != "heartbeat":
                raise InvalidInputError("after the join come credit, ack and heartbeat")

    async def _ack(self, caller: Caller, ack: pb.AckRecords) -> None:
        await paced(partial(self._service._gateway.limits.more, self._rpc.who, ack.ByteSize()))
        places, through = places_of(ack.places), ack.through if ack.HasField("through") else None
        try:
            count = await self._service._operations.ack(caller, self._session.session_id, places, through=through)
            answer = pb.Acked(number=ack.number, acknowledged=count)
        except SessionGoneError:
            raise
        except RayQueueError as error:
            answer = pb.Acked(number=ack.number, problem=problem_of(error))
        await self.write(pb.SubscribeResponse(acked=answer))
        self._more.set()

    async def _send(self) -> None:
        operations, rpc, session = self._service._operations, self._rpc, self._session
        while True:
            caller = self._service._gateway.keys.again(rpc.caller)
            if operations.drain.begun:
                await self._last_acks()
                raise closing()
            most = min(self._credit, _SEND_RECORDS, session.room)
            if most <= 0:
                operations.check_reader(caller, session)
                await heard_within(self._more, LOOK_EVERY_S)
                continue
            found, cursor = await operations.poll(
                caller, session.session_id, max_records=most, wait_ms=_POLL_MS, cursor=session.cursor
            )
            if found:
                self._credit -= len(found)
                answer = pb.Records(records=records_of(found), cursor=cursor)
                await self.write(pb.SubscribeResponse(records=answer))

    async def _last_acks(self) -> None:
        """Nothing more is sent. What is acknowledged soon need not be read again elsewhere."""
        now_s = asyncio.get_running_loop().time
        until_s = now_s() + self._service._gateway.settings.drain_timeout_ms / 1000 * _OF_DRAIN
        while self._session.unacked and (left_s := until_s - now_s()) > 0:
            await heard_within(self._more, left_s)


class Quiet:
    """Watches over a stream: if nothing came or went for so long, or what it does has failed, its task is cancelled."""

    def __init__(self, most_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._most_s = most_s
        self._heard_s = self._loop.time()
        self._over = False
        self._error: BaseException | None = None
        self._timer = self._loop.call_later(most_s, self._look)

    def heard(self) -> None:
        self._heard_s = self._loop.time()

    def _look(self) -> None:
        left_s = self._heard_s + self._most_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
        elif self._task is not None:
            self._over = True
            self._task.cancel()

    def fail(self, error: BaseException) -> None:
        """The first of them counts."""
        if self._error is None and self._task is not None:
            self._error = error
            self._task.cancel()

    def check(self) -> None:
        """``SessionGoneError``, or what has failed, if it was cancelled by this."""
        if self._error is not None:
            raise self._error
        if self._over:
            raise SessionGoneError(f"nothing came or was taken for {self._most_s:g} s: open the stream again") from None

    def close(self) -> None:
        self._timer.cancel()


async def heard_within(more: asyncio.Event, seconds: float) -> None:
    """Until it is set, which it is not any more then, or for so long."""
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(more.wait(), seconds)
    more.clear()


async def next_message(reading: AsyncIterator[Any], within_s: float) -> Any:
    """None at the end of the stream. ``SessionGoneError`` if nothing is heard for so long."""
    try:
        return await asyncio.wait_for(anext(reading), within_s)
    except StopAsyncIteration:
        return None
    except asyncio.TimeoutError:
        raise SessionGoneError(f"nothing was heard of the caller for {within_s:g} s: send heartbeats") from None
