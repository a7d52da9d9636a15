"""Objects as files in a directory, which the gateway serves through signed URLs.

Incomplete uploads are drafts of single uploads and parts of multipart uploads:

{root}/_uploads/{draft}                 becomes an object, or a part, by a rename
{root}/_uploads/{upload_id}/target      the key that the parts are for
{root}/_uploads/{upload_id}/{part}      the parts, each complete

No key can name these files. A process that dies leaves some behind; a sweep removes those without recent changes.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import os
import re
import secrets
import stat
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

from interlock.errors import BadRequest, ConfigurationError, NotFound, Unavailable
from interlock.failpoints import failpoint
from interlock.stores.objects.port import (
    UPLOADS,
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

MAX_PARTS: Final = 10_000
_WRITTEN_AT_ONCE: Final = 1 << 20
_TARGET: Final = "target"
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UPLOAD_ID: Final = re.compile(r"[0-9a-f]{32}")

P = ParamSpec("P")
T = TypeVar("T")


async def on_disk(call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Runs a call in a thread.

    Waits for the thread even if cancelled, because the caller closes its descriptor next.
    """
    working = asyncio.ensure_future(asyncio.to_thread(call, *arguments, **named))
    try:
        return await asyncio.shield(working)
    except OSError as error:
        raise _disk_error(error) from error
    except asyncio.CancelledError:
        while not working.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({working})
        working.exception()  # asyncio would log an exception that is never retrieved
        raise


class Draft:
    """A file that is being written, under a name that is not a valid key."""

    def __init__(self, tree: Tree) -> None:
        self.path = [UPLOADS, secrets.token_hex(16)]
        self.descriptor = tree.draft(self.path)

    def append(self, chunks: Iterable[bytes]) -> None:
        for chunk in chunks:
            view = memoryview(chunk)
            while view:
                view = view[os.write(self.descriptor, view) :]

    def finish(self) -> os.stat_result:
        os.fsync(self.descriptor)
        return os.fstat(self.descriptor)

    async def take(self, chunks: AsyncIterator[bytes], limit: int | None) -> os.stat_result:
        """Writes all chunks to disk. Raises TooLarge over `limit` bytes."""
        waiting, held, size = [], 0, 0
        async for chunk in chunks:
            size, held = size + len(chunk), held + len(chunk)
            if limit is not None and size > limit:
                raise too_large(limit)
            waiting.append(chunk)
            if held >= _WRITTEN_AT_ONCE:
                await on_disk(self.append, waiting)
                waiting, held = [], 0
        await on_disk(self.append, waiting)
        return await on_disk(self.finish)


