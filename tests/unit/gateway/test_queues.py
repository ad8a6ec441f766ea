"""Work queues over REST: every route's contract, on a queue in memory."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from rayqueue.client.queue.detached import JobLease
from rayqueue.client.queue.job import JobId
from rayqueue.errors import InvalidInputError
from rayqueue.gateway.requests import TOPIC as REQUESTS
from rayqueue.gateway.requests import Claimed, request_id
from rayqueue.gateway.server import Gateway
from rayqueue.testing import memory, wait_for
from tests.unit.gateway.test_rest import problem

QUEUE = "/v1/queues/emails"


def make(rest: httpx.Client, **settings: Any) -> None:
    made = rest.post("/v1/queues", json={"name": "emails", "retry_backoff_ms": 0, **settings})
    assert made.status_code == 201, made.text


def put(rest: httpx.Client, *jobs: Any, **headers: str) -> Any:
    answer = rest.post(f"{QUEUE}/jobs", json={"jobs": list(jobs)}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["jobs"]


def lease(rest: httpx.Client, **params: Any) -> list[Any]:
    answer = rest.post(f"{QUEUE}/jobs/lease", params={"wait_ms": 5000, **params})
    assert answer.status_code == 200, answer.text
    found: list[Any] = answer.json()["jobs"]
    return found


def settle(rest: httpx.Client, how: str, *jobs: Any, **said: Any) -> httpx.Response:
    return rest.post(f"{QUEUE}/{how}", json={"leases": [each["lease"] for each in jobs], **said})


def sizes(rest: httpx.Client) -> tuple[int, int, int, int]:
    told = rest.get(QUEUE).json()
    return told["ready"], told["leased"], told["delayed"], told["dead"]


@pytest.mark.slow
def test_queues_are_made_listed_described_and_deleted(rest: httpx.Client, rq: memory.MemoryQueue) -> None:
    rq.create_topic("log")
    make(rest, partitions=2, max_deliveries=7)
    problem(rest.post("/v1/queues", json={"name": "emails"}), 409, "topic_exists")
    again = rest.post("/v1/queues", json={"name": "emails", "if_missing": True})
    assert again.status_code == 201
    (listed,) = rest.get("/v1/queues").json()["queues"]
    assert (listed["queue"], listed["partitions"], listed["ready"], listed["problem"]) == ("emails", 2, 0, None)
    assert listed["settings"]["max_deliveries"] == 7
    assert rest.get(QUEUE).json()["oldest_ready_ms"] is None
    put(rest, {"text": "x"})
    told = rest.get(QUEUE).json()
    assert (told["ready"], told["queue_id"]) == (1, again.json()["queue_id"])
    assert abs(told["oldest_ready_ms"] - time.time() * 1000) < 60_000
    assert rest.delete(QUEUE).status_code == 204
    problem(rest.delete(QUEUE), 404, "unknown_topic")
    problem(rest.get(QUEUE), 404, "unknown_topic")
    problem(rest.post("/v1/queues", json={"name": "q", "retention_ms": 5}), 400, "invalid_input")
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/jobs/lease"), ("GET", "/dead"), ("GET", "/jobs")):
        problem(rest.request(method, f"/v1/queues/log{path}"), 409, "topic_kind")
    problem(rest.post("/v1/queues/log/jobs", json={"jobs": [{"text": "x"}]}), 409, "topic_kind")
    assert rq.topic("log").records == 0


def test_a_job_comes_as_it_was_put_and_is_gone_when_it_is_acknowledged(rest: httpx.Client) -> None:
    make(rest, lanes=2)
    first = {"value": {"to": ["ann"]}, "key": "k", "headers": {"trace": "t"}, "headers_base64": {"b": "/w=="}}
    made = put(rest, first, {"base64": "/w==", "priority": 1}, {})
    ids = [each["job_id"] for each in made]
    assert sorted(ids) == ["0-0", "0-1", "0-2"]
    peeked = rest.get(f"{QUEUE}/jobs").json()["jobs"]
    assert [each["job_id"] for each in peeked] == [ids[1], ids[0], ids[2]]  # the higher priority first
    assert "lease" not in peeked[0]
    urgent, job, empty = lease(rest, max=10)
    assert (urgent["base64"], urgent["priority"], urgent["deliveries"]) == ("/w==", 1, 1)
    assert {name: job[name] for name in first} == first
    assert not {"value", "text", "base64"} & empty.keys()
    assert 0 < job["lease_ms"] <= 30_000
    assert sizes(rest) == (0, 3, 0, 0)
    assert rest.get(f"{QUEUE}/jobs/{ids[0]}").json() == {"job_id": ids[0], "state": "leased", "deliveries": 1}
    for _ in range(2):  # repeated, it is the same one
        assert settle(rest, "ack", urgent, job).json() == {"settled": 2, "lost": []}
    assert rest.get(f"{QUEUE}/jobs/{ids[0]}").json()["state"] == "gone"
    assert settle(rest, "ack", empty).json()["settled"] == 1
    assert sizes(rest) == (0, 0, 0, 0)
    assert lease(rest, wait_ms=0) == []


def test_jobs_may_wait_outlive_be_deduplicated_and_be_cancelled(rest: httpx.Client) -> None:
    make(rest, partitions=3)
    now_ms = int(time.time() * 1000)
    put(rest, {"text": "later", "delay_ms": 3_600_000}, {"text": "then", "deliver_at_ms": now_ms + 3_600_000})
    assert sizes(rest) == (0, 0, 2, 0)
    put(rest, {"text": "short", "ttl_ms": 1})
    wait_for(lambda: sizes(rest)[3] == 1, "the time to live to be over", 20)
    once = [{"text": "a", "dedupe_id": "x"}, {"text": "b", "dedupe_id": "y"}, {"text": "c", "dedupe_id": "x"}]
    one, two, three = put(rest, *once)
    assert (one["duplicate"], two["duplicate"]) == (False, False)
    assert three == {"job_id": one["job_id"], "duplicate": True}
    assert put(rest, {"text": "d", "dedupe_id": "y"}) == [{"job_id": two["job_id"], "duplicate": True}]
    assert sizes(rest) == (2, 0, 2, 1)
    assert rest.delete(f"{QUEUE}/jobs/{one['job_id']}").status_code == 204
    problem(rest.delete(f"{QUEUE}/jobs/{one['job_id']}"), 404, "unknown_job")
    (left,) = lease(rest, max=10)
    assert left["text"] == "b"


def test_nack_reject_release_and_extend(rest: httpx.Client) -> None:
    make(rest, max_deliveries=2)
    put(rest, {"text": "a"})
    (job,) = lease(rest)
    assert settle(rest, "release", job).json()["settled"] == 1
    (job,) = lease(rest)
    assert job["deliveries"] == 1  # it does not count
    extended = settle(rest, "extend", job, lease_ms=600_000).json()
    assert (extended["extended"], extended["lost"]) == (1, [])
    assert 500_000 < extended["lease_ms"] <= 600_000
    assert settle(rest, "nack", job, delay_ms=0, reason="busy").json()["settled"] == 1
    (job,) = lease(rest)
    assert job["deliveries"] == 2
    settle(rest, "nack", job, reason="still busy")
    (dead,) = rest.get(f"{QUEUE}/dead").json()["jobs"]
    assert (dead["job_id"], dead["reason"], dead["text"], dead["deliveries"]) == ("0-0", "still busy", "a", 2)
    assert [each["kind"] for each in dead["history"]] == ["nack", "nack"]
    put(rest, {"text": "b"})
    (job,) = lease(rest)
    settle(rest, "reject", job, reason="no such address", traceback="line 1")
    assert sizes(rest) == (0, 0, 0, 2)
    one = rest.get(f"{QUEUE}/dead/0-1").json()
    assert (one["reason"], one["history"][-1]["traceback"]) == ("no such address", "line 1")
    problem(rest.get(f"{QUEUE}/dead/0-99"), 404, "unknown_job")
    assert [each["job_id"] for each in rest.get(f"{QUEUE}/dead?after=0-0").json()["jobs"]] == ["0-1"]


def test_dead_letters_are_sent_back_to_work_or_deleted(rest: httpx.Client) -> None:
    make(rest, partitions=2)
    put(rest, *({"text": str(number)} for number in range(5)))
    taken: list[Any] = []
    while len(taken) < 5:
        taken += lease(rest, max=5)
    settle(rest, "reject", *taken)
    ids = [each["job_id"] for each in rest.get(f"{QUEUE}/dead").json()["jobs"]]
    wrongs: list[Any] = [{}, {"jobs": []}, {"jobs": ids[:1], "all": True}, {"jobs": ["x"]}]
    for wrong in wrongs:
        problem(rest.post(f"{QUEUE}/dead/purge", json=wrong), 400, "invalid_input")
    assert sizes(rest)[3] == 5
    assert rest.post(f"{QUEUE}/dead/redrive", json={"jobs": ids[:2]}).json() == {"redriven": 2}
    assert rest.post(f"{QUEUE}/dead/redrive", json={"jobs": ids[:2]}).json() == {"redriven": 0}
    assert sizes(rest) == (2, 0, 0, 3)
    assert rest.post(f"{QUEUE}/dead/purge", json={"jobs": ids[2:3]}).json() == {"purged": 1}
    assert rest.post(f"{QUEUE}/dead/purge", json={"all": True}).json() == {"purged": 2}
    assert sizes(rest) == (2, 0, 0, 0)


def test_a_lease_that_ended_is_lost_once_somebody_else_has_the_job(rest: httpx.Client) -> None:
    make(rest)
    put(rest, {"text": "a"})
    (first,) = lease(rest, lease_ms=1)
    (again,) = lease(rest, lease_ms=600_000)
    put(rest, {"text": "b"})
    (other,) = lease(rest, lease_ms=600_000)
    assert (again["job_id"], again["deliveries"], again["lease"] != first["lease"]) == (first["job_id"], 2, True)
    for how in ("ack", "nack", "reject", "release", "extend"):
        assert problem(settle(rest, how, first), 409, "lease_lost")["retriable"] is False
    told = settle(rest, "ack", first, other).json()
    assert told == {"settled": 1, "lost": [first["lease"]]}
    assert settle(rest, "ack", again).json()["settled"] == 1


def test_a_lease_of_a_queue_that_was_made_again_is_lost(rest: httpx.Client) -> None:
    make(rest)
    put(rest, {"text": "a"})
    (old,) = lease(rest)
    assert rest.delete(QUEUE).status_code == 204
    make(rest)
    put(rest, {"text": "b"})
    (new,) = lease(rest)
    assert new["job_id"] == old["job_id"]
    problem(settle(rest, "ack", old), 409, "lease_lost")
    assert sizes(rest) == (0, 1, 0, 0)
    assert settle(rest, "ack", new).json()["settled"] == 1


@pytest.mark.slow
def test_any_gateway_takes_the_ack_also_when_the_one_that_leased_is_gone(
    rq: memory.MemoryQueue, start: Callable[..., Gateway]
) -> None:
    from rayqueue.config import GatewaySettings
    from rayqueue.gateway.server import GatewayThread

    with rq.another() as elsewhere:  # a process of its own: its connections end with it
        one = GatewayThread(elsewhere, GatewaySettings(rest_port=0, grpc_port=0))
        with one as gateway, httpx.Client(base_url=f"http://127.0.0.1:{gateway.rest_port}", timeout=30) as rest:
            make(rest)
            put(rest, {"text": "a"})
            (job,) = lease(rest)
        elsewhere.disconnect("emails")
    with httpx.Client(base_url=f"http://127.0.0.1:{start().rest_port}", timeout=30) as rest:
        assert sizes(rest) == (0, 1, 0, 0)  # the lease has outlived its gateway
        assert settle(rest, "extend", job).json()["extended"] == 1
        assert settle(rest, "ack", job).json()["settled"] == 1


@pytest.mark.slow
def test_a_get_waits_for_a_job_of_any_partition(rest: httpx.Client) -> None:
    make(rest, partitions=4)
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.extend(lease(rest, wait_ms=20_000)))
    waiting.start()
    time.sleep(0.3)
    put(rest, {"text": "a"})
    waiting.join(20)
    assert [each["text"] for each in found] == ["a"]
    # Questions that still wait in other partitions take nothing away for long.
    put(rest, *({"text": str(number)} for number in range(40)))
    taken: list[Any] = []

    def all_of_them() -> bool:
        taken.extend(lease(rest, max=40, wait_ms=500))
        return len(taken) == 40

    wait_for(all_of_them, "every job", 30)
    assert {each["deliveries"] for each in taken} == {1}


@pytest.mark.slow
def test_a_caller_that_goes_away_takes_no_job_with_him(rest: httpx.Client, gateway: Gateway) -> None:
    make(rest, partitions=2)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"http://127.0.0.1:{gateway.rest_port}{QUEUE}/jobs/lease", params={"wait_ms": 20_000, "max": 5}, timeout=0.3
        )
    put(rest, {"text": "a"}, {"text": "b"})
    taken: list[Any] = []

    def both() -> bool:
        taken.extend(lease(rest, max=5, wait_ms=500))
        return len(taken) == 2

    wait_for(both, "both jobs", 20)
    assert [each["deliveries"] for each in taken] == [1, 1]


def test_an_idempotency_key_puts_once(rest: httpx.Client) -> None:
    make(rest)
    headers = {"Idempotency-Key": "k"}
    body = {"jobs": [{"text": "a"}]}
    first, second = (rest.post(f"{QUEUE}/jobs", json=body, headers=headers) for _ in range(2))
    assert first.json() == second.json()
    assert second.headers["idempotency-replayed"] == "true"
    assert sizes(rest)[0] == 1
    problem(rest.post(f"{QUEUE}/jobs", json={"jobs": [{"text": "b"}]}, headers=headers), 422, "request_conflict")


def test_an_idempotency_key_outlives_the_gateway_that_died_on_the_way(
    rest: httpx.Client, rq: memory.MemoryQueue, gateway: Gateway
) -> None:
    """A claim without an answer, and some of the jobs put: what a gateway leaves that is killed in the middle."""
    make(rest, partitions=3)
    headers = {"Idempotency-Key": "k", "Content-Type": "application/json"}
    jobs: list[Any] = [{"text": str(number)} for number in range(20)] + [{"text": "own", "dedupe_id": "mine"}]
    body = msgspec.json.encode({"jobs": jobs})
    (topic,) = (each for each in rq.topics() if each.name == "emails")
    request = request_id("anonymous", "emails", topic.topic_id, "put:k")
    other = {"jobs": [{"text": "other"}]}
    started = rest.post(f"{QUEUE}/jobs", json=other, headers={"Idempotency-Key": "l"})
    assert started.status_code == 200  # the topic of requests is there now
    claimed = Claimed(request, hashlib.sha256(body).digest(), "of the dead")
    with rq.producer() as producer:
        producer.send(REQUESTS, msgspec.msgpack.encode(claimed)).result()
    queue = rq.queue("emails")
    for number in range(0, 20, 2):
        queue.put(str(number).encode(), dedupe_id=f"{request.hex()}-{number}")
    wait_for(lambda: gateway._requests._ledger.get(request) is not None, "the claim to be known", 20)
    first = rest.post(f"{QUEUE}/jobs", content=body, headers=headers)
    again = rest.post(f"{QUEUE}/jobs", content=body, headers=headers)
    assert first.status_code == again.status_code == 200, first.text
    assert first.json() == again.json()
    assert {each["duplicate"] for each in first.json()["jobs"]} == {False}
    texts: list[str] = []
    while len(texts) < 22:
        texts += [each["text"] for each in lease(rest, max=50, wait_ms=500, format="text")]
    assert sorted(texts) == sorted([*(str(number) for number in range(20)), "other", "own"])
    assert sizes(rest)[0] == 0
    problem(rest.post(f"{QUEUE}/jobs", json=other, headers={"Idempotency-Key": "k"}), 422, "request_conflict")


def test_wrong_bodies_put_and_settle_nothing(rest: httpx.Client) -> None:
    make(rest)
    for job in (
        {"text": "a", "priority": 1},
        {"text": "a", "base64": ""},
        {"text": "a", "headers": {"rayqueue-job": "x"}},
        {"text": "a", "dedupe_id": ""},
        {"text": "a", "dedupe_id": "x" * 257},
        {"text": "a", "ttl_ms": 0},
        {"text": "a", "delay_ms": -1},
        {"text": "a", "partition": 0},
    ):
        problem(rest.post(f"{QUEUE}/jobs", json={"jobs": [{"text": "fine"}, job]}), 400, "invalid_input")
    surrogate = rest.post(
        f"{QUEUE}/jobs",
        content=b'{"jobs":[{"text":"a","dedupe_id":"\\ud800"}]}',
        headers={"Content-Type": "application/json"},
    )
    problem(surrogate, 400, "invalid_input")
    for text in ("", "x", "1.2.3", "1.2-3", "1.2-3.x", "-1.2-3.4", f"{2**64}.0-0.0", "1.2-3.4" * 20):
        problem(rest.post(f"{QUEUE}/ack", json={"leases": [text]}), 400, "invalid_input")
    problem(rest.post(f"{QUEUE}/ack", json={"leases": [f"{2**62}.0-0.0"]}), 409, "lease_lost")
    problem(rest.post(f"{QUEUE}/ack", json={"leases": ["1.99-0.0"]}), 409, "lease_lost")
    problem(rest.get(f"{QUEUE}/jobs/99-0"), 404, "unknown_partition")
    assert sizes(rest) == (0, 0, 0, 0)


@pytest.mark.slow
def test_a_queue_without_a_leader_is_listed_and_says_why(rest: httpx.Client, rq: memory.MemoryQueue) -> None:
    make(rest)
    rest.post("/v1/queues", json={"name": "other"})
    with rq.without_leader("emails"):
        listed = {each["queue"]: each for each in rest.get("/v1/queues").json()["queues"]}
    assert listed["other"]["ready"] == 0
    assert listed["emails"]["ready"] is None
    assert listed["emails"]["problem"]


def test_the_text_of_a_lease_is_read_as_it_was_written() -> None:
    made = JobLease(7, JobId(3, 120), 55)
    assert JobLease.of(str(made)) == made
    for wrong in ("", "7", "7.3-120", "7.3-120.55.1", "7.3.120", "٧.3-120.55", f"7.3-120.{2**63}"):
        with pytest.raises(InvalidInputError):
            JobLease.of(wrong)
