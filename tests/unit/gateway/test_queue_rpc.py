"""Work queues over gRPC: every method's contract, on a queue in memory."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest

from rayqueue.gateway.rpc.v1 import admin_pb2, common_pb2
from rayqueue.gateway.rpc.v1 import queues_pb2 as pb
from rayqueue.gateway.rpc.v1.queues_pb2_grpc import QueueServiceStub
from rayqueue.gateway.rpc.v1.records_pb2 import Heartbeat
from rayqueue.gateway.server import Gateway
from rayqueue.testing import wait_for
from tests.unit.gateway.test_rpc import refused

_NAME: Any = {"queue": "emails"}


@pytest.fixture
def jobs(gateway: Gateway) -> Iterator[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        stub: Any = QueueServiceStub(channel)  # type: ignore[no-untyped-call]
        settings = admin_pb2.TopicSettings(partitions=2, retry_backoff_ms=0, max_deliveries=2, lanes=2)
        made = stub.CreateQueue(pb.CreateQueueRequest(name="emails", settings=settings)).queue
        assert (made.partitions, made.size.ready, made.settings.max_deliveries) == (2, 0, 2)
        yield stub


def put(jobs: Any, *values: bytes, **wanted: Any) -> list[Any]:
    new = [pb.NewJob(value=value, **wanted) for value in values]
    return list(jobs.PutJobs(pb.PutJobsRequest(jobs=new, **_NAME)).jobs)


def get(jobs: Any, most: int = 1, wait_ms: int = 5000) -> list[Any]:
    return list(jobs.GetJobs(pb.GetJobsRequest(max_jobs=most, wait_ms=wait_ms, **_NAME)).jobs)


def size(jobs: Any) -> tuple[int, int, int, int]:
    told = jobs.GetQueueSize(pb.GetQueueSizeRequest(**_NAME)).size
    return told.ready, told.leased, told.delayed, told.dead


@pytest.mark.slow
def test_put_get_and_ack(jobs: Any) -> None:
    header = common_pb2.Header(name="h", value=b"\xff")
    (made,) = put(jobs, b"a", key=b"k", priority=1, headers=[header])
    put(jobs, b"later", delay_ms=3_600_000)
    assert size(jobs) == (1, 0, 1, 0)
    (job,) = get(jobs)
    assert (job.job_id, job.value, job.key, job.deliveries, job.priority) == (made.job_id, b"a", b"k", 1, 1)
    assert list(job.headers) == [header]
    acked = jobs.AckJobs(pb.AckJobsRequest(leases=[job.lease], **_NAME))
    assert (acked.settled, list(acked.lost)) == (1, [])
    assert size(jobs) == (0, 0, 1, 0)
    (listed,) = jobs.ListQueues(pb.ListQueuesRequest()).queues
    assert (listed.name, listed.size.delayed, listed.problem) == ("emails", 1, "")
    described = jobs.DescribeQueue(pb.DescribeQueueRequest(**_NAME))
    assert not described.HasField("oldest_ready_ms")
    once = pb.PutJobsRequest(jobs=[pb.NewJob(value=b"x")], idempotency_key="k", **_NAME)
    first, second = jobs.PutJobs(once), jobs.PutJobs(once)
    assert (first.replayed, second.replayed, first.jobs == second.jobs) == (False, True, True)
    jobs.DeleteQueue(pb.DeleteQueueRequest(**_NAME))
    assert refused(jobs.GetJobs, pb.GetJobsRequest(**_NAME)) == (grpc.StatusCode.NOT_FOUND, "unknown_topic")


def test_nack_reject_release_extend_and_dead_letters(jobs: Any) -> None:
    put(jobs, b"a")
    (job,) = get(jobs)
    assert jobs.ReleaseJobs(pb.ReleaseJobsRequest(leases=[job.lease], **_NAME)).settled == 1
    (job,) = get(jobs)
    assert job.deliveries == 1
    extended = jobs.ExtendJobs(pb.ExtendJobsRequest(leases=[job.lease], lease_ms=600_000, **_NAME))
    assert (extended.extended, 500_000 < extended.lease_ms <= 600_000) == (1, True)
    assert jobs.NackJobs(pb.NackJobsRequest(leases=[job.lease], delay_ms=0, **_NAME)).settled == 1
    (again,) = get(jobs)
    assert again.deliveries == 2
    lost = refused(jobs.AckJobs, pb.AckJobsRequest(leases=[job.lease], **_NAME))
    assert lost == (grpc.StatusCode.FAILED_PRECONDITION, "lease_lost")
    told = jobs.RejectJobs(pb.RejectJobsRequest(leases=[again.lease, job.lease], reason="no", traceback="t", **_NAME))
    assert (told.settled, list(told.lost)) == (1, [job.lease])
    (dead,) = jobs.ListDeadJobs(pb.ListDeadJobsRequest(**_NAME)).jobs
    assert (dead.reason, dead.value, dead.history[-1].kind) == ("no", b"a", "reject")
    assert jobs.GetDeadJob(pb.GetDeadJobRequest(job_id=dead.job_id, **_NAME)).job == dead
    assert not jobs.ListDeadJobs(pb.ListDeadJobsRequest(after=dead.job_id, **_NAME)).jobs
    unknown = refused(jobs.GetDeadJob, pb.GetDeadJobRequest(job_id="0-99", **_NAME))
    assert unknown == (grpc.StatusCode.NOT_FOUND, "unknown_job")
    neither = refused(jobs.PurgeDeadJobs, pb.PurgeDeadJobsRequest(**_NAME))
    assert neither == (grpc.StatusCode.INVALID_ARGUMENT, "invalid_input")
    assert jobs.RedriveDeadJobs(pb.RedriveDeadJobsRequest(job_ids=[dead.job_id], **_NAME)).redriven == 1
    (job,) = get(jobs)
    jobs.RejectJobs(pb.RejectJobsRequest(leases=[job.lease], **_NAME))
    assert jobs.PurgeDeadJobs(pb.PurgeDeadJobsRequest(all=True, **_NAME)).purged == 1
    assert size(jobs) == (0, 0, 0, 0)


def test_a_stream_sends_what_there_is_credit_for(jobs: Any) -> None:
    put(jobs, *(b"%d" % number for number in range(10)))
    sent: queue.Queue[Any] = queue.Queue()
    sent.put(pb.StreamJobsRequest(open=pb.OpenJobs(credit=3, **_NAME)))
    answers = jobs.StreamJobs(iter(sent.get, None))
    assert next(answers).timeout_ms == 30_000
    got: list[Any] = []
    while len(got) < 3:
        got += next(answers).jobs
    assert len(got) == 3
    sent.put(pb.StreamJobsRequest(heartbeat=Heartbeat()))
    sent.put(pb.StreamJobsRequest(credit=pb.JobCredit(jobs=100)))
    while len(got) < 10:
        got += next(answers).jobs
    assert sorted(each.value for each in got) == [b"%d" % number for number in range(10)]
    sent.put(None)
    assert list(answers) == []
    assert size(jobs)[1] == 10  # what was sent stays the caller's
    assert jobs.AckJobs(pb.AckJobsRequest(leases=[each.lease for each in got], **_NAME)).settled == 10


@pytest.mark.slow
def test_a_stream_and_a_call_that_are_cancelled_take_no_job_with_them(jobs: Any) -> None:
    sent: queue.Queue[Any] = queue.Queue()
    sent.put(pb.StreamJobsRequest(open=pb.OpenJobs(credit=3, **_NAME)))
    stream = jobs.StreamJobs(iter(sent.get, None))
    next(stream)
    stream.cancel()
    sent.put(None)
    with pytest.raises(grpc.RpcError):
        jobs.GetJobs(pb.GetJobsRequest(wait_ms=20_000, **_NAME), timeout=0.3)
    put(jobs, b"a", b"b")
    got: list[Any] = []

    def both() -> bool:
        got.extend(get(jobs, 5, 500))
        return len(got) == 2

    wait_for(both, "both", 20)
    assert [each.deliveries for each in got] == [1, 1]


def test_wrong_messages(jobs: Any) -> None:
    invalid = (grpc.StatusCode.INVALID_ARGUMENT, "invalid_input")
    first = pb.StreamJobsRequest(heartbeat=Heartbeat())
    assert refused(lambda: list(jobs.StreamJobs(iter([first])))) == invalid
    opened = pb.StreamJobsRequest(open=pb.OpenJobs(**_NAME))
    assert refused(lambda: list(jobs.StreamJobs(iter([opened, opened])))) == invalid
    short = pb.StreamJobsRequest(open=pb.OpenJobs(timeout_ms=1, **_NAME))
    assert refused(lambda: list(jobs.StreamJobs(iter([short])))) == invalid
    assert refused(jobs.AckJobs, pb.AckJobsRequest(**_NAME)) == invalid
    assert refused(jobs.AckJobs, pb.AckJobsRequest(leases=["x"], **_NAME)) == invalid
    assert refused(jobs.GetJobs, pb.GetJobsRequest(lease_ms=2**60, **_NAME)) == invalid
    assert refused(jobs.GetJobs, pb.GetJobsRequest(max_jobs=2**31, **_NAME)) == invalid
    assert refused(jobs.PutJobs, pb.PutJobsRequest(**_NAME)) == invalid
    wrongs: list[Any] = [
        {"delay_ms": 2**63},
        {"deliver_at_ms": 2**63},
        {"ttl_ms": 0},
        {"dedupe_id": ""},
        {"priority": 9},
    ]
    for wrong in wrongs:
        new = [pb.NewJob(value=b"x", **wrong)]
        assert refused(jobs.PutJobs, pb.PutJobsRequest(jobs=new, **_NAME)) == invalid, wrong
    assert refused(jobs.ListDeadJobs, pb.ListDeadJobsRequest(after="x", **_NAME)) == invalid
    assert size(jobs) == (0, 0, 0, 0)


def test_single_jobs_are_looked_at_and_cancelled(jobs: Any) -> None:
    (first,) = put(jobs, b"a", key=b"k", priority=1)
    (peeked,) = jobs.PeekJobs(pb.PeekJobsRequest(**_NAME)).jobs
    assert (peeked.job_id, peeked.value, peeked.key, peeked.priority, peeked.lease) == (first.job_id, b"a", b"k", 1, "")

    def state() -> str:
        told = jobs.GetJobState(pb.GetJobStateRequest(job_id=first.job_id, **_NAME))
        return str(told.state)

    assert state() == "ready"
    jobs.CancelJob(pb.CancelJobRequest(job_id=first.job_id, **_NAME))
    assert state() == "gone"
    gone = refused(jobs.CancelJob, pb.CancelJobRequest(job_id=first.job_id, **_NAME))
    assert gone == (grpc.StatusCode.NOT_FOUND, "unknown_job")
    assert list(jobs.PeekJobs(pb.PeekJobsRequest(**_NAME)).jobs) == []
    for wrong in ("", "x", "-1-2", "0-99999999999999999999"):
        assert refused(jobs.CancelJob, pb.CancelJobRequest(job_id=wrong, **_NAME))[1] in (
            "invalid_input",
            "unknown_job",
        )
    assert refused(jobs.PeekJobs, pb.PeekJobsRequest(max_jobs=2**32 - 1, **_NAME))[1] == "invalid_input"


@pytest.mark.slow
def test_a_result_is_waited_for_over_either_protocol(jobs: Any, gateway: Gateway) -> None:
    url = f"http://127.0.0.1:{gateway.rest_port}/v1/queues/emails"
    (wanted,) = put(jobs, b"ask", want_result=True)
    asking = pb.GetJobResultRequest(job_id=wanted.job_id, **_NAME)
    assert jobs.GetJobResult(asking).state == "pending"
    asking.wait_ms = 20_000
    waiting = jobs.GetJobResult.future(asking)
    (job,) = get(jobs)
    both = pb.AckJobsRequest(leases=[job.lease, "1.0-7.1"], result=b"x", **_NAME)
    assert refused(jobs.AckJobs, both)[1] == "invalid_input"
    jobs.AckJobs(pb.AckJobsRequest(leases=[job.lease], result=b'{"answer":42}', **_NAME))
    told = waiting.result(20)
    assert (told.state, told.result) == ("done", b'{"answer":42}')
    shown = httpx.get(f"{url}/jobs/{wanted.job_id}/result", timeout=30).json()
    assert shown == {"job_id": wanted.job_id, "state": "done", "value": {"answer": 42}}

    asked = httpx.post(f"{url}/jobs", json={"jobs": [{"text": "again", "want_result": True}]}, timeout=30).json()
    (again,) = asked["jobs"]
    (job,) = get(jobs)
    body = {"leases": [job.lease], "result": {"text": "done"}}
    assert httpx.post(f"{url}/ack", json=body, timeout=30).json()["settled"] == 1
    assert jobs.GetJobResult(pb.GetJobResultRequest(job_id=again["job_id"], **_NAME)).result == b"done"
    bad = {"leases": [job.lease], "result": {"text": "x", "value": 1}}
    assert httpx.post(f"{url}/ack", json=bad, timeout=30).status_code == 400

    (dead,) = put(jobs, b"never", want_result=True)
    (job,) = get(jobs)
    jobs.RejectJobs(pb.RejectJobsRequest(leases=[job.lease], reason="no", **_NAME))
    told = jobs.GetJobResult(pb.GetJobResultRequest(job_id=dead.job_id, wait_ms=1000, **_NAME))
    assert (told.state, told.reason) == ("dead", "no")
    (plain,) = put(jobs, b"nobody asks")
    for missing in (plain.job_id, "0-4711", "7-0"):
        told = refused(jobs.GetJobResult, pb.GetJobResultRequest(job_id=missing, **_NAME))
        assert told == (grpc.StatusCode.NOT_FOUND, "unknown_job"), missing
        assert httpx.get(f"{url}/jobs/{missing}/result", timeout=30).status_code == 404
    assert httpx.get(f"{url}/jobs/{plain.job_id}/result?wait_ms=999999999", timeout=30).status_code == 400


def test_an_idempotency_key_may_be_as_long_as_for_records(jobs: Any) -> None:
    for length, told in ((200, None), (201, (grpc.StatusCode.INVALID_ARGUMENT, "invalid_input"))):
        request = pb.PutJobsRequest(jobs=[pb.NewJob(value=b"x")], idempotency_key="k" * length, **_NAME)
        if told is None:
            assert jobs.PutJobs(request).jobs
        else:
            assert refused(jobs.PutJobs, request) == told
