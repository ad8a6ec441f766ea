"""REST over real HTTP: every route's contract, on a queue in memory."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from rayqueue.client.consumer.commits import Commits
from rayqueue.client.consumer.consumer import Consumer
from rayqueue.errors import LeadershipLostError, OutcomeUnknownError, QueueFullError
from rayqueue.gateway.numbered import NumberedWrite
from rayqueue.gateway.rest import problems
from rayqueue.gateway.server import Gateway
from rayqueue.testing import memory, wait_for


def make(rest: httpx.Client, **settings: Any) -> None:
    assert rest.post("/v1/topics", json={"name": "orders", **settings}).status_code == 201


def put(rest: httpx.Client, *records: Any, **headers: str) -> Any:
    answer = rest.post("/v1/topics/orders/records", json={"records": list(records)}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["records"]


def problem(answer: httpx.Response, status: int, code: str) -> Any:
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert answer.headers["content-type"] == problems.CONTENT_TYPE
    assert answer.json()["status"] == status
    assert answer.json()["title"]
    return answer.json()


def test_topics(rest: httpx.Client) -> None:
    made = rest.post("/v1/topics", json={"name": "orders", "partitions": 2, "retention_ms": 5000})
    assert (made.status_code, made.json()["partitions"], made.json()["settings"]["retention_ms"]) == (201, 2, 5000)
    problem(rest.post("/v1/topics", json={"name": "orders"}), 409, "topic_exists")
    again = rest.post("/v1/topics", json={"name": "orders", "if_missing": True})
    assert again.json()["topic_id"] == made.json()["topic_id"]
    problem(rest.post("/v1/topics", json={"name": "orders", "if_missing": True, "lanes": 2}), 409, "topic_differs")
    assert [each["name"] for each in rest.get("/v1/topics").json()["topics"]] == ["orders"]
    changed = rest.patch("/v1/topics/orders", json={"partitions": 3, "retention_ms": None})
    assert (changed.json()["partitions"], changed.json()["settings"]["retention_ms"]) == (3, None)
    problem(rest.patch("/v1/topics/orders", json={"partitions": 1}), 400, "invalid_input")
    problem(rest.patch("/v1/topics/orders", json={}), 400, "invalid_input")
    detail = rest.get("/v1/topics/orders").json()
    replicas = detail["partitions"][0]["replicas"]
    assert sorted(each["role"] for each in replicas) == ["follower", "follower", "leader"]
    assert {each["high_watermark"] for each in replicas} == {0}
    leader = next(each for each in replicas if each["role"] == "leader")
    assert leader["lag"] == 0
    assert {each["raft"]["leader"] for each in replicas} == {leader["replica_id"]}
    assert len({each["raft"]["term"] for each in replicas}) == 1
    assert leader["raft"]["voters"] == sorted(each["replica_id"] for each in replicas)
    assert leader["raft"]["first_index"] <= leader["raft"]["commit"] == leader["raft"]["last_index"]
    assert rest.delete("/v1/topics/orders").status_code == 204
    problem(rest.delete("/v1/topics/orders"), 404, "unknown_topic")
    problem(rest.get("/v1/topics/orders"), 404, "unknown_topic")


def test_records_come_back_as_they_were_published(rest: httpx.Client) -> None:
    make(rest, lanes=2)
    records: list[dict[str, Any]] = [
        {"value": {"a": [1, None, "ü"]}, "key": "k", "headers": {"h": "1"}},
        {"text": "plain, not JSON"},
        {"base64": "AP8="},
        {},
        {"value": None, "timestamp_ms": 1234},
        {"text": "low", "priority": 1, "partition": 0, "key_base64": "AP8=", "headers_base64": {"x": "/w=="}},
    ]
    assert [each["offset"] for each in put(rest, *records[:5])] == [0, 1, 2, 3, 4]
    assert [each["offset"] for each in put(rest, records[5])] == [5]
    found = rest.get("/v1/topics/orders/records").json()["records"]
    assert [each["offset"] for each in found] == [0, 1, 2, 3, 4, 5]
    kept = ("value", "text", "base64", "key", "key_base64", "headers", "headers_base64")
    shown = [{name: each[name] for name in kept if name in each} for each in found]
    assert shown == [{name: value for name, value in each.items() if name in kept} for each in records]
    assert found[4]["timestamp_ms"] == 1234
    assert found[5]["lane"] == 1
    coded = rest.get("/v1/topics/orders/records", params={"format": "base64", "offset": 1, "max": 1}).json()["records"]
    assert coded[0]["base64"] == "cGxhaW4sIG5vdCBKU09O"
    late = rest.get("/v1/topics/orders/records", params={"timestamp_ms": 2**42}).json()["records"]
    assert late == []


def test_a_raw_body_is_a_value(rest: httpx.Client) -> None:
    make(rest)
    body = bytes(range(256))
    sent = rest.post("/v1/topics/orders/records/raw", params={"key": "k"}, content=body)
    assert sent.status_code == 200
    (found,) = rest.get("/v1/topics/orders/records", params={"format": "base64"}).json()["records"]
    assert msgspec.convert(found["base64"], bytes) == body
    assert found["key"] == "k"


@pytest.mark.slow
def test_an_idempotency_key_writes_once_whichever_gateway_is_asked(
    rest: httpx.Client, rq: memory.MemoryQueue, start: Callable[..., Gateway]
) -> None:
    make(rest)
    other = start(rq.another())
    first = put(rest, {"text": "once"}, **{"Idempotency-Key": "k1"})
    url = f"http://127.0.0.1:{other.rest_port}/v1/topics/orders/records"
    again = httpx.post(url, json={"records": [{"text": "once"}]}, headers={"Idempotency-Key": "k1"}, timeout=30)
    assert again.json()["records"] == first
    assert again.headers["idempotency-replayed"] == "true"
    twice = httpx.post(url, json={"records": [{"text": "two"}]}, headers={"Idempotency-Key": "k1"}, timeout=30)
    problem(twice, 422, "request_conflict")
    assert len(rest.get("/v1/topics/orders/records").json()["records"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("died", ["before it wrote", "in the middle", "before it answered"])
def test_an_idempotency_key_outlives_the_gateway_that_died_on_the_way(
    rest: httpx.Client,
    gateway: Gateway,
    rq: memory.MemoryQueue,
    start: Callable[..., Gateway],
    monkeypatch: pytest.MonkeyPatch,
    died: str,
) -> None:
    """Whatever a gateway that is killed leaves, another completes: each record is there once, with one answer."""
    make(rest, partitions=3, lanes=2)
    other = start(rq.another())
    append = NumberedWrite._append

    async def failing(self: Any, partition: int, *rest: Any) -> Any:
        if self._rq is rq and (partition != 1 or died == "before it wrote"):
            raise OutcomeUnknownError("killed")
        return await append(self, partition, *rest)

    async def forgotten(_: Any) -> bool:
        return False

    if died == "before it answered":
        monkeypatch.setattr(gateway._requests, "_keep", forgotten)
    else:
        monkeypatch.setattr(NumberedWrite, "_append", failing)
    records: list[dict[str, Any]] = [{"text": str(row), "partition": row % 3, "priority": row % 2} for row in range(20)]
    records += [{"text": f"k{row}", "key": f"key {row}"} for row in range(20)]
    records += [{"text": "anywhere"}, {"text": "then", "timestamp_ms": 77}]
    headers = {"Idempotency-Key": "k"}
    first = rest.post("/v1/topics/orders/records", json={"records": records}, headers=headers)
    assert first.status_code == (200 if died == "before it answered" else 504), first.text
    rq.alter_topic("orders", partitions=5)  # where records go does not change with it
    url = f"http://127.0.0.1:{other.rest_port}/v1/topics/orders/records"

    def retried() -> httpx.Response | None:
        """Until the other gateway has read the claim, it claims the request itself, and the first claim counts."""
        answer = httpx.post(url, json={"records": records}, headers=headers, timeout=30)
        return None if answer.status_code == 409 else answer

    again = wait_for(retried, "the other gateway to know the claim")
    assert again.status_code == 200, again.text
    assert again.headers["idempotency-replayed"] == "true"
    if first.status_code == 200:
        assert again.json() == first.json()
    assert rest.post("/v1/topics/orders/records", json={"records": records}, headers=headers).json() == again.json()
    there: dict[tuple[int, int], tuple[str, int]] = {}
    for partition in range(5):
        params: dict[str, Any] = {"partition": partition, "max": 100, "format": "text"}
        for each in rest.get("/v1/topics/orders/records", params=params).json()["records"]:
            there[partition, each["offset"]] = each["text"], each["timestamp_ms"]
    told = [(each["partition"], each["offset"]) for each in again.json()["records"]]
    assert [there[place][0] for place in told] == [each["text"] for each in records]
    assert len(there) == len(records)
    assert there[told[-1]] == ("then", 77)
    assert [there[place][1] for place in told] == [each["timestamp_ms"] for each in again.json()["records"]]
    problem(httpx.post(url, json={"records": records[1:]}, headers=headers, timeout=30), 422, "request_conflict")


def test_requests_share_a_few_producer_ids_and_a_keyed_record_goes_where_it_always_does(
    rest: httpx.Client, gateway: Gateway
) -> None:
    make(rest, partitions=4)
    for number in range(5):
        (plain,) = put(rest, {"text": "x", "key": f"key {number}"})
        (once,) = put(rest, {"text": "x", "key": f"key {number}"}, **{"Idempotency-Key": str(number)})
        assert once["partition"] == plain["partition"]
    assert [epoch for _, epoch in gateway._requests._numbers._free] == [5]
    for wrong in ({"text": "x", "partition": 9}, {"text": "x", "priority": 1}, {"text": "x" * 2_000_000}):
        answer = rest.post("/v1/topics/orders/records", json={"records": [wrong]}, headers={"Idempotency-Key": "w"})
        assert answer.status_code in (400, 404, 413), answer.text
    put(rest, {"text": "x"}, **{"Idempotency-Key": "w"})  # what was wrong has claimed nothing


def test_a_session_reads_acknowledges_and_goes_on_where_it_was(rest: httpx.Client) -> None:
    make(rest, partitions=2)
    put(rest, *({"text": str(number)} for number in range(10)))
    opened = rest.post("/v1/groups/billing/sessions", json={"topics": ["orders"]})
    assert opened.status_code == 201
    session = opened.json()["session"]
    found = rest.get(f"/v1/sessions/{session}/records", params={"max": 4}).json()["records"]
    while len(found) < 4:
        found += rest.get(f"/v1/sessions/{session}/records", params={"max": 4 - len(found)}).json()["records"]
    places = [{name: each[name] for name in ("topic", "partition", "offset", "lane")} for each in found]
    acked = rest.post(f"/v1/sessions/{session}/ack", json={"records": places[:3]})
    assert acked.json() == {"acknowledged": 3}
    problem(rest.post(f"/v1/sessions/{session}/ack", json={"records": places[:1]}), 400, "invalid_input")
    problem(rest.post(f"/v1/sessions/{session}/ack", json={}), 400, "invalid_input")
    beat = rest.post(f"/v1/sessions/{session}/heartbeat").json()
    assert beat["assignment"] == [{"topic": "orders", "partition": 0}, {"topic": "orders", "partition": 1}]
    assert rest.get("/v1/groups/billing").json()["lag"] == 7
    problem(rest.delete("/v1/groups/billing"), 409, "group_not_empty")
    assert rest.delete(f"/v1/sessions/{session}").status_code == 204
    problem(rest.get(f"/v1/sessions/{session}/records"), 410, "session_gone")
    problem(rest.get("/v1/sessions/another.abc/records"), 421, "session_elsewhere")
    session = rest.post("/v1/groups/billing/sessions", json={"topics": ["orders"]}).json()["session"]
    rest_of: list[int] = []
    handed: list[Any] = []
    while len(rest_of) < 7:
        handed += rest.get(f"/v1/sessions/{session}/records").json()["records"]
        rest_of = [each["value"] for each in handed]
    acknowledged = {each["value"] for each in found[:3]}
    assert sorted(rest_of) == sorted(set(range(10)) - acknowledged)
    places = [{name: each[name] for name in ("topic", "partition", "offset", "lane")} for each in handed]
    assert rest.post(f"/v1/sessions/{session}/ack", json={"records": places}).json() == {"acknowledged": 7}


def test_an_answer_that_was_lost_comes_again_and_is_not_acknowledged_unseen(rest: httpx.Client) -> None:
    make(rest)
    put(rest, *({"text": str(number)} for number in range(9)))
    session = rest.post("/v1/groups/g/sessions", json={"topics": ["orders"]}).json()["session"]

    def read(**params: int) -> tuple[list[int], int]:
        answer = rest.get(f"/v1/sessions/{session}/records", params={"max": 3, **params}).json()
        return [each["value"] for each in answer["records"]], answer["cursor"]

    def ack(through: int) -> httpx.Response:
        return rest.post(f"/v1/sessions/{session}/ack", json={"through": through})

    assert read() == ([0, 1, 2], 3)
    assert read(cursor=3) == ([3, 4, 5], 6)  # lost on its way
    assert read(cursor=3) == ([3, 4, 5], 6)
    assert ack(6).json() == {"acknowledged": 6}
    assert read(cursor=6) == ([6, 7, 8], 9)
    problem(ack(10), 400, "invalid_input")
    problem(rest.get(f"/v1/sessions/{session}/records", params={"cursor": 10}), 400, "invalid_input")
    assert read(wait_ms=0) == ([], 9)  # does not say what it has seen
    problem(ack(9), 400, "invalid_input")
    assert rest.get("/v1/groups/g").json()["lag"] == 3


def test_what_comes_for_a_caller_who_hung_up_is_not_handed_to_nobody(rest: httpx.Client) -> None:
    make(rest)
    session = rest.post("/v1/groups/g/sessions", json={"topics": ["orders"]}).json()["session"]
    path = f"/v1/sessions/{session}/records"
    rest.get(path, params={"wait_ms": 0})
    with pytest.raises(httpx.ReadTimeout):
        rest.get(path, params={"wait_ms": 20_000}, timeout=0.5)
    put(rest, {"text": "a"})
    answer = rest.get(path, params={"wait_ms": 5000}).json()
    assert [each["text"] for each in answer["records"]] == ["a"]


@pytest.mark.slow
def test_a_session_that_is_not_heard_of_leaves(rest: httpx.Client, rq: memory.MemoryQueue) -> None:
    make(rest)
    opened = rest.post("/v1/groups/g/sessions", json={"topics": ["orders"], "timeout_ms": 1000}).json()
    rest.get(f"/v1/sessions/{opened['session']}/records", params={"wait_ms": 0})
    wait_for(lambda: not rq.group("g").members, "the session to leave", 30)
    problem(rest.post(f"/v1/sessions/{opened['session']}/heartbeat"), 410, "session_gone")


@pytest.mark.slow
def test_a_tracked_consumer_gets_each_record_once_also_from_two_gateways(
    rest: httpx.Client, rq: memory.MemoryQueue, start: Callable[..., Gateway]
) -> None:
    make(rest, partitions=4)
    put(rest, *({"text": f"v{number}"} for number in range(60)))
    other = start(rq.another())
    found: list[str] = []
    with httpx.Client(base_url=f"http://127.0.0.1:{other.rest_port}", timeout=30) as second:

        def everything() -> bool:
            for client in (rest, second):
                answer = client.get("/v1/topics/orders/consumers/w1/records", params={"max": 7, "wait_ms": 50})
                assert answer.status_code == 200, answer.text
                found.extend(each["text"] for each in answer.json()["records"])
            return len(found) >= 60

        wait_for(everything, "all records", 30)
        assert not everything() or len(found) == 60
    assert sorted(found) == sorted(f"v{number}" for number in range(60))


def taken(rest: httpx.Client, **params: Any) -> list[str]:
    answer = rest.get("/v1/topics/orders/consumers/w/records", params={"wait_ms": 2000, **params})
    assert answer.status_code == 200, answer.text
    return [each["text"] for each in answer.json()["records"]]


def test_what_comes_for_a_tracked_consumer_that_hung_up_is_the_next_requests(rest: httpx.Client) -> None:
    make(rest)
    assert taken(rest, wait_ms=0) == []
    with pytest.raises(httpx.ReadTimeout):
        rest.get("/v1/topics/orders/consumers/w/records", params={"wait_ms": 20_000}, timeout=0.5)
    put(rest, {"text": "a"}, {"text": "b"})
    assert taken(rest) == ["a", "b"]
    assert taken(rest, wait_ms=10) == []


@pytest.mark.slow
def test_a_commit_that_fails_passes_nothing_over(
    rest: httpx.Client, rq: memory.MemoryQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(rest)
    put(rest, {"text": "a"}, {"text": "b"}, {"text": "c"})
    with monkeypatch.context() as broken:

        async def fails(*_: Any, **__: Any) -> Any:
            raise OutcomeUnknownError("the leader has just gone")

        broken.setattr(Commits, "commit", fails)
        answer = rest.get("/v1/topics/orders/consumers/w/records", params={"wait_ms": 5000})
        problem(answer, 504, "outcome_unknown")
    assert taken(rest, max=2) == ["a", "b"]
    assert taken(rest) == ["c"]
    assert rq.group("w").lag == 0


def test_groups_are_listed_reset_and_deleted(rest: httpx.Client) -> None:
    make(rest)
    put(rest, *({"text": str(number)} for number in range(5)))
    session = rest.post("/v1/groups/g/sessions", json={"topics": ["orders"]}).json()["session"]
    assert rest.get(f"/v1/sessions/{session}/records").json()["cursor"] == 5
    rest.post(f"/v1/sessions/{session}/ack", json={"through": 5})
    problem(rest.post("/v1/groups/g/reset", json={"to": "earliest"}), 409, "group_not_empty")
    rest.delete(f"/v1/sessions/{session}")
    planned = rest.post("/v1/groups/g/reset", json={"to": 2, "topic": "orders", "dry_run": True}).json()
    assert (planned["executed"], planned["positions"][0]["after"]) == (False, {"0": 2})
    assert rest.get("/v1/groups/g").json()["lag"] == 0
    assert rest.post("/v1/groups/g/reset", json={"to": 2, "topic": "orders"}).json()["executed"]
    assert rest.get("/v1/groups/g").json()["lag"] == 3
    problem(rest.post("/v1/groups/g/reset", json={"to": 2, "by": 1}), 400, "invalid_input")
    assert [each["group"] for each in rest.get("/v1/groups").json()["groups"]] == ["g"]
    assert rest.delete("/v1/groups/g").status_code == 204
    problem(rest.get("/v1/groups/g"), 404, "unknown_group")


@pytest.mark.slow
def test_a_tail_tells_what_comes(rest: httpx.Client) -> None:
    make(rest)
    put(rest, {"value": {"n": 1}}, {"text": "two\nlines"})
    with rest.stream("GET", "/v1/topics/orders/tail", params={"start": "earliest"}) as events:
        assert events.headers["content-type"].startswith("text/event-stream")
        sender = threading.Timer(0.2, lambda: put(rest, {"value": 3}))
        sender.start()
        told: list[Any] = []
        for line in events.iter_lines():
            if line.startswith("data: "):
                told.append(json.loads(line.removeprefix("data: ")))
            if len(told) == 3:
                break
        sender.join()
    assert [each.get("value", each.get("text")) for each in told] == [{"n": 1}, "two\nlines", 3]
    problem(rest.get("/v1/topics/nothing/tail"), 404, "unknown_topic")
    problem(rest.get("/v1/topics/orders/tail", params={"offset": 1}), 400, "invalid_input")


def tailed(rest: httpx.Client, last_id: str | None, wanted: int) -> tuple[list[Any], str]:
    """So many values of a tail, which is hung up on then, and the last id that it told, as a browser keeps it."""
    headers = {} if last_id is None else {"Last-Event-ID": last_id}
    told: list[Any] = []
    seen = ""
    with rest.stream("GET", "/v1/topics/orders/tail", headers=headers) as events:
        assert events.status_code == 200
        for line in events.iter_lines():
            if line.startswith("id: "):
                seen = line.removeprefix("id: ")
            if line.startswith("data: "):
                told.append(json.loads(line.removeprefix("data: "))["value"])
            if not line and seen and len(told) >= wanted:
                break
    return told, seen


def test_a_tail_that_was_cut_off_goes_on_behind_its_last_event(rest: httpx.Client) -> None:
    """Also where nothing had come yet: what is written between two connections is not missed."""
    make(rest, partitions=3)
    _, seen = tailed(rest, None, 0)
    put(rest, *({"value": number, "partition": number % 3} for number in range(9)))
    told, after = tailed(rest, seen, 9)
    assert sorted(told) == list(range(9))
    put(rest, {"value": 9, "partition": 1})
    assert tailed(rest, after, 1)[0] == [9]
    for wrong in ("0:1", "x", "1/0:1;2", "1/0:" + "9" * 400):
        problem(rest.get("/v1/topics/orders/tail", headers={"Last-Event-ID": wrong}), 400, "invalid_input")
    rest.delete("/v1/topics/orders")
    make(rest, partitions=3)
    problem(rest.get("/v1/topics/orders/tail", headers={"Last-Event-ID": after}), 409, "topic_recreated")


def test_falconqs_routes_answer_as_its_readme_shows(rest: httpx.Client) -> None:
    problem(rest.get("/topic/orders/peek", params={"offset": 0, "batch": 5}), 404, "unknown_topic")
    assert rest.get("/topics").json() == {"topics": []}
    make(rest, lanes=2)
    for text, priority in (("normal", "low"), ("urgent", "high"), ("later", "low")):
        sent = rest.post("/topic/orders/publish", json={"message": text, "priority": priority})
        assert sent.json()["status"] == "published"
    assert rest.get("/topics").json() == {"topics": ["orders"]}
    assert rest.get("/topics/orders/partitions").json() == {"partitions": [{"id": 0}], "topic": "orders"}
    peeked = rest.get("/topic/orders/peek", params={"offset": 0, "batch": 5}).json()["messages"]
    assert [each["message"] for each in peeked] == ["normal", "urgent", "later"]
    got: list[str] = []

    def consumed() -> bool:
        """An answer may be empty while the records are on their way."""
        answer = rest.get("/topic/orders/consume", params={"consumerID": "worker1", "batch": 1}).json()
        got.extend(each["message"] for each in answer["messages"])
        return len(got) >= 3

    wait_for(consumed, "three messages")
    assert got == ["urgent", "normal", "later"]
    assert rest.get("/topic/orders/consume", params={"consumerID": "worker1"}).json() == {"messages": []}


def test_cluster_and_health(rest: httpx.Client) -> None:
    assert rest.get("/healthz").json()["status"] == "ok"
    assert rest.get("/readyz").json()["status"] == "ok"
    assert [each["alive"] for each in rest.get("/v1/cluster").json()["brokers"]] == [True] * 3


def test_the_document_and_its_pages_need_nobody_else(rest: httpx.Client) -> None:
    document = rest.get("/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    for page in ("/docs", "/redoc"):
        text = rest.get(page).text
        assert "//cdn" not in text
        assert "googleapis" not in text
    assert rest.get("/docs/static/swagger-ui-bundle.js").status_code == 200


def test_a_producer_repeats_what_can_be_and_a_full_topic_is_told(rest: httpx.Client, rq: memory.MemoryQueue) -> None:
    make(rest)
    put(rest, {"text": "warm"})
    rq.fail_next("append", LeadershipLostError("lost"), topic="orders", times=2, carried_out=True)
    put(rest, {"text": "x"})
    assert len(rest.get("/v1/topics/orders/records").json()["records"]) == 2
    rq.fail_next("append", QueueFullError("full"), topic="orders")
    full = rest.post("/v1/topics/orders/records", json={"records": [{"text": "y"}]})
    assert problem(full, 429, "queue_full")["retriable"]
    assert full.headers["retry-after"] == "1"


def test_a_topic_that_is_made_again_is_written_to(rest: httpx.Client) -> None:
    for number in range(3):
        make(rest)
        assert put(rest, {"text": str(number)}, {"text": "more"})[0]["offset"] == 0
        assert rest.delete("/v1/topics/orders").status_code == 204


@pytest.mark.slow
def test_without_a_leader_a_publish_is_told_to_retry(rq: memory.MemoryQueue, start: Callable[..., Gateway]) -> None:
    gateway = start(request_timeout_ms=1500)
    with httpx.Client(base_url=f"http://127.0.0.1:{gateway.rest_port}", timeout=30) as rest:
        make(rest)
        put(rest, {"text": "warm"})
        with rq.without_leader("orders"):
            answer = rest.post("/v1/topics/orders/records", json={"records": [{"text": "x"}]})
        assert answer.status_code in (503, 504)
        assert answer.headers["content-type"] == problems.CONTENT_TYPE


@pytest.mark.slow
def test_an_ack_tells_what_another_member_reads_and_keeps_the_rest(rest: httpx.Client, rq: memory.MemoryQueue) -> None:
    make(rest, partitions=2)
    put(rest, *({"text": str(number), "partition": number % 2} for number in range(20)))
    first = rest.post("/v1/groups/g/sessions", json={"topics": ["orders"]}).json()["session"]
    cursor = 0
    while cursor < 20:
        cursor = rest.get(f"/v1/sessions/{first}/records", params={"wait_ms": 500, "cursor": cursor}).json()["cursor"]
    again: list[Any] = []
    with rq.consumer("orders", group="g", auto_commit=False) as second:

        def shared() -> bool:  # the first gives one up while it asks for more
            again.extend(second.poll(timeout_ms=50))
            more = rest.get(f"/v1/sessions/{first}/records", params={"wait_ms": 1, "cursor": cursor})
            assert not more.json()["records"]
            return len(again) == 10

        wait_for(shared, "the second to read its half again")
        (gone,) = {each.partition for each in again}
        told = problem(rest.post(f"/v1/sessions/{first}/ack", json={"through": cursor}), 409, "stale_generation")
        assert f"orders-{gone} went to another member" in told["detail"]
        assert "the other 10 are acknowledged" in told["detail"]
        assert rest.post(f"/v1/sessions/{first}/ack", json={"through": cursor}).json() == {"acknowledged": 0}
        lags = {each["partition"]: each["lag"] for each in rest.get("/v1/groups/g").json()["partitions"]}
        assert lags == {gone: 10, 1 - gone: 0}


def test_an_ack_that_could_not_be_committed_may_be_repeated(
    rest: httpx.Client, rq: memory.MemoryQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(rest)
    put(rest, {"text": "a"}, {"text": "b"})
    session = rest.post("/v1/groups/g/sessions", json={"topics": ["orders"]}).json()["session"]
    assert rest.get(f"/v1/sessions/{session}/records", params={"wait_ms": 5000}).json()["cursor"] == 2

    def fails(*_: Any) -> Any:
        raise LeadershipLostError("the leader has just gone")

    with monkeypatch.context() as broken:
        broken.setattr(Consumer, "commit_async", fails)
        problem(rest.post(f"/v1/sessions/{session}/ack", json={"through": 2}), 504, "leadership_lost")
    done = [{"topic": "orders", "partition": 0, "offset": offset, "lane": 0} for offset in (0, 1, 1)]
    assert rest.post(f"/v1/sessions/{session}/ack", json={"records": done}).json() == {"acknowledged": 2}
    assert rq.group("g").lag == 0
