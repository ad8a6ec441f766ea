"""Replicas as Ray actors: the calls, their errors, and what kill -9 does to them.

One Ray for the whole module, on loopback, and one group for the tests that do
no harm to it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from rayqueue.actors.replica import Fetch, ReplicaSpec
from rayqueue.actors.start import start_actor
from rayqueue.client.embedded import embedded_ray
from rayqueue.config import Settings
from rayqueue.errors import (
    CorruptBatchError,
    InvalidInputError,
    InvalidOffsetError,
    MembershipError,
    NotLeaderError,
    OffsetOutOfRangeError,
    OversizedBatchError,
    ProducerFencedError,
    RayQueueError,
    ReplicaClosedError,
    SequenceGapError,
    StoreMissingError,
    UnknownFormatError,
)
from rayqueue.ids import NodeId, Offset
from rayqueue.partition import Appended, Committed, PartitionSettings, commit_command
from rayqueue.records import RecordBatch
from rayqueue.testing import wait_for
from rayqueue.testing.ray_group import ReplicaGroup
from rayqueue.testing.ray_group.home import with_secret
from rayqueue.testing.ray_group.pipeline import MAX_IN_FLIGHT
from tests.integration.actor_groups import (
    Writing,
    check_history,
    end_of,
    fetch_by,
    followers,
    kill,
    new_producer,
    read_all,
    wait_for_end,
)
from tests.integration.history import RECORDS_PER_BATCH, numbered

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    with embedded_ray():
        yield


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaGroup]:
    with ReplicaGroup.start("orders-0", Settings(data_dir=tmp_path_factory.mktemp("orders"))) as started:
        yield started


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return with_secret(Settings(data_dir=tmp_path))


# -- calls ------------------------------------------------------------------------------------------------


def test_append_and_fetch(group: ReplicaGroup) -> None:
    producer, end = new_producer(), end_of(group)
    first = group.append(numbered(producer, 0))
    second = group.append(numbered(producer, RECORDS_PER_BATCH))
    assert first == Appended(end, RECORDS_PER_BATCH, False)
    assert second == Appended(Offset(end + RECORDS_PER_BATCH), RECORDS_PER_BATCH, False)
    answer = group.fetch(end)
    assert [(batch.base_offset, batch.payload) for batch in answer.batches] == [
        (first.base_offset, numbered(producer, 0)),
        (second.base_offset, numbered(producer, RECORDS_PER_BATCH)),
    ]
    assert (answer.high_watermark, answer.start_offset) == (end + 2 * RECORDS_PER_BATCH, 0)
    assert group.fetch(end, 1).batches == answer.batches[:1]
    assert group.fetch(answer.high_watermark).batches == []


def test_every_replica_serves_the_same(group: ReplicaGroup) -> None:
    group.append(numbered(new_producer(), 0))
    wait_for_end(group, end_of(group))
    logs = [read_all(fetch_by(group, node)) for node in group.nodes]
    assert logs[0]
    assert logs[0] == logs[1] == logs[2]


def test_duplicate_gap_and_fence(group: ReplicaGroup) -> None:
    producer, end = new_producer(), end_of(group)
    first = group.append(numbered(producer, 0))
    assert group.append(numbered(producer, 0)) == first._replace(duplicate=True)
    leader = group.handle(group.leader())
    with pytest.raises(SequenceGapError):
        ray.get(leader.append.remote(numbered(producer, 3 * RECORDS_PER_BATCH)))
    newer = RecordBatch.encode([b"x"], timestamps=0, producer_id=producer, epoch=1)
    group.append(newer)
    with pytest.raises(ProducerFencedError):
        group.append(numbered(producer, RECORDS_PER_BATCH))
    assert end_of(group) == end + RECORDS_PER_BATCH + 1


def test_many_batches_by_one_call(group: ReplicaGroup) -> None:
    producer, end = new_producer(), end_of(group)
    batches = [numbered(producer, number * RECORDS_PER_BATCH) for number in range(20)]
    mixed = [*batches[:10], b"no batch", batches[0], *batches[10:], batches[-1] + b"\0"]
    answers = ray.get(group.handle(group.leader()).append_many.remote(mixed))
    written = [answer for answer in answers if isinstance(answer, Appended) and not answer.duplicate]
    assert [answer.base_offset for answer in written] == [end + n * RECORDS_PER_BATCH for n in range(20)]
    assert isinstance(answers[10], UnknownFormatError)
    assert isinstance(answers[-1], CorruptBatchError)
    # The first one again was admitted while the first was not applied yet, or answered at once: once in the log.
    assert answers[11] == written[0]._replace(duplicate=True)
    assert [batch.payload for batch in read_all(group.fetch, end)] == batches


def test_pipeline_keeps_order(group: ReplicaGroup) -> None:
    producer, end = new_producer(), end_of(group)
    pipeline, answers = group.pipeline(), list[Appended]()
    for number in range(300):
        pipeline.send(numbered(producer, number * RECORDS_PER_BATCH), answers.append)
        assert pipeline.waiting <= MAX_IN_FLIGHT
    pipeline.flush()
    assert pipeline.waiting == 0
    assert answers == [Appended(Offset(end + n * RECORDS_PER_BATCH), RECORDS_PER_BATCH, False) for n in range(300)]
    with pytest.raises(InvalidInputError, match="producer id"):
        pipeline.send(RecordBatch.encode([b"x"], timestamps=0), answers.append)


def test_pipeline_ends_at_what_cannot_be_cured(group: ReplicaGroup) -> None:
    producer, answers = new_producer(), list[Appended]()
    pipeline = group.pipeline()
    pipeline.send(numbered(producer, 0), answers.append)
    pipeline.flush()
    pipeline.send(numbered(producer, RECORDS_PER_BATCH, count=1000, padding_bytes=2000), answers.append)
    for _ in range(2):
        with pytest.raises(OversizedBatchError):
            pipeline.flush()
        with pytest.raises(OversizedBatchError):
            pipeline.send(numbered(producer, RECORDS_PER_BATCH), answers.append)
    assert len(answers) == 1


def test_commands(group: ReplicaGroup) -> None:
    answer = group.command(commit_command("billing", 1, {0: 3}))
    assert answer == Committed(1, {0: Offset(3)})
    last = {node: status.last_index for node, status in group.statuses().items()}
    for payload in (b"", b"\xff", b"\x02{}", numbered(new_producer(), 0), "text"):
        with pytest.raises(InvalidInputError):
            group.command(payload)  # type: ignore[arg-type]
    assert {node: status.last_index for node, status in group.statuses().items()} == last


# -- errors ------------------------------------------------------------------------------------------------


def test_errors_keep_their_type_through_ray(group: ReplicaGroup) -> None:
    leader, follower = group.leader(), followers(group)[0]
    with pytest.raises(NotLeaderError) as caught:
        ray.get(group.handle(follower).append.remote(numbered(new_producer(), 0)))
    error = caught.value
    assert (error.code, error.retriable, error.refresh_metadata) == ("not_leader", True, True)
    assert error.details == {"leader": leader}
    with pytest.raises(CorruptBatchError) as caught_here:
        group.append(numbered(new_producer(), 0) + b"\0")
    assert type(caught_here.value) is CorruptBatchError
    assert "\n" not in str(caught_here.value)
    assert {"expected", "length"} == caught_here.value.details.keys()


def test_bad_batches_are_refused_before_anything_is_written(group: ReplicaGroup) -> None:
    good = numbered(new_producer(), 0)
    flipped = bytearray(good)
    flipped[-1] ^= 1
    before = {node: status.last_index for node, status in group.statuses().items()}
    refused: list[tuple[Any, type[RayQueueError]]] = [
        (numbered(1, 0, count=1000, padding_bytes=2000), OversizedBatchError),
        (bytes(flipped), CorruptBatchError),
        (good[:-1], CorruptBatchError),
        (b"XQ" + good[2:], UnknownFormatError),
        (good[:2] + b"\xff" + good[3:], UnknownFormatError),
        (b"", UnknownFormatError),
        (RecordBatch.encode([b"x"], timestamps=0, lane=1), InvalidInputError),
        (RecordBatch.encode([b"x"], timestamps=0, control=True), InvalidInputError),
        ("text", InvalidInputError),
        (None, InvalidInputError),
    ]
    leader = group.handle(group.leader())
    for batch, error in refused:
        with pytest.raises(error):
            ray.get(leader.append.remote(batch))
    for batches in ("text", None, numbered(1, 0)):
        with pytest.raises(InvalidInputError):
            ray.get(leader.append_many.remote(batches))
    assert ray.get(leader.append_many.remote([])) == []
    assert {node: status.last_index for node, status in group.statuses().items()} == before


def test_bad_members_and_addresses_are_refused(group: ReplicaGroup) -> None:
    leader = group.leader()
    handle, pid = group.handle(leader), group.process(leader).pid
    for node in (None, 5, ["n1"], "", "a/b", "n77"):
        for call in (handle.promote, handle.remove, handle.transfer_leadership):
            with pytest.raises((InvalidInputError, MembershipError)):
                ray.get(call.remote(node))
    for node in (None, 5, ["n1"], "", "a/b", leader):
        with pytest.raises(InvalidInputError):
            ray.get(handle.add_learner.remote(node))
    addresses: list[Any] = [None, ["n1"], {"n1": None}, {"n1": ("localhost", 1)}, {"n1": ("127.0.0.1", "x")}]
    addresses += [{"n1": ("127.0.0.1", 0)}, {"n1": (5, 5)}, {5: ("127.0.0.1", 5)}]
    for address in addresses:
        with pytest.raises(InvalidInputError):
            ray.get(handle.set_peers.remote(address))
    assert (group.leader(), group.process(leader).pid) == (leader, pid)


def test_bad_fetches_are_refused(group: ReplicaGroup) -> None:
    end = end_of(group)
    for offset in (-1, 2**63, "1", 1.5, None):
        with pytest.raises(InvalidOffsetError):
            group.fetch(offset)  # type: ignore[arg-type]
    with pytest.raises(OffsetOutOfRangeError) as caught:
        group.fetch(end + 1, max_wait_ms=5000)
    assert caught.value.details == {"offset": end + 1, "start": 0, "end": end}
    leader = group.handle(group.leader())
    bad: list[dict[str, Any]] = [
        {"max_bytes": -1},
        {"max_bytes": "1"},
        {"max_bytes": 1, "max_wait_ms": -1},
        {"max_bytes": 1, "max_wait_ms": None},
        {"max_bytes": 1, "lane": 256},
        {"max_bytes": 1, "lane": "0"},
    ]
    for arguments in bad:
        with pytest.raises(InvalidInputError):
            ray.get(leader.fetch.remote(0, **arguments))
    # A follower cannot know that there is nothing: it may be behind.
    with pytest.raises(NotLeaderError):
        ray.get(group.handle(followers(group)[0]).fetch.remote(end + 1, 1))


# -- waiting --------------------------------------------------------------------------------------------------


def test_long_poll_waits_for_the_next_batch(group: ReplicaGroup) -> None:
    end = end_of(group)
    started_s = time.monotonic()
    assert group.fetch(end, max_wait_ms=200) == Fetch([], end, Offset(0))
    assert 0.2 <= time.monotonic() - started_s < 5
    waiting = {node: group.handle(node).fetch.remote(end, 1 << 20, 20_000) for node in group.nodes}
    assert ray.wait(list(waiting.values()), timeout=0.2)[0] == []
    batch = numbered(new_producer(), 0)
    group.append(batch)
    for answer in ray.get(list(waiting.values()), timeout=10):
        assert [found.payload for found in answer.batches] == [batch]


def test_waiting_fetches_hold_up_nothing(settings: Settings) -> None:
    few = settings.model_copy(
        update={"calls": settings.calls.model_copy(update={"max_appends": 4, "max_controls": 2, "max_fetches": 400})}
    )
    with ReplicaGroup.start("waiters-0", few) as group:
        group.append(numbered(1, 0))
        handle = group.handle(group.leader())
        waiting = [handle.fetch.remote(RECORDS_PER_BATCH, 1 << 20, 30_000) for _ in range(300)]
        assert ray.get(handle.fetch.remote(0, 1 << 20, 30_000), timeout=10).batches
        assert ray.get([handle.status.remote() for _ in range(10)], timeout=10)
        assert ray.wait(waiting, timeout=0.5)[0] == []
        # Appends of another producer than the batch below, and refused: nothing grows, and nobody is woken.
        for answer in ray.get([handle.append_many.remote([b"no batch"]) for _ in range(20)], timeout=10):
            assert isinstance(answer[0], UnknownFormatError)
        assert ray.wait(waiting, timeout=0)[0] == []
        assert group.append(numbered(1, RECORDS_PER_BATCH)).base_offset == RECORDS_PER_BATCH
        answers = ray.get(waiting, timeout=20)
        assert {len(answer.batches) for answer in answers} == {1}


def test_lanes_wait_for_their_own(settings: Settings) -> None:
    with ReplicaGroup.start("lanes-0", settings, replicas=1, partition=PartitionSettings(lanes=2)) as group:
        urgent = RecordBatch.encode([b"u"], timestamps=0, lane=0)
        patient = RecordBatch.encode([b"p"], timestamps=0, lane=1)
        handle = group.handle(group.leader())
        waiting = handle.fetch.remote(0, 1 << 20, 20_000, 1)
        group.append(urgent)
        group.append(urgent)
        assert ray.wait([waiting], timeout=0.2)[0] == []
        group.append(patient)
        assert [batch.payload for batch in ray.get(waiting, timeout=10).batches] == [patient]
        assert [batch.base_offset for batch in group.fetch(0, lane=0).batches] == [0, 1]
        assert group.fetch(3, lane=1, max_wait_ms=50).batches == []


# -- deaths ---------------------------------------------------------------------------------------------------------


def test_leader_killed_during_writes(settings: Settings) -> None:
    with ReplicaGroup.start("kills-0", settings) as group, Writing(group) as writing:
        for _ in range(2):
            writing.wait_for(50)
            killed = group.leader()
            pid = group.process(killed).pid
            kill(group, killed)
            writing.wait_for(50)
            assert group.leader() != killed
            # Ray has restarted it, and it has found its peers and caught up.
            wait_for_end(group, writing.answers[-1].base_offset)
            assert group.process(killed).pid != pid
        writing.finish()
        check_history(group, writing)


def test_all_killed_at_once(settings: Settings) -> None:
    with ReplicaGroup.start("all-0", settings) as group, Writing(group) as writing:
        writing.wait_for(50)
        kill(group, *group.nodes)
        writing.wait_for(50, timeout_s=60)
        writing.finish()
        check_history(group, writing)


def test_stop_and_start_on_the_same_data(settings: Settings) -> None:
    with ReplicaGroup.start("again-0", settings, replicas=3) as group:
        first = group.append(numbered(1, 0))
        group.append(numbered(1, RECORDS_PER_BATCH))
    for node in group.nodes:
        with pytest.raises(RayQueueError):
            group.handle(node)
    with ReplicaGroup.start("again-0", settings, replicas=5) as group:
        assert len(group.nodes) == 3  # as it was made
        assert group.append(numbered(1, 0)) == first._replace(duplicate=True)
        assert group.append(numbered(1, 2 * RECORDS_PER_BATCH)).base_offset == 2 * RECORDS_PER_BATCH
        # Starting what runs finds it.
        other = ReplicaGroup.start("again-0", settings)
        assert other.append(numbered(1, 2 * RECORDS_PER_BATCH)).duplicate
    # The disk of one is lost while all are down: it must not begin anew, and the others go on.
    lost = group.nodes[0]
    shutil.rmtree(settings.data_dir / "again-0" / lost)
    with ReplicaGroup.start("again-0", settings) as group:
        assert group.append(numbered(1, 3 * RECORDS_PER_BATCH)).base_offset == 3 * RECORDS_PER_BATCH
        with pytest.raises(StoreMissingError):
            ray.get(group.handle(lost).status.remote())
        assert lost not in group.statuses()


def test_lost_disk_is_not_silently_replaced(settings: Settings) -> None:
    with ReplicaGroup.start("lost-0", settings) as group:
        group.append(numbered(1, 0))
        lost = followers(group)[0]
        path = settings.data_dir / "lost-0" / lost
        path.rename(path.with_name("away"))
        kill(group, lost)

        def says_so() -> bool:
            try:
                ray.get(group.handle(lost).fetch.remote(0, 1), timeout=5)
            except StoreMissingError as error:
                return str(path) in str(error)
            except ray.exceptions.RayError:
                return False
            return False

        wait_for(says_so, f"{lost} to miss its data", 30.0)
        assert not path.exists()
        assert group.append(numbered(1, RECORDS_PER_BATCH)).base_offset == RECORDS_PER_BATCH


def test_failed_start_leaves_nothing(settings: Settings) -> None:
    path = settings.data_dir / "bad-0" / "n2"
    path.parent.mkdir(parents=True)
    path.touch()
    with pytest.raises(StoreMissingError):
        ReplicaGroup.start("bad-0", settings)
    path.unlink()
    with ReplicaGroup.start("bad-0", settings) as group:
        assert group.append(numbered(1, 0)).base_offset == 0


# -- members ------------------------------------------------------------------------------------------------------


def test_members_change(settings: Settings) -> None:
    with ReplicaGroup.start("members-0", settings) as group:
        group.append(numbered(1, 0))
        added, removed = NodeId("n9"), followers(group)[0]
        newcomer = start_actor(ReplicaSpec(group.group_id, added, settings, create=True))
        try:
            leader = group.handle(group.leader())
            ray.get(leader.add_learner.remote(added), timeout=10)
            wait_for(lambda: ray.get(newcomer.status.remote()).high_watermark == RECORDS_PER_BATCH, "the learner", 20.0)
            assert ray.get(newcomer.status.remote()).role == "learner"
            ray.get(leader.promote.remote(added), timeout=10)
            ray.get(leader.remove.remote(removed), timeout=10)
            ray.get(leader.transfer_leadership.remote(added), timeout=10)
            changed = ReplicaGroup(group.group_id, [*(set(group.nodes) - {removed}), added], settings)
            assert changed.append(numbered(1, RECORDS_PER_BATCH)).base_offset == RECORDS_PER_BATCH
            status = changed.statuses()[added]
            assert set(status.voters) == set(changed.nodes)
            ray.get(changed.handle(changed.leader()).confirm_leadership.remote(), timeout=10)
        finally:
            ray.kill(newcomer, no_restart=True)


def test_closed_replica_says_so(settings: Settings) -> None:
    with ReplicaGroup.start("closed-0", settings) as group:
        group.append(numbered(1, 0))
        closed = group.leader()
        handle = group.handle(closed)
        waiting = handle.fetch.remote(RECORDS_PER_BATCH, 1, 20_000)
        assert ray.wait([waiting], timeout=0.2)[0] == []
        ray.get(handle.close.remote(), timeout=15)
        calls = (
            waiting,
            handle.append.remote(numbered(1, RECORDS_PER_BATCH)),
            handle.fetch.remote(0, 1),
            handle.status.remote(),
            handle.confirm_leadership.remote(),
            handle.command.remote(commit_command("billing", 1, {0: 3})),
        )
        for call in calls:
            with pytest.raises(ReplicaClosedError):
                ray.get(call, timeout=10)
        assert group.append(numbered(1, RECORDS_PER_BATCH)).base_offset == RECORDS_PER_BATCH
