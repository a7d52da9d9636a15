"""Access to files below one folder, without following symbolic links.

Each path component is opened relative to the one before, so a checked path cannot be swapped in between. Only the root
itself may be a link, because the operator controls it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from interlock.errors import Conflict
from interlock.stores.objects.port import UPLOADS, Found, already_exists

_ROOT: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FOLDER: Final = _ROOT | os.O_NOFOLLOW
# O_NONBLOCK: a planted pipe must not block the reader before it is recognized as a non-file.
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DRAFT: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_TRIES: Final = 20
"""Attempts to create a file in a folder that others concurrently remove because it is empty."""


class Tree:
    """File operations. All of them block, so callers use a thread."""

    def __init__(self, root: Path) -> None:
        self._root = root

    # Files

    def open(self, path: Sequence[str]) -> int | None:
        """Opens a file for reading. Returns a descriptor, or None if the file does not exist."""
        try:
            with self.folder(path[:-1]) as parent:
                descriptor = os.open(path[-1], _FILE, dir_fd=parent)
        except OSError as error:
            if _is_missing(error):
                return None
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            return None
        return descriptor

    def draft(self, path: Sequence[str]) -> int:
        """Creates a file for writing and returns its descriptor."""
        for _ in range(_TRIES):
            with suppress(FileNotFoundError), self.folder(path[:-1], make=True) as parent:
                return os.open(path[-1], _DRAFT, 0o600, dir_fd=parent)
        raise _removed_repeatedly(path)

    def move(self, source: Sequence[str], target: Sequence[str], *, create: bool = False) -> None:
        """Moves a file atomically and replaces an existing one.

        With `create`, raises PreconditionFailed if one exists.
        """
        for _ in range(_TRIES):
            with self.folder(source[:-1]) as there:
                os.stat(source[-1], dir_fd=there, follow_symlinks=False)
                with suppress(FileNotFoundError), _conflicts(target), self.folder(target[:-1], make=True) as here:
                    _move(there, source[-1], here, target[-1], create=create)
                    return
        raise _removed_repeatedly(target)

    def remove(self, path: Sequence[str]) -> None:
        """Removes a file if it exists, and folders that are empty without it."""
        try:
            with self.folder(path[:-1]) as parent:
                os.unlink(path[-1], dir_fd=parent)
        except OSError as error:
            if not (_is_missing(error) or isinstance(error, IsADirectoryError)):
                raise
        self._prune(path[:-1])

    # Folders

    @contextmanager
    def folder(self, path: Sequence[str], *, make: bool = False) -> Iterator[int]:
        if make:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        here = os.open(self._root, _ROOT)
        try:
            for segment in path:
                below = _step(here, segment, make=make)
                os.close(here)
                here = below
            yield here
        finally:
            os.close(here)

    def clear(self, path: Sequence[str]) -> int:
        """Removes a folder with its content and returns the number of files."""
        try:
            with self.folder(path) as folder:
                cleared = _clear(folder)
        except OSError as error:
            if _is_missing(error):
                return 0
            raise
        self._prune(path)
        return cleared

    def files(self, path: Sequence[str], after: str) -> Iterator[tuple[str, os.stat_result]]:
        """Yields files below a folder in bytewise key order, after the key `after`."""
        for name, status in self.entries(path):
            below = [*path, name]
            key = "/".join(below)
            if stat.S_ISDIR(status.st_mode):
                if after.startswith(f"{key}/") or os.fsencode(f"{key}/") > os.fsencode(after):
                    yield from self.files(below, after)
            elif stat.S_ISREG(status.st_mode) and os.fsencode(key) > os.fsencode(after):
                yield key, status

    def entries(self, path: Sequence[str]) -> list[tuple[str, os.stat_result]]:
        """Returns the entries of a folder, in the order of the keys below it."""
        try:
            with self.folder(path) as folder:
                found = _entries(folder)
        except OSError as error:
            if _is_missing(error):
                return []
            raise
        shown = [entry for entry in found if path or entry[0] != UPLOADS]
        return sorted(shown, key=lambda entry: os.fsencode(entry[0] + "/" * stat.S_ISDIR(entry[1].st_mode)))

    def _prune(self, path: Sequence[str]) -> None:
        for depth in range(len(path), 0, -1):
            try:
                with self.folder(path[: depth - 1]) as parent:
                    os.rmdir(path[depth - 1], dir_fd=parent)
            except FileNotFoundError:
                continue
            except OSError:
                return  # the folder is not empty


def found(uri: str, status: os.stat_result) -> Found:
    """Returns the metadata of a file. A new file has a new inode, so a replaced object always gets another ETag."""
    etag = f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"
    return Found(uri, status.st_size, etag, datetime.fromtimestamp(status.st_mtime, UTC))


def _is_missing(error: OSError) -> bool:
    """Returns True for errors of a missing file.

    A link counts as missing: ELOOP at the end of a path, ENOTDIR before.
    """
    return isinstance(error, FileNotFoundError | NotADirectoryError) or error.errno in (errno.ELOOP, errno.ENAMETOOLONG)


def _step(here: int, segment: str, *, make: bool) -> int:
    try:
        return os.open(segment, _FOLDER, dir_fd=here)
    except FileNotFoundError:
        if not make:
            raise
    with suppress(FileExistsError):
        os.mkdir(segment, 0o700, dir_fd=here)
        os.fsync(here)
    return os.open(segment, _FOLDER, dir_fd=here)


def _move(there: int, draft: str, here: int, name: str, *, create: bool) -> None:
    if create:
        # A hard link, because a rename would silently replace a file that another writer created in the meantime.
        os.link(draft, name, src_dir_fd=there, dst_dir_fd=here, follow_symlinks=False)
        os.unlink(draft, dir_fd=there)
    else:
        os.rename(draft, name, src_dir_fd=there, dst_dir_fd=here)
    os.fsync(here)


@contextmanager
def _conflicts(target: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise already_exists() from None
    except (IsADirectoryError, NotADirectoryError):
        raise Conflict(
            f"{'/'.join(target)} cannot be an object in a directory: it is a folder, or another object has the name of "
            "one of its folders. Choose another key.",
            code="object_in_the_way",
        ) from None


def _clear(folder: int) -> int:
    cleared = 0
    for name in os.listdir(folder):
        try:
            below = os.open(name, _FOLDER, dir_fd=folder)
        except FileNotFoundError:
            continue
        except OSError:
            os.unlink(name, dir_fd=folder)
            cleared += 1
            continue
        try:
            cleared += _clear(below)
        finally:
            os.close(below)
        with suppress(OSError):  # removed, or no longer empty
            os.rmdir(name, dir_fd=folder)
    return cleared


def _entries(folder: int) -> list[tuple[str, os.stat_result]]:
    return [entry for name in os.listdir(folder) if (entry := _entry(folder, name)) is not None]


def _entry(folder: int, name: str) -> tuple[str, os.stat_result] | None:
    """Returns an entry, or None if it was removed or has a name that no key can have."""
    if name != name.encode(errors="ignore").decode():
        return None
    with suppress(FileNotFoundError):
        return name, os.stat(name, dir_fd=folder, follow_symlinks=False)
    return None


def _removed_repeatedly(path: Sequence[str]) -> OSError:
    return OSError(errno.EBUSY, f"the folder of {'/'.join(path)} is removed repeatedly")
