from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TopicSettings(_message.Message):
    __slots__ = ("partitions", "replication", "lanes", "retention_ms", "retention_bytes", "retention_consumed", "max_record_bytes", "max_backlog_bytes", "max_backlog_records", "prefer_leader", "queue", "lease_ms", "max_lease_ms", "max_deliveries", "retry_backoff_ms", "retry_backoff_max_ms", "dead_letter", "dedupe_window_ms", "result_ttl_ms", "max_leased", "ordered_by_key", "fair_by_key")
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    REPLICATION_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    RETENTION_MS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_BYTES_FIELD_NUMBER: _ClassVar[int]
    RETENTION_CONSUMED_FIELD_NUMBER: _ClassVar[int]
    MAX_RECORD_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BACKLOG_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BACKLOG_RECORDS_FIELD_NUMBER: _ClassVar[int]
    PREFER_LEADER_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    RETRY_BACKOFF_MS_FIELD_NUMBER: _ClassVar[int]
    RETRY_BACKOFF_MAX_MS_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTER_FIELD_NUMBER: _ClassVar[int]
    DEDUPE_WINDOW_MS_FIELD_NUMBER: _ClassVar[int]
    RESULT_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_LEASED_FIELD_NUMBER: _ClassVar[int]
    ORDERED_BY_KEY_FIELD_NUMBER: _ClassVar[int]
    FAIR_BY_KEY_FIELD_NUMBER: _ClassVar[int]
    partitions: int
    replication: int
    lanes: int
    retention_ms: int
    retention_bytes: int
    retention_consumed: bool
    max_record_bytes: int
    max_backlog_bytes: int
    max_backlog_records: int
    prefer_leader: str
    queue: bool
    lease_ms: int
    max_lease_ms: int
    max_deliveries: int
    retry_backoff_ms: int
    retry_backoff_max_ms: int
    dead_letter: bool
    dedupe_window_ms: int
    result_ttl_ms: int
    max_leased: int
    ordered_by_key: bool
    fair_by_key: bool
    def __init__(self, partitions: _Optional[int] = ..., replication: _Optional[int] = ..., lanes: _Optional[int] = ..., retention_ms: _Optional[int] = ..., retention_bytes: _Optional[int] = ..., retention_consumed: _Optional[bool] = ..., max_record_bytes: _Optional[int] = ..., max_backlog_bytes: _Optional[int] = ..., max_backlog_records: _Optional[int] = ..., prefer_leader: _Optional[str] = ..., queue: _Optional[bool] = ..., lease_ms: _Optional[int] = ..., max_lease_ms: _Optional[int] = ..., max_deliveries: _Optional[int] = ..., retry_backoff_ms: _Optional[int] = ..., retry_backoff_max_ms: _Optional[int] = ..., dead_letter: _Optional[bool] = ..., dedupe_window_ms: _Optional[int] = ..., result_ttl_ms: _Optional[int] = ..., max_leased: _Optional[int] = ..., ordered_by_key: _Optional[bool] = ..., fair_by_key: _Optional[bool] = ...) -> None: ...

class Topic(_message.Message):
    __slots__ = ("name", "topic_id", "partitions", "settings")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    name: str
    topic_id: int
    partitions: int
    settings: TopicSettings
    def __init__(self, name: _Optional[str] = ..., topic_id: _Optional[int] = ..., partitions: _Optional[int] = ..., settings: _Optional[_Union[TopicSettings, _Mapping]] = ...) -> None: ...

class CreateTopicRequest(_message.Message):
    __slots__ = ("name", "settings", "if_missing")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    IF_MISSING_FIELD_NUMBER: _ClassVar[int]
    name: str
    settings: TopicSettings
    if_missing: bool
    def __init__(self, name: _Optional[str] = ..., settings: _Optional[_Union[TopicSettings, _Mapping]] = ..., if_missing: _Optional[bool] = ...) -> None: ...

