"""A seccomp filter that refuses system calls to user code, for attack surface that the walls leave in the kernel.

Every other call is allowed, because the walls confine the code. The filter refuses the calls in which most kernel
vulnerabilities were found, and new namespaces, in which an ordinary user would be root again.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from typing import Final

from interlock.processes import linux

# name: x86_64, aarch64 (None where it does not exist)
_REFUSED: Final[dict[str, tuple[int, int | None]]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
_SHARED: Final[dict[str, tuple[int, int | None]]] = {
    "ioprio_set": (251, 30),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "msgctl": (71, 187),
    "msgget": (68, 186),
    "msgrcv": (70, 188),
    "msgsnd": (69, 189),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "semctl": (66, 191),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "setpriority": (141, 140),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmget": (29, 194),
}
"""Without namespaces, these would affect other processes of the same user, or memory that they share."""
_ATTRIBUTES: Final[dict[str, tuple[int, int | None]]] = {
    "chmod": (90, None),
    "chown": (92, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "fremovexattr": (199, 16),
    "fsetxattr": (190, 7),
    "lchown": (94, None),
    "lremovexattr": (198, 15),
    "lsetxattr": (189, 6),
    "removexattr": (197, 14),
    "removexattrat": (466, 466),
    "setxattr": (188, 5),
    "setxattrat": (463, 463),
}
"""Landlock does not check these: code that runs as the runner's own user could make its bundle unreadable to later
runs."""
_PRLIMIT: Final = (302, 261)
_CLONE: Final = (56, 220)
_CLONE3: Final = 435
_SOCKET: Final = (41, 198)
_SOCKETPAIR: Final = (53, 199)
_KIND_MASK: Final = 0xF
_SENDS: Final = {"sendto": ((44, 206), 3), "sendmsg": ((46, 211), 2), "sendmmsg": ((307, 269), 3)}
"""Calls that send, with the index of their flags argument."""
_MSG_FASTOPEN: Final = 0x2000_0000
_NAMESPACES: Final = (
    linux.CLONE_NEWNS
    | linux.CLONE_NEWCGROUP
    | linux.CLONE_NEWUTS
    | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUSER
    | linux.CLONE_NEWPID
    | linux.CLONE_NEWNET
)
_ARCHITECTURES: Final = {"x86_64": (0, 0xC000_003E), "aarch64": (1, 0xC000_00B7)}
_X32: Final = 0x4000_0000
"""Numbers from here on are x32 calls on x86_64, which the list would not match."""

_FAMILIES: Final = (
    socket.AF_UNIX,
    socket.AF_INET,
    socket.AF_INET6,
    16,
)  # 16: netlink, which libraries use to inspect lo

# Classic BPF
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW: Final = 0x7FFF_0000
_ERROR: Final = 0x0005_0000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16


def supported() -> bool:
    return os.uname().machine in _ARCHITECTURES


def refuse(*, only_wall: bool, same_user: bool, sockets: bool = True) -> None:
    """Installs the filter.

    `only_wall`: there are no namespaces, so sockets other than TCP are refused: Landlock does not check them.
    `same_user`: changes of file modes are refused: Landlock does not check them, and the runner owns the files as the
    same user. `sockets`: False refuses to create any socket."""
    refused = _REFUSED | (_SHARED if only_wall else {}) | (_ATTRIBUTES if only_wall and same_user else {})
    refused |= {} if sockets else {"socket": _SOCKET}
    linux.seccomp(_program(*_ARCHITECTURES[os.uname().machine], refused, only_wall=only_wall))


def refuse_unix_sockets() -> None:
    """Refuses new Unix sockets, whose addresses a filter cannot read. Pairs of connected ones stay allowed, except
    datagrams: either end of such a pair could send to any address. The caller must have set no_new_privs.
    """
    column, architecture = _ARCHITECTURES[os.uname().machine]
    datagram = [
        *_argument(1),
        _line(_AND, _KIND_MASK),
        *_if_equal(int(socket.SOCK_DGRAM), [_refusal(errno.EACCES)]),
        _line(_RETURN, _ALLOW),
    ]
    family = [*_argument(0), *_if_equal(int(socket.AF_UNIX), [_refusal(errno.EACCES)]), _line(_RETURN, _ALLOW)]
    lines = _checked_calls(column, architecture)
    for name in ("io_uring_setup", "io_uring_enter", "io_uring_register"):  # which can create sockets, too
        lines += _if_equal(_REFUSED[name][0], [_refusal(errno.EPERM)])
    lines += _if_equal(_SOCKET[column], family) + _if_equal(_SOCKETPAIR[column], datagram)
    linux.seccomp(b"".join([*lines, _line(_RETURN, _ALLOW)]))


def _checked_calls(column: int, architecture: int) -> list[bytes]:
    """Refuses calls with numbers of another architecture, and loads the number of the call."""
    return [
        *_load(_ARCHITECTURE),
        *_unless_equal(architecture, errno.ENOSYS),
        *_load(_NUMBER),
        *([_line(_AT_LEAST, _X32, 0, 1), _refusal(errno.ENOSYS)] if column == 0 else []),
    ]


def _program(column: int, architecture: int, refused: dict[str, tuple[int, int | None]], *, only_wall: bool) -> bytes:
    lines = [
        *_checked_calls(column, architecture),
        # The flags of clone3 are in memory, which a filter cannot read. C libraries fall back to clone.
        *_if_equal(_CLONE3, [_refusal(errno.ENOSYS)]),
    ]
    for numbers in refused.values():
        number = numbers[column]
        if number is not None:
            lines += _if_equal(number, [_refusal(errno.EPERM)])
    lines += _if_equal(_CLONE[column], _refused_bits(0, _NAMESPACES))
    lines += _if_equal(_SOCKET[column], _sockets_of_tcp() if only_wall else _sockets())
    if only_wall:
        lines += _if_equal(_PRLIMIT[column], [*_argument(0), *_unless_equal(0, errno.EPERM), _line(_RETURN, _ALLOW)])
        for numbers, flags in _SENDS.values():
            # TCP Fast Open connects without a Landlock check.
            lines += _if_equal(numbers[column], _refused_bits(flags, _MSG_FASTOPEN))
    lines.append(_line(_RETURN, _ALLOW))
    return b"".join(lines)


def _sockets() -> list[bytes]:
    return [*_argument(0), *_one_of([int(family) for family in _FAMILIES], errno.EAFNOSUPPORT), _line(_RETURN, _ALLOW)]


def _sockets_of_tcp() -> list[bytes]:
    return [
        *_argument(0),
        *_one_of([int(socket.AF_INET), int(socket.AF_INET6)], errno.EAFNOSUPPORT),
        *_argument(1),
        _line(_AND, _KIND_MASK),
        *_one_of([int(socket.SOCK_STREAM)], errno.EPROTONOSUPPORT),
        *_argument(2),
        *_one_of([0, int(socket.IPPROTO_TCP)], errno.EPROTONOSUPPORT),
        _line(_RETURN, _ALLOW),
    ]


def _refused_bits(argument: int, bits: int) -> list[bytes]:
    return [*_argument(argument), _line(_ANY_BIT, bits, 0, 1), _refusal(errno.EPERM), _line(_RETURN, _ALLOW)]


def _one_of(values: list[int], error: int) -> list[bytes]:
    """Falls through if the loaded word is one of the values."""
    tests = [_line(_EQUAL, value, len(values) - index, 0) for index, value in enumerate(values)]
    return [*tests, _refusal(error)]


def _if_equal(value: int, then: list[bytes]) -> list[bytes]:
    return [_line(_EQUAL, value, 0, len(then)), *then]


def _unless_equal(value: int, error: int) -> list[bytes]:
    return [_line(_EQUAL, value, 1, 0), _refusal(error)]


def _load(offset: int) -> list[bytes]:
    return [_line(_LOAD, offset)]


def _argument(index: int) -> list[bytes]:
    """Loads the lower half of an argument: families, types and flags have 32 bits."""
    return _load(_ARGUMENTS + 8 * index)


def _refusal(error: int) -> bytes:
    return _line(_RETURN, _ERROR | error)


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