class Uploads:
    def __init__(self, tree: Tree, uri_of: Callable[[str], str]) -> None:
        self._tree = tree
        self._uri_of = uri_of

    @asynccontextmanager
    async def draft(self) -> AsyncIterator[Draft]:
        """Yields a draft, and deletes it at the end unless it was moved."""
        draft = await on_disk(Draft, self._tree)
        try:
            yield draft
        finally:
            await on_disk(self.discard, draft)

    def discard(self, draft: Draft) -> None:
        os.close(draft.descriptor)
        with suppress(FileNotFoundError), self._tree.folder([UPLOADS]) as folder:
            os.unlink(draft.path[-1], dir_fd=folder)

    async def place(self, draft: Draft, key: str, *, create: bool = False) -> None:
        """Turns the draft into the object with this key."""
        await failpoint("object.before_visible")
        await on_disk(self._tree.move, draft.path, key.split("/"), create=create)

    async def start(self, key: str) -> str:
        """Starts an upload for this key and returns its id."""
        upload_id = secrets.token_hex(16)
        async with self.draft() as draft:
            await on_disk(draft.append, [key.encode()])
            await on_disk(draft.finish)
            await on_disk(self._tree.move, draft.path, [UPLOADS, upload_id, _TARGET])
        return upload_id

    async def put_part(self, key: str, upload_id: str, number: int, chunks: AsyncIterator[bytes], limit: int) -> Found:
        """Writes or replaces a part. All parts of an upload together may have at most `limit` bytes."""
        if not 1 <= number <= MAX_PARTS:
            raise BadRequest(f"partNumber must be from 1 to {MAX_PARTS}, got {number}.", code="bad_part")
        parts = await on_disk(self._parts, key, upload_id)
        others = sum(part.size for n, part in parts.items() if n != number)
        async with self.draft() as draft:
            status = await draft.take(chunks, limit - others)
            await on_disk(self._parts, key, upload_id)  # the upload may have ended in the meantime
            await on_disk(self._tree.move, draft.path, _part(upload_id, number))
        return found(self._uri_of(key), status)

    async def complete(self, key: str, upload_id: str, named: Sequence[tuple[int, str]], limit: int) -> Found:
        """Concatenates the named parts, in order, to one object. Idempotent."""
        parts = await on_disk(self._parts, key, upload_id)
        _require_parts(named, parts, limit)
        async with self.draft() as draft:
            for number, _ in named:
                await on_disk(self._append_part, draft, upload_id, number)
            status = await on_disk(draft.finish)
            await self.place(draft, key)
        await failpoint("object.visible")
        await on_disk(self._tree.clear, [UPLOADS, upload_id])
        return found(self._uri_of(key), status)

    async def abort(self, key: str, upload_id: str) -> None:
        await on_disk(self._parts, key, upload_id)
        await on_disk(self._tree.clear, [UPLOADS, upload_id])

    def sweep(self, before: datetime) -> int:
        """Removes old uploads. Each new part changes the folder, so an active upload is never old."""
        swept = 0
        for name, status in self._tree.entries([UPLOADS]):
            if status.st_mtime >= before.timestamp():
                continue
            swept += 1
            if stat.S_ISDIR(status.st_mode):
                self._tree.clear([UPLOADS, name])
            else:
                self._tree.remove([UPLOADS, name])
        return swept

    def _parts(self, key: str, upload_id: str) -> dict[int, Found]:
        """Returns the parts. Raises NotFound unless the upload belongs to exactly this key."""
        if not _UPLOAD_ID.fullmatch(upload_id) or not hmac.compare_digest(self._target(upload_id), key.encode()):
            raise _no_upload()
        entries = self._tree.entries([UPLOADS, upload_id])
        return {int(name): found(name, status) for name, status in entries if name != _TARGET}

    def _target(self, upload_id: str) -> bytes:
        descriptor = self._tree.open([UPLOADS, upload_id, _TARGET])
        if descriptor is None:
            raise _no_upload()
        with os.fdopen(descriptor, "rb") as file:
            return file.read()

    def _append_part(self, draft: Draft, upload_id: str, number: int) -> None:
        descriptor = self._tree.open(_part(upload_id, number))
        if descriptor is None:
            raise _no_upload()
        with os.fdopen(descriptor, "rb") as part:
            draft.append(iter(lambda: part.read(_WRITTEN_AT_ONCE), b""))


def _part(upload_id: str, number: int) -> list[str]:
    return [UPLOADS, upload_id, f"{number:05}"]


def _require_parts(named: Sequence[tuple[int, str]], parts: dict[int, Found], limit: int) -> None:
    numbers = [number for number, _ in named]
    if not numbers or numbers != sorted(set(numbers)):
        raise BadRequest("Name at least one part, each part once, and in ascending order.", code="bad_part")
    for number, etag in named:
        if number not in parts or parts[number].etag != etag:
            raise BadRequest(f"Part {number} with this ETag does not exist; upload it again.", code="bad_part")
    if sum(parts[number].size for number in numbers) > limit:
        raise too_large(limit)


def _disk_error(error: OSError) -> Unavailable:
    why = error.strerror or type(error).__name__
    if error.errno in _NO_ROOM:
        return Unavailable(
            f"No disk space for the object ({why}): free space on the disk of objects_url.", code="object_store_full"
        )
    return Unavailable(f"The object directory is not usable ({why}): check objects_url.")


def _no_upload() -> NotFound:
    return NotFound("This upload does not exist for this object; start a new one.", code="no_such_upload")


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
