"""Folders for what a driver keeps on disk while it lives, gone with it whatever ends it.

A folder's lock file is held by the worker. When the worker was killed, nobody holds it any more, and the next worker of
this user on this machine removes the folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

PREFIX: Final = "interlock-spark-"
_LOCK: Final = ".lock"
_YOUNG_SECONDS: Final = 3600.0
"""A folder without a lock file may be one that is being made."""


class Scratch:
    def __init__(self) -> None:
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep() -> int:
    """Remove what workers have left behind that were killed. Returns how many folders that were."""
    left = [path for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*") if _is_left(path)]
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return len(left)


def _is_left(path: Path) -> bool:
    with suppress(FileNotFoundError):  # somebody else removes it just now
        about = path.lstat()
        if about.st_uid != os.getuid() or not path.is_dir() or path.is_symlink():
            return False
        try:
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return time.time() - about.st_mtime > _YOUNG_SECONDS
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(lock)
        return True
    return False
