"""Drops all privileges that the user process does not need, just before its code runs."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Final

from interlock.processes import landlock, linux, seccomp
from interlock.untrusted.runner.in_sandbox import namespaces
from interlock.untrusted.runner.in_sandbox.job import Job

_OPEN_FILES: Final = 256
_FIRST_OWN: Final = 3
_NODE_RESERVES: Final = 64 << 30
"""Address space that Node reserves without using it. RLIMIT_DATA limits the memory that it uses."""


def drop_privileges(job: Job) -> None:
    """Drops privileges in this order: each step needs what a later one removes."""
    os.closerange(_FIRST_OWN, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    os.umask(0o077)
    _prefer_as_oom_victim()
    if job.user:
        _become(job.user)
    _limit(job)
    linux.drop_capabilities()
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    if job.landlock:
        _confine_files(job)
    if seccomp.supported():
        seccomp.refuse(only_wall=job.landlock, same_user=not job.user)


def _prefer_as_oom_victim() -> None:
    """Makes this process the OOM killer's first choice, so that the platform survives."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        return  # no /proc inside the walls; the limits still apply


def _become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    # After the change, /proc/self belongs to another user, but the mapping of a user namespace is written there.
    linux.prctl(linux.PR_SET_DUMPABLE, 1)
    try:
        # The kernel counts processes by user and user namespace: in a new namespace only its own processes count.
        linux.unshare(linux.CLONE_NEWUSER)
        namespaces.map_ids(user, user)
    except OSError:
        return  # they are counted by user then, and no other slot has this user
    finally:
        namespaces.die_with_parent()


def _limit(job: Job) -> None:
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: job.cpu_seconds,
        resource.RLIMIT_FSIZE: job.disk_bytes,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_NPROC: job.processes + (0 if job.user or job.own_network else _counted_already()),
        resource.RLIMIT_DATA: job.memory_bytes,
        resource.RLIMIT_AS: job.memory_bytes + (_NODE_RESERVES if job.language == "node" else 0),
    }
    for kind, limit in limits.items():
        _set_limit(kind, limit)


def _counted_already() -> int:
    """Counts processes and threads of this user, which share the limit if the code has no user namespace of its own."""
    count, user = 0, os.getuid()
    for process in Path("/proc").glob("[0-9]*/task"):
        try:
            count += len(os.listdir(process)) if process.stat().st_uid == user else 0  # noqa: PTH208 - names suffice
        except OSError:
            continue  # the process has ended
    return count


def _set_limit(kind: int, limit: int) -> None:
    """Sets a limit no higher than it is: only root may raise one.

    The hard CPU limit kills one second after the soft one.
    """
    hard = resource.getrlimit(kind)[1]
    room = limit + 1 if kind == resource.RLIMIT_CPU else limit
    hard = room if hard == resource.RLIM_INFINITY else min(room, hard)
    resource.setrlimit(kind, (min(limit, hard), hard))


def _confine_files(job: Job) -> None:
    seen = [*job.read_only.values(), job.bundle, job.programs, *job.devices]
    present = [Path(path) for path in seen if Path(path).exists()]
    writable = [Path(job.work), Path("/dev/null")]
    landlock.restrict([], writable, programs=present, ports=[place.port for place in job.places])


def clean_modules(job: Job) -> None:
    """Leaves only the standard library, the bundle and the SDK importable, and unloads modules of Interlock."""
    for name in [name for name in sys.modules if name.split(".")[0] == "interlock"]:
        del sys.modules[name]
    sys.path[:] = [entry for entry in sys.path if _is_standard(entry)] + [job.bundle, job.programs]


def _is_standard(entry: str) -> bool:
    return Path(entry).is_relative_to(sys.base_prefix) and "site-packages" not in entry
