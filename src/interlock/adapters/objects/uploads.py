"""What is not an object yet: drafts of single uploads, and the parts of larger ones.

{root}/_uploads/{draft}                 becomes an object, or a part, by a rename
{root}/_uploads/{upload_id}/target      the key that the parts are for
{root}/_uploads/{upload_id}/{part}      its parts, each whole

No key leads there. A process that dies leaves things behind; a sweep removes what has not changed for long.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import os
import re
import secrets
import stat
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from typing import Final, ParamSpec, TypeVar

from interlock.adapters.objects.keys import UPLOADS
from interlock.adapters.objects.port import Found, too_large
from interlock.adapters.objects.tree import Tree, found
from interlock.errors import BadRequest, NotFound, Unavailable
from interlock.failpoints import failpoint

MOST_PARTS: Final = 10_000
_WRITTEN_AT_ONCE: Final = 1 << 20
_TARGET: Final = "target"
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UPLOAD_ID: Final = re.compile(r"[0-9a-f]{32}")

P = ParamSpec("P")
T = TypeVar("T")


async def on_disk(call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """In a thread, which is waited for even by who is cancelled: it works on a descriptor that will be closed next."""
    working = asyncio.ensure_future(asyncio.to_thread(call, *arguments, **named))
    try:
        return await asyncio.shield(working)
    except OSError as error:
        raise _in_a_sentence(error) from error
    except asyncio.CancelledError:
        while not working.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({working})
        working.exception()  # nobody else will ask for it
        raise


class Draft:
    """A file that is being written, under a name that is nobody's key."""

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

    async def take(self, chunks: AsyncIterator[bytes], most: int | None) -> os.stat_result:
        """All of it, on the disk. Raises TooLarge past `most` bytes."""
        waiting, held, size = [], 0, 0
        async for chunk in chunks:
            size, held = size + len(chunk), held + len(chunk)
            if most is not None and size > most:
                raise too_large(most)
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
        """Gone at the end, unless it has become something else."""
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
        """From here on it is the object of this key."""
        await failpoint("object.before_visible")
        await on_disk(self._tree.move, draft.path, key.split("/"), create=create)

    async def start(self, key: str) -> str:
        """The id of a new upload for this key."""
        upload_id = secrets.token_hex(16)
        async with self.draft() as draft:
            await on_disk(draft.append, [key.encode()])
            await on_disk(draft.finish)
            await on_disk(self._tree.move, draft.path, [UPLOADS, upload_id, _TARGET])
        return upload_id

    async def put_part(self, key: str, upload_id: str, number: int, chunks: AsyncIterator[bytes], most: int) -> Found:
        """In place of a part of this number that was there. The parts of an upload have at most `most` bytes in all."""
        if not 1 <= number <= MOST_PARTS:
            raise BadRequest(f"partNumber is between 1 and {MOST_PARTS}.", code="bad_part")
        parts = await on_disk(self._parts, key, upload_id)
        others = sum(part.size for n, part in parts.items() if n != number)
        async with self.draft() as draft:
            status = await draft.take(chunks, most - others)
            await on_disk(self._parts, key, upload_id)  # it may have ended meanwhile
            await on_disk(self._tree.move, draft.path, _part(upload_id, number))
        return found(self._uri_of(key), status)

    async def complete(self, key: str, upload_id: str, named: Sequence[tuple[int, str]], most: int) -> Found:
        """Makes one object of the parts that are named, in their order. Doing so twice is doing it once."""
        parts = await on_disk(self._parts, key, upload_id)
        _require_parts(named, parts, most)
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
        """A part that arrives changes its folder, so an upload that goes on is never old."""
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
        """Raises NotFound when there is no such upload for this very key."""
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


def _require_parts(named: Sequence[tuple[int, str]], parts: dict[int, Found], most: int) -> None:
    numbers = [number for number, _ in named]
    if not numbers or numbers != sorted(set(numbers)):
        raise BadRequest("Name at least one part, and each once, in the order of their numbers.", code="bad_part")
    for number, etag in named:
        if number not in parts or parts[number].etag != etag:
            raise BadRequest(f"Part {number} is not there with this etag; put it again.", code="bad_part")
    if sum(parts[number].size for number in numbers) > most:
        raise too_large(most)


def _in_a_sentence(error: OSError) -> Unavailable:
    why = error.strerror or type(error).__name__
    if error.errno in _NO_ROOM:
        return Unavailable(
            f"There is no room for the object ({why}): free some on the disk of objects_url.", code="object_store_full"
        )
    return Unavailable(f"The directory of objects does not work ({why}): check objects_url.")


def _no_upload() -> NotFound:
    return NotFound("There is no such upload for this object: it has ended, or begin another.", code="no_such_upload")
