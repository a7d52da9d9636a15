"""In the user's process, just before its code: everything is given up that it does not need."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Final

from interlock import landlock
from interlock.runner.inside import linux, syscalls, walls
from interlock.runner.inside.job import Job

_OPEN_FILES: Final = 256
_FIRST_OWN: Final = 3
_NODE_RESERVES: Final = 64 << 30
"""Address space that Node sets aside without using it: what it uses is held by RLIMIT_DATA."""


def give_up(job: Job) -> None:
    """In this order: each step needs what a later one takes away."""
    os.closerange(_FIRST_OWN, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    os.umask(0o077)
    _offer_to_the_kernel()
    if job.user:
        _become(job.user)
    _limit(job)
    linux.drop_capabilities()
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    if job.landlock:
        _confine_files(job)
    if syscalls.supported():
        syscalls.refuse(only_wall=job.landlock, same_user=not job.user)


def _offer_to_the_kernel() -> None:
    """When memory runs out, this process is to go first, and not the platform."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        return  # there is no /proc inside: its limits hold all the same


def _become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    # The change made /proc/self another's, where the mapping of a user namespace is written.
    linux.prctl(linux.PR_SET_DUMPABLE, 1)
    try:
        # Processes are counted by user and user namespace: in one of its own, only its own count.
        linux.unshare(linux.CLONE_NEWUSER)
        walls.map_ids(user, user)
    except OSError:
        return  # they are counted by user then, and no other place has this one
    finally:
        walls.follow_parent()


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
    for kind, most in limits.items():
        _set_limit(kind, most)


def _counted_already() -> int:
    """Processes and threads of this user, with whom the code shares its count where it has no namespace of its own."""
    count, user = 0, os.getuid()
    for process in Path("/proc").glob("[0-9]*/task"):
        try:
            count += len(os.listdir(process)) if process.stat().st_uid == user else 0  # noqa: PTH208 - names suffice
        except OSError:
            continue  # it has ended meanwhile
    return count


def _set_limit(kind: int, most: int) -> None:
    """No higher than it is: only root may raise one. The processor's hard limit kills a second after its soft one."""
    hard = resource.getrlimit(kind)[1]
    room = most + 1 if kind == resource.RLIMIT_CPU else most
    hard = room if hard == resource.RLIM_INFINITY else min(room, hard)
    resource.setrlimit(kind, (min(most, hard), hard))


def _confine_files(job: Job) -> None:
    seen = [*job.read_only.values(), job.bundle, job.programs, *job.devices]
    present = [Path(path) for path in seen if Path(path).exists()]
    writable = [Path(job.work), Path("/dev/null")]
    landlock.restrict([], writable, programs=present, ports=[place.port for place in job.places])


def clean_modules(job: Job) -> None:
    """User code finds the standard library, its bundle and the SDK; what was loaded from elsewhere is forgotten."""
    for name in [name for name in sys.modules if name.split(".")[0] == "interlock"]:
        del sys.modules[name]
    sys.path[:] = [entry for entry in sys.path if _is_standard(entry)] + [job.bundle, job.programs]


def _is_standard(entry: str) -> bool:
    return Path(entry).is_relative_to(sys.base_prefix) and "site-packages" not in entry
