"""A control group with a memory limit, below this process's own group. The kernel kills processes that exceed it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from tests.support.polls import PATIENCE

ROOT = Path("/sys/fs/cgroup")


class NoMemoryGroup(Exception):
    """Memory cannot be limited on this machine; the message says why."""


class MemoryGroup:
    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, pid: int) -> None:
        """Adds the process and all its future children."""
        (self._path / "cgroup.procs").write_text(str(pid))


def _parent() -> tuple[Path, dict[str, str]]:
    """Returns our own group and the limit files of a group below it. Without swap, or nothing would be killed."""
    own = Path("/proc/self/cgroup").read_text()
    if legacy := re.search(r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:(.*)$", own, re.MULTILINE):
        return ROOT / "memory" / legacy[1].lstrip("/"), {"memory.limit_in_bytes": "{}", "memory.swappiness": "0"}
    if unified := re.search(r"^0::(.*)$", own, re.MULTILINE):
        return ROOT / unified[1].lstrip("/"), {"memory.max": "{}", "memory.swap.max": "0"}
    raise NoMemoryGroup("there are no control groups here")


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """Raises NoMemoryGroup if the group cannot be created. Processes that remain at the end are killed."""
    try:
        parent, limits = _parent()
        path = parent / f"interlock-crash-{uuid4().hex[:8]}"
        path.mkdir()
    except OSError as error:
        raise NoMemoryGroup(f"a control group cannot be created: {error}") from error
    try:
        for file, text in limits.items():
            if not (path / file).exists():
                raise NoMemoryGroup(f"{path} has no {file}: the memory controller is not delegated")
            (path / file).write_text(text.format(limit_bytes))
        yield MemoryGroup(path)
    finally:
        _remove(path)


def _remove(path: Path) -> None:
    """Kills remaining processes and removes the group. Dying processes stay in it for a moment."""
    deadline = time.monotonic() + PATIENCE
    while True:
        for pid in (path / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            path.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
        else:
            return
