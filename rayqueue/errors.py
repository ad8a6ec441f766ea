"""Every error RayQueue raises, in one tree::

    RayQueueError
    ├── InvalidInputError            the caller's mistake; nothing was written
    │   ├── ConfigError
    │   ├── OversizedBatchError
    │   ├── OversizedRecordError
    │   ├── CorruptBatchError        checksum does not match
    │   │   └── UnreadableBatchError a batch in the log that this consumer cannot read
    │   ├── SerializationError       a value or key that the producer's serializer cannot write
    │   ├── UnknownFormatError       not a batch, or a version this release does not know
    │   ├── InvalidOffsetError       negative or not a number
    │   └── OffsetOutOfRangeError    trimmed away, or past the end
    ├── DeserializationError         a record's value or key that the consumer's deserializer cannot read
    ├── ProducerError
    │   ├── ProducerFencedError      a newer epoch of this producer exists
    │   ├── SequenceGapError         an earlier batch of this producer is missing
    │   ├── TooManyProducersError    the partition cannot remember another one yet
    │   └── SequenceExpiredError     a duplicate so old that its answer is forgotten
    ├── TransactionError
    │   ├── TransactionAbortedError  nothing of it will ever be seen; the producer may begin another
    │   ├── TransactionPendingError  an open transaction has staged what this would change; it ends before long
    │   ├── TransactionTooLargeError more than a partition takes of one transaction; abort it
    │   ├── TooManyTransactionsError too many are open in this partition, or too many ids are known
    │   └── UnknownTransactionError  the coordinator does not know it, or has not decided so
    ├── GroupError
    │   ├── StaleGenerationError     a consumer that is no longer a member
    │   ├── UnknownGenerationError   one that the coordinator has not given
    │   ├── UnknownMemberError       the group has gone on without this member
    │   ├── UnknownGroupError
    │   ├── GroupNotEmptyError
    │   └── ResetIncompleteError     some positions of a group were moved, some were not; the text says which
    ├── JobError
    │   ├── LeaseLostError           somebody else has been given the job since, or it is gone
    │   ├── JobFailedError           its result was waited for, and it is dead; the text says why
    │   └── UnknownJobError          there is no such job, or none that this can be done with
    │       └── ResultGoneError      the job has ended, and its result is not kept any more, if one was wanted
    ├── TopicError
    │   ├── UnknownTopicError
    │   ├── UnknownPartitionError
    │   ├── TopicRecreatedError      the topic was deleted, and another one has its name
    │   ├── TopicKindError           a call for a queue, and it is a log; or the other way around
    │   ├── TopicNotReadyError       its partitions did not get their leaders
    │   └── TopicExistsError
    │       └── TopicDiffersError    and it is not as it was asked for; the text says in which settings
    ├── ClusterNotFoundError         no RayQueue runs here, and none was to be started
    ├── ClusterStartError            it could not be started in time; the text names what is missing
    ├── NoBrokerError                no node is there to take a replica
    ├── UnknownBrokerError           there is none of this name
    ├── CapacityError                the nodes' memory is not enough for so many replicas; nothing was made
    ├── ClosedError                  this producer, consumer or connection was closed
    ├── ForkedError                  it belongs to the process from which this one was forked
    ├── NotLeaderError               ask another replica; nothing was written
    ├── ReplicaClosedError           this replica is stopping; nothing was written
    ├── QueueFullError               too much is waiting; nothing was written
    ├── OutcomeUnknownError          it may or may not have been written
    │   ├── LeadershipLostError
    │   ├── AppendTimeoutError
    │   └── DeliveryTimeoutError     a producer has tried for as long as it was told to
    ├── DeliveryFailedError          told by flush: records of a producer that nobody has asked about have failed
    ├── UpgradeUnfinishedError       a replica of the release before could not read this; nothing was written
    ├── RecoveryRefusedError         a majority is there, or nobody who could go on alone; nothing was done
    ├── UnsafeRestartError           a broker's stop now would leave partitions without a majority; nothing was stopped
    ├── MembershipError
    │   ├── ChangeInProgressError
    │   ├── LearnerBehindError
    │   ├── NotInSyncError           a replica that lacks committed entries, or is away, cannot lead
    │   └── TransferFailedError
    ├── StorageError
    │   ├── DiskFullError            no records are taken until there is space again
    │   ├── DamagedLogError          stored bytes are not what was written
    │   ├── StoreMissingError        there should be data here and there is none
    │   │   └── StoreAbandonedError  it is from before an unsafe recovery, which went on without it
    │   ├── StoreFormatError         the data was written by a release that this one is too old, or too new, for
    │   └── StoreIdentityError       the data belongs to another replica
    ├── TransportError
    │   └── HandshakeError
    │       └── IncompatibleVersionError  the other side's release is too old, or too new, for this one
    ├── BridgeError                  to Spark or Ray Data
    │   ├── DataLossError            retention has deleted what was still to be read
    │   ├── StaleWriterError         another run of this query has gone on; this one must stop
    │   ├── BatchConflictError       this batch id was written with other contents; nothing was written
    │   ├── BatchForgottenError      whether this batch id was written is not known any more; nothing was written
    │   └── MissingDependencyError   something must be installed; the text says what
    ├── GatewayError                 told to callers of the gateway
    │   ├── UnauthenticatedError     no key, or one that is not known (any more)
    │   ├── PermissionDeniedError    the key's grants do not have it; the text says which would
    │   ├── RateLimitedError         too much at once; ``details["retry_after_ms"]`` says when to come again
    │   ├── RequestTooLargeError     the body, or what it unpacks to; nothing was written
    │   ├── UnsupportedMediaError    a form of body, or of its compression, that the gateway does not read
    │   ├── SessionGoneError         a session that expired, was closed, or never was
    │   ├── SessionElsewhereError    a session of another gateway
    │   ├── RequestConflictError     this idempotency key came with another request; nothing was written
    │   ├── RequestInProgressError   the same request is being carried out; ask again
    │   └── GatewayClosingError      this gateway is being stopped; ask another
    └── InvariantBrokenError         a bug; the replica stops rather than diverge
        └── LostHistoryError         its group has decided without what this replica knows to be committed

Retry policy is data: ``retriable`` says that the same call may succeed later,
``refresh_metadata`` that the caller should first ask again who leads. An
idempotent producer may retry an ``OutcomeUnknownError``; anyone else must
decide for himself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar


class RayQueueError(Exception):
    """Base of the tree. ``details`` carries the values named in the text, under any names: a peer may choose them."""

    code: ClassVar[str] = "error"
    retriable: ClassVar[bool] = False
    refresh_metadata: ClassVar[bool] = False

    def __init__(self, message: str, /, **details: Any) -> None:
        super().__init__(message)
        self.details = details

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions with keyword arguments do not survive pickle by themselves, and Ray pickles them.
        return _rebuild, (type(self), str(self), self.details)


def _rebuild(cls: type[RayQueueError], message: str, details: dict[str, Any]) -> RayQueueError:
    return cls(message, **details)


class InvalidInputError(RayQueueError):
    """The caller's mistake. Nothing was written; the same call will fail again."""

    code = "invalid_input"


