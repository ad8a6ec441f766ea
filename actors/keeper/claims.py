"""The brokers of a data directory, and the Ray node that each is on.

One Ray node with a data directory of its own is the usual case: the directory
itself is its broker, named by the file ``broker_id``. Where several nodes have
the same directory (on one machine, or by NFS), each further one is a broker
with a directory of its own, ``brokers/NAME``. The name of that directory is the
broker's, so whoever has the data has the name.

A node *claims* a broker before it uses it. The n-th claim of a broker is the
file ``claim-n`` in its directory, made by ``link``, which succeeds for one of all
who try, also over NFS; the highest counts. A claim says which Ray node, and lasts
as long as that node: Ray node ids are never used again, so after a start of
everything all claims are of nodes that are gone, each node takes a broker that is
there, and only nodes beyond their number get new ones. A claim whose node may
live is never taken over. Whether it does is the ``Neighbours``' to say; they are
asked after the claims were read, so that whoever has claimed is known to them.

A node that died may leave processes behind for a moment, and Ray may take a node
for dead that lives. So each replica's directory is locked as well, whoever has
the claim (``rayqueue.log.lmdb_file``). Where such a lock is not seen by other
machines, a claim of another machine is not taken over: ``StorageError`` says what
to set.

No Ray here. Nothing is decided about labels, but that a broker which a live node
names by its label is that node's.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import NamedTuple, Protocol

from rayqueue.actors.keeper.files import write_once
from rayqueue.actors.names import check_id
from rayqueue.errors import InvalidInputError, StorageError
from rayqueue.log.private import make_directory, opener

BROKER_LABEL = "rayqueue.broker"
BROKERS = "brokers"

_BROKER_FILE = "broker_id"
_LOCK_FILE = "claims.lock"
_CLAIM = "claim-"
_TRIES = 100
_LOCK_PATIENCE_S = 20.0
_LOCK_AGAIN_S = 0.02
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS = Path("/proc/self/mountinfo")
# What a mount of these kinds says if its locks stay on the machine.
_LOCAL_LOCKS = {
    "nfs": ("nolock", "local_lock=all", "local_lock=flock"),
    "nfs4": ("nolock", "local_lock=all", "local_lock=flock"),
    "cifs": ("nobrl",),
    "smb3": ("nobrl",),
}


class Standing(Enum):
    """What is known of the Ray node that made a claim."""

    LIVES = "lives"
    GONE = "gone"
    UNKNOWN = "unknown"


class Neighbours(Protocol):
    """The other Ray nodes, as they are now."""

    @property
    def labels(self) -> Collection[str]:
        """The brokers that live nodes name by their labels."""

    def standing(self, ray_node: str) -> Standing: ...


class Claimant(NamedTuple):
    """A Ray node that wants a broker, or has one."""

    ray_node: str
    machine: str
    boot: str
    """Of the kernel: two that have the same see each other's locks."""

    @classmethod
    def here(cls, ray_node: str) -> Claimant:
        try:
            boot = _BOOT_ID.read_text().strip()
        except OSError:
            boot = ""
        return cls(ray_node, os.uname().nodename, boot)

    def is_here(self, other: Claimant) -> bool:
        return self.machine == other.machine or (self.boot != "" and self.boot == other.boot)


class Place(NamedTuple):
    """A broker, and its directory below ``data_dir``; "" is ``data_dir`` itself."""

    broker: str
    directory: str


class _Slot(NamedTuple):
    place: Place
    path: Path
    number: int
    """Of the highest claim; 0 if there is none."""
    owner: Claimant | None


def named_place(data_dir: Path, label: str) -> Place:
    """The broker that a label names: one that has a directory of its own, or one that shares ``data_dir``."""
    own = f"{BROKERS}/{check_id(label)}"
    return Place(label, own if (data_dir / own).is_dir() else "")


def claim(
    data_dir: Path, node: Claimant, neighbours: Callable[[], Neighbours], preferred: Collection[str] = ()
) -> Place:
    """The broker that this Ray node is: the one that it has claimed, or one that is free, or a new one.

    ``preferred`` are taken first. ``StorageError`` if it cannot be known whether one is free.
    """
    make_directory(data_dir)
    with _one_at_a_time(data_dir):
        for _ in range(_TRIES):
            slots = _slots(data_dir)
            mine = next(
                (slot for slot in slots if slot.owner is not None and slot.owner.ray_node == node.ray_node), None
            )
            if mine is not None:
                return mine.place
            free = _free(data_dir, slots, node, neighbours())
            free.sort(key=lambda slot: _rank(slot, node, preferred))
            if not free:
                make_directory(data_dir / BROKERS / _new_name())  # from here on it is a free one, whoever takes it
            elif _take(free[0], node):
                return free[0].place
    raise StorageError(f"other Ray nodes take every broker of {data_dir} first", path=str(data_dir))


def _free(data_dir: Path, slots: Sequence[_Slot], node: Claimant, neighbours: Neighbours) -> list[_Slot]:
    """Those that nobody has. If there is none, and somebody's end is not certain, ``StorageError``."""
    free: list[_Slot] = []
    doubtful: StorageError | None = None
    for slot in slots:
        if slot.place.broker in neighbours.labels:
            continue
        standing = Standing.GONE if slot.owner is None else neighbours.standing(slot.owner.ray_node)
        if standing is Standing.LIVES:
            continue
        if slot.owner is not None and standing is Standing.UNKNOWN:
            doubtful = _may_live(data_dir, slot.place, slot.owner)
        elif slot.owner is not None and not node.is_here(slot.owner) and (why := local_locks(data_dir)) is not None:
            doubtful = _not_seen(data_dir, slot.place, slot.owner, why)
        else:
            free.append(slot)
    if not free and doubtful is not None:
        raise doubtful
    return free


