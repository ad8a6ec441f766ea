"""Routes: every route of the gateway, as data. The OpenAPI document and the tests of who may what walk this table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from rayqueue.gateway.rest import handlers as h
from rayqueue.gateway.rest import models as m
from rayqueue.gateway.values import Publish

Body = Literal["json", "raw"] | None

_ORDER = {"value": {"order": 17, "total": 12.5}, "key": "customer-4", "headers": {"trace": "a1b2"}}
_RECORD = {"topic": "orders", "partition": 0, "offset": 0, "lane": 0, "timestamp_ms": 1763460000000}


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str
    handler: Callable[[h.Call], Awaitable[Any]]
    tag: str
    summary: str
    params: Any = m.NoParams
    body: Any = None
    """The model of a JSON body; ``bytes``: any body, as it is."""
    answer: Any = None
    """None: no body, status 204."""
    status: int = 200
    example: Any = None
    """Of the body."""
    answer_example: Any = None
    public: bool = False
    """Needs no key. Whatever else there is does."""
    stream: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    """Request headers with a meaning."""

    @property
    def operation_id(self) -> str:
        return self.handler.__name__


_KEY = {
    "Idempotency-Key": "A name for this request, of your choice. Asked again with the same one, whichever gateway is "
    "asked, nothing is written twice: the first answer comes again. Remembered for a day, per API key and topic."
}

ROUTES: tuple[Route, ...] = (
    Route("GET", "/healthz", h.health, "health", "Whether this process lives", answer=m.Health, public=True),
    Route("GET", "/readyz", h.ready, "health", "Whether requests can be served", answer=m.Health, public=True),
    Route("GET", "/v1/topics", h.list_topics, "topics", "List topics", answer=m.TopicList),
    Route(
        "POST",
        "/v1/topics",
        h.create_topic,
        "topics",
        "Create a topic; answers once every partition has a leader",
        body=m.CreateTopic,
        answer=m.TopicOut,
        status=201,
        example={"name": "orders", "partitions": 4, "if_missing": True},
    ),
    Route(
        "GET",
        "/v1/topics/{topic}",
        h.describe_topic,
        "topics",
        "Describe a topic: settings, partitions, leaders, terms, and every replica's Raft state",
        params=m.TopicParams,
        answer=m.TopicDetail,
    ),
    Route(
        "PATCH",
        "/v1/topics/{topic}",
        h.alter_topic,
        "topics",
        "Change a topic's settings",
        params=m.TopicParams,
        body=m.AlterTopic,
        answer=m.TopicOut,
        example={"retention_ms": 86400000},
    ),
    Route(
        "DELETE",
        "/v1/topics/{topic}",
        h.delete_topic,
        "topics",
        "Delete a topic with its records",
        params=m.TopicParams,
    ),
    Route(
        "POST",
        "/v1/topics/{topic}/records",
        h.publish,
        "records",
        "Publish records; answers once all are on the disks of a majority",
        params=m.TopicParams,
        body=Publish,
        answer=m.Published,
        example={"records": [_ORDER, {"text": "plain text"}, {"base64": "AAEC/w=="}]},
        answer_example={"topic": "orders", "records": [{"partition": 0, "offset": 0, "timestamp_ms": 1763460000000}]},
        headers=_KEY,
    ),
    Route(
        "POST",
        "/v1/topics/{topic}/records/raw",
        h.publish_raw,
        "records",
        "Publish one record whose value is the body, as it is",
        params=m.PublishRawParams,
        body=bytes,
        answer=m.Published,
        headers=_KEY,
    ),
    Route(
        "GET",
        "/v1/topics/{topic}/records",
        h.peek,
        "records",
        "Look at records from an offset, or a time, on; nothing is consumed",
        params=m.PeekParams,
        answer=m.Records,
        answer_example={"records": [{**_RECORD, **_ORDER}]},
    ),
    Route(
        "GET",
        "/v1/topics/{topic}/tail",
        h.tail,
        "records",
        "Follow a topic by server-sent events",
        params=m.TailParams,
        stream=True,
    ),
    Route(
        "GET",
        "/v1/topics/{topic}/consumers/{consumer}/records",
        h.consume_tracked,
        "records",
        "The next records of a consumer that is tracked by its name; each is handed out once",
        params=m.TrackedParams,
        answer=m.Records,
    ),
    Route("GET", "/v1/groups", h.list_groups, "groups", "List consumer groups", answer=m.GroupList),
    Route(
        "GET",
        "/v1/groups/{group}",
        h.describe_group,
        "groups",
        "Describe a group: members, positions, lag",
        params=m.GroupParams,
        answer=m.GroupDetail,
    ),
    Route(
        "DELETE",
        "/v1/groups/{group}",
        h.delete_group,
        "groups",
        "Forget a group without members, and its positions",
        params=m.GroupParams,
    ),
    Route(
        "POST",
        "/v1/groups/{group}/reset",
        h.reset_group,
        "groups",
        "Move a group's positions, or with dry_run see what that would do",
        params=m.GroupParams,
        body=m.ResetGroup,
        answer=m.ResetOut,
        example={"to": "earliest", "topic": "orders", "dry_run": True},
    ),
    Route(
        "POST",
        "/v1/groups/{group}/sessions",
        h.open_session,
        "sessions",
        "Join a group: open a session that reads its share of the topics",
        params=m.GroupParams,
        body=m.OpenSession,
        answer=m.SessionOut,
        status=201,
        example={"topics": ["orders"]},
    ),
    Route(
        "GET",
        "/v1/sessions/{session}/records",
        h.read_session,
        "sessions",
        "The session's next records; waits for the first",
        params=m.SessionReadParams,
        answer=m.SessionRecords,
    ),
    Route(
        "POST",
        "/v1/sessions/{session}/ack",
        h.ack,
        "sessions",
        "Acknowledge records; what is not acknowledged is read again after the session",
        params=m.SessionParams,
        body=m.Ack,
        answer=m.Acked,
        example={"records": [{"topic": "orders", "partition": 0, "offset": 0}]},
    ),
    Route(
        "POST",
        "/v1/sessions/{session}/heartbeat",
        h.heartbeat,
        "sessions",
        "Say that the session is still used; every request of it says so, too",
        params=m.SessionParams,
        answer=m.SessionOut,
    ),
    Route(
        "DELETE",
        "/v1/sessions/{session}",
        h.close_session,
        "sessions",
        "Leave the group",
        params=m.SessionParams,
    ),
    Route(
        "GET",
        "/v1/cluster",
        h.cluster,
        "cluster",
        "Brokers, the coordinator, and replicas that are being moved or are lost",
        answer=m.ClusterOut,
    ),
    Route(
        "POST",
        "/topic/{topic}/publish",
        h.falcon_publish,
        "falconq",
        "Publish a message, as FalconQ does",
        params=m.TopicParams,
        body=m.FalconPublish,
        answer=m.FalconPublished,
        example={"message": "Urgent refund", "priority": "high"},
    ),
    Route(
        "GET",
        "/topic/{topic}/consume",
        h.falcon_consume,
        "falconq",
        "Consume messages, with the offset tracked per consumer",
        params=m.FalconConsumeParams,
        answer=m.FalconMessages,
    ),
    Route(
        "GET",
        "/topic/{topic}/peek",
        h.falcon_peek,
        "falconq",
        "Look at messages of partition 0",
        params=m.FalconPeekParams,
        answer=m.FalconMessages,
    ),
    Route("GET", "/topics", h.falcon_topics, "falconq", "List the names of topics", answer=m.FalconTopics),
    Route(
        "GET",
        "/topics/{topic}/partitions",
        h.falcon_partitions,
        "falconq",
        "List a topic's partitions",
        params=m.TopicParams,
        answer=m.FalconPartitions,
    ),
)
