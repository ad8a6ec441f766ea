"""Files and directories for their owner only, whatever the umask: 0600 and 0700.

What RayQueue makes for its data is made here. A directory that was there
before stays as its owner made it; what is put into it is private.
"""

from __future__ import annotations

import os
from pathlib import Path

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700


def make_directory(path: Path) -> None:
    """With its parents, as far as there are none. No error if it is there."""
    if path.is_dir():
        return
    make_directory(path.parent)
    try:
        path.mkdir(DIRECTORY_MODE)
    except FileExistsError:
        if not path.is_dir():
            raise
        return  # somebody else made it just now
    path.chmod(DIRECTORY_MODE)  # a umask may take even the owner's rights away


def close_directory(path: Path) -> None:
    """Take everybody else's rights to a directory of ours and what is in it, which an older release may have given."""
    for each in (path, *path.iterdir()):
        mode = DIRECTORY_MODE if each.is_dir() else FILE_MODE
        if each.stat().st_mode & 0o777 != mode:
            each.chmod(mode)


def opener(path: str, flags: int) -> int:
    """For ``open(opener=)``: what is made has ``FILE_MODE``."""
    handle = os.open(path, flags, FILE_MODE)
    if os.fstat(handle).st_mode & 0o777 != FILE_MODE:
        os.fchmod(handle, FILE_MODE)
    return handle
