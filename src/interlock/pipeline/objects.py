"""Single objects by their URI, from wherever a task's code runs: a folder, or a store that obstore knows.

A file in a folder appears whole or not at all: it is written beside its place, synced and renamed.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import obstore
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import ObjectStore, from_url

from interlock.pipeline.failures import DiskFull, FileMissing, ObjectStoreAway, PrefixSwept

_FOLDER: Final = "file://"
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def folder_path(uri: str) -> Path | None:
    """Of an object that is a file here."""
    return Path(uri.removeprefix(_FOLDER)) if uri.startswith(_FOLDER) else None


@contextmanager
def replacing(uri: str) -> Iterator[Path]:
    """A local file to write to; it becomes the object when the block ends well. Raises DiskFull and the like."""
    target = folder_path(uri)
    with _in_a_sentence(uri):
        if target is None:
            with tempfile.NamedTemporaryFile(prefix="interlock-") as local:
                yield Path(local.name)
                _put(uri, Path(local.name))
            return
        _make_private(target.parent)
        draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
        try:
            yield draft
            draft.chmod(0o600)
            _sync(draft)
            draft.replace(target)
            _sync(target.parent)
        finally:
            draft.unlink(missing_ok=True)


def _make_private(folder: Path) -> None:
    """Makes the folder and those above it that are missing, for this user alone, whatever the umask is."""
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def read(uri: str) -> bytes:
    """Raises FileMissing and ObjectStoreAway."""
    path = folder_path(uri)
    with _in_a_sentence(uri):
        try:
            if path is not None:
                return path.read_bytes()
            store, key = _opened(uri)
            return bytes(obstore.get(store, key).bytes())
        except (FileNotFoundError, NotFoundError):
            raise FileMissing(f"{uri} is gone: it was replaced long ago, or deleted by hand.") from None


def write(uri: str, content: bytes) -> None:
    with replacing(uri) as draft:
        draft.write_bytes(content)


def remove_prefix(prefix: str) -> None:
    """As far as it can be done now: what is left is swept later."""
    folder = folder_path(prefix)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
        return
    with suppress(BaseError, OSError):
        store, key = _opened(prefix)
        for found in obstore.list(store, key):
            obstore.delete(store, [meta["path"] for meta in found])


def _put(uri: str, local: Path) -> None:
    store, key = _opened(uri)
    obstore.put(store, key, local)


def _opened(uri: str) -> tuple[ObjectStore, str]:
    """The bucket, and the key in it. Credentials are those of the machine or its environment."""
    scheme, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    return from_url(f"{scheme}://{bucket}"), key


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _in_a_sentence(uri: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise DiskFull(
                f"There is no room to write {uri} ({error.strerror}): free some on the disk of objects_url."
            ) from None
        if isinstance(error, FileNotFoundError):
            raise PrefixSwept(
                f"The folder of {uri} was removed while it was written: the attempt has lost its task."
            ) from None
        raise
    except BaseError as error:
        raise ObjectStoreAway(
            f"The object store does not take or give {uri} ({type(error).__name__}): check objects_url, and the "
            "credentials where Spark's executors run."
        ) from None