class CreateTopicResponse(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: Topic
    def __init__(self, topic: _Optional[_Union[Topic, _Mapping]] = ...) -> None: ...

class ListTopicsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTopicsResponse(_message.Message):
    __slots__ = ("topics",)
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedCompositeFieldContainer[Topic]
    def __init__(self, topics: _Optional[_Iterable[_Union[Topic, _Mapping]]] = ...) -> None: ...

class DescribeTopicRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DescribeTopicResponse(_message.Message):
    __slots__ = ("name", "topic_id", "settings", "records", "size_bytes", "partitions")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    topic_id: int
    settings: TopicSettings
    records: int
    size_bytes: int
    partitions: _containers.RepeatedCompositeFieldContainer[Partition]
    def __init__(self, name: _Optional[str] = ..., topic_id: _Optional[int] = ..., settings: _Optional[_Union[TopicSettings, _Mapping]] = ..., records: _Optional[int] = ..., size_bytes: _Optional[int] = ..., partitions: _Optional[_Iterable[_Union[Partition, _Mapping]]] = ...) -> None: ...

class Partition(_message.Message):
    __slots__ = ("number", "leader", "term", "start_offset", "end_offset", "size_bytes", "replicas")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    START_OFFSET_FIELD_NUMBER: _ClassVar[int]
    END_OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    number: int
    leader: str
    term: int
    start_offset: int
    end_offset: int
    size_bytes: int
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    def __init__(self, number: _Optional[int] = ..., leader: _Optional[str] = ..., term: _Optional[int] = ..., start_offset: _Optional[int] = ..., end_offset: _Optional[int] = ..., size_bytes: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("replica_id", "broker", "role", "high_watermark", "size_bytes", "problem", "in_sync", "lag", "raft")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    BROKER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    HIGH_WATERMARK_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    IN_SYNC_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    RAFT_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    broker: str
    role: str
    high_watermark: int
    size_bytes: int
    problem: str
    in_sync: bool
    lag: int
    raft: RaftState
    def __init__(self, replica_id: _Optional[str] = ..., broker: _Optional[str] = ..., role: _Optional[str] = ..., high_watermark: _Optional[int] = ..., size_bytes: _Optional[int] = ..., problem: _Optional[str] = ..., in_sync: _Optional[bool] = ..., lag: _Optional[int] = ..., raft: _Optional[_Union[RaftState, _Mapping]] = ...) -> None: ...

class RaftState(_message.Message):
    __slots__ = ("term", "leader", "first_index", "last_index", "last_term", "commit", "applied", "epoch", "voters", "learners")
    TERM_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    LAST_INDEX_FIELD_NUMBER: _ClassVar[int]
    LAST_TERM_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VOTERS_FIELD_NUMBER: _ClassVar[int]
    LEARNERS_FIELD_NUMBER: _ClassVar[int]
    term: int
    leader: str
    first_index: int
    last_index: int
    last_term: int
    commit: int
    applied: int
    epoch: int
    voters: _containers.RepeatedScalarFieldContainer[str]
    learners: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, term: _Optional[int] = ..., leader: _Optional[str] = ..., first_index: _Optional[int] = ..., last_index: _Optional[int] = ..., last_term: _Optional[int] = ..., commit: _Optional[int] = ..., applied: _Optional[int] = ..., epoch: _Optional[int] = ..., voters: _Optional[_Iterable[str]] = ..., learners: _Optional[_Iterable[str]] = ...) -> None: ...

class AlterTopicRequest(_message.Message):
    __slots__ = ("name", "settings", "clear")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    CLEAR_FIELD_NUMBER: _ClassVar[int]
    name: str
    settings: TopicSettings
    clear: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., settings: _Optional[_Union[TopicSettings, _Mapping]] = ..., clear: _Optional[_Iterable[str]] = ...) -> None: ...

