"""AdminService: topics, groups and the cluster over gRPC."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rayqueue.client.admin.admin import PartitionDescription
from rayqueue.errors import InvalidInputError
from rayqueue.gateway.operations import Operations
from rayqueue.gateway.rpc.calls import Rpc
from rayqueue.gateway.rpc.v1 import admin_pb2 as pb
from rayqueue.gateway.rpc.v1.admin_pb2_grpc import AdminServiceServicer
from rayqueue.protocol.topics import TopicInfo, declared
from rayqueue.protocol.topics import TopicSettings as Settings


class Admin(AdminServiceServicer):
    def __init__(self, gateway: Any) -> None:
        self._operations: Operations = gateway.operations

    async def CreateTopic(self, request: pb.CreateTopicRequest, rpc: Rpc) -> pb.CreateTopicResponse:  # noqa: N802
        given = given_settings(request.settings)
        info = await self._operations.create_topic(rpc.caller, request.name, given, if_missing=request.if_missing)
        return pb.CreateTopicResponse(topic=_topic(info))

    async def ListTopics(self, request: pb.ListTopicsRequest, rpc: Rpc) -> pb.ListTopicsResponse:  # noqa: N802
        return pb.ListTopicsResponse(topics=map(_topic, await self._operations.topics(rpc.caller)))

    async def DescribeTopic(self, request: pb.DescribeTopicRequest, rpc: Rpc) -> pb.DescribeTopicResponse:  # noqa: N802
        found = await self._operations.topic(rpc.caller, request.name)
        return pb.DescribeTopicResponse(
            name=found.name,
            topic_id=found.topic_id,
            settings=settings_of(found.settings),
            records=found.records,
            size_bytes=found.size_bytes,
            partitions=map(_partition, found.partitions),
        )

    async def AlterTopic(self, request: pb.AlterTopicRequest, rpc: Rpc) -> pb.AlterTopicResponse:  # noqa: N802
        changes = {**given_settings(request.settings), **dict.fromkeys(request.clear)}
        return pb.AlterTopicResponse(
            topic=_topic(await self._operations.alter_topic(rpc.caller, request.name, changes))
        )

    async def DeleteTopic(self, request: pb.DeleteTopicRequest, rpc: Rpc) -> pb.DeleteTopicResponse:  # noqa: N802
        await self._operations.delete_topic(rpc.caller, request.name)
        return pb.DeleteTopicResponse()

    async def ListGroups(self, request: pb.ListGroupsRequest, rpc: Rpc) -> pb.ListGroupsResponse:  # noqa: N802
        return pb.ListGroupsResponse(groups=map(_group, await self._operations.groups(rpc.caller)))

    async def DescribeGroup(self, request: pb.DescribeGroupRequest, rpc: Rpc) -> pb.DescribeGroupResponse:  # noqa: N802
        found = await self._operations.group(rpc.caller, request.group)
        lags = [
            pb.PartitionLag(
                topic=each.topic,
                partition=each.partition,
                member=each.member or "",
                committed=dict(each.committed),
                lag=each.lag,
            )
            for each in found.partitions
        ]
        return pb.DescribeGroupResponse(group=_group(found), lag=found.lag, partitions=lags)

    async def ResetGroup(self, request: pb.ResetGroupRequest, rpc: Rpc) -> pb.ResetGroupResponse:  # noqa: N802
        target = request.WhichOneof("target")
        if target is None or (target in ("to_earliest", "to_latest") and not getattr(request, target)):
            raise InvalidInputError("say where to: to_earliest, to_latest, to_offset, to_time_ms or by")
        anchors: dict[str, Any] = {
            "to_earliest": "earliest",
            "to_latest": "latest",
            "to_offset": request.to_offset,
        }
        reset = await self._operations.reset_group(
            rpc.caller,
            request.group,
            to=anchors.get(target),
            to_time_ms=request.to_time_ms if target == "to_time_ms" else None,
            by=request.by if target == "by" else None,
            topic=request.topic or None,
            partitions=list(request.partitions) or None,
            dry_run=request.dry_run,
        )
        moves = [
            pb.PositionMove(
                topic=each.topic,
                partition=each.partition,
                before=dict(each.before),
                after=dict(each.after),
                note=each.note,
            )
            for each in reset.positions
        ]
        return pb.ResetGroupResponse(positions=moves, executed=reset.executed)

    async def DeleteGroup(self, request: pb.DeleteGroupRequest, rpc: Rpc) -> pb.DeleteGroupResponse:  # noqa: N802
        await self._operations.delete_group(rpc.caller, request.group)
        return pb.DeleteGroupResponse()

    async def DescribeCluster(  # noqa: N802
        self, request: pb.DescribeClusterRequest, rpc: Rpc
    ) -> pb.DescribeClusterResponse:
        found = await self._operations.cluster(rpc.caller)
        brokers = [
            pb.Broker(
                broker=each.broker,
                host=each.host,
                alive=each.alive,
                replicas=each.replicas,
                draining=each.draining,
            )
            for each in found.brokers
        ]
        return pb.DescribeClusterResponse(
            cluster_id=found.cluster_id,
            coordinator=found.coordinator,
            term=found.term,
            brokers=brokers,
            topics=found.topics,
            partitions=found.partitions,
            groups=found.groups,
        )


def given_settings(settings: pb.TopicSettings) -> dict[str, Any]:
    """What is set in the message, of what topics have."""
    fields = pb.TopicSettings.DESCRIPTOR.fields_by_name
    return {name: getattr(settings, name) for name in declared(Settings) if name in fields and settings.HasField(name)}


def settings_of(settings: Settings) -> pb.TopicSettings:
    fields = pb.TopicSettings.DESCRIPTOR.fields_by_name
    told = {name: getattr(settings, name) for name in declared(Settings) if name in fields}
    return pb.TopicSettings(**{name: value for name, value in told.items() if value is not None})


def _topic(info: TopicInfo) -> pb.Topic:
    settings = settings_of(info.settings)
    return pb.Topic(name=info.name, topic_id=info.topic_id, partitions=len(info.partitions), settings=settings)


def _partition(found: PartitionDescription) -> pb.Partition:
    replicas = [
        pb.Replica(
            replica_id=each.replica_id,
            broker=each.broker,
            role=each.role,
            high_watermark=each.high_watermark,
            size_bytes=each.size_bytes,
            problem=each.problem or "",
            in_sync=each.in_sync,
            lag=each.lag,
            raft=None if each.raft is None else pb.RaftState(**{**asdict(each.raft), "leader": each.raft.leader or ""}),
        )
        for each in found.replicas
    ]
    return pb.Partition(
        number=found.number,
        leader=found.leader or "",
        term=found.term,
        start_offset=found.start_offset,
        end_offset=found.end_offset,
        size_bytes=found.size_bytes,
        replicas=replicas,
    )


def _group(found: Any) -> pb.Group:
    """Of a ``GroupInfo`` or a ``GroupDescription``."""
    members = [pb.Member(member=each.member, client=each.client, topics=each.topics) for each in found.members]
    return pb.Group(
        group=found.group,
        generation=found.generation,
        assignor=found.assignor,
        state=found.state,
        members=members,
    )