def _rank(slot: _Slot, node: Claimant, preferred: Collection[str]) -> tuple[bool, bool, str]:
    elsewhere = slot.owner is not None and not node.is_here(slot.owner)
    return slot.place.broker not in preferred, elsewhere, slot.place.directory


def _slots(data_dir: Path) -> list[_Slot]:
    """All brokers of the directory; the first is the directory itself."""
    if not (data_dir / _BROKER_FILE).exists():
        write_once(data_dir / _BROKER_FILE, _new_name())
    try:
        places = [Place(check_id((data_dir / _BROKER_FILE).read_text()), "")]
    except (InvalidInputError, ValueError) as error:
        raise StorageError(f"{data_dir / _BROKER_FILE} cannot be read: {error}", path=str(data_dir)) from error
    for path in sorted((data_dir / BROKERS).glob("*")):
        with suppress(InvalidInputError):  # nothing of ours
            if path.is_dir():
                places.append(Place(check_id(path.name), f"{BROKERS}/{path.name}"))
    return [_slot(data_dir, place) for place in places]


def _slot(data_dir: Path, place: Place) -> _Slot:
    path = data_dir / place.directory
    for _ in range(_TRIES):
        number = _highest(path)
        with suppress(FileNotFoundError):  # a newer claim was made since, and this one deleted
            return _Slot(place, path, number, None if number == 0 else _read(path / f"{_CLAIM}{number}"))
    raise StorageError(f"the claims of {path} change all the time", path=str(path))


def _highest(path: Path) -> int:
    return max(_numbers(path), default=0)


def _numbers(path: Path) -> list[int]:
    told = (each.name.removeprefix(_CLAIM) for each in path.glob(f"{_CLAIM}*"))
    return [int(number) for number in told if number.isascii() and number.isdigit()]


def _read(path: Path) -> Claimant:
    try:
        told = json.loads(path.read_text())
        return Claimant(str(told["ray_node"]), str(told["machine"]), str(told["boot"]))
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"{path} cannot be read: {error!r}; delete it once no Ray node uses this directory", path=str(path)
        ) from error


def _take(slot: _Slot, node: Claimant) -> bool:
    """False if another one was faster."""
    number = slot.number + 1
    path = slot.path / f"{_CLAIM}{number}"
    write_once(path, json.dumps(node._asdict()))
    try:
        if _read(path) != node:
            return False
    except FileNotFoundError:  # a newer claim was made at once, and this one deleted
        return False
    numbers = _numbers(slot.path)
    if max(numbers, default=0) != number:  # claims beyond it were made and it was deleted, before it was made anew
        path.unlink(missing_ok=True)
        return False
    for older in numbers:
        if older < number:
            (slot.path / f"{_CLAIM}{older}").unlink(missing_ok=True)
    return True


def _new_name() -> str:
    return f"broker-{uuid.uuid4().hex[:12]}"


@contextmanager
def _one_at_a_time(data_dir: Path) -> Iterator[None]:
    """Of this machine, so that one node which is asked twice at a time answers the same."""
    handle = opener(str(data_dir / _LOCK_FILE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        deadline_s = time.monotonic() + _LOCK_PATIENCE_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise StorageError(
                        f"another process has had {data_dir / _LOCK_FILE} locked for {_LOCK_PATIENCE_S:.0f} s",
                        path=str(data_dir),
                        reason="locked",
                    ) from None
            time.sleep(_LOCK_AGAIN_S)
        yield
    finally:
        os.close(handle)


def local_locks(path: Path, mounts: Path = _MOUNTS) -> str | None:
    """Why another machine does not see a lock on a file here: the file system and its option. None if it does."""
    best, found = -1, None
    resolved = str(path.resolve())
    for line in mounts.read_text(errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 6 or len(kind) < 3:
            continue
        point = fields[4].encode().decode("unicode_escape", errors="replace")  # blanks are written as \040
        inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:  # of two on one point the later one is on top
            options = {*fields[5].split(","), *kind[2].split(",")}
            wrong = next((each for each in _LOCAL_LOCKS.get(kind[0], ()) if each in options), None)
            best, found = len(point), None if wrong is None else f"{kind[0]} with {wrong}"
    return found


def _may_live(data_dir: Path, place: Place, owner: Claimant) -> StorageError:
    return StorageError(
        f"broker {place.broker} of {data_dir} is on Ray node {owner.ray_node} on {owner.machine}, which does not "
        f"answer and which Ray has not given up yet; wait, or start this node as another broker: "
        f"ray start --labels {BROKER_LABEL}=NAME",
        path=str(data_dir),
        reason="doubtful",
        broker=place.broker,
    )


def _not_seen(data_dir: Path, place: Place, owner: Claimant, why: str) -> StorageError:
    return StorageError(
        f"broker {place.broker} of {data_dir} was last used on {owner.machine}, and whether it still is cannot be seen "
        f"here: {why} keeps locks on each machine. If it is not, start this Ray node as that broker: ray start "
        f"--labels {BROKER_LABEL}={place.broker}; otherwise as another one, --labels {BROKER_LABEL}=NAME; or mount the "
        f"file system with its locks",
        path=str(data_dir),
        reason="locks",
        broker=place.broker,
    )
