"""Private files and their access lists, the lock on the folder of a server, and the size-limited log."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import stat
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO, Final

from interlock.stores.embedded.account import Account

LOG_BYTES: Final = 10 * 1024 * 1024
TICK: Final = 0.02
"""Poll interval in seconds for changes by another process."""


def write_private(path: Path, text: str, owner: Account | None = None) -> None:
    """Writes `text` atomically to a file that only its owner can read.

    Writes nothing if nothing changes, so that a server can restart on a full disk.
    """
    if path.is_file() and not path.is_symlink() and path.read_text() == text:
        return
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    if owner is not None:
        owner.own(draft)
    draft.replace(path)


def sync_folder(folder: Path) -> None:
    """Makes a rename in `folder` durable across a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_log(path: Path) -> BinaryIO:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def trim_log(path: Path, limit: int = LOG_BYTES) -> None:
    """Moves the content of a log over `limit` bytes to `{path}.1`.

    The server has the file open for appending, so the file is truncated in place instead of renamed.
    """
    if not path.is_file() or path.stat().st_size <= limit:
        return
    earlier = path.with_name(f"{path.name}.1")
    earlier.unlink(missing_ok=True)
    shutil.copyfile(path, earlier)
    earlier.chmod(0o600)
    os.truncate(path, 0)


def last_lines(path: Path, since: int, count: int = 15) -> list[str]:
    """Returns the last lines of a log, ignoring its first `since` bytes."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(since if since <= size else 0, size - 16_384))
        return file.read().decode(errors="replace").splitlines()[-count:]


@asynccontextmanager
async def locked(path: Path, patience: float) -> AsyncIterator[None]:
    """Holds a kernel lock on `path`, which is released when its holder ends for any reason."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while not _try_lock(handle):
            if loop.time() > deadline:
                raise TimeoutError(f"another process has been starting this server for {patience:.0f} s")
            await asyncio.sleep(TICK)
        yield
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


_NAME: Final = "system.posix_acl_access"
_VERSION: Final = struct.pack("<I", 2)
_ENTRY: Final = struct.Struct("<HHI")
_OWNER, _USER, _GROUP, _NAMED_GROUP, _MASK, _OTHERS = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
_NOBODY: Final = 0xFFFF_FFFF
_EXECUTE: Final = 0o1

_Entries = dict[tuple[int, int], int]
"""Rights by tag and id."""


def let_pass(folder: Path, uid: int) -> bool:
    """Lets `uid` traverse the folder. Returns False if the file system does not support access control lists."""
    if sys.platform != "linux":
        return False
    entries = _read(folder)
    if entries is None:
        return False
    entries[_USER, uid] = entries.get((_USER, uid), 0) | _EXECUTE
    # The mask limits the group and all named entries: they keep their effective rights and get no others.
    before = entries.get((_MASK, _NOBODY), entries[_GROUP, _NOBODY])
    entries[_MASK, _NOBODY] = before | _EXECUTE
    for key in entries:
        if key != (_USER, uid) and key[0] in (_USER, _GROUP, _NAMED_GROUP):
            entries[key] &= before
    packed = b"".join(_ENTRY.pack(tag, rights, who) for (tag, who), rights in sorted(entries.items()))
    try:
        os.setxattr(folder, _NAME, _VERSION + packed)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        return False
    return True


def passes(folder: Path, uid: int) -> bool:
    """Returns True if an ACL entry lets `uid` traverse the folder."""
    entries = (_read(folder) or {}) if sys.platform == "linux" else {}
    rights = entries.get((_USER, uid), 0) & entries.get((_MASK, _NOBODY), 0)
    return bool(rights & _EXECUTE)


def _read(folder: Path) -> _Entries | None:
    """Returns the list of a folder, or the equivalent of its mode; None without support for lists."""
    try:
        data = os.getxattr(folder, _NAME)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return None
        if error.errno != errno.ENODATA:
            raise
        mode = stat.S_IMODE(folder.stat().st_mode)
        return {(_OWNER, _NOBODY): mode >> 6 & 7, (_GROUP, _NOBODY): mode >> 3 & 7, (_OTHERS, _NOBODY): mode & 7}
    return {(tag, who): rights for tag, rights, who in _ENTRY.iter_unpack(data[len(_VERSION) :])}