class ConfigError(InvalidInputError):
    """A setting is unknown or impossible. The text names the key."""

    code = "invalid_config"


class OversizedBatchError(InvalidInputError):
    """The batch is larger than the partition accepts. Split it."""

    code = "oversized_batch"


class OversizedRecordError(InvalidInputError):
    """Key, value and headers of the record are larger than its topic takes (``max_record_bytes``)."""

    code = "oversized_record"


class CorruptBatchError(InvalidInputError):
    """The batch's checksum does not match its bytes. Encode it again."""

    code = "corrupt_batch"


class UnreadableBatchError(CorruptBatchError):
    """A batch in the log cannot be read. ``details`` has topic, partition, offset and end: seek to ``end`` to go on
    behind it, or let the consumer do so (``on_corrupt``)."""

    code = "unreadable_batch"


class SerializationError(InvalidInputError):
    """The producer's serializer cannot write this value or key. Nothing was accepted. ``details`` has topic and type;
    of a ``send_many`` also the row."""

    code = "serialization"


class UnknownFormatError(InvalidInputError):
    """The bytes are not a batch, or are of a version this release does not know."""

    code = "unknown_format"


class InvalidOffsetError(InvalidInputError):
    """An offset must be a whole number that is not negative."""

    code = "invalid_offset"


class OffsetOutOfRangeError(InvalidInputError):
    """The offset was trimmed by retention or is past the end. ``details`` has start and end."""

    code = "offset_out_of_range"


class DeserializationError(RayQueueError):
    """The consumer's deserializer cannot read a record. ``details`` has topic, partition, offset, end and the record
    with its bytes: seek to ``end`` to go on behind it, or let the consumer do so (``on_corrupt``)."""

    code = "deserialization"


