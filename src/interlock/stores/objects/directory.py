"""Objects as files in a directory, which the gateway serves through signed URLs."""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import AsyncIterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Final

from interlock.errors import ConfigurationError
from interlock.stores.objects.port import (
    Found,
    Method,
    Objects,
    SignUrl,
    as_object,
    as_prefix,
    canonical_key,
    require_lifetime,
    too_large,
)
from interlock.stores.objects.tree import Tree, found
from interlock.stores.objects.uploads import Draft, Uploads, on_disk

SCHEME: Final = "file://"
_READ_AT_ONCE: Final = 1 << 20
_LISTED_AT_ONCE: Final = 1000


class DirectoryObjects(Objects):
    def __init__(self, root: str, sign_url: SignUrl | None = None) -> None:
        super().__init__(root)
        self._tree = Tree(Path(self.root.removeprefix(SCHEME)))
        self._sign_url = sign_url
        self.uploads = Uploads(self._tree, self.uri)

    async def read(self, uri: str, limit: int | None = None) -> bytes | None:
        return await on_disk(self._read, as_object(self.key(uri)), limit)

    async def read_range(self, uri: str, start: int, length: int) -> bytes | None:
        return await on_disk(self._read_range, as_object(self.key(uri)), start, length)

    async def read_to(self, uri: str, path: Path, limit: int) -> Found | None:
        return await on_disk(self._read_to, as_object(self.key(uri)), path, limit)

    async def head(self, uri: str) -> Found | None:
        opened = await self.open(uri)
        if opened is None:
            return None
        opened.close()
        return opened.found

    async def open(self, uri: str) -> OpenObject | None:
        """Opens an object. The caller closes it, or reads its chunks to the end."""
        descriptor = await on_disk(self._open, as_object(self.key(uri)))
        return None if descriptor is None else OpenObject(uri, descriptor)

    async def write(
        self, uri: str, chunks: AsyncIterator[bytes], *, limit: int | None = None, create: bool = False
    ) -> Found:
        key = as_object(self.key(uri))
        async with self.uploads.draft() as draft:
            status = await draft.take(chunks, limit)
            await self.uploads.place(draft, key, create=create)
        return found(uri, status)

    async def put(self, uri: str, data: bytes, *, create: bool = False) -> Found:
        """Writes in a single thread call, because small objects are frequent."""
        return await on_disk(self._put, as_object(self.key(uri)), data, create=create)

    async def list_under(self, prefix: str, *, after: str | None = None) -> AsyncIterator[Found]:
        """Lists objects in bytewise key order, after the object `after`."""
        path = _folder(prefix, self)
        listed = self._tree.files(path, "" if after is None else as_object(self.key(after)))
        while page := await on_disk(lambda: list(islice(listed, _LISTED_AT_ONCE))):
            for key, status in page:
                yield found(self.uri(key), status)

    async def delete(self, uri: str) -> None:
        await on_disk(self._tree.remove, as_object(self.key(uri)).split("/"))

    async def delete_under(self, prefix: str) -> int:
        return await on_disk(self._tree.clear, as_prefix(self.key(prefix)).split("/")[:-1])

    async def sign(self, method: Method, uri: str, seconds: float) -> str:
        if self._sign_url is None:
            raise ConfigurationError("This process has no signing keys, so it cannot sign object URLs.")
        require_lifetime(seconds)
        return await self._sign_url(method, canonical_key(self.key(uri)), seconds)

    async def sweep_uploads(self, before: datetime) -> int:
        return await on_disk(self.uploads.sweep, before)

    def _open(self, key: str) -> int | None:
        return self._tree.open(key.split("/"))

    def _read(self, key: str, limit: int | None) -> bytes | None:
        descriptor = self._open(key)
        if descriptor is None:
            return None
        with os.fdopen(descriptor, "rb") as file:
            size = os.fstat(descriptor).st_size
            if limit is not None and size > limit:
                raise too_large(limit)
            return file.read(size)  # read no more, because the writer may continue to write

    def _read_range(self, key: str, start: int, length: int) -> bytes | None:
        descriptor = self._open(key)
        if descriptor is None:
            return None
        with os.fdopen(descriptor, "rb") as file:
            file.seek(start)
            return file.read(length)

    def _read_to(self, key: str, path: Path, limit: int) -> Found | None:
        descriptor = self._open(key)
        if descriptor is None:
            return None
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size > limit:
                raise too_large(limit)
            with path.open("wb") as copy:
                while chunk := file.read(_READ_AT_ONCE):
                    copy.write(chunk)
        return found(self.uri(key), status)

    def _put(self, key: str, data: bytes, *, create: bool) -> Found:
        draft = Draft(self._tree)
        try:
            draft.append([data])
            status = draft.finish()
            self._tree.move(draft.path, key.split("/"), create=create)
        finally:
            self.uploads.discard(draft)
        return found(self.uri(key), status)


class OpenObject:
    """An open object. It keeps its content even if the object is replaced."""

    def __init__(self, uri: str, descriptor: int) -> None:
        self._descriptor = descriptor
        self.found = found(uri, os.fstat(descriptor))
        # Closes on garbage collection at the latest: a response may end before its first chunk is read.
        self.close = weakref.finalize(self, os.close, descriptor)

    async def chunks(self, start: int, length: int) -> AsyncIterator[bytes]:
        try:
            while length > 0:
                chunk = await on_disk(os.pread, self._descriptor, min(length, _READ_AT_ONCE), start)
                if not chunk:
                    raise OSError(errno.EIO, "the object was truncated while it was read")
                yield chunk
                start, length = start + len(chunk), length - len(chunk)
        finally:
            self.close()


def _folder(prefix: str, objects: Objects) -> list[str]:
    """Returns the path of a prefix; the root itself is also a prefix."""
    if prefix == f"{objects.root}/":
        return []
    return as_prefix(objects.key(prefix)).split("/")[:-1]
