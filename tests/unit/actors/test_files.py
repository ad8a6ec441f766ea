"""Small files of the keeper."""

from __future__ import annotations

import threading
from pathlib import Path

from rayqueue.actors.keeper.files import write_once


def test_of_all_that_write_at_once_one_is_kept_whole_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "data" / "secret"
    barrier, found = threading.Barrier(8), list[str]()

    def write(number: int) -> None:
        barrier.wait()
        write_once(path, f"{number}" * 1000)
        found.append(path.read_text())

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert list(path.parent.iterdir()) == [path]
