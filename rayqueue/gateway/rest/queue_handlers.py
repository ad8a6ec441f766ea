"""Handlers of work queues, in terms of ``rayqueue.gateway.queues``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rayqueue.client.queue.dead import DeadJob
from rayqueue.client.queue.detached import JobLease, Kind
from rayqueue.errors import InvalidInputError
from rayqueue.gateway.queues import PutJob, QueueState, Wanted
from rayqueue.gateway.rest import queue_models as m
from rayqueue.gateway.rest.handlers import Answer, Call, Handed
from rayqueue.gateway.rest.models import given
from rayqueue.gateway.values import Form, column, contents_of, show, utf8, value_of

# -- queues -----------------------------------------------------------------------------------------


async def create_queue(call: Call) -> Any:
    body = call.body
    info = await call.queues.create(call.caller, body.name, given(body), if_missing=body.if_missing)
    return _queue(await call.queues.state_of(info))


async def list_queues(call: Call) -> Any:
    return m.QueueList([_queue(each) for each in await call.queues.listed(call.caller)])


async def describe_queue(call: Call) -> Any:
    return _queue(await call.queues.describe(call.caller, call.params.queue))


async def delete_queue(call: Call) -> Any:
    await call.queues.delete(call.caller, call.params.queue)


def _queue(state: QueueState) -> m.QueueOut:
    return m.QueueOut(
        queue=state.info.name,
        queue_id=state.info.topic_id,
        partitions=len(state.info.partitions),
        problem=state.problem,
        settings=msgspec.structs.asdict(state.info.settings),
        oldest_ready_ms=state.oldest_ready_ms,
        **({} if state.sizes is None else msgspec.structs.asdict(state.sizes)),
    )


# -- jobs -------------------------------------------------------------------------------------------


async def put_jobs(call: Call) -> Any:
    name, jobs = call.params.queue, call.body.jobs
    columns = contents_of(jobs, call.max_json_depth, "job")
    wanted = column(jobs, _wanted, "job")

    def encode(put: list[PutJob]) -> bytes:
        return msgspec.json.encode(m.Put(name, [m.PutOut(str(each.job), each.duplicate) for each in put]))

    key = call.headers.get("idempotency-key")
    if key is None:
        return Answer(encode(await call.queues.put(call.caller, name, columns, wanted)), {})
    answer, before = await call.queues.put_once(call.caller, name, key, call.raw, columns, wanted, encode, kind="put:")
    return Answer(answer, {"Idempotency-Replayed": "true" if before else "false"})


def _wanted(job: m.JobIn) -> Wanted:
    if job.dedupe_id is not None:
        utf8(job.dedupe_id)
    return Wanted(job.delay_ms, job.deliver_at_ms, job.ttl_ms, job.dedupe_id, job.want_result)


async def lease_jobs(call: Call) -> Any:
    params: m.LeaseJobsParams = call.params
    taken = await call.queues.get(
        call.caller, params.queue, max_jobs=params.max, wait_ms=params.wait_ms, lease_ms=params.lease_ms
    )
    made = []
    for each in taken:
        job = each.job
        shown = m.JobOut(str(each.lease.job), job.lane, job.deliveries, job.timestamp, str(each.lease), each.lease_ms)
        show(shown, job.value, job.key, job.headers, params.format)
        made.append(shown)
    return Handed(m.JobsOut(made), lambda: call.queues.give_back(params.queue, taken))


async def peek_jobs(call: Call) -> Any:
    params: m.PeekJobsParams = call.params
    made = []
    for each in await call.queues.peek(call.caller, params.queue, params.max):
        shown = m.JobOut(str(each.id), each.priority, each.deliveries, each.put_ms)
        show(shown, each.value, each.key, each.headers, params.format)
        made.append(shown)
    return m.JobsOut(made)


async def job_state(call: Call) -> Any:
    found = await call.queues.state(call.caller, call.params.queue, call.params.job)
    return m.JobState(call.params.job, found.state, found.deliveries)


async def job_result(call: Call) -> Any:
    params: m.ResultParams = call.params
    found = await call.queues.result(call.caller, params.queue, params.job, params.wait_ms)
    shown = m.ResultOut(params.job, found.state, found.reason, found.traceback)
    show(shown, found.value, None, (), params.format)
    return shown


async def cancel_job(call: Call) -> Any:
    await call.queues.cancel(call.caller, call.params.queue, call.params.job)


# -- leases -----------------------------------------------------------------------------------------


async def ack_jobs(call: Call) -> Any:
    body: m.AckJobs = call.body
    result = None if body.result is None else value_of(call.max_json_depth, body.result)
    return await _settle(call, "ack", result=result)


async def nack_jobs(call: Call) -> Any:
    body: m.NackJobs = call.body
    return await _settle(call, "nack", delay_ms=body.delay_ms, reason=body.reason, traceback=body.traceback)


async def reject_jobs(call: Call) -> Any:
    body: m.RejectJobs = call.body
    return await _settle(call, "reject", reason=body.reason, traceback=body.traceback)


async def release_jobs(call: Call) -> Any:
    return await _settle(call, "release")


async def _settle(call: Call, kind: Kind, **said: Any) -> m.SettledOut:
    for text in (said.get("reason", ""), said.get("traceback", "")):
        utf8(text)
    leases: list[str] = call.body.leases
    lost = await call.queues.settle(call.caller, call.params.queue, kind, leases, **said)
    return m.SettledOut(len(set(leases)) - len(lost), _texts(lost))


async def extend_jobs(call: Call) -> Any:
    body: m.ExtendJobs = call.body
    lost, lasts_ms = await call.queues.extend(call.caller, call.params.queue, body.leases, body.lease_ms)
    return m.ExtendedOut(len(set(body.leases)) - len(lost), lasts_ms, _texts(lost))


def _texts(leases: Sequence[JobLease]) -> list[str]:
    return [str(each) for each in leases]


# -- dead letters -----------------------------------------------------------------------------------


async def list_dead(call: Call) -> Any:
    params: m.DeadParams = call.params
    found = await call.queues.dead(call.caller, params.queue, max_jobs=params.max, after=params.after)
    return m.DeadList([_dead(each, params.format) for each in found])


async def dead_job(call: Call) -> Any:
    params: m.DeadJobParams = call.params
    return _dead(await call.queues.dead_job(call.caller, params.queue, params.job), params.format)


async def redrive_dead(call: Call) -> Any:
    return m.Redriven(await call.queues.redrive(call.caller, call.params.queue, _chosen(call.body)))


async def purge_dead(call: Call) -> Any:
    return m.Purged(await call.queues.purge(call.caller, call.params.queue, _chosen(call.body)))


def _chosen(body: m.ChangeDead) -> list[str] | None:
    if (body.jobs is None) != body.all:
        raise InvalidInputError('say which are meant: {"jobs": ["0-17"]}, or {"all": true}')
    return body.jobs


def _dead(job: DeadJob[Any, Any], form: Form) -> m.DeadOut:
    shown = m.DeadOut(
        str(job.id),
        job.id.partition,
        job.reason,
        job.priority,
        job.deliveries,
        job.put_ms,
        job.died_ms,
        [m.FailureOut(each.time_ms, each.kind, each.worker, each.reason, each.traceback) for each in job.history],
    )
    show(shown, job.value, job.key, job.headers, form)
    return shown
