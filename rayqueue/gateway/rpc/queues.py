"""QueueService: work queues over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import msgspec

from rayqueue.client.queue.dead import DeadJob
from rayqueue.client.queue.decoding import PeekedJob
from rayqueue.client.queue.detached import Kind, TakenJob
from rayqueue.errors import InvalidInputError
from rayqueue.gateway.principals import Caller
from rayqueue.gateway.queues import MAX_CHANGED, PutJob, Queues, QueueState, Wanted
from rayqueue.gateway.rpc.admin import given_settings, settings_of
from rayqueue.gateway.rpc.calls import Rpc
from rayqueue.gateway.rpc.messages import columns_of_contents
from rayqueue.gateway.rpc.records import LOOK_EVERY_S, heard_within, next_message
from rayqueue.gateway.rpc.v1 import common_pb2
from rayqueue.gateway.rpc.v1 import queues_pb2 as pb
from rayqueue.gateway.rpc.v1.queues_pb2_grpc import QueueServiceServicer
from rayqueue.protocol.jobs import MAX_TIME_MS, QueueSizes
from rayqueue.records import Headers

_POLL_MS = 1000
_SEND_JOBS = 500
_MAX_CREDIT = 10_000
_MAX_DEAD = 100
_PEEKED = 10


class WorkQueues(QueueServiceServicer):
    def __init__(self, gateway: Any) -> None:
        self._gateway = gateway
        self._queues: Queues = gateway.queues

    # -- queues -----------------------------------------------------------------------------------

    async def CreateQueue(self, request: pb.CreateQueueRequest, rpc: Rpc) -> pb.CreateQueueResponse:  # noqa: N802
        given = given_settings(request.settings)
        info = await self._queues.create(rpc.caller, request.name, given, if_missing=request.if_missing)
        return pb.CreateQueueResponse(queue=_queue(await self._queues.state_of(info)))

    async def ListQueues(self, request: pb.ListQueuesRequest, rpc: Rpc) -> pb.ListQueuesResponse:  # noqa: N802
        return pb.ListQueuesResponse(queues=map(_queue, await self._queues.listed(rpc.caller)))

    async def DescribeQueue(self, request: pb.DescribeQueueRequest, rpc: Rpc) -> pb.DescribeQueueResponse:  # noqa: N802
        found = await self._queues.describe(rpc.caller, request.queue)
        return pb.DescribeQueueResponse(queue=_queue(found), oldest_ready_ms=found.oldest_ready_ms)

    async def GetQueueSize(self, request: pb.GetQueueSizeRequest, rpc: Rpc) -> pb.GetQueueSizeResponse:  # noqa: N802
        return pb.GetQueueSizeResponse(size=_size(await self._queues.size(rpc.caller, request.queue)))

    async def DeleteQueue(self, request: pb.DeleteQueueRequest, rpc: Rpc) -> pb.DeleteQueueResponse:  # noqa: N802
        await self._queues.delete(rpc.caller, request.queue)
        return pb.DeleteQueueResponse()

    # -- jobs -------------------------------------------------------------------------------------

    async def PutJobs(self, request: pb.PutJobsRequest, rpc: Rpc) -> pb.PutJobsResponse:  # noqa: N802
        columns, wanted = columns_of_contents(request.jobs), list(map(_wanted, request.jobs))

        def answer_of(put: list[PutJob]) -> pb.PutJobsResponse:
            jobs = [pb.PutJob(job_id=str(each.job), duplicate=each.duplicate) for each in put]
            return pb.PutJobsResponse(jobs=jobs)

        if not request.idempotency_key:
            return answer_of(await self._queues.put(rpc.caller, request.queue, columns, wanted))
        contents = msgspec.msgpack.encode([each.SerializeToString(deterministic=True) for each in request.jobs])
        told, before = await self._queues.put_once(
            rpc.caller,
            request.queue,
            request.idempotency_key,
            contents,
            columns,
            wanted,
            lambda put: answer_of(put).SerializeToString(),
            kind="grpc-put:",
        )
        answer = pb.PutJobsResponse.FromString(told)
        answer.replayed = before
        return answer

    async def GetJobs(self, request: pb.GetJobsRequest, rpc: Rpc) -> pb.GetJobsResponse:  # noqa: N802
        taken = await self._queues.get(
            rpc.caller,
            request.queue,
            max_jobs=request.max_jobs or 1,
            wait_ms=request.wait_ms,
            lease_ms=_time("lease_ms", request.lease_ms),
        )
        return pb.GetJobsResponse(jobs=map(_job, taken))

    async def StreamJobs(self, requests: AsyncIterator[pb.StreamJobsRequest], rpc: Rpc) -> None:  # noqa: N802
        reading = aiter(requests)
        settings = self._gateway.settings
        first = await next_message(reading, settings.slow_timeout_ms / 1000)
        if first is None or first.WhichOneof("message") != "open":
            raise InvalidInputError("the first message of a stream of jobs opens it")
        timeout_ms = first.open.timeout_ms or settings.session_timeout_ms
        if not 1000 <= timeout_ms <= 600_000:
            raise InvalidInputError("a stream's timeout is from 1,000 to 600,000 ms")
        with self._gateway.limits.streams.held(rpc.caller.name):
            await _Stream(self, rpc, first.open, timeout_ms).run(reading)

    # -- leases -----------------------------------------------------------------------------------

    async def AckJobs(self, request: pb.AckJobsRequest, rpc: Rpc) -> pb.AckJobsResponse:  # noqa: N802
        result = request.result if request.HasField("result") else None
        return pb.AckJobsResponse(**await self._settle(rpc, request, "ack", result=result))

    async def NackJobs(self, request: pb.NackJobsRequest, rpc: Rpc) -> pb.NackJobsResponse:  # noqa: N802
        delay_ms = _time("delay_ms", request.delay_ms) if request.HasField("delay_ms") else None
        said = {"delay_ms": delay_ms, "reason": request.reason, "traceback": request.traceback}
        return pb.NackJobsResponse(**await self._settle(rpc, request, "nack", **said))

    async def RejectJobs(self, request: pb.RejectJobsRequest, rpc: Rpc) -> pb.RejectJobsResponse:  # noqa: N802
        said = {"reason": request.reason, "traceback": request.traceback}
        return pb.RejectJobsResponse(**await self._settle(rpc, request, "reject", **said))

    async def ReleaseJobs(self, request: pb.ReleaseJobsRequest, rpc: Rpc) -> pb.ReleaseJobsResponse:  # noqa: N802
        return pb.ReleaseJobsResponse(**await self._settle(rpc, request, "release"))

    async def _settle(self, rpc: Rpc, request: Any, kind: Kind, **said: Any) -> dict[str, Any]:
        leases = list(request.leases)
        lost = await self._queues.settle(rpc.caller, request.queue, kind, leases, **said)
        return {"settled": len(set(leases)) - len(lost), "lost": map(str, lost)}

    async def ExtendJobs(self, request: pb.ExtendJobsRequest, rpc: Rpc) -> pb.ExtendJobsResponse:  # noqa: N802
        leases = list(request.leases)
        lease_ms = _time("lease_ms", request.lease_ms)
        lost, lasts_ms = await self._queues.extend(rpc.caller, request.queue, leases, lease_ms)
        return pb.ExtendJobsResponse(extended=len(set(leases)) - len(lost), lost=map(str, lost), lease_ms=lasts_ms)

    # -- single jobs ------------------------------------------------------------------------------

    async def PeekJobs(self, request: pb.PeekJobsRequest, rpc: Rpc) -> pb.PeekJobsResponse:  # noqa: N802
        most = request.max_jobs or _PEEKED
        if most > MAX_CHANGED:
            raise InvalidInputError(f"1 to {MAX_CHANGED} jobs at a time, not {most}")
        return pb.PeekJobsResponse(jobs=map(_peeked, await self._queues.peek(rpc.caller, request.queue, most)))

    async def GetJobState(self, request: pb.GetJobStateRequest, rpc: Rpc) -> pb.GetJobStateResponse:  # noqa: N802
        found = await self._queues.state(rpc.caller, request.queue, request.job_id)
        return pb.GetJobStateResponse(state=found.state, deliveries=found.deliveries)

    async def GetJobResult(self, request: pb.GetJobResultRequest, rpc: Rpc) -> pb.GetJobResultResponse:  # noqa: N802
        found = await self._queues.result(rpc.caller, request.queue, request.job_id, request.wait_ms)
        return pb.GetJobResultResponse(
            state=found.state, result=found.value, reason=found.reason, traceback=found.traceback
        )

    async def CancelJob(self, request: pb.CancelJobRequest, rpc: Rpc) -> pb.CancelJobResponse:  # noqa: N802
        await self._queues.cancel(rpc.caller, request.queue, request.job_id)
        return pb.CancelJobResponse()

    # -- dead letters -----------------------------------------------------------------------------

    async def ListDeadJobs(self, request: pb.ListDeadJobsRequest, rpc: Rpc) -> pb.ListDeadJobsResponse:  # noqa: N802
        found = await self._queues.dead(
            rpc.caller, request.queue, max_jobs=request.max_jobs or _MAX_DEAD, after=request.after or None
        )
        return pb.ListDeadJobsResponse(jobs=map(_dead, found))

    async def GetDeadJob(self, request: pb.GetDeadJobRequest, rpc: Rpc) -> pb.GetDeadJobResponse:  # noqa: N802
        return pb.GetDeadJobResponse(job=_dead(await self._queues.dead_job(rpc.caller, request.queue, request.job_id)))

    async def RedriveDeadJobs(  # noqa: N802
        self, request: pb.RedriveDeadJobsRequest, rpc: Rpc
    ) -> pb.RedriveDeadJobsResponse:
        count = await self._queues.redrive(rpc.caller, request.queue, _chosen(request))
        return pb.RedriveDeadJobsResponse(redriven=count)

    async def PurgeDeadJobs(self, request: pb.PurgeDeadJobsRequest, rpc: Rpc) -> pb.PurgeDeadJobsResponse:  # noqa: N802
        return pb.PurgeDeadJobsResponse(purged=await self._queues.purge(rpc.caller, request.queue, _chosen(request)))


class _Stream:
    """A stream of jobs: two tasks, of which either's end is the other's. What was sent stays leased to the caller."""

    def __init__(self, service: WorkQueues, rpc: Rpc, opened: pb.OpenJobs, timeout_ms: int) -> None:
        self._gateway = service._gateway
        self._queues = service._queues
        self._rpc = rpc
        self._name = opened.queue
        self._lease_ms = _time("lease_ms", opened.lease_ms)
        self._timeout_ms = timeout_ms
        self._credit = min(opened.credit, _MAX_CREDIT)
        self._more = asyncio.Event()

    async def run(self, reading: AsyncIterator[pb.StreamJobsRequest]) -> None:
        await self._queues.check_worker(self._rpc.caller, self._name)
        await self._write(pb.StreamJobsResponse(timeout_ms=self._timeout_ms))
        tasks = [asyncio.ensure_future(self._listen(reading)), asyncio.ensure_future(self._send())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self, reading: AsyncIterator[pb.StreamJobsRequest]) -> None:
        while True:
            request = await next_message(reading, self._timeout_ms / 1000)
            if request is None:
                return
            self._again()
            kind = request.WhichOneof("message")
            if kind == "credit":
                self._credit = min(self._credit + request.credit.jobs, _MAX_CREDIT)
                self._more.set()
            elif kind != "heartbeat":
                raise InvalidInputError("after the first message come credit and heartbeat")

    def _again(self) -> Caller:
        """The caller, as he is now: he may still work here."""
        caller: Caller = self._gateway.keys.again(self._rpc.caller)
        self._queues.check_grant(caller, self._name)
        return caller

    async def _send(self) -> None:
        while True:
            caller = self._again()
            self._gateway.drain.check()
            if self._credit <= 0:
                await heard_within(self._more, LOOK_EVERY_S)
                continue
            taken = await self._queues.get(
                caller,
                self._name,
                max_jobs=min(self._credit, _SEND_JOBS),
                wait_ms=_POLL_MS,
                lease_ms=self._lease_ms,
            )
            if not taken:
                continue
            self._credit -= len(taken)
            try:
                await self._write(pb.StreamJobsResponse(jobs=map(_job, taken)))
            except BaseException:
                self._queues.give_back(self._name, taken)
                raise

    async def _write(self, answer: pb.StreamJobsResponse) -> None:
        """Who takes nothing for too long is hung up on."""
        await asyncio.wait_for(self._rpc.context.write(answer), self._gateway.settings.slow_timeout_ms / 1000)


# -- messages -------------------------------------------------------------------------------------------


def _wanted(job: pb.NewJob) -> Wanted:
    return Wanted(
        job.delay_ms,
        job.deliver_at_ms if job.HasField("deliver_at_ms") else None,
        job.ttl_ms if job.HasField("ttl_ms") else None,
        job.dedupe_id if job.HasField("dedupe_id") else None,
        job.want_result,
    )


def _time(name: str, value_ms: int) -> int | None:
    if value_ms > MAX_TIME_MS:
        raise InvalidInputError(f"{name} is at most {MAX_TIME_MS}, not {value_ms}")
    return value_ms or (0 if name == "delay_ms" else None)


def _headers(headers: Headers) -> Iterable[common_pb2.Header]:
    return (common_pb2.Header(name=name, value=value) for name, value in headers)


def _job(taken: TakenJob) -> pb.Job:
    lease, lease_ms, job = taken
    return pb.Job(
        job_id=str(lease.job),
        lease=str(lease),
        lease_ms=lease_ms,
        deliveries=job.deliveries,
        priority=job.lane,
        put_at_ms=job.timestamp,
        value=job.value,
        key=job.key,
        headers=_headers(job.headers),
    )


def _peeked(job: PeekedJob) -> pb.Job:
    return pb.Job(
        job_id=str(job.id),
        deliveries=job.deliveries,
        priority=job.priority,
        put_at_ms=job.put_ms,
        value=job.value,
        key=job.key,
        headers=_headers(job.headers),
    )


def _dead(job: DeadJob[Any, Any]) -> pb.DeadJob:
    history = [
        pb.Failure(
            time_ms=each.time_ms, kind=each.kind, worker=each.worker, reason=each.reason, traceback=each.traceback
        )
        for each in job.history
    ]
    return pb.DeadJob(
        job_id=str(job.id),
        reason=job.reason,
        deliveries=job.deliveries,
        priority=job.priority,
        put_at_ms=job.put_ms,
        died_at_ms=job.died_ms,
        value=job.value,
        key=job.key,
        headers=_headers(job.headers),
        history=history,
    )


def _size(sizes: QueueSizes) -> pb.QueueSize:
    return pb.QueueSize(ready=sizes.ready, leased=sizes.leased, delayed=sizes.delayed, dead=sizes.dead)


def _queue(state: QueueState) -> pb.Queue:
    return pb.Queue(
        name=state.info.name,
        queue_id=state.info.topic_id,
        partitions=len(state.info.partitions),
        settings=settings_of(state.info.settings),
        size=None if state.sizes is None else _size(state.sizes),
        problem=state.problem or "",
    )


def _chosen(request: Any) -> Sequence[str] | None:
    if bool(request.job_ids) == request.all:
        raise InvalidInputError("say which are meant: job_ids, or all")
    return None if request.all else list(request.job_ids)
