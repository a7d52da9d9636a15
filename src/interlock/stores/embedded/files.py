"""Private files, the lock on the folder of a server, and the size-limited log."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
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