class ProducerError(RayQueueError):
    """An idempotent producer's batch was refused. Nothing was written."""

    code = "producer"


class ProducerFencedError(ProducerError):
    """A newer epoch of this producer exists. This one must stop."""

    code = "producer_fenced"


class SequenceGapError(ProducerError):
    """An earlier batch of this producer has not arrived. Send that one first, then retry."""

    code = "sequence_gap"
    retriable = True


class TooManyProducersError(ProducerError):
    """The partition remembers as many producers as it can, all of them active not long ago. Nothing was written; retry
    later, and let producers live longer than one batch."""

    code = "too_many_producers"
    retriable = True


class SequenceExpiredError(ProducerError):
    """The batch was written before, so long ago that its offset is no longer remembered."""

    code = "sequence_expired"


class TransactionError(RayQueueError):
    """Base of what can be wrong with a transaction."""

    code = "transaction"


class TransactionAbortedError(TransactionError):
    """It was aborted: it took longer than its timeout, or an operator ended it. Nothing of it will ever be seen. The
    producer may begin another one."""

    code = "transaction_aborted"


class TransactionPendingError(TransactionError):
    """An open transaction has staged what this call would change: it commits or aborts before long, at the latest by
    its timeout. Nothing was written."""

    code = "transaction_pending"
    retriable = True


class TransactionTooLargeError(TransactionError):
    """A partition takes no more of this transaction; nothing was written. Abort it, and make smaller ones."""

    code = "transaction_too_large"


class TooManyTransactionsError(TransactionError):
    """So many are open in this partition, or so many transactional ids are known, that there is no room for another
    one. Nothing was written."""

    code = "too_many_transactions"
    retriable = True


class UnknownTransactionError(TransactionError):
    """The coordinator does not know this transactional id (any more), or has not decided what a marker says."""

    code = "unknown_transaction"


class GroupError(RayQueueError):
    """A consumer group refused."""

    code = "group"


class StaleGenerationError(GroupError):
    """The group has moved on. Join again; the commit was not taken."""

    code = "stale_generation"


class UnknownGenerationError(GroupError):
    """The coordinator has not given this generation to whoever commits with it. Join the group; nothing was written."""

    code = "unknown_generation"


class UnknownMemberError(GroupError):
    """The group has gone on without this member. Join again; what it read belongs to others now."""

    code = "unknown_member"


class UnknownGroupError(GroupError):
    """No group of this name has ever had a member."""

    code = "unknown_group"


class GroupNotEmptyError(GroupError):
    """The group has members. Close its consumers first."""

    code = "group_not_empty"


class ResetIncompleteError(GroupError):
    """Some positions of a group may have been moved and some were not: its consumers came back, it was deleted, or
    partitions have no leader. ``details`` has ``moved`` and ``left``. Stop the consumers and reset it again."""

    code = "reset_incomplete"
    retriable = True


class JobError(RayQueueError):
    """About one job of a work queue."""

    code = "job"


class LeaseLostError(JobError):
    """The lease has ended, and somebody else has been given the job since, or it is gone. What the worker did with it
    does not count."""

    code = "lease_lost"


class JobFailedError(JobError):
    """The job whose result was waited for is dead. ``details`` has its reason and traceback."""

    code = "job_failed"


class UnknownJobError(JobError):
    """There is no such job, or it is in no state in which this can be done with it."""

    code = "unknown_job"


class ResultGoneError(UnknownJobError):
    """The job has ended. Its result, if one was wanted, is not kept any more: ``result_ttl_ms`` is over, or later ones
    needed the room (``max_results_bytes``)."""

    code = "result_gone"


class TopicError(RayQueueError):
    """A topic is not what the caller takes it for."""

    code = "topic"


class UnknownTopicError(TopicError):
    """There is no topic of this name. Create it, or set ``cluster.auto_create_topics``."""

    code = "unknown_topic"


class UnknownPartitionError(TopicError):
    """The topic has fewer partitions."""

    code = "unknown_partition"


class TopicRecreatedError(TopicError):
    """The topic was deleted, and another one was made with its name: offsets and positions of the old one mean nothing
    in it. Begin anew. ``details`` has both ids."""

    code = "topic_recreated"


class TopicKindError(TopicError):
    """The topic is a work queue and was asked as a log is, or the other way around. Nothing was done."""

    code = "topic_kind"


class TopicNotReadyError(TopicError):
    """Partitions of a topic got no leader: full disks, or too few nodes. The text says why, and whether the topic is
    there: if it is, ``create_topic(if_missing=True)`` goes on waiting and ``delete_topic`` takes it back."""

    code = "topic_not_ready"