class AlterTopicResponse(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: Topic
    def __init__(self, topic: _Optional[_Union[Topic, _Mapping]] = ...) -> None: ...

class DeleteTopicRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteTopicResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListGroupsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListGroupsResponse(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    def __init__(self, groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("group", "generation", "assignor", "state", "members")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ASSIGNOR_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    group: str
    generation: int
    assignor: str
    state: str
    members: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, group: _Optional[str] = ..., generation: _Optional[int] = ..., assignor: _Optional[str] = ..., state: _Optional[str] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("member", "client", "topics")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    member: str
    client: str
    topics: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, member: _Optional[str] = ..., client: _Optional[str] = ..., topics: _Optional[_Iterable[str]] = ...) -> None: ...

class DescribeGroupRequest(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: str
    def __init__(self, group: _Optional[str] = ...) -> None: ...

class DescribeGroupResponse(_message.Message):
    __slots__ = ("group", "lag", "partitions")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    group: Group
    lag: int
    partitions: _containers.RepeatedCompositeFieldContainer[PartitionLag]
    def __init__(self, group: _Optional[_Union[Group, _Mapping]] = ..., lag: _Optional[int] = ..., partitions: _Optional[_Iterable[_Union[PartitionLag, _Mapping]]] = ...) -> None: ...

class PartitionLag(_message.Message):
    __slots__ = ("topic", "partition", "member", "committed", "lag")
    class CommittedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    member: str
    committed: _containers.ScalarMap[int, int]
    lag: int
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., member: _Optional[str] = ..., committed: _Optional[_Mapping[int, int]] = ..., lag: _Optional[int] = ...) -> None: ...

class ResetGroupRequest(_message.Message):
    __slots__ = ("group", "to_earliest", "to_latest", "to_offset", "to_time_ms", "by", "topic", "partitions", "dry_run")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TO_EARLIEST_FIELD_NUMBER: _ClassVar[int]
    TO_LATEST_FIELD_NUMBER: _ClassVar[int]
    TO_OFFSET_FIELD_NUMBER: _ClassVar[int]
    TO_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    group: str
    to_earliest: bool
    to_latest: bool
    to_offset: int
    to_time_ms: int
    by: int
    topic: str
    partitions: _containers.RepeatedScalarFieldContainer[int]
    dry_run: bool
    def __init__(self, group: _Optional[str] = ..., to_earliest: _Optional[bool] = ..., to_latest: _Optional[bool] = ..., to_offset: _Optional[int] = ..., to_time_ms: _Optional[int] = ..., by: _Optional[int] = ..., topic: _Optional[str] = ..., partitions: _Optional[_Iterable[int]] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class ResetGroupResponse(_message.Message):
    __slots__ = ("positions", "executed")
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    EXECUTED_FIELD_NUMBER: _ClassVar[int]
    positions: _containers.RepeatedCompositeFieldContainer[PositionMove]
    executed: bool
    def __init__(self, positions: _Optional[_Iterable[_Union[PositionMove, _Mapping]]] = ..., executed: _Optional[bool] = ...) -> None: ...

class PositionMove(_message.Message):
    __slots__ = ("topic", "partition", "before", "after", "note")
    class BeforeEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class AfterEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    before: _containers.ScalarMap[int, int]
    after: _containers.ScalarMap[int, int]
    note: str
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., before: _Optional[_Mapping[int, int]] = ..., after: _Optional[_Mapping[int, int]] = ..., note: _Optional[str] = ...) -> None: ...

class DeleteGroupRequest(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: str
    def __init__(self, group: _Optional[str] = ...) -> None: ...

class DeleteGroupResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeClusterRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeClusterResponse(_message.Message):
    __slots__ = ("cluster_id", "coordinator", "term", "brokers", "topics", "partitions", "groups")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    BROKERS_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    coordinator: str
    term: int
    brokers: _containers.RepeatedCompositeFieldContainer[Broker]
    topics: int
    partitions: int
    groups: int
    def __init__(self, cluster_id: _Optional[str] = ..., coordinator: _Optional[str] = ..., term: _Optional[int] = ..., brokers: _Optional[_Iterable[_Union[Broker, _Mapping]]] = ..., topics: _Optional[int] = ..., partitions: _Optional[int] = ..., groups: _Optional[int] = ...) -> None: ...

class Broker(_message.Message):
    __slots__ = ("broker", "host", "alive", "replicas", "draining")
    BROKER_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    broker: str
    host: str
    alive: bool
    replicas: int
    draining: bool
    def __init__(self, broker: _Optional[str] = ..., host: _Optional[str] = ..., alive: _Optional[bool] = ..., replicas: _Optional[int] = ..., draining: _Optional[bool] = ...) -> None: ...
