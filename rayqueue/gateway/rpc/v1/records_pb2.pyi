from rayqueue.gateway.rpc.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AppendRequest(_message.Message):
    __slots__ = ("topic", "records", "idempotency_key")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    topic: str
    records: _containers.RepeatedCompositeFieldContainer[_common_pb2.NewRecord]
    idempotency_key: str
    def __init__(self, topic: _Optional[str] = ..., records: _Optional[_Iterable[_Union[_common_pb2.NewRecord, _Mapping]]] = ..., idempotency_key: _Optional[str] = ...) -> None: ...

class AppendResponse(_message.Message):
    __slots__ = ("records", "replayed")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[_common_pb2.Written]
    replayed: bool
    def __init__(self, records: _Optional[_Iterable[_Union[_common_pb2.Written, _Mapping]]] = ..., replayed: _Optional[bool] = ...) -> None: ...

class PollRequest(_message.Message):
    __slots__ = ("session", "group", "topics", "max_records", "wait_ms", "start_at_end", "cursor", "isolation")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    MAX_RECORDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    START_AT_END_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    session: str
    group: str
    topics: _containers.RepeatedScalarFieldContainer[str]
    max_records: int
    wait_ms: int
    start_at_end: bool
    cursor: int
    isolation: _common_pb2.Isolation
    def __init__(self, session: _Optional[str] = ..., group: _Optional[str] = ..., topics: _Optional[_Iterable[str]] = ..., max_records: _Optional[int] = ..., wait_ms: _Optional[int] = ..., start_at_end: _Optional[bool] = ..., cursor: _Optional[int] = ..., isolation: _Optional[_Union[_common_pb2.Isolation, str]] = ...) -> None: ...

class PollResponse(_message.Message):
    __slots__ = ("session", "records", "cursor")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    session: str
    records: _containers.RepeatedCompositeFieldContainer[_common_pb2.Record]
    cursor: int
    def __init__(self, session: _Optional[str] = ..., records: _Optional[_Iterable[_Union[_common_pb2.Record, _Mapping]]] = ..., cursor: _Optional[int] = ...) -> None: ...

class AckRequest(_message.Message):
    __slots__ = ("session", "places", "through")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    THROUGH_FIELD_NUMBER: _ClassVar[int]
    session: str
    places: _containers.RepeatedCompositeFieldContainer[_common_pb2.Place]
    through: int
    def __init__(self, session: _Optional[str] = ..., places: _Optional[_Iterable[_Union[_common_pb2.Place, _Mapping]]] = ..., through: _Optional[int] = ...) -> None: ...

class AckResponse(_message.Message):
    __slots__ = ("acknowledged",)
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    acknowledged: int
    def __init__(self, acknowledged: _Optional[int] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProduceRequest(_message.Message):
    __slots__ = ("number", "topic", "records")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    number: int
    topic: str
    records: _containers.RepeatedCompositeFieldContainer[_common_pb2.NewRecord]
    def __init__(self, number: _Optional[int] = ..., topic: _Optional[str] = ..., records: _Optional[_Iterable[_Union[_common_pb2.NewRecord, _Mapping]]] = ...) -> None: ...

class ProduceResponse(_message.Message):
    __slots__ = ("number", "records", "problem")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    number: int
    records: _containers.RepeatedCompositeFieldContainer[_common_pb2.Written]
    problem: _common_pb2.Problem
    def __init__(self, number: _Optional[int] = ..., records: _Optional[_Iterable[_Union[_common_pb2.Written, _Mapping]]] = ..., problem: _Optional[_Union[_common_pb2.Problem, _Mapping]] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("topic", "partition", "offset", "start_at_end", "isolation")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    START_AT_END_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    offset: int
    start_at_end: bool
    isolation: _common_pb2.Isolation
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ..., start_at_end: _Optional[bool] = ..., isolation: _Optional[_Union[_common_pb2.Isolation, str]] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[_common_pb2.Record]
    def __init__(self, records: _Optional[_Iterable[_Union[_common_pb2.Record, _Mapping]]] = ...) -> None: ...

class SubscribeRequest(_message.Message):
    __slots__ = ("join", "credit", "ack", "heartbeat")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    join: Join
    credit: Credit
    ack: AckRecords
    heartbeat: Heartbeat
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., ack: _Optional[_Union[AckRecords, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("group", "topics", "start_at_end", "credit", "timeout_ms", "isolation")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    START_AT_END_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    group: str
    topics: _containers.RepeatedScalarFieldContainer[str]
    start_at_end: bool
    credit: int
    timeout_ms: int
    isolation: _common_pb2.Isolation
    def __init__(self, group: _Optional[str] = ..., topics: _Optional[_Iterable[str]] = ..., start_at_end: _Optional[bool] = ..., credit: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., isolation: _Optional[_Union[_common_pb2.Isolation, str]] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: int
    def __init__(self, records: _Optional[int] = ...) -> None: ...

class AckRecords(_message.Message):
    __slots__ = ("number", "places", "through")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    THROUGH_FIELD_NUMBER: _ClassVar[int]
    number: int
    places: _containers.RepeatedCompositeFieldContainer[_common_pb2.Place]
    through: int
    def __init__(self, number: _Optional[int] = ..., places: _Optional[_Iterable[_Union[_common_pb2.Place, _Mapping]]] = ..., through: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SubscribeResponse(_message.Message):
    __slots__ = ("records", "acked", "joined")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    ACKED_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    records: Records
    acked: Acked
    joined: Joined
    def __init__(self, records: _Optional[_Union[Records, _Mapping]] = ..., acked: _Optional[_Union[Acked, _Mapping]] = ..., joined: _Optional[_Union[Joined, _Mapping]] = ...) -> None: ...

class Records(_message.Message):
    __slots__ = ("records", "cursor")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[_common_pb2.Record]
    cursor: int
    def __init__(self, records: _Optional[_Iterable[_Union[_common_pb2.Record, _Mapping]]] = ..., cursor: _Optional[int] = ...) -> None: ...

class Acked(_message.Message):
    __slots__ = ("number", "acknowledged", "problem")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    number: int
    acknowledged: int
    problem: _common_pb2.Problem
    def __init__(self, number: _Optional[int] = ..., acknowledged: _Optional[int] = ..., problem: _Optional[_Union[_common_pb2.Problem, _Mapping]] = ...) -> None: ...

class Joined(_message.Message):
    __slots__ = ("group", "timeout_ms")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    group: str
    timeout_ms: int
    def __init__(self, group: _Optional[str] = ..., timeout_ms: _Optional[int] = ...) -> None: ...
