"""System calls that Python does not wrap."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from typing import Final

CLONE_NEWNS: Final = 0x0002_0000
CLONE_NEWCGROUP: Final = 0x0200_0000
CLONE_NEWUTS: Final = 0x0400_0000
CLONE_NEWIPC: Final = 0x0800_0000
CLONE_NEWUSER: Final = 0x1000_0000
CLONE_NEWPID: Final = 0x2000_0000
CLONE_NEWNET: Final = 0x4000_0000

MS_RDONLY: Final = 0x1
MS_NOSUID: Final = 0x2
MS_NODEV: Final = 0x4
MS_NOEXEC: Final = 0x8
MS_BIND: Final = 0x1000
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 0x4_0000
MNT_DETACH: Final = 0x2

PR_SET_PDEATHSIG: Final = 1
PR_SET_DUMPABLE: Final = 4
PR_SET_SECCOMP: Final = 22
PR_SET_CHILD_SUBREAPER: Final = 36
PR_SET_NO_NEW_PRIVS: Final = 38
PR_CAP_AMBIENT: Final = 47

_AT_FDCWD: Final = -100
_AT_RECURSIVE: Final = 0x8000
# The same number on every architecture, since it was added after the tables were unified.
_MOUNT_SETATTR: Final = 442
_PIVOT_ROOT: Final = {"x86_64": 155, "aarch64": 41}
_CAP_VERSION_3: Final = 0x2008_0522

ORPHANED: Final = 75
"""Exit code of a process whose parent is gone."""
_POLL_SECONDS: Final = 1.0

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(outcome: int, what: str) -> int:
    if outcome < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return outcome


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    named = kind.encode() if kind else None
    outcome = _libc.mount(source.encode(), target.encode(), named, ctypes.c_ulong(flags), options.encode() or None)
    _checked(outcome, f"mount {target}")


def set_mount_flags(target: str, flags: int, *, recursive: bool) -> None:
    """Adds `MS_RDONLY`, `MS_NOSUID` and `MS_NODEV` to a mount and, if recursive, to all mounts below it."""
    # struct mount_attr: set, clear, propagation, userns_fd. The values of these three flags equal those of mount().
    attributes = (ctypes.c_uint64 * 4)(flags, 0, 0, 0)
    how = _AT_RECURSIVE if recursive else 0
    outcome = _libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, target.encode(), how, ctypes.byref(attributes), 32)
    _checked(outcome, f"mount_setattr {target}")


def pivot_root(new_root: str) -> None:
    """Makes `new_root` the root and detaches the old tree."""
    os.chdir(new_root)
    _checked(_libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def prctl(option: int, *arguments: int) -> None:
    words = [ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:4]]
    _checked(_libc.prctl(option, *words), f"prctl {option}")


def die_with(parent: int) -> None:
    """Ends this process when `parent`, which started it, ends, or if it has already ended.

    On Linux, the kernel sends the signal, so this works even if the process hangs. Elsewhere, a thread polls.
    Not in processes/child.py, because the warm query process does without asyncio.
    """
    if sys.platform == "linux":
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(ORPHANED)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(ORPHANED)


def sethostname(name: str) -> None:
    _checked(_libc.sethostname(name.encode(), ctypes.c_size_t(len(name))), "sethostname")


def drop_capabilities() -> None:
    """Drops all capabilities permanently: with no_new_privs no program can regain one."""
    pr_cap_ambient_clear_all = 4
    prctl(PR_CAP_AMBIENT, pr_cap_ambient_clear_all)
    header = (ctypes.c_uint32 * 2)(_CAP_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    _checked(_libc.capset(ctypes.byref(header), ctypes.byref(nothing)), "capset")


def seccomp(program: bytes) -> None:
    """`program` is an array of `struct sock_filter`, eight bytes each."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))

    seccomp_mode_filter = 2
    wanted = Program(len(program) // 8, program)
    outcome = _libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(seccomp_mode_filter), ctypes.byref(wanted), 0, 0)
    _checked(outcome, "seccomp")
