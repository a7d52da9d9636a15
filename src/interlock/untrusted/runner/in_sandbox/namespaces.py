"""Namespaces, and the file tree that user code sees: system programs, its bundle, and a private folder."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Final

from interlock.processes import linux
from interlock.untrusted.runner.in_sandbox.job import PROGRAMS, SANDBOX, WORK, Job

_SPACES: Final = (
    linux.CLONE_NEWNS
    | linux.CLONE_NEWPID
    | linux.CLONE_NEWNET
    | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUTS
    | linux.CLONE_NEWCGROUP
)
_ROOT_BYTES: Final = 1 << 20
_OF_THE_KERNEL: Final = ("sys", "sysrq-trigger", "irq", "bus")
"""Entries of `/proc` that affect the whole machine. No kind of root may write to them."""
_READ_ONLY: Final = linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV


def separate() -> None:
    """Enters new namespaces. A user other than root becomes root in a user namespace first."""
    user, group = os.getuid(), os.getgid()
    if user == 0:
        linux.unshare(_SPACES)
    else:
        linux.unshare(_SPACES | linux.CLONE_NEWUSER)
        map_ids(user, group)
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)


def map_ids(user: int, group: int) -> None:
    """Maps only this user and group, to the same ids inside as outside."""
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def die_with_parent() -> None:
    """Requests SIGKILL when the parent dies. A change of user or namespace resets this: call it again then.

    Unlike `linux.die_with`, compares no id, because a parent outside a new PID namespace has the id 0.
    """
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)


def build(job: Job) -> None:
    """Builds the new tree under an empty folder and makes it the root. Must be called by the first process of the PID
    namespace: only it can mount its own `/proc`."""
    linux.sethostname(SANDBOX)
    root = job.root
    linux.mount("tmpfs", root, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, f"size={_ROOT_BYTES},mode=755")
    for link, target in job.links.items():
        Path(root + link).symlink_to(target)
    for inside, outside in job.read_only.items():
        _bind(outside, root + inside, _READ_ONLY)
    for device in job.devices:
        _bind(device, root + device, 0)
    for name, text in job.files.items():
        _write(root + name, text)
    _mount_proc(root + "/proc")
    _mount_work(root + WORK, job)
    linux.pivot_root(root)
    linux.set_mount_flags("/", _READ_ONLY, recursive=False)


def _bind(outside: str, inside: str, flags: int) -> None:
    if Path(outside).is_dir():
        Path(inside).mkdir(parents=True, exist_ok=True)
    elif not Path(inside).exists():
        _write(inside, "")
    linux.mount(outside, inside, None, linux.MS_BIND | linux.MS_REC)
    if flags:
        linux.set_mount_flags(inside, flags, recursive=True)


def _write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def _mount_proc(path: str) -> None:
    """Mounts `/proc`, or none at all: containers that mask parts of their `/proc` do not allow another mount."""
    Path(path).mkdir()
    try:
        linux.mount("proc", path, "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    except PermissionError:
        return
    for name in _OF_THE_KERNEL:
        if Path(path, name).exists():
            _bind(f"{path}/{name}", f"{path}/{name}", _READ_ONLY)


def _mount_work(path: str, job: Job) -> None:
    Path(path).mkdir()
    user, group = job.user or os.getuid(), job.user or os.getgid()
    options = f"size={job.disk_bytes},nr_inodes={job.most_files},mode=700,uid={user},gid={group}"
    linux.mount("tmpfs", path, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, options)
    Path(path.removesuffix(WORK) + "/dev/shm").symlink_to(WORK)  # noqa: S108 - counts against the same quota


def forget_outside() -> None:
    """Removes paths of the outside from the module search path and adds the one inside."""
    sys.path[:] = [entry for entry in sys.path if Path(entry).exists()] + [PROGRAMS]
