from rayqueue.gateway.rpc.v1 import admin_pb2 as _admin_pb2
from rayqueue.gateway.rpc.v1 import common_pb2 as _common_pb2
from rayqueue.gateway.rpc.v1 import records_pb2 as _records_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class QueueSize(_message.Message):
    __slots__ = ("ready", "leased", "delayed", "dead")
    READY_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    DELAYED_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    ready: int
    leased: int
    delayed: int
    dead: int
    def __init__(self, ready: _Optional[int] = ..., leased: _Optional[int] = ..., delayed: _Optional[int] = ..., dead: _Optional[int] = ...) -> None: ...

class Queue(_message.Message):
    __slots__ = ("name", "queue_id", "partitions", "settings", "size", "problem")
    NAME_FIELD_NUMBER: _ClassVar[int]
    QUEUE_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    name: str
    queue_id: int
    partitions: int
    settings: _admin_pb2.TopicSettings
    size: QueueSize
    problem: str
    def __init__(self, name: _Optional[str] = ..., queue_id: _Optional[int] = ..., partitions: _Optional[int] = ..., settings: _Optional[_Union[_admin_pb2.TopicSettings, _Mapping]] = ..., size: _Optional[_Union[QueueSize, _Mapping]] = ..., problem: _Optional[str] = ...) -> None: ...

class CreateQueueRequest(_message.Message):
    __slots__ = ("name", "settings", "if_missing")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    IF_MISSING_FIELD_NUMBER: _ClassVar[int]
    name: str
    settings: _admin_pb2.TopicSettings
    if_missing: bool
    def __init__(self, name: _Optional[str] = ..., settings: _Optional[_Union[_admin_pb2.TopicSettings, _Mapping]] = ..., if_missing: _Optional[bool] = ...) -> None: ...

class CreateQueueResponse(_message.Message):
    __slots__ = ("queue",)
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    queue: Queue
    def __init__(self, queue: _Optional[_Union[Queue, _Mapping]] = ...) -> None: ...

class ListQueuesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListQueuesResponse(_message.Message):
    __slots__ = ("queues",)
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    queues: _containers.RepeatedCompositeFieldContainer[Queue]
    def __init__(self, queues: _Optional[_Iterable[_Union[Queue, _Mapping]]] = ...) -> None: ...

class DescribeQueueRequest(_message.Message):
    __slots__ = ("queue",)
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    queue: str
    def __init__(self, queue: _Optional[str] = ...) -> None: ...

class DescribeQueueResponse(_message.Message):
    __slots__ = ("queue", "oldest_ready_ms")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    OLDEST_READY_MS_FIELD_NUMBER: _ClassVar[int]
    queue: Queue
    oldest_ready_ms: int
    def __init__(self, queue: _Optional[_Union[Queue, _Mapping]] = ..., oldest_ready_ms: _Optional[int] = ...) -> None: ...

class GetQueueSizeRequest(_message.Message):
    __slots__ = ("queue",)
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    queue: str
    def __init__(self, queue: _Optional[str] = ...) -> None: ...

class GetQueueSizeResponse(_message.Message):
    __slots__ = ("size",)
    SIZE_FIELD_NUMBER: _ClassVar[int]
    size: QueueSize
    def __init__(self, size: _Optional[_Union[QueueSize, _Mapping]] = ...) -> None: ...

class DeleteQueueRequest(_message.Message):
    __slots__ = ("queue",)
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    queue: str
    def __init__(self, queue: _Optional[str] = ...) -> None: ...

class DeleteQueueResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NewJob(_message.Message):
    __slots__ = ("value", "key", "headers", "priority", "delay_ms", "deliver_at_ms", "ttl_ms", "dedupe_id", "want_result")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AT_MS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    DEDUPE_ID_FIELD_NUMBER: _ClassVar[int]
    WANT_RESULT_FIELD_NUMBER: _ClassVar[int]
    value: bytes
    key: bytes
    headers: _containers.RepeatedCompositeFieldContainer[_common_pb2.Header]
    priority: int
    delay_ms: int
    deliver_at_ms: int
    ttl_ms: int
    dedupe_id: str
    want_result: bool
    def __init__(self, value: _Optional[bytes] = ..., key: _Optional[bytes] = ..., headers: _Optional[_Iterable[_Union[_common_pb2.Header, _Mapping]]] = ..., priority: _Optional[int] = ..., delay_ms: _Optional[int] = ..., deliver_at_ms: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., dedupe_id: _Optional[str] = ..., want_result: _Optional[bool] = ...) -> None: ...

class PutJobsRequest(_message.Message):
    __slots__ = ("queue", "jobs", "idempotency_key")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    queue: str
    jobs: _containers.RepeatedCompositeFieldContainer[NewJob]
    idempotency_key: str
    def __init__(self, queue: _Optional[str] = ..., jobs: _Optional[_Iterable[_Union[NewJob, _Mapping]]] = ..., idempotency_key: _Optional[str] = ...) -> None: ...

class PutJobsResponse(_message.Message):
    __slots__ = ("jobs", "replayed")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[PutJob]
    replayed: bool
    def __init__(self, jobs: _Optional[_Iterable[_Union[PutJob, _Mapping]]] = ..., replayed: _Optional[bool] = ...) -> None: ...

