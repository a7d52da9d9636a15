"""Keeps operator code away from the files and processes of the platform, which belong to the same user.

A process that runs operators confines itself with Landlock (Linux 5.13 and newer) before it loads any of them. The
confinement includes all processes that it starts:

    hidden      the platform's folder, keys and configuration, which operators can neither open nor change
    kept        folders inside the hidden ones that operators need: the objects that they read and write
    read-only   folders of the system and of Python, since code placed there would run in the platform's processes

Everything else stays accessible. A Landlock rule can allow but not deny. In the folder that contains a hidden path,
such as the project's folder, each other entry is therefore allowed by its own rule, as listed when the process starts.
Operators can change files there but not create any, and only processes that start later can open a replaced file.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from interlock.processes import landlock, seccomp
from interlock.processes.landlock import Access

SYSTEM: Final = ("/bin", "/boot", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/sbin", "/sys", "/usr")
NOT_CONFINED: Final = (
    "operators run as this user and can read the platform's files, keys and passwords, because this system has no "
    "Landlock (Linux 5.13 or newer): run only operators that you trust with these"
)
OF_ROOT: Final = (
    "operators run as root, without its privileges, and can change files of root outside the system's folders, such as "
    "profiles of its shell: start Interlock as an ordinary user on a machine that has more to protect than Interlock"
)
_JOBS_OF_ROOT: Final = Path("/var/spool")
"""Tables of cron, which would run commands with all privileges."""
_MEMORY: Final = frozenset({"kmem", "mem", "port"})
_PR_CAPBSET_DROP: Final = 24
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_CAPABILITY_VERSION: Final = 0x20080522
_LAST_CAPABILITY: Final = 63

Limits = Mapping[Path, Access | None]
"""Access by path; None for a path that cannot be opened."""


def is_possible() -> bool:
    return landlock.version() > 0


def confine(hidden: Iterable[Path], kept: Iterable[Path] = ()) -> bool:
    """Confines this process permanently. It must have a single thread. Returns False if the kernel has no Landlock.

    If no hidden path exists, there is nothing to protect, and the process is not confined.
    """
    # /dev/null may be the configuration file. It is not secret, and every program needs it.
    secret = [path.resolve() for path in hidden if path.is_dir() or path.is_file()]
    if not secret or not is_possible():
        return not secret
    limits: dict[Path, Access | None] = dict.fromkeys(_read_only(), Access.READ)
    limits |= dict.fromkeys(secret)
    for path in kept:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)  # a rule needs an existing path
        limits[path.resolve()] = Access.ALL
    if os.geteuid() == 0:
        limits |= dict.fromkeys(_raw_devices())
        if _JOBS_OF_ROOT.exists():
            limits[_JOBS_OF_ROOT.resolve()] = Access.READ
        _drop_capabilities()
    above = frozenset(parent for path in limits for parent in path.parents)
    landlock.restrict_files(list(_rules(Path("/"), Access.ALL, limits, above)))
    if os.geteuid() == 0 and seccomp.supported():
        # Landlock does not restrict Unix sockets that are files. Services such as systemd and Docker trust root there.
        seccomp.refuse_unix_sockets()
    return True


def _read_only() -> list[Path]:
    package = Path(__file__).resolve().parents[1]
    return [Path(path).resolve() for path in (*SYSTEM, sys.prefix, sys.base_prefix, package) if Path(path).exists()]


def _rules(folder: Path, usual: Access | None, limits: Limits, above: frozenset[Path]) -> Iterator[tuple[Path, Access]]:
    """Yields rules for everything below a folder, whose own access is `usual` unless `limits` has another."""
    access = limits.get(folder, usual)
    if folder not in above:
        if access is not None:
            yield folder, access
        return
    try:
        entries = [Path(entry.path) for entry in os.scandir(folder) if not entry.is_symlink()]
    except OSError:
        return  # a folder that this user cannot list needs no rule
    for entry in entries:
        yield from _rules(entry, access, limits, above)


def _raw_devices() -> Iterator[Path]:
    """Yields disks and memory devices, from which root could read the content of hidden files."""
    for entry in os.scandir("/dev"):
        if entry.name in _MEMORY or stat.S_ISBLK(entry.stat(follow_symlinks=False).st_mode):
            yield Path(entry.path)


def _drop_capabilities() -> None:
    """Drops all capabilities of root, so that operators cannot mount, trace processes or load kernel modules."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(_LAST_CAPABILITY + 1):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails for capabilities that this kernel does not know
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header, none = struct.pack("=Ii", _CAPABILITY_VERSION, 0), bytes(24)
    if libc.capset(header, none) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"capset: {os.strerror(number)}")
