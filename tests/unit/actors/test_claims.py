"""Claims: one Ray node per broker of a data directory, whoever starts, dies or starts again, and when."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest

from rayqueue.actors.keeper import claims
from rayqueue.actors.keeper.claims import Claimant, Place, Standing, claim, local_locks, named_place
from rayqueue.actors.keeper.nodes import Neighbours, RayNode
from rayqueue.errors import InvalidInputError, StorageError

HERE = ("host-a", "boot-a")


class Cluster:
    """Ray nodes by name: those here live, others are gone; some do not answer."""

    def __init__(self, *alive: str, silent: Collection[str] = (), labels: Collection[str] = ()) -> None:
        self.alive, self.silent, self.labels = set(alive), set(silent), labels

    def __call__(self) -> Cluster:
        return self

    def standing(self, ray_node: str) -> Standing:
        if ray_node in self.silent:
            return Standing.UNKNOWN
        return Standing.LIVES if ray_node in self.alive else Standing.GONE


def node(name: str, machine: str = HERE[0], boot: str = HERE[1]) -> Claimant:
    return Claimant(name, machine, boot)


def start(data_dir: Path, *names: str, machine: str = HERE[0], boot: str = HERE[1]) -> dict[str, Place]:
    """These nodes and no others are there; each asks who it is."""
    cluster = Cluster(*names)
    return {name: claim(data_dir, node(name, machine, boot), cluster) for name in names}


def test_the_first_node_is_the_directory_itself_and_further_ones_have_their_own(tmp_path: Path) -> None:
    found = start(tmp_path, "n1", "n2", "n3")
    assert found["n1"] == Place((tmp_path / "broker_id").read_text(), "")
    for name in ("n2", "n3"):
        assert found[name].directory == f"brokers/{found[name].broker}"
        assert (tmp_path / found[name].directory).stat().st_mode & 0o777 == 0o700
    assert len({place.broker for place in found.values()}) == 3
    assert start(tmp_path, "n1", "n2", "n3") == found


def test_a_directory_of_an_older_release_is_the_first_nodes(tmp_path: Path) -> None:
    (tmp_path / "broker_id").write_text("broker-old")
    (tmp_path / "coordinator" / "c1").mkdir(parents=True)
    assert start(tmp_path, "n1") == {"n1": Place("broker-old", "")}
    assert not (tmp_path / "brokers").exists()


def test_after_a_start_of_everything_each_broker_is_taken_once(tmp_path: Path) -> None:
    before = set(start(tmp_path, "n1", "n2", "n3").values())
    for life in range(5):
        names = [f"life{life}-{number}" for number in range(3)]
        assert set(start(tmp_path, *names).values()) == before
    assert len(list(tmp_path.glob("claim-*"))) == 1  # only the last one is kept
    fewer = start(tmp_path, "m1", "m2")
    assert set(fewer.values()) < before
    more = start(tmp_path, "o1", "o2", "o3", "o4")
    assert before < set(more.values())


def test_a_node_that_comes_back_is_who_it_was_while_the_others_run(tmp_path: Path) -> None:
    found = start(tmp_path, "n1", "n2", "n3")
    assert claim(tmp_path, node("n4"), Cluster("n1", "n3", "n4")) == found["n2"]
    assert claim(tmp_path, node("n3"), Cluster("n1", "n3", "n4")) == found["n3"]


def test_with_fewer_nodes_than_brokers_the_coordinators_are_taken_first(tmp_path: Path) -> None:
    found = start(tmp_path, "n1", "n2", "n3", "n4")
    wanted = {found["n3"].broker, found["n4"].broker}
    cluster = Cluster("m1", "m2")
    assert {claim(tmp_path, node(name), cluster, wanted).broker for name in ("m1", "m2")} == wanted


def test_a_node_that_may_live_keeps_its_broker_and_the_next_one_waits(tmp_path: Path) -> None:
    (taken,) = start(tmp_path, "n1").values()
    with pytest.raises(
        StorageError, match=rf"broker {taken.broker} .*Ray node n1 on host-a.*rayqueue\.broker=NAME"
    ) as no:
        claim(tmp_path, node("n2"), Cluster("n1", "n2", silent=["n1"]))
    assert no.value.details["reason"] == "doubtful"
    assert not (tmp_path / "brokers").exists()
    assert claim(tmp_path, node("n2"), Cluster("n2")) == taken


def test_a_broker_that_a_live_node_has_by_its_label_is_not_taken(tmp_path: Path) -> None:
    found = start(tmp_path, "n1", "n2")
    cluster = Cluster("m1", "m2", labels=[found["n1"].broker])
    assert claim(tmp_path, node("m1"), cluster) == found["n2"]
    assert claim(tmp_path, node("m2"), cluster) not in found.values()
    assert named_place(tmp_path, found["n2"].broker) == found["n2"]
    assert named_place(tmp_path, "another") == Place("another", "")
    with pytest.raises(InvalidInputError):
        named_place(tmp_path, "../b")


def all_at_once(data_dir: Path, names: list[str], machines: Callable[[str], str] = lambda _: HERE[0]) -> list[Place]:
    cluster, barrier = Cluster(*names), threading.Barrier(len(names))
    found: dict[str, Place] = {}

    def run(name: str) -> None:
        barrier.wait()
        found[name] = claim(data_dir, node(name, machines(name), machines(name)), cluster)

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[name] for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("locks", [True, False], ids=["one machine", "machines that see no lock of each other"])
def test_of_nodes_that_start_at_the_same_time_no_two_are_one_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    if not locks:
        monkeypatch.setattr(claims, "_one_at_a_time", lambda _: contextlib.nullcontext())
    names = [f"n{number}" for number in range(6)]
    first = set(all_at_once(tmp_path, names))
    assert len(first) == 6
    brokers = {path.name for path in (tmp_path / "brokers").iterdir()} | {(tmp_path / "broker_id").read_text()}
    for life in range(3):
        again = all_at_once(tmp_path, [f"life{life}-{name}" for name in names])
        assert len(set(again)) == 6
        assert {place.broker for place in again} <= brokers  # nothing new is made while old ones are free


def test_one_node_asked_by_several_at_the_same_time_answers_the_same(tmp_path: Path) -> None:
    start(tmp_path, "old1", "old2", "old3")
    assert len(set(all_at_once(tmp_path, ["n1"] * 6))) == 1


def test_a_claim_made_late_over_a_deleted_one_does_not_count(tmp_path: Path) -> None:
    (place,) = start(tmp_path, "n1").values()
    late = claims._slots(tmp_path)[0]  # has read claim 1, and sleeps
    start(tmp_path, "n2")
    start(tmp_path, "n3")  # claims 1 and 2 are deleted
    assert not claims._take(late, node("n4"))
    assert claims._slots(tmp_path)[0].owner == node("n3")
    assert start(tmp_path, "n3")["n3"] == place


def test_a_claim_that_is_deleted_while_it_is_read_was_followed_by_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place,) = start(tmp_path, "n1").values()
    slot, read = claims._slots(tmp_path)[0], claims._read
    start(tmp_path, "n2")  # claim 1 is deleted

    def overtaken(path: Path) -> claims.Claimant:
        """Between looking for the highest claim and reading it, the next one is made."""
        monkeypatch.setattr(claims, "_read", read)
        start(tmp_path, "n3")
        return read(path)

    monkeypatch.setattr(claims, "_read", overtaken)
    assert claims._slots(tmp_path)[0].owner == node("n3")

    def vanished(path: Path) -> claims.Claimant:
        path.unlink()
        return read(path)

    monkeypatch.setattr(claims, "_read", vanished)
    assert not claims._take(slot._replace(number=9), node("n4"))
    monkeypatch.setattr(claims, "_read", read)
    assert start(tmp_path, "n3")["n3"] == place


STEPS = ("link", "unlink", "mkdir", "fsync", "rename")


@contextlib.contextmanager
def dying_at(step: int) -> Iterator[None]:
    """The process ends before its n-th change of the disk, with nothing cleaned up."""
    left = [step]

    def counted(name: str) -> None:
        real = getattr(os, name)

        def maybe(*args: object, **options: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                os._exit(7)
            return real(*args, **options)

        setattr(os, name, maybe)

    for name in STEPS:
        counted(name)
    yield


def dies(data_dir: Path, name: str, alive: Cluster, step: int) -> bool:
    child = os.fork()
    if child == 0:
        with dying_at(step):
            claim(data_dir, node(name), alive)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.slow
@pytest.mark.parametrize("before", [0, 1, 2], ids=["empty", "one broker", "two brokers"])
def test_a_node_that_dies_at_any_step_of_its_claim_costs_nobody_a_broker(tmp_path: Path, before: int) -> None:
    names = [f"n{number}" for number in range(before)]
    step, done = 0, False
    while not done:
        assert step < 50
        data_dir = tmp_path / str(step)
        found = start(data_dir, *names)
        done = not dies(data_dir, "dying", Cluster(*names, "dying"), step)
        again = start(data_dir, *names)
        assert again == found  # the others stay who they are
        later = start(data_dir, *(f"later{number}" for number in range(before + 1)))
        assert set(found.values()) <= set(later.values())
        assert len({place.broker for place in later.values()}) == before + 1
        made = [each for each in (data_dir / "brokers").glob("*") if each.is_dir()]
        assert len(made) <= before  # what a dead one has begun is used by the next
        step += 1
    assert step > 5


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"ray_node": "n1"}', b"\xff\xfe"])
def test_a_claim_that_cannot_be_read_is_nobodys_to_take(tmp_path: Path, text: bytes) -> None:
    start(tmp_path, "n1")
    (tmp_path / "claim-1").write_bytes(text)
    with pytest.raises(StorageError, match=r"claim-1 cannot be read.*delete it once no Ray node uses"):
        start(tmp_path, "n2")
    (tmp_path / "claim-1").unlink()
    assert start(tmp_path, "n2")["n2"].directory == ""


@pytest.mark.parametrize("text", [b"", b"../../etc", b"\xff"])
def test_a_broker_id_that_cannot_be_one_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "broker_id").write_bytes(text)
    with pytest.raises(StorageError, match="broker_id cannot be read"):
        start(tmp_path, "n1")


def test_what_else_lies_there_is_no_broker(tmp_path: Path) -> None:
    (tmp_path / "brokers").mkdir()
    (tmp_path / "brokers" / "a file").write_text("")
    (tmp_path / "brokers" / ".hidden").mkdir()
    (tmp_path / "claim-x").write_text("")
    (tmp_path / "claim-²").write_text("")
    assert start(tmp_path, "n1")["n1"].directory == ""
    assert set(start(tmp_path, "n1", "n2")["n2"].broker) != {"a"}


# -- machines that share a file system -----------------------------------------------------------


def test_each_machine_takes_what_it_had(tmp_path: Path) -> None:
    first = claim(tmp_path, node("n1", "m1", "b1"), Cluster("n1", "n2"))
    second = claim(tmp_path, node("n2", "m2", "b2"), Cluster("n1", "n2"))
    everything = Cluster("n3", "n4")
    assert claim(tmp_path, node("n3", "m2", "b3"), everything) == second
    assert claim(tmp_path, node("n4", "m1", "b4"), everything) == first


def test_without_locks_that_reach_other_machines_theirs_is_refused_and_the_error_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "local_locks", lambda _: "nfs4 with nolock")
    place = claim(tmp_path, node("n1", "m1", "b1"), Cluster("n1"))
    with pytest.raises(StorageError, match=f"nfs4 with nolock.*--labels rayqueue.broker={place.broker}") as refused:
        claim(tmp_path, node("n2", "m2", "b2"), Cluster("n2"))
    assert refused.value.details["reason"] == "locks"
    assert named_place(tmp_path, place.broker) == place  # what the error says to set
    # A live one is no reason to refuse, nor is the same machine after it was started again.
    other = claim(tmp_path, node("n2", "m2", "b2"), Cluster("n1", "n2"))
    assert other != place
    assert claim(tmp_path, node("n3", "m1", "b9"), Cluster("n2", "n3")) == place


MOUNTS = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /home rw,relatime shared:9 - nfs4 server:/home rw,vers=4.2,hard,local_lock=none,addr=10.0.0.1
31 22 0:41 / /scratch rw,relatime shared:9 - nfs server:/scratch rw,vers=3,nolock,local_lock=all,addr=10.0.0.1
32 22 0:42 / /with\040blank rw - nfs server:/b rw,local_lock=flock
33 22 0:43 / /over rw - nfs server:/b rw,nolock
34 33 0:44 / /over rw - ext4 /dev/sdb rw
nonsense
"""


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/var/lib", None),
        ("/home/me", None),
        ("/homeless", None),
        ("/scratch", "nfs with nolock"),
        ("/scratch/me/data", "nfs with nolock"),
        ("/with blank/x", "nfs with local_lock=flock"),
        ("/over/x", None),
    ],
)
def test_where_locks_stay_on_the_machine(tmp_path: Path, path: str, why: str | None) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTS)
    assert local_locks(Path(path), tmp_path / "mountinfo") == why


