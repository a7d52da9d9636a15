"""Landlock: restricts the files, ports and signals that this process and its child processes can use.

Requires Linux 5.13 or newer, and no privileges. A restriction applies to the calling thread and to threads it starts
later, so call it while the process has a single thread. It cannot be undone.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import struct
import sys
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any, Final

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""Syscall numbers, which are the same on every architecture."""
_VERSION_FLAG: Final = 1
_RULE_PATH_BENEATH: Final = 1
_RULE_NET_PORT: Final = 2
_PR_SET_NO_NEW_PRIVS: Final = 38

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = (1 << bit for bit in range(4))
_REMOVE_DIR, _REMOVE_FILE = 1 << 4, 1 << 5
_MAKE_DIR, _MAKE_REG = 1 << 7, 1 << 8
_TRUNCATE: Final = 1 << 14
_IOCTL_DEVICE: Final = 1 << 15
_OF_FILES: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
"""The rights that apply to files; all others apply to folders only."""

_FILE_RIGHTS: Final = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All file system rights per Landlock ABI version; version 5 is the last that added one."""
_TCP: Final = 0b11
"""The rights to bind and to connect TCP sockets, from version 4 on."""
_CONNECT_TCP: Final = 0b10
TCP_VERSION: Final = 4
SCOPE_VERSION: Final = 6
_SCOPES: Final = 0b11
"""Blocks abstract Unix sockets and signals of processes outside, from version 6 on."""


class Access(Enum):
    """The access allowed below a path."""

    READ = "read"
    ALL = "all"


class LandlockRefused(OSError):
    """Raised when the kernel rejects a rule. The caller must not continue unrestricted."""


def version() -> int:
    """Returns the Landlock ABI version, or 0 if the kernel does not support Landlock."""
    if sys.platform != "linux":
        return 0
    try:
        return max(0, _call(_CREATE_RULESET, None, 0, _VERSION_FLAG))
    except OSError:
        return 0


def restrict(
    readable: Iterable[Path], writable: Iterable[Path], *, programs: Iterable[Path] = (), ports: Iterable[int] = ()
) -> None:
    """Restricts this process to the given paths.

    It can read the `readable` files; create, change and remove files in the `writable` folders; and read and execute
    files below `programs`. If the kernel supports it, TCP connections are limited to `ports`, and signals to processes
    outside are blocked.
    """
    known = version()
    if not known:
        raise LandlockRefused("this kernel does not support Landlock; Linux 5.13 or newer is required")
    ruleset = _ruleset(known)
    try:
        in_folder = _WRITE_FILE | _READ_FILE | _READ_DIR | _REMOVE_FILE | _REMOVE_DIR | _MAKE_DIR | _MAKE_REG
        for folder in writable:
            _allow(ruleset, folder, in_folder | (_TRUNCATE if known >= 3 else 0))
        for file in readable:
            _allow(ruleset, file, _READ_FILE)
        for path in programs:
            _allow(ruleset, path, _EXECUTE | _READ_FILE | _READ_DIR)
        for port in ports if known >= TCP_VERSION else ():
            _call(_ADD_RULE, ruleset, _RULE_NET_PORT, struct.pack("=QQ", _CONNECT_TCP, port), 0)
        _libc_checked("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def restrict_files(rules: Iterable[tuple[Path, Access]]) -> None:
    """Restricts opening files to the given paths, each with its access. All folders can still be listed.

    The network stays open. Processes outside cannot be signalled or traced, so their memory and environment cannot be
    read, even by the same user.
    """
    known = version()
    if not known:
        raise LandlockRefused("this kernel does not support Landlock; Linux 5.13 or newer is required")
    ruleset = _ruleset(known, tcp=False)
    every = _FILE_RIGHTS[min(known, 5)]
    try:
        # Python finds modules by listing folders, and a rule covers everything below its path. File names are not
        # secret.
        _allow(ruleset, Path("/"), _READ_DIR)
        for path, access in rules:
            with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                _allow(ruleset, path, every if access is Access.ALL else _EXECUTE | _READ_FILE | _READ_DIR)
        _libc_checked("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _ruleset(known: int, *, tcp: bool = True) -> int:
    files = _FILE_RIGHTS[min(known, 5)]
    net = _TCP if known >= 4 and tcp else 0
    scopes = _SCOPES if known >= 6 else 0
    size = 24 if known >= 6 else 16 if known >= 4 else 8
    attributes = struct.pack("=QQQ", files, net, scopes)[:size]
    return _call(_CREATE_RULESET, attributes, size, 0)


def _allow(ruleset: int, path: Path, rights: int) -> None:
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    if not path.is_dir():
        rights &= _OF_FILES
    try:
        _call(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, struct.pack("=Qi", rights, handle), 0)
    finally:
        os.close(handle)


def _call(number: int, *arguments: int | bytes | None) -> int:
    words = [argument if isinstance(argument, bytes) or argument is None else _word(argument) for argument in arguments]
    return _libc_checked("syscall", _word(number), *words)


def _word(number: int) -> ctypes.c_long:
    return ctypes.c_long(number)


@functools.cache
def _libc_function(name: str) -> Any:
    """Typed as Any because ctypes functions have no static type."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.restype = ctypes.c_long
    return function


def _libc_checked(name: str, *arguments: object) -> int:
    result = int(_libc_function(name)(*arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise LandlockRefused(number, f"{name} of Landlock: {os.strerror(number)}")
    return result
