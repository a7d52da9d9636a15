"""A control group with a memory limit, made below this process's own: what grows in it is killed by the kernel."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from tests.patience import PATIENCE

ROOT = Path("/sys/fs/cgroup")


class NoMemoryGroup(Exception):
    """This machine does not let us limit memory; says why."""


class MemoryGroup:
    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, pid: int) -> None:
        """The process, and all that it starts from now on."""
        (self._path / "cgroup.procs").write_text(str(pid))


def _parent() -> tuple[Path, dict[str, str]]:
    """Our own group, and the files that limit a group below it: no swap, or nothing would ever be killed."""
    own = Path("/proc/self/cgroup").read_text()
    if legacy := re.search(r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:(.*)$", own, re.MULTILINE):
        return ROOT / "memory" / legacy[1].lstrip("/"), {"memory.limit_in_bytes": "{}", "memory.swappiness": "0"}
    if unified := re.search(r"^0::(.*)$", own, re.MULTILINE):
        return ROOT / unified[1].lstrip("/"), {"memory.max": "{}", "memory.swap.max": "0"}
    raise NoMemoryGroup("there are no control groups here")


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """Raises NoMemoryGroup where that is not for us to do. Whoever is left in it at the end is killed."""
    try:
        parent, limits = _parent()
        path = parent / f"interlock-crash-{uuid4().hex[:8]}"
        path.mkdir()
    except OSError as error:
        raise NoMemoryGroup(f"a control group cannot be made: {error}") from error
    try:
        for file, text in limits.items():
            if not (path / file).exists():
                raise NoMemoryGroup(f"{path} has no {file}: the memory controller is not handed down to us")
            (path / file).write_text(text.format(limit_bytes))
        yield MemoryGroup(path)
    finally:
        _remove(path)


def _remove(path: Path) -> None:
    """Those that die are still in it for a moment."""
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
