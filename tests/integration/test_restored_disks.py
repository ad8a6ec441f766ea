"""Disks that were replaced by older copies of themselves, of real processes: what was acknowledged is kept, or said."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from rayqueue.ids import ReplicaId
from rayqueue.log.waymark import read_waymark
from rayqueue.testing import ProcessGroup, wait_for
from tests.integration.history import RECORDS_PER_BATCH, end_of, numbered

BATCHES = 30
QUIET_S = 4.0
"""Longer than any election takes, on a busy machine as well."""


def _write(group: ProcessGroup, first: int, batches: int) -> int:
    """Acknowledged when it returns; gives the end of the log."""
    for number in range(first, first + batches):
        appended = group.client.append(numbered(1, number * RECORDS_PER_BATCH))
    return end_of(appended)


def _restore(path: Path, backup: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(backup, path)


def test_an_old_copy_beside_a_lost_node_loses_nothing(tmp_path: Path) -> None:
    """Found by trying: one was away while the others acknowledged; of these one was lost, the other an old copy."""
    with ProcessGroup(tmp_path / "group", 3) as group:
        end = _write(group, 0, 1)
        group.wait_for_offset(end)
        leader = group.leader()
        forgetful, away = sorted(set(group.replica_ids) - {leader})
        group.kill(forgetful)
        backup = tmp_path / "backup"
        shutil.copytree(tmp_path / "group" / forgetful, backup)
        group.restart(forgetful)
        group.kill(away)
        end = _write(group, 1, BATCHES)
        group.wait_for_offset(end, forgetful)
        group.kill(leader)
        group.kill(forgetful)
        _restore(tmp_path / "group" / forgetful, backup)
        group.restart(forgetful)
        group.restart(away)

        def doubt() -> bool:
            status = group.status(forgetful)
            return status.doubted is not None and f"before {leader} answered" in status.doubted

        wait_for(doubt, "the copy to wait for the node that is away", 30.0)
        _nobody_leads(group, [forgetful, away])
        group.restart(leader)
        end = _write(group, 1 + BATCHES, 1)
        group.wait_for_offset(end)
        wait_for(lambda: group.status(forgetful).doubted is None, "the copy to be up to date", 30.0)
        for node in group.replica_ids:
            bases = [batch.base_offset for batch in group.client.read_log(via=node)]
            assert bases == list(range(0, end, RECORDS_PER_BATCH))
        assert group.crashes == []


def test_an_old_copy_of_the_only_replica_says_what_is_lost_and_a_newer_one_goes_on(tmp_path: Path) -> None:
    with ProcessGroup(tmp_path / "group", 1) as group:
        (node,) = group.replica_ids
        path, older, newer = (tmp_path / each for each in (f"group/{node}", "older", "newer"))
        _write(group, 0, 1)
        group.kill(node)
        shutil.copytree(path, older)
        group.restart(node)
        end = _write(group, 1, BATCHES)
        wait_for(lambda: read_waymark(path).records == end, "the mark", 30.0)
        group.kill(node)
        shutil.copytree(path, newer)
        _restore(path, older)
        group.restart(node)
        wait_for(lambda: f"before offset {end}" in str(group.status(node).doubted), "the copy to say so", 30.0)
        _nobody_leads(group, [node])
        group.kill(node)
        _restore(path, newer)
        group.restart(node)
        group.wait_for_offset(_write(group, 1 + BATCHES, 1))
        assert group.crashes == []


def test_an_old_copy_of_the_only_replica_waits_for_those_that_have_joined_since(tmp_path: Path) -> None:
    """Found by trying: it led alone, beside the leader of the others."""
    with ProcessGroup(tmp_path / "group", 1) as group:
        (first,) = group.replica_ids
        path, backup = tmp_path / "group" / first, tmp_path / "backup"
        end = _write(group, 0, 1)
        wait_for(lambda: read_waymark(path).records == end, "the mark", 30.0)
        group.kill(first)
        shutil.copytree(path, backup)
        group.restart(first)
        for _ in range(2):
            group.promote(group.add_learner())
        others = [node for node in group.replica_ids if node != first]
        end = _write(group, 1, BATCHES)
        group.wait_for_offset(end)
        group.kill()
        _restore(path, backup)
        group.restart(first)
        wait_for(lambda: "If others have joined" in str(group.status(first).doubted), "the copy to say so", 30.0)
        _nobody_leads(group, [first])
        group.restart(*others)
        end = _write(group, 1 + BATCHES, 1)
        group.wait_for_offset(end)
        wait_for(lambda: group.status(first).doubted is None, "the copy to be up to date", 30.0)
        for node in group.replica_ids:
            bases = [batch.base_offset for batch in group.client.read_log(via=node)]
            assert bases == list(range(0, end, RECORDS_PER_BATCH))
        assert group.crashes == []


def _nobody_leads(group: ProcessGroup, nodes: list[ReplicaId]) -> None:
    terms = {node: group.status(node).term for node in nodes}
    deadline = time.monotonic() + QUIET_S
    while time.monotonic() < deadline:
        for node in nodes:
            assert group.status(node).role == "follower"
    assert {node: group.status(node).term for node in nodes} == terms


def test_who_has_what_the_group_has_lost_keeps_it_and_says_so(tmp_path: Path) -> None:
    """Two of three are old copies that nobody can know (their places were made up): too many. The third one does not
    crash again and again; it keeps what only it has."""
    with ProcessGroup(tmp_path / "group", 3) as group:
        end = _write(group, 0, 1)
        group.wait_for_offset(end)
        leader = group.leader()
        others = sorted(set(group.replica_ids) - {leader})
        backups = {}
        for node in others:
            group.kill(node)
            backups[node] = tmp_path / f"backup of {node}"
            shutil.copytree((tmp_path / "group" / node), backups[node])
            group.restart(node)
        end = _write(group, 1, BATCHES)
        group.wait_for_offset(end)
        group.kill()
        for node in others:
            _restore((tmp_path / "group" / node), backups[node])
            for made_up in ((tmp_path / "group" / node) / "PLACE", *(tmp_path / "group" / node).glob("HERE.*")):
                made_up.unlink()
            group.restart(node)
        for number in range(1, 4):
            group.client.append(numbered(1, number * RECORDS_PER_BATCH))
        group.restart(leader)
        said = wait_for(lambda: group.status(leader).doubted, "it to say what only it has", 30.0)
        assert "alone has the committed entries" in said
        assert group.running == group.replica_ids
        assert group.crashes == []