def test_this_machines_file_systems_can_be_read(tmp_path: Path) -> None:
    local_locks(tmp_path)  # whatever it says
    here = Claimant.here("n")
    assert here.machine == os.uname().nodename
    assert json.loads(json.dumps(here._asdict())) == here._asdict()


# -- who lives, as a node finds out ----------------------------------------------------------------


def test_a_node_lives_if_its_raylet_can_be_dialled() -> None:
    with socket.create_server(("127.0.0.1", 0)) as raylet:
        port = raylet.getsockname()[1]
        me = RayNode("me", "127.0.0.1", 1, None)
        other = RayNode("other", "127.0.0.1", port, "b7")
        seen = Neighbours(me, {"me": me, "other": other})
        assert seen.standing("other") is Standing.LIVES
        assert seen.standing("one that Ray does not know") is Standing.GONE
        assert seen.labels == {"b7"}
        successor = RayNode("new", "127.0.0.1", port, None)  # with the same fixed port, before Ray has noticed
        assert Neighbours(successor, {"new": successor, "other": other}).standing("other") is Standing.GONE
    assert seen.standing("other") is Standing.GONE  # refused, though Ray takes it for alive
    silent = RayNode("other", "name.invalid", 1, None)
    assert Neighbours(me, {"me": me, "other": silent}).standing("other") is Standing.UNKNOWN