class TopicExistsError(TopicError):
    """There is a topic of this name already."""

    code = "topic_exists"


class TopicDiffersError(TopicExistsError):
    """There is a topic of this name, with other settings than were asked for. ``details["differences"]`` has for each
    the wanted and the existing value. Leave a setting out to take the topic as it is, or ``alter_topic``."""

    code = "topic_differs"


class ClusterNotFoundError(RayQueueError):
    """No RayQueue runs on this Ray. Start one: ``rayqueue up``, or ``connect()`` without ``create=False``."""

    code = "cluster_not_found"


class ClusterStartError(RayQueueError):
    """The cluster has data but could not be started. ``details["missing"]`` names the brokers to wait for."""

    code = "cluster_start"


class NoBrokerError(RayQueueError):
    """No node is there that could take a replica. Nothing was made; retry once a node has joined."""

    code = "no_broker"
    retriable = True


class UnknownBrokerError(RayQueueError):
    """There is no broker of this name; the text says which there are."""

    code = "unknown_broker"


class CapacityError(RayQueueError):
    """So many replicas do not fit. Nothing was made. ``details`` has wanted, there and left."""

    code = "capacity"


class ClosedError(RayQueueError):
    """This producer, consumer or connection was closed. Make a new one."""

    code = "closed"


class ForkedError(RayQueueError):
    """It was made before this process was forked, and stays with the parent. Connect in a child that was spawned."""

    code = "forked"


class NotLeaderError(RayQueueError):
    """This replica does not lead. ``details["leader"]`` names who does, if known. Nothing was written."""

    code = "not_leader"
    retriable = True
    refresh_metadata = True


class ReplicaClosedError(RayQueueError):
    """The replica is closed or closing. Nothing was written."""

    code = "replica_closed"
    retriable = True
    refresh_metadata = True


class QueueFullError(RayQueueError):
    """Too much is waiting already. Nothing was written; slow down and retry."""

    code = "queue_full"
    retriable = True


class OutcomeUnknownError(RayQueueError):
    """It may or may not have been written. Unknown is not failed."""

    code = "outcome_unknown"
    retriable = True
    refresh_metadata = True


class LeadershipLostError(OutcomeUnknownError):
    """The replica stopped leading before the batch was committed. A later leader may still commit it."""

    code = "leadership_lost"


class AppendTimeoutError(OutcomeUnknownError):
    """No majority confirmed the batch in time. It may still be committed."""

    code = "append_timeout"


class DeliveryTimeoutError(OutcomeUnknownError):
    """The record was not acknowledged within ``delivery_timeout_ms``. It may be in the log, or still get there."""

    code = "delivery_timeout"
    retriable = False
    refresh_metadata = False


class DeliveryFailedError(RayQueueError):
    """Records that a producer had accepted were not acknowledged, and no delivery was asked about them.

    ``deliveries`` has theirs, each with its own error; ``details`` how many failed, and of how many nobody knows.
    """

    code = "delivery_failed"
    deliveries: Sequence[Any] = ()


class UpgradeUnfinishedError(RayQueueError):
    """Replicas of the release before are still in the group, and could not apply this. Nothing was written; retry once
    all are upgraded."""

    code = "upgrade_unfinished"
    retriable = True


class RecoveryRefusedError(RayQueueError):
    """A group is not to go on without a majority: it has one, or nobody is left who could. Nothing was done."""

    code = "recovery_refused"


class UnsafeRestartError(RayQueueError):
    """A broker that is stopped now would leave partitions, which ``details["groups"]`` names, without a majority.
    Nothing was stopped; wait until what is missing is back."""

    code = "unsafe_restart"
    retriable = True


class MembershipError(RayQueueError):
    """A change of a group's replicas was refused. Nothing changed."""

    code = "membership"


class ChangeInProgressError(MembershipError):
    """Another change is not finished yet, or the leader is too new. Retry."""

    code = "change_in_progress"
    retriable = True


class LearnerBehindError(MembershipError):
    """The learner has not caught up. Wait, then promote it."""

    code = "learner_behind"
    retriable = True


class NotInSyncError(MembershipError):
    """The replica that is to lead lacks committed entries, or cannot be reached; or too few would be left that answer.
    Nothing changed; retry later."""

    code = "not_in_sync"
    retriable = True


class TransferFailedError(MembershipError):
    """Leadership did not move in time; the old leader goes on."""

    code = "transfer_failed"
    retriable = True


