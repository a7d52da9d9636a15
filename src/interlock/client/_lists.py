"""Uploads long task lists in parts to the URLs that the gateway hands out, reading the file in small chunks."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeVar
from uuid import UUID, uuid4

import msgspec
from msgspec import Raw

from interlock.client._caller import Caller, path
from interlock.client._http import refuse_line_breaks
from interlock.errors import InterlockError, ServerUnreachable
from interlock.wire.jobs import (
    MAX_PARTS,
    ListFormat,
    ListSource,
    ListUpload,
    RunView,
    TasksAdded,
    TasksRequest,
    UploadRequest,
)

PART_BYTES: Final = 1 << 30
"""A longer list is uploaded in several parts. Compressed and CSV lists are not split: they cannot be cut at a line."""
_READ_BYTES: Final = 1 << 20
_PACKED: Final = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")
_raw = msgspec.json.Encoder()
T = TypeVar("T")

OnSent = Callable[[int, int], None]
"""Called with the bytes sent so far and the total."""


@dataclass(frozen=True)
class Span:
    """A byte range of a file that starts and ends at a line boundary."""

    start: int
    end: int


class ListCalls:
    """`client.lists`: uploads, and tasks for open runs."""

    def __init__(self, caller: Caller, verify: ssl.SSLContext | bool) -> None:
        self._caller = caller
        self._verify = verify

    async def upload(self, parts: int = 1, *, idempotency_key: str | None = None) -> ListUpload:
        """Requests upload URLs for a list."""
        return await self._post("/v1/uploads", ListUpload, UploadRequest(parts=parts), idempotency_key)

    async def put(
        self,
        file: Path,
        form: ListFormat = ListFormat.JSONL,
        *,
        part_bytes: int = PART_BYTES,
        on_sent: OnSent | None = None,
    ) -> ListSource:
        """Uploads a file of any size with little memory. Returns the value for `source` of a job."""
        spans = await asyncio.to_thread(spans_of, file, form, part_bytes)
        digest = await asyncio.to_thread(_digest, file)
        upload = await self.upload(len(spans))
        total, sent = spans[-1].end, 0

        def count(size: int) -> None:
            nonlocal sent
            sent += size
            if on_sent is not None:
                on_sent(sent, total)

        for span, part in zip(spans, upload.parts, strict=True):
            await self._put(part.url, file, span, count)
        return ListSource(upload_id=upload.upload_id, format=form, sha256=digest)

    async def _put(self, url: str, file: Path, span: Span, count: Callable[[int], None]) -> None:
        # A general-purpose client: this is one long request to an object store, perhaps S3.
        import aiohttp  # noqa: PLC0415

        async def chunks() -> AsyncIterator[bytes]:
            with await asyncio.to_thread(file.open, "rb") as source:
                await asyncio.to_thread(source.seek, span.start)
                left = span.end - span.start
                while left:
                    chunk = await asyncio.to_thread(source.read, min(_READ_BYTES, left))
                    left -= len(chunk)
                    count(len(chunk))
                    yield chunk

        headers = {"Content-Length": str(span.end - span.start), "Content-Type": "application/octet-stream"}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=300)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.put(url, data=chunks(), headers=headers, ssl=self._verify) as reply,
            ):
                if reply.status >= 300:
                    raise InterlockError(
                        f"The list was not stored: the object store answered {reply.status}.", code="not_stored"
                    )
        except aiohttp.ClientError as error:
            raise ServerUnreachable(f"The object store does not answer ({type(error).__name__}).") from None

    async def add(self, job: UUID | str, tasks: Iterable[Any], *, idempotency_key: str | None = None) -> TasksAdded:
        """Adds tasks to a job's open run, all or none."""
        raws = [task if isinstance(task, Raw) else Raw(_raw.encode(task)) for task in tasks]
        target = path("v1", "jobs", job, "tasks")
        return await self._post(target, TasksAdded, TasksRequest(tasks=raws), idempotency_key)

    async def close(self, job: UUID | str) -> RunView:
        """Closes the open run: no more tasks can be added."""
        return await self._post(path("v1", "jobs", job, "close"), RunView, None, None)

    async def _post(self, target: str, kind: type[T], body: Any, key: str | None) -> T:
        key = key or str(uuid4())
        refuse_line_breaks("Idempotency-Key", key)
        return await self._caller.call("POST", target, kind, body, extra=f"Idempotency-Key: {key}\r\n")


def spans_of(file: Path, form: ListFormat, part_bytes: int = PART_BYTES) -> list[Span]:
    """Splits a file at line boundaries into at most as many parts as an upload allows."""
    size = file.stat().st_size
    with file.open("rb") as source:
        packed = source.read(4).startswith(_PACKED)
        if packed or form is ListFormat.CSV or size <= part_bytes:
            return [Span(0, size)]
        step, cuts = max(part_bytes, -(-size // (MAX_PARTS - 1))), [0]
        while cuts[-1] + step < size:
            source.seek(cuts[-1] + step - 1)
            source.readline()
            cuts.append(source.tell())
    if cuts[-1] < size:
        cuts.append(size)
    return [Span(start, end) for start, end in pairwise(cuts)]


def _digest(file: Path) -> str:
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
