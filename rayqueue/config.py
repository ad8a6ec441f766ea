"""Every setting, its limits, and where its value came from.

Owns all limits and timeouts: nothing else in RayQueue reads the environment
or a configuration file. A value is taken from the first of these that names it:

1. an argument: ``Settings(raft={"heartbeat_ms": 50})``, or by dotted key, as a
   command's flags give it: ``Settings(**{"raft.heartbeat_ms": 50})``
2. the environment: ``RAYQUEUE_RAFT__HEARTBEAT_MS=50``. An empty variable is
   as good as none; ``none`` takes away a limit that a file has set.
3. a file: ``config_path``, or ``RAYQUEUE_CONFIG_PATH``, or ``rayqueue.toml`` or
   ``rayqueue.yaml`` in the current directory
4. the default below

A key that is not known, a value that cannot be and two values that contradict
each other are a ``ConfigError``, which names the key, where it was set and
what is allowed. Secrets are never shown.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from typing_extensions import Self

from rayqueue import _config_sources as sources
from rayqueue._config_sources import Problem
from rayqueue.errors import ConfigError

MIB = 1024 * 1024
DEFAULT = "default"

_CONTRADICTION = "contradiction"
_INCOMPLETE = "incomplete"


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("not_a_number", "Input should be a whole number")
    return value


def _absolute(path: Path) -> Path:
    # Ray's workers have other current directories than the driver.
    return path.expanduser().absolute()


def _long_enough(secret: SecretStr) -> SecretStr:
    if len(secret.get_secret_value()) < 16:
        raise PydanticCustomError("short_secret", "Input should have at least 16 characters")
    return secret


Positive = Annotated[int, BeforeValidator(_no_bool), Field(gt=0)]
NotNegative = Annotated[int, BeforeValidator(_no_bool), Field(ge=0)]
Port = Annotated[int, BeforeValidator(_no_bool), Field(ge=0, le=65535)]
Secret = Annotated[SecretStr, AfterValidator(_long_enough)]
AbsolutePath = Annotated[Path, AfterValidator(_absolute)]


_RELATIONS = {"less than": operator.lt, "at most": operator.le, "at least": operator.ge, "more than": operator.gt}


def _require(model: BaseModel, key: str, relation: str, other: str) -> None:
    """A rule between two settings of a model; dotted keys reach into its sections."""
    value, limit = operator.attrgetter(key, other)(model)
    if not _RELATIONS[relation](value, limit):
        context = {"key": key, "value": value, "relation": relation, "other": other, "limit": limit}
        raise PydanticCustomError(_CONTRADICTION, "must be {relation} {other}", context)


class Section(BaseModel):
    """A frozen group of settings. May be made by hand; it then reads neither environment nor files."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _config_error(_problems(error, values, None)) from None

    # Without this mark pydantic would call __init__ for sections inside Settings too, and lose their place.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


