"""Concurrency limit and delay per host, over all processes of this user on this machine.

The processes share two files. `places` stays empty: processes lock bytes of it, a few per host, and the system releases
the locks of a process that dies. `turns` holds the time of the next allowed request for 65,536 groups of hosts; hosts
that share a group get slightly fewer requests. Neither file grows with the number of hosts, and neither needs cleanup.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import stat
import struct
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Final

from interlock.workers.context import TaskFailed

LONGEST_HOLD_SECONDS: Final = 3600.0
"""Caps the wait that a server asks for. Later times in the file come from a clock that was wrong, and are ignored."""

_MAX_PERMITS: Final = 64
_FIRST_POLL_SECONDS: Final = 0.01
_LONGEST_POLL_SECONDS: Final = 0.25
_time: Final = struct.Struct("<d")


class HostBusy(TaskFailed):
    """The permit for the host would come later than this attempt may wait."""


class WaitBudget:
    """The rest of the time that an attempt may wait."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds

    async def wait(self, seconds: float, why: str) -> None:
        if seconds > self.left:
            raise HostBusy(
                f"{why}, and this attempt may not wait that long: raise max_wait_seconds or the job's backoff_seconds, "
                "or lower its max_concurrency."
            )
        began = time.monotonic()
        await asyncio.sleep(seconds)
        self.left = max(self.left - (time.monotonic() - began), 0.0)


class Hosts:
    """Permits for requests to hosts.

    Create one per process: POSIX drops all locks of a process on a file as soon as it closes any descriptor of it.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        _own(folder)
        self._clock = clock
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        self._permits = os.open(folder / "places", flags, 0o600)
        self._times = os.open(folder / "turns", flags, 0o600)

    def close(self) -> None:
        os.close(self._permits)
        os.close(self._times)

    @asynccontextmanager
    async def permit(self, host: str, limit: int, delay: float, budget: WaitBudget) -> AsyncIterator[None]:
        """Holds one of `limit` permits for the host, from the moment that a request may start. Raises HostBusy."""
        offset = await self._acquire(host, limit, budget)
        try:
            while (wait := self._reserve(host, delay)) > 0:
                await budget.wait(wait, f"{host} takes no request for another {wait:.1f} s")
            yield
        finally:
            fcntl.lockf(self._permits, fcntl.LOCK_UN, 1, offset)

    async def _acquire(self, host: str, limit: int, budget: WaitBudget) -> int:
        first = int.from_bytes(_digest(host)[:6]) * _MAX_PERMITS
        pause = _FIRST_POLL_SECONDS
        while True:
            for offset in range(first, first + limit):
                with suppress(OSError):  # another process holds it
                    fcntl.lockf(self._permits, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
                    return offset
            await budget.wait(min(pause, budget.left or pause), f"{host} already serves {limit} other requests")
            pause = min(2 * pause, _LONGEST_POLL_SECONDS)

    def _reserve(self, host: str, delay: float) -> float:
        """Returns 0 and moves the next start by `delay` if a request may start now; else the seconds to wait."""
        with self._entry(host) as at:
            now, free = self._clock(), self._free(at)
            if free > now:
                return free - now
            if delay > 0:
                os.pwrite(self._times, _time.pack(now + delay), at)
            return 0.0

    def hold(self, host: str, seconds: float) -> None:
        """Blocks requests to the host for as long as its Retry-After asks."""
        with self._entry(host) as at:
            until = self._clock() + min(seconds, LONGEST_HOLD_SECONDS)
            os.pwrite(self._times, _time.pack(max(until, self._free(at))), at)

    def _free(self, at: int) -> float:
        data = os.pread(self._times, _time.size, at)
        free: float = _time.unpack(data)[0] if len(data) == _time.size else 0.0
        return free if free <= self._clock() + LONGEST_HOLD_SECONDS else 0.0

    @contextmanager
    def _entry(self, host: str) -> Iterator[int]:
        at = int.from_bytes(_digest(host)[6:8]) * _time.size
        fcntl.lockf(self._times, fcntl.LOCK_EX, _time.size, at)
        try:
            yield at
        finally:
            fcntl.lockf(self._times, fcntl.LOCK_UN, _time.size, at)


@cache
def hosts_of_this_machine() -> Hosts:
    return Hosts(Path(tempfile.gettempdir()) / f"interlock-hosts-{os.getuid()}")


def _digest(host: str) -> bytes:
    return hashlib.sha256(host.encode()).digest()


def _own(folder: Path) -> None:
    """Creates the folder, and checks its owner: in a world-writable folder another user may have taken the name."""
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise TaskFailed(
            f"{folder} must be a folder that belongs to this user, with mode 0700: remove it, or set TMPDIR for the "
            "worker.",
            "BadTempFolder",
        )
