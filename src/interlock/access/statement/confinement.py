"""What a process gives up before it looks at a statement."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

from interlock import landlock
from interlock.runner.inside import linux, syscalls

_PR_SET_PDEATHSIG: Final = 1
_HEADROOM: Final = 128 << 20
"""Private memory beyond DuckDB's own limit: Arrow's buffers, fragmentation. The largest spilling statements that were
measured used 75 MiB of it. With what Python, DuckDB and Arrow have when a statement begins (about 105 MiB resident),
its process stays within QUERY_OVERHEAD_MB beyond the setting."""
_UNKNOWN_STACK: Final = 8 << 20
_OPEN_FILES: Final = 512


def die_with_parent(parent: int) -> None:
    """However the parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def let_go(kept: Collection[int]) -> None:
    """Every other descriptor and the whole environment."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    last = max((2, *kept))
    for number in range(3, last):
        if number not in kept:
            with suppress(OSError):
                os.close(number)
    os.closerange(last + 1, 65_536)
    os.environ.clear()


def bound_all_alike() -> None:
    """What is the same for every statement, before there is one. The number of processes is not bounded: the kernel
    counts all of the user's, whoever started them. There is nothing to start, as Landlock lets no file be executed."""
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, _OPEN_FILES)
    os.umask(0o077)
    if sys.platform == "linux":
        # Whoever must die when memory runs out, it is this one.
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")


def bound(*, memory_mb: int, temp_mb: int, cpu_seconds: int, threads: int) -> None:
    """Sets the limits of one statement.

    DuckDB's `memory_limit` does not count what its functions and aggregates build (`repeat`, `string_agg`, `list`,
    regular expressions), nor Arrow's buffers. RLIMIT_DATA counts every private writable mapping, so the kernel refuses
    the allocation itself. RLIMIT_AS would count reserved addresses as well.
    """
    _limit(resource.RLIMIT_CPU, cpu_seconds)
    _limit(resource.RLIMIT_FSIZE, temp_mb << 20)
    if sys.platform == "linux":
        _limit(resource.RLIMIT_DATA, _data_size() + (memory_mb << 20) + _HEADROOM + threads * _stack_size())


def _limit(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    most = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (most, most))


def _data_size() -> int:
    """Bytes that RLIMIT_DATA counts already."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    return pages * resource.getpagesize()


def _stack_size() -> int:
    """Bytes that each new thread maps for its stack, and hardly touches."""
    soft = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return _UNKNOWN_STACK if soft == resource.RLIM_INFINITY else soft


def rehearse() -> None:
    """What the rest needs of Python and the kernel is looked up, and nothing is given up."""
    resource.getrlimit(resource.RLIMIT_DATA)
    _data_size()
    landlock.version()


def refuse_calls() -> None:
    """Puts the process under the seccomp filter that holds users' code, which also refuses new sockets here: those
    that a statement needs exist already."""
    if sys.platform == "linux" and syscalls.supported():
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        syscalls.refuse(only_wall=True, same_user=True, sockets=False)


def confine(files: Collection[str], folder: Path) -> None:
    """From here on the process reads these files, writes into this folder and reaches nothing else. Raises where the
    kernel has no Landlock."""
    os.chdir(folder)
    landlock.restrict(map(Path, files), [folder])
