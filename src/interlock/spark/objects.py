"""Reads and writes single objects by their URI, in a folder or in any store that obstore supports.

Writes to a folder are atomic: the file is written under a temporary name, synced and renamed.
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
import pyarrow as pa
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import ObjectStore, from_url

from interlock.schemas import MAX_FOOTER_BYTES, PARQUET_END_BYTES, footer_bytes
from interlock.workers.failures import CorruptFile, DiskFull, FileMissing, ObjectStoreAway, PrefixSwept

_FOLDER: Final = "file://"
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def folder_path(uri: str) -> Path | None:
    """Returns the local path of a `file://` URI, else None."""
    return Path(uri.removeprefix(_FOLDER)) if uri.startswith(_FOLDER) else None


@contextmanager
def replacing(uri: str) -> Iterator[Path]:
    """Yields a local path to write to, and publishes it as the object if the block succeeds.

    Raises DiskFull, PrefixSwept or ObjectStoreAway.
    """
    target = folder_path(uri)
    with _readable_errors(uri):
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
    """Creates the folder and its missing parents with mode 0700, whatever the umask."""
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def read(uri: str) -> bytes:
    """Returns the content of an object. Raises FileMissing or ObjectStoreAway."""
    path = folder_path(uri)
    with _readable_errors(uri):
        try:
            if path is not None:
                return path.read_bytes()
            store, key = _opened(uri)
            return bytes(obstore.get(store, key).bytes())
        except (FileNotFoundError, NotFoundError):
            raise FileMissing(
                f"{uri} no longer exists: retention deleted it after it was replaced, or it was deleted by hand."
            ) from None


def open_parquet(uri: str) -> pa.NativeFile:
    """Opens a Parquet file, and limits its footer before it is parsed: untrusted code may have written the file.

    Raises CorruptFile, FileMissing or ObjectStoreAway.
    """
    path = folder_path(uri)
    file = pa.BufferReader(read(uri)) if path is None or not path.is_file() else pa.OSFile(str(path))
    file.seek(max(0, file.size() - PARQUET_END_BYTES))
    if (length := footer_bytes(file.read(PARQUET_END_BYTES))) > MAX_FOOTER_BYTES:
        file.close()
        raise CorruptFile(
            f"{uri} has a Parquet footer of {length} bytes; the limit is {MAX_FOOTER_BYTES}: write fewer row groups, "
            "and recompute its range (interlock dataset invalidate)."
        )
    file.seek(0)
    return file


def write(uri: str, content: bytes) -> None:
    with replacing(uri) as draft:
        draft.write_bytes(content)


def remove_prefix(prefix: str) -> None:
    """Deletes all objects under a prefix, best effort. A later sweep deletes the rest."""
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
    """Returns the bucket and the key in it. Credentials come from the machine or the environment."""
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
def _readable_errors(uri: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise DiskFull(
                f"The disk has no space to write {uri} ({error.strerror}): free space on the disk of objects_url."
            ) from None
        if isinstance(error, FileNotFoundError):
            raise PrefixSwept(
                f"The folder of {uri} was deleted during the write: this attempt has lost its lease."
            ) from None
        raise
    except BaseError as error:
        raise ObjectStoreAway(
            f"The object store failed to read or write {uri} ({type(error).__name__}): check objects_url, and the "
            "credentials of Spark's executors."
        ) from None
