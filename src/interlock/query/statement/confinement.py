"""Drops privileges of a process before it parses a statement."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

from interlock.processes import landlock, linux, seccomp

_HEADROOM: Final = 128 << 20
"""Private memory beyond DuckDB's own limit, for Arrow buffers and fragmentation. The largest spilling statements that
were measured used 75 MiB of it. With the memory of Python, DuckDB and Arrow at the start of a statement (about 105 MiB
resident), the process stays within QUERY_OVERHEAD_MB beyond the setting."""
_UNKNOWN_STACK: Final = 8 << 20
_OPEN_FILES: Final = 512


def drop_descriptors(kept: Collection[int]) -> None:
    """Closes all other descriptors and clears the environment."""
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


def set_common_limits() -> None:
    """Sets the limits that are the same for all statements.

    The number of processes is not limited, because the kernel counts all processes of the user. A statement cannot
    start
    any, because Landlock lets it execute no file.
    """
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, _OPEN_FILES)
    os.umask(0o077)
    if sys.platform == "linux":
        # If memory runs out, the kernel must kill this process first.
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")


def set_limits(*, memory_mb: int, temp_mb: int, cpu_seconds: int, threads: int) -> None:
    """Sets the limits of one statement.

    DuckDB's `memory_limit` does not count memory that its functions and aggregates allocate (`repeat`, `string_agg`,
    `list`, regular expressions), nor Arrow's buffers. RLIMIT_DATA counts every private writable mapping, so the kernel
    refuses the allocation. RLIMIT_AS would also count reserved addresses.
    """
    _limit(resource.RLIMIT_CPU, cpu_seconds)
    _limit(resource.RLIMIT_FSIZE, temp_mb << 20)
    if sys.platform == "linux":
        _limit(resource.RLIMIT_DATA, _data_size() + (memory_mb << 20) + _HEADROOM + threads * _stack_size())


def _limit(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (limit, limit))


def _data_size() -> int:
    """Returns the bytes that RLIMIT_DATA already counts."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    return pages * resource.getpagesize()


def _stack_size() -> int:
    """Returns the bytes that each new thread maps for its stack and hardly uses."""
    soft = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return _UNKNOWN_STACK if soft == resource.RLIM_INFINITY else soft


def warm_up() -> None:
    """Loads what the other functions need from Python and the kernel, without dropping anything."""
    resource.getrlimit(resource.RLIMIT_DATA)
    _data_size()
    landlock.version()


def install_seccomp_filter() -> None:
    """Installs the seccomp filter for user code.

    It also refuses new sockets here; a statement already has those it needs.
    """
    if sys.platform == "linux" and seccomp.supported():
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        seccomp.refuse(only_wall=True, same_user=True, sockets=False)


def confine(files: Collection[str], folder: Path) -> None:
    """Restricts the process to reading these files and writing to this folder. Raises without Landlock support."""
    os.chdir(folder)
    landlock.restrict(map(Path, files), [folder])
