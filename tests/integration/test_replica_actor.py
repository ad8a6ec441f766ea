"""Replicas as Ray actors, reached as clients reach them: what they serve, what they refuse, and what kill -9 does to
them.

One Ray for the whole module, on loopback, and one group for the tests that do
no harm to it.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray

from rayqueue.actors.partition_actor import PartitionSpec
from rayqueue.actors.start import start_actor
from rayqueue.client.embedded import embedded_ray
from rayqueue.client.io import IoThread
from rayqueue.config import Settings
from rayqueue.errors import (
    CorruptBatchError,
    InvalidInputError,
    InvalidOffsetError,
    MembershipError,
    NotLeaderError,
    OffsetOutOfRangeError,
    OutcomeUnknownError,
    OversizedBatchError,
    ProducerFencedError,
    RayQueueError,
    ReplicaClosedError,
    SequenceGapError,
    StoreMissingError,
    UnknownFormatError,
)
from rayqueue.ids import Offset, ReplicaId
from rayqueue.net.channel import Channel
from rayqueue.partition import Appended, Committed, PartitionSettings, commit_command
from rayqueue.protocol import data
from rayqueue.protocol.calls import GetStatus
from rayqueue.protocol.data import ANY_LANE, Cursor, FetchAnswer, FetchRequest
from rayqueue.records import RecordBatch
from rayqueue.testing import wait_for
from tests.integration.actor_groups import (
    ActorGroup,
    actor_settings,
    answer_of,
    check_history,
    eventually,
    new_producer,
    wait_for_more,
)
from tests.integration.history import RECORDS_PER_BATCH, Writer, end_of, numbered

pytestmark = pytest.mark.timeout(180)

TIMEOUT_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    with embedded_ray():
        yield


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ActorGroup]:
    with ActorGroup("orders-0", actor_settings(data_dir=tmp_path_factory.mktemp("orders"))) as started:
        yield started


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return actor_settings(data_dir=tmp_path)


def run(work: Any) -> Any:
    return IoThread.shared().call(work, TIMEOUT_S)


def last_indexes(group: ActorGroup) -> dict[ReplicaId, int]:
    return {node: status.last_index for node, status in group.statuses().items()}


# -- appending and fetching ---------------------------------------------------------------------------------------


def test_append_and_fetch(group: ActorGroup) -> None:
    producer, end, client = new_producer(), group.end(), group.client
    first = client.append(numbered(producer, 0))
    second = client.append(numbered(producer, RECORDS_PER_BATCH))
    assert first == Appended(Offset(end), RECORDS_PER_BATCH, False)
    assert second == Appended(Offset(end + RECORDS_PER_BATCH), RECORDS_PER_BATCH, False)
    answer = client.fetch(end)
    assert [(batch.base_offset, bytes(batch.payload)) for batch in answer.batches] == [
        (first.base_offset, numbered(producer, 0)),
        (second.base_offset, numbered(producer, RECORDS_PER_BATCH)),
    ]
    assert (answer.high_watermark, answer.start_offset) == (end + 2 * RECORDS_PER_BATCH, 0)
    assert client.fetch(end, 1).batches == answer.batches[:1]
    assert client.fetch(answer.high_watermark).batches == []


def test_every_replica_serves_the_same(group: ActorGroup) -> None:
    appended = group.client.append(numbered(new_producer(), 0))
    first, second, third = group.logs(end_of(appended)).values()
    assert first
    assert first == second == third


def test_duplicate_gap_and_fence(group: ActorGroup) -> None:
    producer, end, client = new_producer(), group.end(), group.client
    first = client.append(numbered(producer, 0))
    assert client.append(numbered(producer, 0)) == first._replace(duplicate=True)
    with pytest.raises(SequenceGapError):
        client.append(numbered(producer, 3 * RECORDS_PER_BATCH), via=group.leader())
    newer = RecordBatch.encode([b"x"], timestamps=0, producer_id=producer, epoch=1)
    client.append(newer)
    with pytest.raises(ProducerFencedError):
        client.append(numbered(producer, RECORDS_PER_BATCH))
    assert group.end() == end + RECORDS_PER_BATCH + 1


def test_good_batches_among_bad_ones_on_one_connection(group: ActorGroup) -> None:
    producer, end = new_producer(), group.end()
    batches = [numbered(producer, number * RECORDS_PER_BATCH) for number in range(20)]
    mixed = [*batches[:10], b"no batch", batches[0], *batches[10:], batches[-1] + b"\0"]

    async def send() -> list[Any]:
        route = group.route()
        channel = await route.leader()
        answers = await asyncio.gather(*map(channel.append, mixed), return_exceptions=True)
        route.close()
        return answers

    answers = run(send())
    written = [answer for answer in answers if isinstance(answer, data.Appended) and not answer.duplicate]
    assert [answer.base_offset for answer in written] == [end + n * RECORDS_PER_BATCH for n in range(20)]
    assert isinstance(answers[10], UnknownFormatError)
    assert isinstance(answers[-1], CorruptBatchError)
    # The first one again was admitted while the first was not applied yet, or answered at once: once in the log.
    assert answers[11] == written[0]._replace(duplicate=True)
    assert [batch.payload for batch in group.client.read_log(end)] == batches


def test_batches_in_flight_keep_their_order(group: ActorGroup) -> None:
    producer, end = new_producer(), group.end()
    batches = [numbered(producer, number * RECORDS_PER_BATCH) for number in range(300)]
    answers = list(group.client.append_each(batches, in_flight=16))
    assert answers == [Appended(Offset(end + n * RECORDS_PER_BATCH), RECORDS_PER_BATCH, False) for n in range(300)]


def test_what_cannot_be_cured_is_not_repeated(group: ActorGroup) -> None:
    producer, answers = new_producer(), list[Appended]()
    oversized = numbered(producer, RECORDS_PER_BATCH, count=500, padding_bytes=2120)
    with pytest.raises(OversizedBatchError):
        answers.extend(group.client.append_each([numbered(producer, 0), oversized, oversized]))
    assert len(answers) == 1


def test_commands(group: ActorGroup) -> None:
    leader = group.handle(group.leader())
    answer = answer_of(leader.command.remote(commit_command("billing", 1, {0: 3})))
    assert answer == Committed(1, {0: Offset(3)})
    before = last_indexes(group)
    for payload in (b"", b"\xff", b"\x02{}", numbered(new_producer(), 0), "text"):
        with pytest.raises(InvalidInputError):
            answer_of(leader.command.remote(payload))
    assert last_indexes(group) == before


# -- errors ------------------------------------------------------------------------------------------------


def test_errors_keep_their_type_through_ray_and_on_the_wire(group: ActorGroup) -> None:
    leader, follower = group.leader(), group.followers()[0]
    with pytest.raises(NotLeaderError) as through_ray:
        ray.get(group.handle(follower).command.remote(commit_command("billing", 1, {0: 3})))
    with pytest.raises(NotLeaderError) as on_the_wire:
        group.client.append(numbered(new_producer(), 0), via=follower)
    for caught in (through_ray, on_the_wire):
        error = caught.value
        assert (error.code, error.retriable, error.refresh_metadata) == ("not_leader", True, True)
        assert error.details == {"leader": leader}
    with pytest.raises(CorruptBatchError) as caught_here:
        group.client.append(numbered(new_producer(), 0) + b"\0")
    assert type(caught_here.value) is CorruptBatchError
    assert "\n" not in str(caught_here.value)
    assert {"expected", "length"} == caught_here.value.details.keys()


def test_bad_batches_are_refused_before_anything_is_written(group: ActorGroup) -> None:
    good = numbered(new_producer(), 0)
    flipped = bytearray(good)
    flipped[-1] ^= 1
    before = last_indexes(group)
    refused: list[tuple[bytes, type[RayQueueError]]] = [
        (numbered(1, 0, count=500, padding_bytes=2120), OversizedBatchError),
        (bytes(flipped), CorruptBatchError),
        (good[:-1], CorruptBatchError),
        (b"XQ" + good[2:], UnknownFormatError),
        (good[:2] + b"\xff" + good[3:], UnknownFormatError),
        (b"", UnknownFormatError),
        (RecordBatch.encode([b"x"], timestamps=0, lane=1), InvalidInputError),
        (RecordBatch.encode([b"x"], timestamps=0, control=True), InvalidInputError),
    ]
    leader = group.leader()
    for batch, error in refused:
        with pytest.raises(error):
            group.client.append(batch, via=leader)
    assert last_indexes(group) == before


def test_bad_members_are_refused(group: ActorGroup) -> None:
    leader = group.leader()
    handle, pid = group.handle(leader), group.process(leader).pid
    for node in (None, 5, ["n1"], "", "a/b", "n77"):
        for call in (handle.promote, handle.remove, handle.transfer_leadership):
            with pytest.raises((InvalidInputError, MembershipError)):
                answer_of(call.remote(node))
    for node in (None, 5, ["n1"], "", "a/b", leader):
        with pytest.raises(InvalidInputError):
            answer_of(handle.add_learner.remote(node))
    assert (group.leader(), group.process(leader).pid) == (leader, pid)


def test_bad_fetches_are_refused(group: ActorGroup) -> None:
    end, leader, follower = group.end(), group.leader(), group.followers()[0]
    with pytest.raises(InvalidOffsetError):
        group.client.fetch(2**63)
    with pytest.raises(OffsetOutOfRangeError) as caught:
        group.client.fetch(end + 1, max_wait_ms=5000)
    assert caught.value.details == {"offset": end + 1, "lane": ANY_LANE, "start": 0, "end": end}
    for bad in ({"max_bytes": -1}, {"max_wait_ms": -1}, {"offset": -1}, {"lane": 254}, {"lane": 256}):
        with pytest.raises(InvalidInputError):
            group.client.fetch(**{"offset": 0, **bad}, via=leader)
    # A follower cannot know that there is nothing: it may be behind.
    assert group.client.fetch(end + 1, via=follower).batches == []

    async def without_leave_to_read_from_a_follower() -> FetchAnswer:
        channel = await Channel.open(await group.directory.endpoint(group.group_id, follower), group.settings)
        try:
            return await channel.fetch(FetchRequest((Cursor(ANY_LANE, 0),), 1))
        finally:
            channel.close()

    with pytest.raises(NotLeaderError):
        run(without_leave_to_read_from_a_follower())


# -- waiting --------------------------------------------------------------------------------------------------


def test_long_poll_waits_for_the_next_batch(group: ActorGroup) -> None:
    end, fetch = group.end(), group.client.fetch
    group.wait_for_end(end)
    started_s = time.monotonic()
    assert fetch(end, max_wait_ms=200) == FetchAnswer([], end, 0)
    assert 0.2 <= time.monotonic() - started_s < 5
    with ThreadPoolExecutor(len(group.replica_ids)) as pool:
        waiting = [pool.submit(fetch, end, via=node, max_wait_ms=20_000) for node in group.replica_ids]
        time.sleep(0.2)
        assert not any(each.done() for each in waiting)
        batch = numbered(new_producer(), 0)
        group.client.append(batch)
        for each in waiting:
            assert [bytes(found.payload) for found in each.result(10).batches] == [batch]


def test_waiting_fetches_hold_up_nothing(settings: Settings) -> None:
    few = settings.model_copy(
        update={"calls": settings.calls.model_copy(update={"max_controls": 2, "max_fetches": 400})}
    )
    with ActorGroup("waiters-0", few) as group:
        group.client.append(numbered(1, 0))
        handle = group.handle(group.leader())

        async def scenario() -> None:
            route = group.route()
            channel = await route.leader()
            request = FetchRequest((Cursor(ANY_LANE, RECORDS_PER_BATCH),), 1 << 20, 30_000)
            waiting = [channel.fetch(request) for _ in range(300)]
            assert (await channel.fetch(request._replace(cursors=(Cursor(ANY_LANE, 0),)))).batches
            await asyncio.gather(*(channel.call(GetStatus()) for _ in range(10)))
            await asyncio.to_thread(lambda: ray.get([handle.status.remote() for _ in range(10)], timeout=10))
            # Appends that are refused: nothing grows, and nobody is woken.
            refused = await asyncio.gather(*(channel.append(b"no batch") for _ in range(20)), return_exceptions=True)
            assert {type(error) for error in refused} == {UnknownFormatError}
            await asyncio.sleep(0.5)
            assert not any(each.done() for each in waiting)
            assert (await channel.append(numbered(1, RECORDS_PER_BATCH))).base_offset == RECORDS_PER_BATCH
            answers = await asyncio.wait_for(asyncio.gather(*waiting), 20)
            assert {len(answer.batches) for answer in answers} == {1}
            route.close()

        run(scenario())


def test_lanes_wait_for_their_own(settings: Settings) -> None:
    with ActorGroup("lanes-0", settings, replicas=1, partition=PartitionSettings(lanes=2)) as group:
        urgent = RecordBatch.encode([b"u"], timestamps=0, lane=0)
        patient = RecordBatch.encode([b"p"], timestamps=0, lane=1)
        client = group.client
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.fetch, 0, lane=1, max_wait_ms=20_000)
            client.append(urgent)
            client.append(urgent)
            time.sleep(0.2)
            assert not waiting.done()
            client.append(patient)
            assert [bytes(batch.payload) for batch in waiting.result(10).batches] == [patient]
        assert [batch.base_offset for batch in client.fetch(0, lane=0).batches] == [0, 1]
        assert client.fetch(3, lane=1, max_wait_ms=50).batches == []


# -- deaths ---------------------------------------------------------------------------------------------------------


def test_leader_killed_during_writes(settings: Settings) -> None:
    with ActorGroup("kills-0", settings) as group:
        with Writer(group.client, new_producer()) as writer:
            for _ in range(2):
                wait_for_more(writer, 50)
                killed = group.leader()
                pid = group.process(killed).pid
                group.kill(killed)
                wait_for_more(writer, 50)
                assert group.leader() != killed
                # Ray has restarted it, and it has found its peers and caught up.
                group.wait_for_end(end_of(writer.acked[-1]))
                assert group.process(killed).pid != pid
        check_history(group, writer)


def test_all_killed_at_once(settings: Settings) -> None:
    with ActorGroup("all-0", settings) as group:
        with Writer(group.client, new_producer()) as writer:
            wait_for_more(writer, 50)
            group.kill(*group.replica_ids)
            wait_for_more(writer, 50, timeout_s=60)
        check_history(group, writer)


def test_stop_and_start_on_the_same_data(settings: Settings) -> None:
    with ActorGroup("again-0", settings) as group:
        first = group.client.append(numbered(1, 0))
        group.client.append(numbered(1, RECORDS_PER_BATCH))
    with ActorGroup("again-0", settings, create=False) as group:
        assert group.client.append(numbered(1, 0)) == first._replace(duplicate=True)
        assert group.client.append(numbered(1, 2 * RECORDS_PER_BATCH)).base_offset == 2 * RECORDS_PER_BATCH
    # The disk of one is lost while all are down: it must not begin anew, and the others go on.
    lost = group.replica_ids[0]
    shutil.rmtree(settings.data_dir / "again-0" / lost)
    with ActorGroup("again-0", settings, create=False) as group:
        assert group.client.append(numbered(1, 3 * RECORDS_PER_BATCH)).base_offset == 3 * RECORDS_PER_BATCH
        for call in (group.handle(lost).status, group.handle(lost).endpoint):
            with pytest.raises(StoreMissingError):
                answer_of(call.remote())
        with pytest.raises(StoreMissingError):
            group.client.fetch(0, via=lost)
        assert lost not in group.statuses()


def test_lost_disk_is_not_silently_replaced(settings: Settings) -> None:
    with ActorGroup("lost-0", settings) as group:
        group.client.append(numbered(1, 0))
        lost = group.followers()[0]
        path = settings.data_dir / "lost-0" / lost
        path.rename(path.with_name("away"))
        group.kill(lost)
        eventually(StoreMissingError, lambda: group.client.fetch(0, via=lost), str(path))
        assert not path.exists()
        assert group.client.append(numbered(1, RECORDS_PER_BATCH)).base_offset == RECORDS_PER_BATCH


def test_a_replica_that_cannot_start_says_why_to_everybody(settings: Settings) -> None:
    path = settings.data_dir / "bad-0" / "n2"
    path.parent.mkdir(parents=True)
    path.touch()
    with ActorGroup("bad-0", settings) as group:
        assert group.client.append(numbered(1, 0)).base_offset == 0
        with pytest.raises(StoreMissingError):
            group.client.fetch(0, via=ReplicaId("n2"))
        assert ReplicaId("n2") not in group.statuses()


# -- members ------------------------------------------------------------------------------------------------------


def test_members_change(settings: Settings) -> None:
    with ActorGroup("members-0", settings) as group:
        group.client.append(numbered(1, 0))
        added, removed = ReplicaId("n9"), group.followers()[0]
        newcomer = start_actor(PartitionSpec(group.group_id, added, settings, create=True))
        try:
            leader = group.handle(group.leader())
            answer_of(leader.add_learner.remote(added), 10)
            wait_for(lambda: ray.get(newcomer.status.remote()).high_watermark == RECORDS_PER_BATCH, "the learner", 20.0)
            assert answer_of(newcomer.status.remote()).role == "learner"
            for call, node in ((leader.promote, added), (leader.remove, removed), (leader.transfer_leadership, added)):
                answer_of(call.remote(node), 10)
            group.replica_ids = (*(set(group.replica_ids) - {removed}), added)
            group.client.set_replicas(group.replica_ids)
            assert group.client.append(numbered(1, RECORDS_PER_BATCH)).base_offset == RECORDS_PER_BATCH
            assert set(group.statuses()[added].voters) == set(group.replica_ids)
            assert group.leader() in group.replica_ids
        finally:
            group.replica_ids = (*group.replica_ids, removed)


def test_closed_replica_says_so(settings: Settings) -> None:
    with ActorGroup("closed-0", settings) as group, ThreadPoolExecutor(1) as pool:
        group.client.append(numbered(1, 0))
        closed = group.leader()
        handle = group.handle(closed)
        group.client.call(GetStatus(), via=closed)
        waiting = pool.submit(group.client.fetch, RECORDS_PER_BATCH, 1, via=closed, max_wait_ms=20_000)
        time.sleep(0.2)
        assert not waiting.done()
        answer_of(handle.close.remote(), 15)
        with pytest.raises((ReplicaClosedError, OutcomeUnknownError)):
            waiting.result(10)
        calls = (
            handle.status.remote(),
            handle.confirm_leadership.remote(),
            handle.command.remote(commit_command("billing", 1, {0: 3})),
        )
        for call in calls:
            with pytest.raises(ReplicaClosedError):
                answer_of(call, 10)
        with pytest.raises((ReplicaClosedError, OutcomeUnknownError)):
            group.client.append(numbered(1, RECORDS_PER_BATCH), via=closed)
        with pytest.raises((ReplicaClosedError, OutcomeUnknownError)):
            group.client.fetch(0, via=closed)
        assert group.client.append(numbered(1, RECORDS_PER_BATCH)).base_offset == RECORDS_PER_BATCH


# -- older copies -------------------------------------------------------------------------------------------------


def _copy(group: ActorGroup, node: ReplicaId, to: Path) -> None:
    """Of a disk that nothing is written to. The replica goes on with it."""
    answer_of(group.handle(node).close.remote())
    shutil.copytree(group.settings.data_dir / group.group_id / node, to)
    group.kill(node)


def _restore(group: ActorGroup, node: ReplicaId, copy: Path) -> None:
    answer_of(group.handle(node).close.remote())
    path = group.settings.data_dir / group.group_id / node
    shutil.rmtree(path)
    shutil.copytree(copy, path)
    group.kill(node)


def _add(group: ActorGroup, node: ReplicaId) -> None:
    start_actor(PartitionSpec(group.group_id, node, group.settings, create=True))
    group.replica_ids = (*group.replica_ids, node)
    answer_of(group.handle(group.leader()).add_learner.remote(node), 10)

    def promoted() -> bool:
        try:
            answer_of(group.handle(group.leader()).promote.remote(node), 10)
        except RayQueueError as error:
            if not error.retriable:
                raise
        return node in group.statuses()[group.leader()].voters

    wait_for(promoted, f"{node} to vote", TIMEOUT_S)
    group.client.set_replicas(group.replica_ids)


def _write_twenty(group: ActorGroup, first: int) -> int:
    for number in range(first, first + 20):
        end = end_of(group.client.append(numbered(1, number * RECORDS_PER_BATCH)))
    return end


@pytest.mark.long
def test_an_older_copy_meets_those_of_whom_it_knows_nothing(settings: Settings, tmp_path: Path) -> None:
    """Found by trying: a copy from before others had joined led alone beside them; one from before another replica was
    replaced waited for ever for the new one, which it never met."""
    with ActorGroup("copies-0", settings, replicas=1) as group:
        restored, replaced, newest = group.replica_ids[0], ReplicaId("n2"), ReplicaId("n4")
        ended = []
        try:
            _write_twenty(group, 0)
            time.sleep(2.0)  # no waiting for something: it is marked once a second that it has acknowledged this alone
            _copy(group, restored, tmp_path / "alone")
            for node in (replaced, ReplicaId("n3")):
                _add(group, node)
            group.wait_for_end(_write_twenty(group, 20))

            _restore(group, restored, tmp_path / "alone")
            group.wait_for_end(_write_twenty(group, 40))
            assert group.statuses()[restored].doubted is None

            _copy(group, restored, tmp_path / "of three")
            wait_for(lambda: restored in group.statuses(), "it to run again", TIMEOUT_S)
            _add(group, newest)
            wait_for(lambda: _removed(group, replaced, newest), "it to be removed", TIMEOUT_S)
            group.replica_ids = tuple(node for node in group.replica_ids if node != replaced)
            group.client.set_replicas(group.replica_ids)
            ended.append(group.handle(replaced))
            ray.kill(ended[0], no_restart=True)
            end = _write_twenty(group, 60)
            group.wait_for_end(end)

            _restore(group, restored, tmp_path / "of three")
            group.wait_for_end(end, timeout_s=TIMEOUT_S)
            assert group.statuses()[restored].doubted is None
            assert len({tuple(bases(group, node)) for node in group.replica_ids}) == 1
        finally:
            if not ended and len(group.replica_ids) > 1:
                ray.kill(group.handle(replaced), no_restart=True)


def _removed(group: ActorGroup, node: ReplicaId, heir: ReplicaId) -> bool:
    """Whoever has just restarted a copy may see another leader the next moment: no leader removes itself."""
    leader = group.leader()
    if leader == node:
        group.transfer_leadership(heir)
        return False
    if node not in group.statuses()[leader].voters:
        return True
    with suppress(MembershipError, NotLeaderError):
        answer_of(group.handle(leader).remove.remote(node), 10)
    return False


def bases(group: ActorGroup, node: ReplicaId) -> list[Offset]:
    return [batch.base_offset for batch in group.client.read_log(via=node)]