class RaftSettings(Section):
    """Elections and replication of one group."""

    election_timeout_min_ms: Positive = Field(
        default=1000, description="the shortest silence after which a follower asks for votes"
    )
    election_timeout_max_ms: Positive = Field(
        default=2500, description="the longest; each wait is drawn between the two"
    )
    heartbeat_ms: Positive = Field(default=100, description="a leader with nothing to say says so this often")
    leader_fallback_ms: Positive = Field(
        default=2000, description="a leader that hears no majority for this long steps down"
    )
    in_sync_ms: Positive = Field(
        default=3000, description="a follower is in sync if it had all that the leader had this long ago, and answers"
    )
    fast_election_max_ms: Positive = Field(
        default=150, description="the longest wait for votes when the leader is known dead"
    )
    append_batch_bytes: Positive = Field(default=4 * MIB, description="entries in one message to a follower")
    window_bytes: Positive = Field(default=16 * MIB, description="sent to one follower and not confirmed yet")
    max_uncommitted_bytes: Positive = Field(
        default=64 * MIB, description="accepted and not committed; more is QueueFull"
    )

    apply_batch_bytes: Positive = Field(default=8 * MIB, description="committed entries applied in one step")
    snapshot_retry_ms: Positive = Field(default=1000, description="a snapshot that is not confirmed is sent again")
    promote_lag_entries: NotNegative = Field(default=64, description="a learner this close to the end may vote")
    catch_up_bytes_per_s: Positive | None = Field(
        default=16 * MIB, description="sent to one learner, so that a move leaves room for producers; none: no bound"
    )
    fast_election_rounds: NotNegative = Field(default=10, description="how often a known death hurries an election")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _require(self, "election_timeout_min_ms", "less than", "election_timeout_max_ms")
        _require(self, "heartbeat_ms", "less than", "election_timeout_min_ms")
        _require(self, "fast_election_max_ms", "less than", "election_timeout_min_ms")
        _require(self, "leader_fallback_ms", "more than", "heartbeat_ms")
        _require(self, "in_sync_ms", "more than", "heartbeat_ms")
        _require(self, "window_bytes", "at least", "append_batch_bytes")
        _require(self, "max_uncommitted_bytes", "at least", "append_batch_bytes")
        return self