class PutJob(_message.Message):
    __slots__ = ("job_id", "duplicate")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    duplicate: bool
    def __init__(self, job_id: _Optional[str] = ..., duplicate: _Optional[bool] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("job_id", "lease", "lease_ms", "deliveries", "priority", "put_at_ms", "value", "key", "headers")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PUT_AT_MS_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    lease: str
    lease_ms: int
    deliveries: int
    priority: int
    put_at_ms: int
    value: bytes
    key: bytes
    headers: _containers.RepeatedCompositeFieldContainer[_common_pb2.Header]
    def __init__(self, job_id: _Optional[str] = ..., lease: _Optional[str] = ..., lease_ms: _Optional[int] = ..., deliveries: _Optional[int] = ..., priority: _Optional[int] = ..., put_at_ms: _Optional[int] = ..., value: _Optional[bytes] = ..., key: _Optional[bytes] = ..., headers: _Optional[_Iterable[_Union[_common_pb2.Header, _Mapping]]] = ...) -> None: ...

class GetJobsRequest(_message.Message):
    __slots__ = ("queue", "max_jobs", "wait_ms", "lease_ms")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    MAX_JOBS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    queue: str
    max_jobs: int
    wait_ms: int
    lease_ms: int
    def __init__(self, queue: _Optional[str] = ..., max_jobs: _Optional[int] = ..., wait_ms: _Optional[int] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class GetJobsResponse(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    def __init__(self, jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ...) -> None: ...

class StreamJobsRequest(_message.Message):
    __slots__ = ("open", "credit", "heartbeat")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    open: OpenJobs
    credit: JobCredit
    heartbeat: _records_pb2.Heartbeat
    def __init__(self, open: _Optional[_Union[OpenJobs, _Mapping]] = ..., credit: _Optional[_Union[JobCredit, _Mapping]] = ..., heartbeat: _Optional[_Union[_records_pb2.Heartbeat, _Mapping]] = ...) -> None: ...

class OpenJobs(_message.Message):
    __slots__ = ("queue", "credit", "lease_ms", "timeout_ms")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    queue: str
    credit: int
    lease_ms: int
    timeout_ms: int
    def __init__(self, queue: _Optional[str] = ..., credit: _Optional[int] = ..., lease_ms: _Optional[int] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class JobCredit(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: int
    def __init__(self, jobs: _Optional[int] = ...) -> None: ...

class StreamJobsResponse(_message.Message):
    __slots__ = ("jobs", "timeout_ms")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    timeout_ms: int
    def __init__(self, jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class AckJobsRequest(_message.Message):
    __slots__ = ("queue", "leases", "result")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    queue: str
    leases: _containers.RepeatedScalarFieldContainer[str]
    result: bytes
    def __init__(self, queue: _Optional[str] = ..., leases: _Optional[_Iterable[str]] = ..., result: _Optional[bytes] = ...) -> None: ...

class AckJobsResponse(_message.Message):
    __slots__ = ("settled", "lost")
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    settled: int
    lost: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, settled: _Optional[int] = ..., lost: _Optional[_Iterable[str]] = ...) -> None: ...

class NackJobsRequest(_message.Message):
    __slots__ = ("queue", "leases", "delay_ms", "reason", "traceback")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    queue: str
    leases: _containers.RepeatedScalarFieldContainer[str]
    delay_ms: int
    reason: str
    traceback: str
    def __init__(self, queue: _Optional[str] = ..., leases: _Optional[_Iterable[str]] = ..., delay_ms: _Optional[int] = ..., reason: _Optional[str] = ..., traceback: _Optional[str] = ...) -> None: ...

class NackJobsResponse(_message.Message):
    __slots__ = ("settled", "lost")
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    settled: int
    lost: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, settled: _Optional[int] = ..., lost: _Optional[_Iterable[str]] = ...) -> None: ...

class RejectJobsRequest(_message.Message):
    __slots__ = ("queue", "leases", "reason", "traceback")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    queue: str
    leases: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    traceback: str
    def __init__(self, queue: _Optional[str] = ..., leases: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ..., traceback: _Optional[str] = ...) -> None: ...

class RejectJobsResponse(_message.Message):
    __slots__ = ("settled", "lost")
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    settled: int
    lost: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, settled: _Optional[int] = ..., lost: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseJobsRequest(_message.Message):
    __slots__ = ("queue", "leases")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    queue: str
    leases: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, queue: _Optional[str] = ..., leases: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseJobsResponse(_message.Message):
    __slots__ = ("settled", "lost")
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    settled: int
    lost: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, settled: _Optional[int] = ..., lost: _Optional[_Iterable[str]] = ...) -> None: ...

class ExtendJobsRequest(_message.Message):
    __slots__ = ("queue", "leases", "lease_ms")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    queue: str
    leases: _containers.RepeatedScalarFieldContainer[str]
    lease_ms: int
    def __init__(self, queue: _Optional[str] = ..., leases: _Optional[_Iterable[str]] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class ExtendJobsResponse(_message.Message):
    __slots__ = ("extended", "lost", "lease_ms")
    EXTENDED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    extended: int
    lost: _containers.RepeatedScalarFieldContainer[str]
    lease_ms: int
    def __init__(self, extended: _Optional[int] = ..., lost: _Optional[_Iterable[str]] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class PeekJobsRequest(_message.Message):
    __slots__ = ("queue", "max_jobs")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    MAX_JOBS_FIELD_NUMBER: _ClassVar[int]
    queue: str
    max_jobs: int
    def __init__(self, queue: _Optional[str] = ..., max_jobs: _Optional[int] = ...) -> None: ...

class PeekJobsResponse(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    def __init__(self, jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ...) -> None: ...

class GetJobStateRequest(_message.Message):
    __slots__ = ("queue", "job_id")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    queue: str
    job_id: str
    def __init__(self, queue: _Optional[str] = ..., job_id: _Optional[str] = ...) -> None: ...

class GetJobStateResponse(_message.Message):
    __slots__ = ("state", "deliveries")
    STATE_FIELD_NUMBER: _ClassVar[int]
    DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    state: str
    deliveries: int
    def __init__(self, state: _Optional[str] = ..., deliveries: _Optional[int] = ...) -> None: ...

class GetJobResultRequest(_message.Message):
    __slots__ = ("queue", "job_id", "wait_ms")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    queue: str
    job_id: str
    wait_ms: int
    def __init__(self, queue: _Optional[str] = ..., job_id: _Optional[str] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class GetJobResultResponse(_message.Message):
    __slots__ = ("state", "result", "reason", "traceback")
    STATE_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    state: str
    result: bytes
    reason: str
    traceback: str
    def __init__(self, state: _Optional[str] = ..., result: _Optional[bytes] = ..., reason: _Optional[str] = ..., traceback: _Optional[str] = ...) -> None: ...

class CancelJobRequest(_message.Message):
    __slots__ = ("queue", "job_id")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    queue: str
    job_id: str
    def __init__(self, queue: _Optional[str] = ..., job_id: _Optional[str] = ...) -> None: ...

class CancelJobResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DeadJob(_message.Message):
    __slots__ = ("job_id", "reason", "deliveries", "priority", "put_at_ms", "died_at_ms", "value", "key", "headers", "history")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PUT_AT_MS_FIELD_NUMBER: _ClassVar[int]
    DIED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    reason: str
    deliveries: int
    priority: int
    put_at_ms: int
    died_at_ms: int
    value: bytes
    key: bytes
    headers: _containers.RepeatedCompositeFieldContainer[_common_pb2.Header]
    history: _containers.RepeatedCompositeFieldContainer[Failure]
    def __init__(self, job_id: _Optional[str] = ..., reason: _Optional[str] = ..., deliveries: _Optional[int] = ..., priority: _Optional[int] = ..., put_at_ms: _Optional[int] = ..., died_at_ms: _Optional[int] = ..., value: _Optional[bytes] = ..., key: _Optional[bytes] = ..., headers: _Optional[_Iterable[_Union[_common_pb2.Header, _Mapping]]] = ..., history: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("time_ms", "kind", "worker", "reason", "traceback")
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    time_ms: int
    kind: str
    worker: str
    reason: str
    traceback: str
    def __init__(self, time_ms: _Optional[int] = ..., kind: _Optional[str] = ..., worker: _Optional[str] = ..., reason: _Optional[str] = ..., traceback: _Optional[str] = ...) -> None: ...

class ListDeadJobsRequest(_message.Message):
    __slots__ = ("queue", "max_jobs", "after")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    MAX_JOBS_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    queue: str
    max_jobs: int
    after: str
    def __init__(self, queue: _Optional[str] = ..., max_jobs: _Optional[int] = ..., after: _Optional[str] = ...) -> None: ...

class ListDeadJobsResponse(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[DeadJob]
    def __init__(self, jobs: _Optional[_Iterable[_Union[DeadJob, _Mapping]]] = ...) -> None: ...

class GetDeadJobRequest(_message.Message):
    __slots__ = ("queue", "job_id")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    queue: str
    job_id: str
    def __init__(self, queue: _Optional[str] = ..., job_id: _Optional[str] = ...) -> None: ...

class GetDeadJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: DeadJob
    def __init__(self, job: _Optional[_Union[DeadJob, _Mapping]] = ...) -> None: ...

class RedriveDeadJobsRequest(_message.Message):
    __slots__ = ("queue", "job_ids", "all")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    JOB_IDS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    queue: str
    job_ids: _containers.RepeatedScalarFieldContainer[str]
    all: bool
    def __init__(self, queue: _Optional[str] = ..., job_ids: _Optional[_Iterable[str]] = ..., all: _Optional[bool] = ...) -> None: ...

class RedriveDeadJobsResponse(_message.Message):
    __slots__ = ("redriven",)
    REDRIVEN_FIELD_NUMBER: _ClassVar[int]
    redriven: int
    def __init__(self, redriven: _Optional[int] = ...) -> None: ...

class PurgeDeadJobsRequest(_message.Message):
    __slots__ = ("queue", "job_ids", "all")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    JOB_IDS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    queue: str
    job_ids: _containers.RepeatedScalarFieldContainer[str]
    all: bool
    def __init__(self, queue: _Optional[str] = ..., job_ids: _Optional[_Iterable[str]] = ..., all: _Optional[bool] = ...) -> None: ...

class PurgeDeadJobsResponse(_message.Message):
    __slots__ = ("purged",)
    PURGED_FIELD_NUMBER: _ClassVar[int]
    purged: int
    def __init__(self, purged: _Optional[int] = ...) -> None: ...