class StorageError(RayQueueError):
    """The replica's disk refused."""

    code = "storage"


class DiskFullError(StorageError):
    """No space. Nothing was written. Reading and committing go on; records are taken again once there is space."""

    code = "disk_full"
    retriable = True


class DamagedLogError(StorageError):
    """Stored bytes are not what was written. Never served; the replica is rebuilt from its peers."""

    code = "damaged_log"
    retriable = True
    refresh_metadata = True


class StoreMissingError(StorageError):
    """There should be data at this path and there is none. Rejoin under a new replica id."""

    code = "store_missing"


class StoreAbandonedError(StoreMissingError):
    """The data is from before its group went on without a majority (``rayqueue recover --unsafe``): what is in it, and
    in no other replica, is lost to the group. It is never served again under its id."""

    code = "store_abandoned"


class StoreFormatError(StorageError):
    """The store was written by a release that knows more than this one, or is older than what this one reads. Nothing
    was changed. The text names both versions and which release to run."""

    code = "store_format"


class StoreIdentityError(StorageError):
    """The data at this path belongs to another replica or group."""

    code = "store_identity"


class TransportError(RayQueueError):
    """Two replicas could not talk."""

    code = "transport"
    retriable = True


class HandshakeError(TransportError):
    """The other side does not hold this cluster's secret, or speaks another version."""

    code = "handshake"
    retriable = False


class IncompatibleVersionError(HandshakeError):
    """The two sides speak no version of the protocol in common. The text says which of them is to be upgraded."""

    code = "incompatible_version"
    retriable = False


class BridgeError(RayQueueError):
    """A bridge to Spark or Ray Data refused."""

    code = "bridge"


class DataLossError(BridgeError):
    """Retention has deleted records that were still to be read. ``details`` has offset and start."""

    code = "data_loss"


class StaleWriterError(BridgeError):
    """Another run of the same query has written a later batch. This one must stop."""

    code = "stale_writer"


class BatchConflictError(BridgeError):
    """This id of this writer was written before, for other contents. Nothing was written; use another writer."""

    code = "batch_conflict"


class BatchForgottenError(BridgeError):
    """Whether this id of this writer was written is forgotten. Nothing was written; use another writer."""

    code = "batch_forgotten"


class MissingDependencyError(BridgeError):
    """Something that this bridge needs is not installed. The text says what, and how to get it."""

    code = "missing_dependency"


class GatewayError(RayQueueError):
    """The gateway refused. Nothing was written."""

    code = "gateway"


class UnauthenticatedError(GatewayError):
    """There is no key in the request, or it is unknown or revoked. `rayqueue keys create` makes one."""

    code = "unauthenticated"


class PermissionDeniedError(GatewayError):
    """The key may not do this. `rayqueue keys grant` gives what the text names."""

    code = "permission_denied"


class RateLimitedError(GatewayError):
    """Too much at once, of this key or from this address. Come again after ``details["retry_after_ms"]``."""

    code = "rate_limited"
    retriable = True


class RequestTooLargeError(GatewayError):
    """The request, or what it unpacks to, is larger than the gateway takes. Send less at a time."""

    code = "request_too_large"


class UnsupportedMediaError(GatewayError):
    """The gateway does not read this form of body, or of compression; the text says which it does."""

    code = "unsupported_media_type"


class SessionGoneError(GatewayError):
    """The session expired, was closed, or never was. Open a new one; what was not acknowledged is read again there."""

    code = "session_gone"


class SessionElsewhereError(GatewayError):
    """The session is held by another gateway. Send its requests there, or open a new one here."""

    code = "session_elsewhere"


class RequestConflictError(GatewayError):
    """This idempotency key was used for another request. Nothing was written by this one: take a new key."""

    code = "request_conflict"


class GatewayClosingError(GatewayError):
    """This gateway is being stopped. Ask another one, or this one again in a moment."""

    code = "gateway_closing"
    retriable = True


class RequestInProgressError(GatewayError):
    """A request with this idempotency key is being carried out, or its outcome is not known yet. Ask again."""

    code = "request_in_progress"
    retriable = True


class InvariantBrokenError(RayQueueError):
    """A promise of the design does not hold. The replica stops rather than diverge."""

    code = "invariant_broken"


class LostHistoryError(InvariantBrokenError):
    """A replica has committed entries that the rest of its group has lost: more disks were lost or restored than the
    group can bear. It stops, keeps them, and says which; a person decides."""

    code = "lost_history"
