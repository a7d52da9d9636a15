"""Namespaces, and the file tree that user code sees: system programs, its bundle, and a private folder.

Listeners for the platform are the only thing in the network inside. They are created here and handed to the runner,
which accepts from them outside and forwards to the platform: inside there is neither a route nor a process to attack.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from interlock.processes import linux
from interlock.untrusted.runner.in_sandbox.job import PROGRAMS, SANDBOX, WORK, Job, Place

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


_SIOCGIFFLAGS: Final = 0x8913
_SIOCSIFFLAGS: Final = 0x8914
_SIOCSIFADDR: Final = 0x8916
_IFF_UP: Final = 0x1
_BACKLOG: Final = 64


def bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack_from("H", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request), 16)[0]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def listen(places: list[Place]) -> list[socket.socket]:
    """Returns one listening socket per place, in order."""
    return [_listening(place, number) for number, place in enumerate(places)]


def _listening(place: Place, number: int) -> socket.socket:
    address = ipaddress.ip_address(place.host)
    if address.version == 4 and not address.is_loopback:
        _add_address(f"lo:{number + 1}", address.packed)
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((place.host, place.port))
    listener.listen(_BACKLOG)
    return listener


def _add_address(alias: str, packed: bytes) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sHH4s8x", alias.encode(), socket.AF_INET, 0, packed)
        fcntl.ioctl(any_socket, _SIOCSIFADDR, request)


def hosts(names: Mapping[str, str]) -> Iterator[str]:
    """Yields lines for `/etc/hosts` with these names and addresses."""
    yield "127.0.0.1 localhost"
    yield "::1 localhost"
    for name, address in names.items():
        yield f"{address} {name}"
