"""How many requests go to one host at once, and how soon after each other, over all processes of this user here.

Two files that all share. In `places` there is nothing: processes lock bytes of it, a few for each host, and a process
that dies has let go. In `turns` there is the time at which a host may be asked next, for 65,536 groups of hosts: two
that share a group are asked a little less often. Nothing grows with the number of hosts, and nothing is left to clean.
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
"""A server that asks for more time is asked again after this. Later times in the file are of a clock that was wrong."""

_MOST_PLACES: Final = 64
_FIRST_LOOK_SECONDS: Final = 0.01
_LONGEST_LOOK_SECONDS: Final = 0.25
_time: Final = struct.Struct("<d")


class HostBusy(TaskFailed):
    """Others ask the host, or it wants to be left alone, for longer than this attempt waits."""


class Patience:
    """What is left of the time that an attempt may wait."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds

    async def wait(self, seconds: float, why: str) -> None:
        if seconds > self.left:
            raise HostBusy(
                f"{why}, for longer than this attempt waits: raise max_wait_seconds or the job's backoff_seconds, or "
                "lower its max_concurrency."
            )
        began = time.monotonic()
        await asyncio.sleep(seconds)
        self.left = max(self.left - (time.monotonic() - began), 0.0)


class Hosts:
    """One for each process: the system forgets a process's locks on a file when it closes it anywhere."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        _own(folder)
        self._clock = clock
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        self._places = os.open(folder / "places", flags, 0o600)
        self._turns = os.open(folder / "turns", flags, 0o600)

    def close(self) -> None:
        os.close(self._places)
        os.close(self._turns)

    @asynccontextmanager
    async def turn(self, host: str, most: int, delay: float, patience: Patience) -> AsyncIterator[None]:
        """A time at which this process may ask the host, with at most `most` at once. Raises HostBusy."""
        place = await self._place(host, most, patience)
        try:
            while (wait := self._reserve(host, delay)) > 0:
                await patience.wait(wait, f"{host} is not to be asked for {wait:.1f} s")
            yield
        finally:
            fcntl.lockf(self._places, fcntl.LOCK_UN, 1, place)

    async def _place(self, host: str, most: int, patience: Patience) -> int:
        first = int.from_bytes(_digest(host)[:6]) * _MOST_PLACES
        pause = _FIRST_LOOK_SECONDS
        while True:
            for place in range(first, first + most):
                with suppress(OSError):  # another process has it
                    fcntl.lockf(self._places, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                    return place
            await patience.wait(min(pause, patience.left or pause), f"{host} is asked by {most} others")
            pause = min(2 * pause, _LONGEST_LOOK_SECONDS)

    def _reserve(self, host: str, delay: float) -> float:
        """0 when it is this process's turn, and the next one is `delay` later; else seconds until it may be."""
        with self._entry(host) as at:
            now, free = self._clock(), self._free(at)
            if free > now:
                return free - now
            if delay > 0:
                os.pwrite(self._turns, _time.pack(now + delay), at)
            return 0.0

    def hold(self, host: str, seconds: float) -> None:
        """Nobody here asks the host for so long: it said so."""
        with self._entry(host) as at:
            until = self._clock() + min(seconds, LONGEST_HOLD_SECONDS)
            os.pwrite(self._turns, _time.pack(max(until, self._free(at))), at)

    def _free(self, at: int) -> float:
        data = os.pread(self._turns, _time.size, at)
        free: float = _time.unpack(data)[0] if len(data) == _time.size else 0.0
        return free if free <= self._clock() + LONGEST_HOLD_SECONDS else 0.0

    @contextmanager
    def _entry(self, host: str) -> Iterator[int]:
        at = int.from_bytes(_digest(host)[6:8]) * _time.size
        fcntl.lockf(self._turns, fcntl.LOCK_EX, _time.size, at)
        try:
            yield at
        finally:
            fcntl.lockf(self._turns, fcntl.LOCK_UN, _time.size, at)


@cache
def hosts_of_this_machine() -> Hosts:
    return Hosts(Path(tempfile.gettempdir()) / f"interlock-hosts-{os.getuid()}")


def _digest(host: str) -> bytes:
    return hashlib.sha256(host.encode()).digest()


def _own(folder: Path) -> None:
    """In a folder that everybody may write to, the name may be taken by somebody else."""
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise TaskFailed(
            f"{folder} must be a folder that only this user can use: remove it, or set TMPDIR for the worker.",
            "BadTempFolder",
        )
