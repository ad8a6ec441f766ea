"""RayQueue: the handle of a running queue that an application holds.

Made by ``rayqueue.connect``. It may be passed into Ray tasks and actors, where
it connects again when it is first used. All handles of a process that mean the
same queue share its connections (``rayqueue.client.shared``).

Closing a handle closes nothing but the handle. The queue itself outlives
whoever started it; ``RayQueue.shutdown`` ends it, and its data stays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, Concatenate, Literal, TypeVar

import ray
from typing_extensions import ParamSpec

from rayqueue.client.admin.admin import Admin, GroupDescription, forget_group
from rayqueue.client.admin.group_reset import GroupReset, Target, reset_group
from rayqueue.client.admin.leaders import transfer_leader
from rayqueue.client.admin.open_transactions import abort_transaction, list_transactions
from rayqueue.client.admin.readiness import Progress
from rayqueue.client.admin.rebalancing import JoinStatus, RebalancePlan, RebalanceProgress, joins_of, progress_of
from rayqueue.client.admin.recovery import PartitionRecovery
from rayqueue.client.admin.restarts import BrokerRestart, HandOver, alive_broker, hand_over, restart_broker
from rayqueue.client.arguments import UNCHANGED, check_text, check_whole, explained, with_given
from rayqueue.client.factories import Factories
from rayqueue.client.io import IoThread
from rayqueue.client.joining import current_ray, find_ray, join_ray
from rayqueue.client.lifecycle import stop_cluster
from rayqueue.client.routes import ClusterRoutes
from rayqueue.client.shared import SharedConnections, in_child, refuse_in_child
from rayqueue.client.twins import Twin, awaiting, beside, blocking, in_io, part, run_blocking
from rayqueue.config import Settings
from rayqueue.errors import ClosedError, ClusterNotFoundError
from rayqueue.protocol.calls import ClusterInfo, EventInfo, GroupInfo, MoveInfo
from rayqueue.protocol.topics import TopicInfo, TopicSettings, check_name, declared
from rayqueue.protocol.transactions import TransactionInfo

_P = ParamSpec("_P")
_T = TypeVar("_T")


class RayQueue(Factories, Twin):
    """A running queue. Made by ``connect``; may be pickled into tasks and actors of the same Ray."""

    def __init__(self, settings: Settings, ray_address: str | None = None) -> None:
        self.settings = settings
        self.namespace = settings.namespace
        self._ray_address = ray_address or current_ray()
        self._shared: SharedConnections | None = None
        self._closed = False
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return RayQueue, (self.settings, self._ray_address)

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        return f"RayQueue(namespace={self.namespace!r}, ray={self._ray_address!r}{closed})"

    async def _leave(self, kind: type[BaseException] | None) -> None:
        await part(self.close)()

    # -- for producers, consumers and everything else that is made from this ------------------

    @property
    def io(self) -> IoThread:
        """The thread of this process's connections."""
        return self._connected().io

    @property
    def routes(self) -> ClusterRoutes:
        """The cluster as this process sees it. Belongs to the thread of ``io``."""
        return self._connected().routes

    def _connected(self) -> SharedConnections:
        """Connected again if need be, which may block."""
        shared = self._shared
        if shared is None or not shared.usable:
            refuse_in_child()
            with self._lock:
                if self._closed:
                    raise ClosedError("this connection was closed; connect again")
                if not ray.is_initialized():
                    found = find_ray(self._ray_address, self.settings.data_dir)
                    if found is None:
                        raise ClusterNotFoundError("no Ray runs here, and none was to be started")
                    join_ray(found)
                shared = self._shared = SharedConnections.of(self.settings)
        return shared

    async def _connection(self) -> SharedConnections:
        shared = self._shared
        return shared if shared is not None and shared.usable else await beside(self._connected)

    async def _admin(
        self,
        method: Callable[Concatenate[Admin, _P], Coroutine[Any, Any, _T]],
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _T:
        shared = await self._connection()
        return await in_io(shared.io, method(Admin(shared.routes, self.settings), *args, **kwargs))

    # -- the end --------------------------------------------------------------------------------

    @blocking
    async def close(self) -> None:
        """Let go of it. The queue goes on, and so do the connections that other handles share."""
        if in_child():  # they are the parent's, and another thread of it may have held the lock
            self._closed = True
        else:
            await beside(self._let_go)

    close_async = awaiting(close)

    def _let_go(self) -> None:
        with self._lock:
            shared, self._shared, self._closed = self._shared, None, True
        if shared is not None:
            shared.let_go()

    @blocking
    async def shutdown(self, *, on_progress: Progress | None = None) -> None:
        """End the queue, for everybody: every replica in good order. The data stays; connect again to continue.

        ``on_progress`` is told how many replicas have been closed, of how many.
        """
        refuse_in_child()
        await beside(self._stop, on_progress)
        await part(self.close)()

    shutdown_async = awaiting(shutdown)

    def _stop(self, on_progress: Progress | None) -> None:
        stop_cluster(self.namespace, on_progress)
        SharedConnections.end_all(self.namespace)

    # -- topics ---------------------------------------------------------------------------------

    @blocking
    @explained(TopicSettings)
    @with_given
    async def create_topic(
        self,
        given: Mapping[str, Any],
        name: str,
        *,
        partitions: int = 1,
        replication: int = 3,
        prefer_leader: Literal["consumer"] | None = None,
        lanes: int = 1,
        retention_ms: int | None = None,
        retention_bytes: int | None = None,
        retention_consumed: bool = False,
        max_record_bytes: int = 1_000_000,
        max_backlog_bytes: int | None = None,
        max_backlog_records: int | None = None,
        queue: bool = False,
        lease_ms: int = 30_000,
        max_lease_ms: int = 43_200_000,
        max_deliveries: int | None = 5,
        retry_backoff_ms: int = 1_000,
        retry_backoff_max_ms: int = 300_000,
        dead_letter: bool = True,
        ordered_by_key: bool = False,
        fair_by_key: bool = False,
        dedupe_window_ms: int = 300_000,
        result_ttl_ms: int = 3_600_000,
        max_leased: int = 50_000,
        max_results_bytes: int | None = None,
        if_missing: bool = False,
        wait: bool = True,
        on_progress: Progress | None = None,
    ) -> TopicInfo:
        """Make a topic. Returns once every partition has a leader.

        ``TopicExistsError`` if there is one of this name, unless ``if_missing``: then it is taken as it is, and
        ``TopicDiffersError`` says in which of the settings that were given here it differs.
        """
        settings = {key: given[key] for key in declared(TopicSettings) if key in given}
        return await self._admin(
            Admin.create_topic, name, settings, if_missing=if_missing, wait=wait, on_progress=on_progress
        )

    create_topic_async = awaiting(create_topic)

    @blocking
    async def topics(self, *, include_internal: bool = False) -> list[TopicInfo]:
        """All topics, by name. Those that RayQueue has made for itself (the gateway's) if asked for."""
        return await self._admin(Admin.topics, include_internal=include_internal)

    topics_async = awaiting(topics)

    @blocking
    @explained(TopicSettings)
    @with_given
    async def alter_topic(
        self,
        given: Mapping[str, Any],
        name: str,
        *,
        partitions: int = UNCHANGED,
        replication: int = UNCHANGED,
        prefer_leader: Literal["consumer"] | None = UNCHANGED,
        retention_ms: int | None = UNCHANGED,
        retention_bytes: int | None = UNCHANGED,
        retention_consumed: bool = UNCHANGED,
        max_record_bytes: int = UNCHANGED,
        max_backlog_bytes: int | None = UNCHANGED,
        max_backlog_records: int | None = UNCHANGED,
        lease_ms: int = UNCHANGED,
        max_lease_ms: int = UNCHANGED,
        max_deliveries: int | None = UNCHANGED,
        retry_backoff_ms: int = UNCHANGED,
        retry_backoff_max_ms: int = UNCHANGED,
        dead_letter: bool = UNCHANGED,
        dedupe_window_ms: int = UNCHANGED,
        result_ttl_ms: int = UNCHANGED,
        max_leased: int = UNCHANGED,
        max_results_bytes: int | None = UNCHANGED,
        wait: bool = True,
        on_progress: Progress | None = None,
    ) -> TopicInfo:
        """More partitions, other retention, other limits. ``None`` takes a limit away; what is left out stays.

        Another ``replication`` is carried out after this has returned, a replica at a time (``cluster().moves``).
        """
        changes = {key: given[key] for key in declared(TopicSettings) if given.get(key, UNCHANGED) is not UNCHANGED}
        return await self._admin(Admin.alter_topic, name, changes, wait=wait, on_progress=on_progress)

    alter_topic_async = awaiting(alter_topic)

    @blocking
    async def delete_topic(self, name: str) -> bool:
        """Delete a topic with its records. False if there is none."""
        return await self._admin(Admin.delete_topic, name)

    delete_topic_async = awaiting(delete_topic)

    # -- groups and brokers -----------------------------------------------------------------------

    @blocking
    async def groups(self) -> list[GroupInfo]:
        """All consumer groups, by name."""
        return await self._admin(Admin.groups)

    groups_async = awaiting(groups)

    @blocking
    async def group(self, name: str) -> GroupDescription:
        """A group's members, and how far it is in each partition."""
        return await self._admin(Admin.group, name)

    group_async = awaiting(group)

    @blocking
    async def delete_group(self, name: str) -> bool:
        """Forget a group without members, and its positions. False if there is none."""
        return await self._admin(lambda admin: forget_group(admin.routes, check_name("group", name)))

    delete_group_async = awaiting(delete_group)

    @blocking
    async def transactions(self) -> list[TransactionInfo]:
        """All transactional ids, and what each has open: since when, whose, and in which partitions."""
        return await self._admin(lambda admin: list_transactions(admin.routes))

    transactions_async = awaiting(transactions)

    @blocking
    async def abort_transaction(self, transactional_id: str) -> bool:
        """Abort what this id has open: nothing of it will be seen. Its producer is told, and may begin another one.

        False if that had ended already. ``UnknownTransactionError`` if there is no such id.
        """
        given = check_text("transactional_id", transactional_id)
        return await self._admin(lambda admin: abort_transaction(admin.routes, given))

    abort_transaction_async = awaiting(abort_transaction)

    @blocking
    async def reset_group(
        self,
        name: str,
        *,
        to: Literal["earliest", "latest"] | int | None = None,
        to_time_ms: int | None = None,
        by: int | None = None,
        topic: str | None = None,
        partitions: Iterable[int] | None = None,
        dry_run: bool = False,
    ) -> GroupReset:
        """Move the positions of a group without members (``GroupNotEmptyError``), and say from where to where.

        ``to`` the beginning, the end, or an offset; ``to_time_ms``: to the first record that is not older; ``by`` so
        many offsets, forward or back. Of one topic, also where the group has no position yet, or of all partitions in
        which it has one. What lies outside the log becomes its beginning or end. ``dry_run`` changes nothing.

        If a consumer joins meanwhile, the positions that were not moved by then stay: ``ResetIncompleteError``.
        """
        target = Target.of(to, to_time_ms, by)
        numbers = None if partitions is None else tuple(partitions)
        wanted = partial(reset_group, topic=topic, partitions=numbers, dry_run=dry_run)
        return await self._admin(lambda admin: wanted(admin.routes, name, target))

    reset_group_async = awaiting(reset_group)

    @blocking
    async def cluster(self) -> ClusterInfo:
        """Brokers, and how many topics, partitions and groups there are."""
        return await self._admin(Admin.cluster)

    cluster_async = awaiting(cluster)

    @blocking
    async def events(self, *, after: int = 0) -> list[EventInfo]:
        """The last things that happened to brokers and replicas, the oldest first: at most 256 are kept.

        ``after``: only those with a higher ``number``, for whoever asks again and again.
        """
        return await self._admin(Admin.events, check_whole("after", after, least=0))

    events_async = awaiting(events)

    @blocking
    async def decommission(self, broker: str, *, cancel: bool = False) -> ClusterInfo:
        """Empty a broker: it gets no new replica, and those that it has are moved to others, while they serve.

        Returns at once. ``cluster()`` says how many it still ``holds``; with none, its node can be stopped, and is
        forgotten then. ``cancel``: let it be used again; what was moved stays where it is.
        """
        return await self._admin(Admin.drain, broker, not cancel)

    decommission_async = awaiting(decommission)

    @blocking
    async def move_replica(self, topic: str, partition: int, *, source: str, target: str) -> MoveInfo:
        """Move a partition's replica from one broker to another that has none of it. Returns once it has begun;
        ``cluster().moves`` lists what is under way."""
        number = check_whole("partition", partition, least=0)
        return await self._admin(Admin.move_replica, topic, number, source, target)

    move_replica_async = awaiting(move_replica)

    @blocking
    async def transfer_leader(self, topic: str, partition: int, to_broker: str, *, timeout_ms: int = 5_000) -> None:
        """Let the replica on this broker lead the partition. Returns once it does, which takes some milliseconds.

        ``InvalidInputError`` if the broker has no replica of it; ``NotInSyncError`` if that one has not all that is
        committed, or is away; ``TransferFailedError`` if it did not take over. In each case the old leader goes on.
        """
        number = check_whole("partition", partition, least=0)
        patience_ms = check_whole("timeout_ms", timeout_ms, least=1)
        await self._admin(lambda admin: transfer_leader(admin.routes, topic, number, to_broker, patience_ms))

    transfer_leader_async = awaiting(transfer_leader)

    @blocking
    async def restart_broker(
        self, broker: str, *, timeout_ms: int = 120_000, on_progress: Progress | None = None
    ) -> BrokerRestart:
        """Stop the replicas of one broker in good order, and start them again, while the others serve.

        Those that lead hand over first. Nothing is stopped while a group could not do without that broker
        (``UnsafeRestartError`` after ``timeout_ms``). Returns once they are back and have caught up; then the next
        broker's turn may come. ``on_progress`` is told how many are back, of how many.
        """
        patience_ms = check_whole("timeout_ms", timeout_ms, least=1)
        found = alive_broker(await self._admin(Admin.cluster), broker)
        return await beside(restart_broker, found, self.namespace, patience_ms / 1000, on_progress)

    restart_broker_async = awaiting(restart_broker)

    @blocking
    async def hand_over(self, broker: str, *, timeout_ms: int = 60_000) -> HandOver:
        """Let others lead what this broker leads: stop its node right after this.

        ``UnsafeRestartError`` after ``timeout_ms`` if a group could not do without that broker.
        """
        patience_ms = check_whole("timeout_ms", timeout_ms, least=1)
        found = alive_broker(await self._admin(Admin.cluster), broker)
        return await beside(hand_over, found, self.namespace, patience_ms / 1000)

    hand_over_async = awaiting(hand_over)

    @blocking
    async def recover_partition(
        self,
        topic: str,
        partition: int,
        *,
        survivor: str | None = None,
        unsafe: bool = False,
        begin_at: int | None = None,
        broker: str | None = None,
    ) -> PartitionRecovery:
        """Let a partition that has lost a majority of its replicas go on with one that is left. Records may be lost.

        Without ``unsafe`` nothing is done: the answer says which replica would go on (``survivor``, or the one that has
        most) and what may be lost. With it the others are given up for ever, which ``cluster().recoveries`` remembers;
        should they come back, their data is set aside. ``RecoveryRefusedError`` while a majority is there.

        If no replica is left that could go on, the partition begins anew, empty: behind all offsets that are known to
        have been acknowledged, or at ``begin_at`` if nobody knows them; on ``broker``, or on the one that had it.
        """
        number = check_whole("partition", partition, least=0)
        offset = None if begin_at is None else check_whole("begin_at", begin_at, least=0)
        where = None if broker is None else check_name("broker", broker)
        return await self._admin(Admin.recover_partition, topic, number, survivor, unsafe, offset, where)

    recover_partition_async = awaiting(recover_partition)

    @blocking
    async def plan_rebalance(self) -> RebalancePlan:
        """The moves after which replicas and leaders are spread over the brokers, and their racks. Changes nothing."""
        return await self._admin(Admin.plan_rebalance)

    plan_rebalance_async = awaiting(plan_rebalance)

    @blocking
    async def rebalance(self, plan: RebalancePlan | None = None) -> RebalanceProgress | None:
        """Carry a plan out, or one that is made now. Returns once it is written down (``rebalance_progress``).

        It goes on whoever leads, and whatever becomes of the caller. ``ChangeInProgressError`` if another one is
        under way.
        """
        return await self._admin(Admin.rebalance, plan)

    rebalance_async = awaiting(rebalance)

    @blocking
    async def stop_rebalance(self) -> None:
        """Forget what was not begun yet. What is being moved is carried through; another rebalance does the rest."""
        await self._admin(Admin.stop_rebalance)

    stop_rebalance_async = awaiting(stop_rebalance)

    @blocking
    async def rebalance_progress(self) -> RebalanceProgress | None:
        """The progress of the rebalance that is under way; None if none is."""
        return progress_of(await self._admin(Admin.cluster))

    rebalance_progress_async = awaiting(rebalance_progress)

    @blocking
    async def join_status(self) -> list[JoinStatus]:
        """Which brokers have joined, what they have, and what is on its way to them."""
        return joins_of(await self._admin(Admin.cluster))

    join_status_async = awaiting(join_status)

    def _wait_for_coordinator(self, timeout_ms: int) -> None:
        run_blocking(self._admin(Admin.cluster, timeout_ms))
