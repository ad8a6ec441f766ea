"""One look at everything, lag in time with its trend, and settings with their sources."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from rayqueue.config import descriptions
from rayqueue.gateway.keys import KeyStore
from rayqueue.gateway.overview import Trends
from rayqueue.gateway.server import Gateway
from rayqueue.testing import memory, wait_for


@pytest.mark.slow
def test_an_overview_has_what_the_caller_may_see(rq: memory.MemoryQueue, start: Callable[..., Gateway]) -> None:
    rq.create_topic("orders", partitions=2)
    rq.create_topic("secret")
    rq.queue("emails")
    grants = ["describe:cluster:brokers", "describe:topic:orders", "describe:queue:emails", "describe:group:g"]
    store = KeyStore(rq)
    key = store.create("some", grants)[0].text
    blind = store.create("blind", ["describe:topic:*"])[0].text
    for group in ("g", "h"):
        with rq.consumer("orders", group=group) as consumer:
            consumer.poll(timeout_ms=100)
            consumer.commit()
    with rq.producer() as producer:
        producer.send_many("orders", [b"x"] * 10)
    gateway = start()
    with httpx.Client(base_url=f"http://127.0.0.1:{gateway.rest_port}", timeout=30) as rest:
        seen = rest.get("/v1/overview", headers={"Authorization": f"Bearer {key}"}).json()
        assert rest.get("/v1/overview", headers={"Authorization": f"Bearer {blind}"}).status_code == 403
        assert rest.get("/v1/settings", headers={"Authorization": f"Bearer {key}"}).status_code == 403
    assert {each["name"]: each["kind"] for each in seen["topics"]} == {"orders": "log", "emails": "queue"}
    (group,) = seen["groups"]
    assert (group["group"], group["lag"], group["members"], group["topics"]) == ("g", 10, 0, ["orders"])
    assert len(seen["cluster"]["brokers"]) == 3
    assert (seen["gateway"], abs(seen["now_ms"] - time.time() * 1000) < 60_000) == (gateway.gateway_id, True)
    orders = next(each for each in seen["topics"] if each["name"] == "orders")
    assert sum(each["end_offset"] for each in orders["partitions"]) == 10


@pytest.mark.slow
def test_many_who_look_ask_the_cluster_once_a_second(rest: httpx.Client) -> None:
    began_s = time.monotonic()
    looks = {rest.get("/v1/overview").json()["now_ms"] for _ in range(50)}
    assert len(looks) <= 1 + (time.monotonic() - began_s) / 1.0
    wait_for(lambda: rest.get("/v1/overview").json()["now_ms"] > max(looks), "another look", 20)


def test_a_group_is_behind_in_time_as_its_first_unread_record_says(rest: httpx.Client, rq: memory.MemoryQueue) -> None:
    rq.create_topic("orders", lanes=2)
    with rq.producer() as producer:
        for at_ms, lane in ((1000, 0), (2000, 1), (3000, 0), (4000, 1)):
            producer.send("orders", b"x", timestamp_ms=at_ms, priority=lane).result()

    def oldest() -> Any:
        (part,) = rest.get("/v1/groups/g").json()["partitions"]
        return part["lag"], part["oldest_unread_ms"]

    with rq.consumer("orders", group="g", ack="record", auto_commit=False) as consumer:
        found: list[Any] = []
        while len(found) < 4:
            found += consumer.poll(timeout_ms=1000)
        for record in sorted(found, key=lambda each: each.timestamp):
            assert oldest()[1] == record.timestamp
            consumer.ack(record)
            consumer.commit()
        assert oldest() == (0, None)


@pytest.mark.slow
def test_a_partition_without_a_leader_hides_no_group(rest: httpx.Client, rq: memory.MemoryQueue) -> None:
    rq.create_topic("orders")
    with rq.consumer("orders", group="g") as consumer:
        consumer.poll(timeout_ms=100)
        consumer.commit()
    with rq.without_leader("orders"):
        (group,) = rest.get("/v1/overview").json()["groups"]
    assert (group["group"], group["lag"]) == ("g", None)


def test_settings_say_where_they_are_from(start: Callable[..., Gateway], rq: memory.MemoryQueue) -> None:
    gateway = start(max_body_bytes=4096)
    with httpx.Client(base_url=f"http://127.0.0.1:{gateway.rest_port}", timeout=30) as rest:
        told = {each["key"]: each for each in rest.get("/v1/settings").json()["settings"]}
    assert set(told) == set(descriptions())
    assert (told["gateway.max_body_bytes"]["value"], told["gateway.max_body_bytes"]["source"]) == ("4096", "argument")
    assert told["gateway.max_connections"]["source"] == "default"
    assert told["gateway.max_connections"]["description"]
    secret = rq.settings.transport.secret
    assert secret is not None
    assert secret.get_secret_value() not in str(told)


def test_a_trend_is_the_growth_of_the_last_minute() -> None:
    trends = Trends()
    for at_s in range(100):
        assert at_s > 2 or trends.of("g") is None
        trends.add("g", float(at_s), 1000 if at_s < 39 else 5 * (at_s - 39))  # a minute ago it was otherwise
    assert round(trends.of("g") or 0, 6) == 5.0
    trends.add("g", 99.0, 10**9)  # no later than the last: not a point
    assert round(trends.of("g") or 0, 6) == 5.0