class LogSettings(Section):
    """One replica's log on disk."""

    max_batch_bytes: Positive = Field(default=1 * MIB, description="the largest batch a partition takes")
    max_message_bytes: Annotated[Positive, Field(le=64 * MIB)] = Field(
        default=16 * MIB, description="what a compressed batch may unpack to"
    )
    max_batch_records: Positive = Field(default=250_000, description="records of one batch")
    cache_bytes: NotNegative = Field(
        default=32 * MIB, description="the newest entries, kept in memory for followers and readers"
    )
    map_initial_bytes: Positive = Field(default=8 * MIB, description="disk space that is allocated at first")
    map_growth_bytes: Positive = Field(
        default=64 * MIB, description="what is allocated at a time, at most; a quarter of what there is"
    )
    reserve_bytes: Positive = Field(
        default=4 * MIB, description="allocated for votes, positions and trims, for when the disk is full"
    )
    segment_bytes: Positive = Field(
        default=64 * MIB, description="log between two checkpoints; retention trims whole ones"
    )
    retention_ms: Positive | None = Field(default=None, description="older records may be trimmed")
    retention_bytes: Positive | None = Field(
        default=None, description="the oldest records of a larger log may be trimmed"
    )
    trim_entries_per_tick: Positive = Field(
        default=256, description="entries deleted at a time, so that a trim never holds up an append"
    )

    scrub_bytes_per_second: NotNegative = Field(
        default=1 * MIB, description="each replica reads all it has, this slowly, to find damage; 0: never"
    )
    scrub_every_ms: Positive = Field(
        default=24 * 3_600_000, description="from the beginning of one such pass to the next, if it is not longer"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _require(self, "segment_bytes", "at least", "max_batch_bytes")
        _require(self, "map_initial_bytes", "more than", "max_batch_bytes")
        _require(self, "map_growth_bytes", "more than", "max_batch_bytes")
        return self


class TransportSettings(Section):
    """Connections between the replicas of a group."""

    send_queue_bytes: Positive = Field(
        default=32 * MIB, description="waiting for one peer; more is dropped, and Raft repeats it"
    )
    reconnect_min_ms: Positive = Field(default=50, description="wait before the first attempt to connect again")
    reconnect_max_ms: Positive = Field(default=2000, description="wait before each attempt after many")
    stable_ms: NotNegative = Field(
        default=1000, description="a connection that stood this long lets the next wait be short again"
    )
    peer_timeout_ms: Positive = Field(
        default=10_000, description="the kernel gives up a connection whose other end does not confirm for this long"
    )
    handshake_timeout_ms: Positive = Field(default=3000, description="time to connect and prove who one is")
    max_unauthenticated: Positive = Field(
        default=64, description="accepted connections that have proven nothing; for one more the oldest is closed"
    )
    max_unnamed_peers: NotNegative = Field(
        default=16, description="connected holders of the secret that are not known as members of the group"
    )
    max_frame_bytes: Annotated[Positive, Field(lt=2**32)] = Field(
        default=64 * MIB, description="the largest message between replicas, the same at all of them"
    )
    read_buffer_bytes: Annotated[Positive, Field(ge=4096)] = Field(
        default=MIB // 2, description="what is read from one peer at a time"
    )
    read_budget_bytes: Positive = Field(
        default=8 * MIB, description="what is read from one peer before the others have their turn"
    )
    socket_buffer_bytes: NotNegative = Field(
        default=0, description="the kernel's buffers per connection; 0 lets it choose, and adapt"
    )
    tls_cert_path: AbsolutePath | None = Field(default=None, description="TLS: this replica's certificate (PEM)")
    tls_key_path: AbsolutePath | None = Field(default=None, description="TLS: its private key")
    tls_ca_path: AbsolutePath | None = Field(default=None, description="TLS: who signs the peers' certificates")
    secret: Secret | None = Field(default=None, description="what the members of this cluster share")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _require(self, "reconnect_min_ms", "at most", "reconnect_max_ms")
        names = ("tls_cert_path", "tls_key_path", "tls_ca_path")
        given = [name for name in names if getattr(self, name) is not None]
        missing = [name for name in names if name not in given]
        if given and missing:
            context = {"key": given[0], "missing": " and ".join(missing)}
            raise PydanticCustomError(_INCOMPLETE, "TLS also needs {missing}", context)
        return self


class CallSettings(Section):
    """Limits on clients' calls to one replica."""

    max_fetches: Positive = Field(
        default=4096, description="fetches under way at a time, with those that wait for new records"
    )
    max_controls: Positive = Field(
        default=64, description="calls to the replica's actor under way at a time: where it serves, how it is"
    )
    room_hold_ms: Positive = Field(
        default=1000, description="room in a bounded topic is kept for this long for a producer that waited for it"
    )
    max_fetch_bytes: Positive = Field(default=4 * MIB, description="the most that one fetch returns")
    max_fetch_wait_ms: NotNegative = Field(default=30_000, description="the longest that a fetch waits for records")
    disk_readers: Positive = Field(default=4, description="threads that read what is not in memory any more")
    max_clients: Positive = Field(
        default=1024, description="connections of clients with one replica; for one more the longest idle is closed"
    )
    max_clients_per_source: Positive = Field(default=512, description="the same for those from one address")
    client_idle_ms: Positive = Field(
        default=600_000, description="a client that wants nothing for this long is hung up on; members are exempt"
    )
    max_unanswered: Positive = Field(
        default=4096, description="requests of one client under way at a time; one more is refused"
    )
    check_queue_bytes: Positive = Field(
        default=64 * MIB,
        description="compressed and large batches that wait to be checked; one client may have a quarter of it",
    )
    client_queue_bytes: Positive = Field(
        default=16 * MIB, description="answers that one client has not taken; with more it is not heard until it does"
    )
    client_read_bytes: Positive = Field(
        default=2 * MIB, description="what is read from one client before the others have their turn"
    )
    turn_read_bytes: Positive = Field(
        default=16 * MIB, description="what is read from all clients before what they want is written to disk"
    )


class ClientSettings(Section):
    """Retries and patience of an application's side when a replica does not answer, or not well."""

    retry_min_ms: Positive = Field(default=10, description="wait before the first attempt to repeat a call")
    retry_max_ms: Positive = Field(default=500, description="wait before each attempt after many")
    call_timeout_ms: Positive = Field(default=30_000, description="a call that makes no progress for this long fails")
    doubt_ms: Positive = Field(
        default=200, description="a leader that has not answered for this long is doubted: the others are asked"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _require(self, "retry_min_ms", "at most", "retry_max_ms")
        return self


class ProducerSettings(Section):
    """Defaults of producers, unless one is told otherwise where it is made."""

    linger_ms: NotNegative = Field(
        default=0, description="how long a record waits for company; batches fill by themselves while one is under way"
    )
    batch_bytes: Positive = Field(default=96 * 1024, description="a batch is sent once it has this many bytes")
    in_flight_bytes: Positive = Field(default=4 * MIB, description="on the way to one partition, not acknowledged yet")
    in_flight_batches: Annotated[Positive, Field(le=32)] = Field(
        default=32, description="the same in batches; at most what a partition remembers of a producer"
    )
    buffer_bytes: Positive = Field(
        default=32 * MIB, description="accepted by send and not acknowledged; more makes send wait, or raise"
    )
    delivery_timeout_ms: Positive = Field(
        default=120_000, description="a record that is not acknowledged by then is reported as unknown"
    )
    on_full: Literal["block", "raise"] = Field(
        default="block", description="what send does when the buffer, or the topic, is full"
    )
    acks: Literal["all", "leader", "none"] = Field(default="all", description="who must have a record on disk")
    compression: Literal["none", "lz4", "zstd"] = Field(default="none", description="of each batch")
    partitioner: str = Field(
        default="consistent", description="consistent, murmur2, roundrobin or sticky: which partition a record goes to"
    )
    transaction_timeout_ms: Positive = Field(
        default=60_000, description="a transaction that is open for longer is aborted, whatever became of its producer"
    )


class ConsumerSettings(Section):
    """Defaults of consumers, unless one is told otherwise where it is made."""

    fetch_bytes: Positive = Field(default=MIB, description="asked of a partition at a time")
    fetch_wait_ms: Positive = Field(default=500, description="how long a partition may wait for records to answer with")
    prefetch_bytes: NotNegative = Field(
        default=8 * MIB, description="fetched and not polled yet, over all partitions; then fetching pauses"
    )
    max_poll_records: Positive = Field(default=500, description="the most that one poll returns")
    auto_commit_ms: Positive = Field(default=1000, description="how often positions are committed by themselves")
    session_timeout_ms: Positive = Field(default=2500, description="a member that is silent for this long is out")
    heartbeat_ms: Positive = Field(default=500, description="a member says this often that it lives")
    max_poll_interval_ms: Positive = Field(
        default=300_000, description="a member whose program does not poll for this long gives its partitions up"
    )
    assignor: Literal["balanced", "sticky", "range", "roundrobin"] = Field(
        default="balanced", description="who reads what"
    )
    start: Literal["earliest", "latest", "error"] = Field(
        default="earliest", description="where to begin without a position, or with one that retention has deleted"
    )
    on_corrupt: Literal["raise", "skip", "set_aside"] = Field(
        default="raise",
        description="what poll does with a batch, or a value, that cannot be read; set_aside keeps its bytes",
    )
    on_topic_deleted: Literal["raise", "drop"] = Field(
        default="raise", description="when none of its topics is left: poll raises UnknownTopicError, or waits for them"
    )
    refresh_ms: Positive = Field(
        default=5000,
        description="how often a consumer looks for topics that match its pattern, and without a group for partitions",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _require(self, "heartbeat_ms", "less than", "session_timeout_ms")
        return self


class ClusterSettings(Section):
    """The coordinator: topics, brokers, groups."""

    auto_create_topics: bool = Field(
        default=False, description="make a topic when somebody names one that is not there"
    )
    coordinators: Annotated[Positive, Field(le=7)] = Field(
        default=3, description="replicas of the coordinator, on as many nodes; one if there are fewer than three"
    )
    look_ms: Positive = Field(default=500, description="how often the coordinator looks for nodes that came or went")
    start_timeout_ms: Positive = Field(default=60_000, description="how long a start may take before it is given up")
    topic_timeout_ms: Positive = Field(
        default=30_000, description="a new topic of which no further partition gets a leader for so long is given up"
    )
    disconnect_grace_ms: NotNegative = Field(
        default=300, description="a member whose connection broke may come back within this time; else it is out"
    )
    join_window_ms: NotNegative = Field(
        default=60, description="how long a group's first member waits for others, so that they share in one step"
    )
    max_topics: Positive = Field(default=10_000, description="topics at a time")
    max_partitions: Positive = Field(default=100_000, description="partitions of all topics at a time")
    broker_wait_ms: NotNegative = Field(
        default=10_000,
        description="a new topic waits this long for known brokers that are away, rather than put copies on one node;"
        " a broker that was decommissioned is given up when it has been away for so long",
    )
    replace_after_ms: Positive | None = Field(
        default=None,
        description="replicas on a broker that has been away for so long are made anew on others; none: never",
    )
    moves_at_once: Positive = Field(default=2, description="replicas that are replaced or moved at the same time")
    starts_at_once: Positive = Field(
        default=8, description="replicas that are started at the same time on one host; each takes half a second of CPU"
    )
    spread_leaders: bool = Field(default=True, description="share the leaders of partitions out over the brokers")
    leaders_look_ms: Positive = Field(
        default=10_000,
        description="how often the coordinator looks who leads, how large partitions and how full disks are",
    )
    leader_rest_ms: NotNegative = Field(
        default=60_000, description="a partition whose leadership was moved is left alone for so long"
    )
    leader_moves_per_look: Positive = Field(default=4, description="leaderships that are moved after one such look")
    replica_memory_bytes: Positive = Field(default=70 * MIB, description="what one replica's process takes, about")
    replica_memory_percent: Annotated[Positive, Field(le=100)] = Field(
        default=80, description="of a node's memory that replicas may take; a topic that needs more is refused"
    )
    max_replicas_per_broker: Positive | None = Field(
        default=None, description="replicas on one node; none: as many as fit into its memory"
    )
    replica_disk_bytes: Positive = Field(
        default=16 * MIB, description="what a new, empty replica takes on its disk, about"
    )
    disk_reserve_percent: Annotated[NotNegative, Field(le=90)] = Field(
        default=5, description="of a disk that is kept free: a broker with less gets no replica, and status warns"
    )
    group_retention_ms: Positive | None = Field(
        default=7 * 24 * 3_600_000,
        description="a group is forgotten this long after its last member left; without members, after its last commit",
    )
    max_groups: Positive = Field(default=10_000, description="consumer groups, with those that have no members now")
    max_group_members: Positive = Field(default=2_000, description="members of one consumer group")
    max_transaction_timeout_ms: Positive = Field(
        default=900_000, description="the longest time that a producer may give its transactions"
    )
    max_transactional_ids: Positive = Field(
        default=10_000, description="transactional ids, with those not in use; the longest unused makes room"
    )
    max_transaction_participants: Annotated[Positive, Field(le=10_000)] = Field(
        default=1_000, description="partitions that one transaction may touch"
    )
    transactional_id_retention_ms: Positive | None = Field(
        default=7 * 24 * 3_600_000, description="a transactional id is forgotten this long after its last transaction"
    )
    resolve_after_ms: Positive = Field(
        default=1_000,
        description="a partition asks for the fate of a transaction that has been open for so long, and so often",
    )


class GatewaySettings(Section):
    """The gateway: REST and gRPC for callers outside of the Ray cluster."""

    host: str = Field(default="127.0.0.1", description="where it listens; beyond loopback only with keys and TLS")
    rest_port: Port = Field(default=8280, description="of REST; 0: any free one")
    grpc_port: Port = Field(default=8281, description="of gRPC; 0: any free one")
    tls_cert_path: AbsolutePath | None = Field(default=None, description="TLS: the gateway's certificate (PEM)")
    tls_key_path: AbsolutePath | None = Field(default=None, description="TLS: its private key")
    max_body_bytes: Positive = Field(default=8 * MIB, description="the largest request, packed and unpacked")
    max_answer_bytes: Positive = Field(
        default=2 * MIB,
        description="records or jobs of one answer, the first whatever its size; gRPC clients refuse more than 4 MiB",
    )
    max_json_depth: Positive = Field(default=64, description="how deep a JSON value may be nested")
    max_topic_partitions: Positive = Field(default=256, description="partitions that a caller may give a topic")
    max_connections: Positive = Field(default=1024, description="connections of REST at a time")
    max_connections_per_source: Positive = Field(default=256, description="the same for those from one address")
    max_streams_per_caller: Positive = Field(
        default=64, description="sessions, tails and gRPC streams of one key at a time; without keys, of all callers"
    )
    requests_per_s: Positive = Field(default=5000, description="requests of one key, or from one address")
    bytes_per_s: Positive = Field(default=256 * MIB, description="bytes of requests of one key, or from one address")
    request_timeout_ms: Positive = Field(
        default=30_000, description="a request that is not carried out by then gets an error that may be retried"
    )
    slow_timeout_ms: Positive = Field(
        default=10_000, description="a caller whose request does not arrive within so long is hung up on"
    )
    idle_timeout_ms: Positive = Field(default=75_000, description="a connection without requests is closed after that")
    session_timeout_ms: Positive = Field(
        default=30_000, description="a consuming session that is not heard of for so long is closed"
    )
    max_sessions: Positive = Field(default=1024, description="consuming sessions at a time, of all callers")
    max_wait_ms: Positive = Field(default=30_000, description="the longest that a request may wait for records")
    keys_stale_ms: Positive = Field(
        default=15_000, description="nobody is let in if the keys could not be looked up for so long"
    )
    requests_kept_ms: Positive = Field(
        default=24 * 3_600_000, description="how long an idempotency key is remembered, at least"
    )
    max_requests_kept: Positive = Field(
        default=200_000, description="idempotency keys that are remembered at a time; a new one more is refused"
    )
    max_requests_bytes: Positive = Field(
        default=256 * MIB, description="memory for idempotency keys and their answers; beyond it new ones are refused"
    )
    drain_timeout_ms: Positive = Field(default=10_000, description="what is under way may take so long at a stop")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        given = [name for name in ("tls_cert_path", "tls_key_path") if getattr(self, name) is not None]
        if len(given) == 1:
            missing = "tls_key_path" if given[0] == "tls_cert_path" else "tls_cert_path"
            raise PydanticCustomError(_INCOMPLETE, "TLS also needs {missing}", {"key": given[0], "missing": missing})
        return self


class Settings(BaseSettings):
    """All settings of a process. See the module's text for where they come from."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        env_prefix=sources.ENV_PREFIX,
        env_nested_delimiter=sources.ENV_DELIMITER,
        env_ignore_empty=True,
        env_parse_none_str="none",
    )

    data_dir: AbsolutePath = Field(
        default=Path("~/.rayqueue"), validate_default=True, description="where replicas keep their logs"
    )
    namespace: str = Field(default="rayqueue", min_length=1, description="the Ray namespace of the actors")
    raft: RaftSettings = RaftSettings()
    log: LogSettings = LogSettings()
    transport: TransportSettings = TransportSettings()
    calls: CallSettings = CallSettings()
    client: ClientSettings = ClientSettings()
    producer: ProducerSettings = ProducerSettings()
    consumer: ConsumerSettings = ConsumerSettings()
    cluster: ClusterSettings = ClusterSettings()
    gateway: GatewaySettings = GatewaySettings()

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    def __init__(self, *, config_path: Path | str | None = None, **arguments: Any) -> None:
        shape = sources.shape_of(type(self))
        layers = (
            sources.from_file(shape, Path(config_path) if config_path is not None else None),
            sources.from_environment(type(self), shape),
            sources.from_arguments(shape, arguments),
        )
        values: dict[str, Any] = {}
        origin: dict[str, str] = {}
        for layer in layers:  # a later one overrides an earlier one
            values |= layer.values
            origin |= layer.sources
        problems = [problem for layer in layers for problem in layer.problems]
        try:
            super().__init__(**_nested(values))
        except ValidationError as error:
            problems += _problems(error, values, origin)
        if problems:
            raise _config_error(problems) from None
        self._sources = origin

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """``__init__`` has merged the sources already, because it remembers which one each value is from."""
        return (init_settings,)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _require(self, "log.max_batch_bytes", "less than", "raft.append_batch_bytes")
        _require(self, "transport.send_queue_bytes", "more than", "raft.append_batch_bytes")
        _require(self, "transport.max_frame_bytes", "more than", "raft.append_batch_bytes")
        return self


class Effective(NamedTuple):
    """One setting as it is in force. ``source``: default, argument, a variable's name or a file's path."""

    key: str
    value: Any
    source: str


def effective(settings: Settings) -> list[Effective]:
    """Every setting, in the order of this module. Secrets come masked."""
    return [Effective(key, _shown(value), settings._sources.get(key, DEFAULT)) for key, value in _flat(settings, "")]


def descriptions() -> dict[str, str]:
    """The purpose of each setting, by dotted key."""
    told: dict[str, str] = {}
    for name, info in Settings.model_fields.items():
        section = info.annotation
        if isinstance(section, type) and issubclass(section, Section):
            told |= {f"{name}.{key}": each.description or "" for key, each in section.model_fields.items()}
        else:
            told[name] = info.description or ""
    return told


def _flat(model: BaseModel, prefix: str) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name in type(model).model_fields:
        value = getattr(model, name)
        rows += _flat(value, f"{name}.") if isinstance(value, BaseModel) else [(prefix + name, value)]
    return rows


def _shown(value: Any) -> Any:
    return str(value) if isinstance(value, SecretStr | Path) else value


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for dotted, value in values.items():
        section, dot, key = dotted.partition(".")
        if dot:
            nested.setdefault(section, {})[key] = value
        else:
            nested[section] = value
    return nested


def _config_error(problems: list[Problem]) -> ConfigError:
    lines = [str(problem) for problem in problems]
    text = (
        lines[0]
        if len(lines) == 1
        else "\n".join([f"{len(lines)} settings are wrong:", *(f"- {line}" for line in lines)])
    )
    return ConfigError(text, problems=[(problem.key, problem.source, problem.text) for problem in problems])


def _problems(error: ValidationError, values: Mapping[str, Any], origin: Mapping[str, str] | None) -> list[Problem]:
    return [_problem(each, values, origin) for each in error.errors(include_url=False, include_input=False)]


def _problem(each: ErrorDetails, values: Mapping[str, Any], origin: Mapping[str, str] | None) -> Problem:
    """``origin`` is None for a section made by hand: all that it was given are arguments."""

    def source_of(key: str) -> str:
        if origin is not None:
            return origin.get(key, DEFAULT)
        return "argument" if key in values else DEFAULT

    place = [str(part) for part in each["loc"]]
    context = each.get("ctx", {})
    if each["type"] == _CONTRADICTION:
        key, other = (".".join([*place, context[name]]) for name in ("key", "other"))
        text = f"{context['value']} must be {context['relation']} {other} = {context['limit']} ({source_of(other)})"
    elif each["type"] == _INCOMPLETE:
        key, text = ".".join([*place, context["key"]]), each["msg"]
    elif each["type"] == "extra_forbidden":
        key, text = ".".join(place), "unknown key"
    else:
        key = ".".join(place)
        got = "" if "secret" in key else f", not {values.get(key)!r}"
        text = each["msg"].replace("Input should", "should") + got
    return Problem(key, source_of(key), text)
