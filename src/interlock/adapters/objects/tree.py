"""The files below one folder. Nothing here follows a symbolic link: none leads out of the root, or into it twice.

Each segment is opened by itself, relative to the one before, so there is no moment at which a path that was checked
could be exchanged for another. The root alone may be a link: it is the operator's.
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

from interlock.adapters.objects.keys import UPLOADS
from interlock.adapters.objects.port import Found, there_already
from interlock.errors import Conflict

_ROOT: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FOLDER: Final = _ROOT | os.O_NOFOLLOW
# A pipe that somebody put there must not hold the reader up before it is seen to be no file.
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DRAFT: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_TRIES: Final = 20
"""To put a file into a folder that others remove, as it was empty, at the same time."""


class Tree:
    """All of it blocks: callers are in a thread of their own."""

    def __init__(self, root: Path) -> None:
        self._root = root

    # Files

    def open(self, path: Sequence[str]) -> int | None:
        """A descriptor to read from; None when there is no such file."""
        try:
            with self.folder(path[:-1]) as parent:
                descriptor = os.open(path[-1], _FILE, dir_fd=parent)
        except OSError as error:
            if _is_nowhere(error):
                return None
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            return None
        return descriptor

    def draft(self, path: Sequence[str]) -> int:
        """A descriptor of a new file to write to."""
        for _ in range(_TRIES):
            with suppress(FileNotFoundError), self.folder(path[:-1], make=True) as parent:
                return os.open(path[-1], _DRAFT, 0o600, dir_fd=parent)
        raise _no_peace(path)

    def move(self, source: Sequence[str], target: Sequence[str], *, create: bool = False) -> None:
        """In one step, in place of a file that was there; PreconditionFailed if there is one and `create` is set."""
        for _ in range(_TRIES):
            with self.folder(source[:-1]) as there:
                os.stat(source[-1], dir_fd=there, follow_symlinks=False)
                with suppress(FileNotFoundError), _in_the_way(target), self.folder(target[:-1], make=True) as here:
                    _move(there, source[-1], here, target[-1], create=create)
                    return
        raise _no_peace(target)

    def remove(self, path: Sequence[str]) -> None:
        """Harmless when it is gone. A folder that is left empty goes with its last file."""
        try:
            with self.folder(path[:-1]) as parent:
                os.unlink(path[-1], dir_fd=parent)
        except OSError as error:
            if not (_is_nowhere(error) or isinstance(error, IsADirectoryError)):
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
        """Removes a folder with all that is in it; how many files there were."""
        try:
            with self.folder(path) as folder:
                cleared = _clear(folder)
        except OSError as error:
            if _is_nowhere(error):
                return 0
            raise
        self._prune(path)
        return cleared

    def files(self, path: Sequence[str], after: str) -> Iterator[tuple[str, os.stat_result]]:
        """Those below a folder, by key and in the order of the keys' bytes, behind the key `after`."""
        for name, status in self.entries(path):
            below = [*path, name]
            key = "/".join(below)
            if stat.S_ISDIR(status.st_mode):
                if after.startswith(f"{key}/") or os.fsencode(f"{key}/") > os.fsencode(after):
                    yield from self.files(below, after)
            elif stat.S_ISREG(status.st_mode) and os.fsencode(key) > os.fsencode(after):
                yield key, status

    def entries(self, path: Sequence[str]) -> list[tuple[str, os.stat_result]]:
        """Of a folder, in the order that the keys below it have."""
        try:
            with self.folder(path) as folder:
                found = _entries(folder)
        except OSError as error:
            if _is_nowhere(error):
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
                return  # somebody has something in there


def found(uri: str, status: os.stat_result) -> Found:
    """A new file has a number of its own, so whatever replaces an object has another tag."""
    etag = f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"
    return Found(uri, status.st_size, etag, datetime.fromtimestamp(status.st_mtime, UTC))


def _is_nowhere(error: OSError) -> bool:
    """A link on the way is as good as nothing: ELOOP at the end of the path, ENOTDIR before it."""
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
        # A second name, since a rename would silently replace what another writer has put there meanwhile.
        os.link(draft, name, src_dir_fd=there, dst_dir_fd=here, follow_symlinks=False)
        os.unlink(draft, dir_fd=there)
    else:
        os.rename(draft, name, src_dir_fd=there, dst_dir_fd=here)
    os.fsync(here)


@contextmanager
def _in_the_way(target: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise there_already() from None
    except (IsADirectoryError, NotADirectoryError):
        raise Conflict(
            f"{'/'.join(target)} cannot be an object in a directory: it is a folder of others, or another object is "
            "where its folder would be. Choose another key.",
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
        with suppress(OSError):  # gone, or somebody has put something in meanwhile
            os.rmdir(name, dir_fd=folder)
    return cleared


def _entries(folder: int) -> list[tuple[str, os.stat_result]]:
    return [entry for name in os.listdir(folder) if (entry := _entry(folder, name)) is not None]


def _entry(folder: int, name: str) -> tuple[str, os.stat_result] | None:
    """None when it is gone meanwhile, or has a name that no key can have."""
    if name != name.encode(errors="ignore").decode():
        return None
    with suppress(FileNotFoundError):
        return name, os.stat(name, dir_fd=folder, follow_symlinks=False)
    return None


def _no_peace(path: Sequence[str]) -> OSError:
    return OSError(errno.EBUSY, f"the folder of {'/'.join(path)} is removed again and again")
