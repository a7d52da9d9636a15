"""The rows of a running statement, and its outcome."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import msgspec
import pyarrow as pa

from interlock.errors import InterlockError, InvalidQuery, QueryCrashed, QueryTooLarge, Unavailable
from interlock.query.engine.io_server import Lanes
from interlock.query.engine.jobs import Format, QueryJob, Summary
from interlock.query.engine.pool import Fork
from interlock.query.statement import protocol
from interlock.query.statement.protocol import Done, Failed, Kind

_END_OF_STREAM: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"
EXPORT: Final = "export.parquet"
_BATCH: Final = "Select less data, or run it as a batch query."


@dataclass(frozen=True, slots=True)
class Frame:
    kind: Kind
    payload: bytes


T = TypeVar("T", bound=msgspec.Struct)


def decoded(frame: Frame, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(frame.payload, type=kind)
    except msgspec.DecodeError:
        raise _invalid_message() from None


def _invalid_message() -> QueryCrashed:
    return QueryCrashed("The query process sent an invalid message.")


class Statement:
    """The process of a statement, its channel and its resources."""

    def __init__(self, job: QueryJob, folder: Path, fork: Fork, lanes: Lanes) -> None:
        self.job, self.folder, self.lanes = job, folder, lanes
        self.export = str(folder / EXPORT) if job.format is Format.PARQUET else None
        self.unsized_numbers: list[str] = []
        """Numeric columns that are shown as text."""
        self._fork = fork
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.started = time.monotonic()
        self._closing: asyncio.Task[None] | None = None

    async def connect(self, sock: Any) -> None:
        self._reader, self._writer = await asyncio.open_unix_connection(sock=sock, limit=1 << 20)

    @property
    def _left(self) -> float:
        return self.started + self.job.limits.seconds - time.monotonic()

    async def send(self, kind: Kind, message: msgspec.Struct) -> None:
        if self._writer is None:
            raise QueryCrashed("The query process is not connected.")
        try:
            self._writer.write(protocol.encoded(kind, message))
            await self._writer.drain()
        except ConnectionError:
            raise await self._died() from None

    async def receive(self, *expected: Kind) -> Frame:
        """Returns the next frame. Raises the error that the process reports, or an error for its timeout or death."""
        try:
            async with asyncio.timeout(max(0.0, self._left)):
                frame = await self._frame()
        except TimeoutError:
            raise QueryTooLarge(
                f"The query took longer than {self.job.limits.seconds:g} seconds. {_BATCH}", code="query_timeout"
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await self._died() from None
        if frame.kind is Kind.FAILED:
            raise self._failure(decoded(frame, Failed))
        if frame.kind not in expected:
            raise _invalid_message()
        return frame

    async def _frame(self) -> Frame:
        if self._reader is None:
            raise QueryCrashed("The query process is not connected.")
        kind, size = protocol.HEADER.unpack(await self._reader.readexactly(protocol.HEADER.size))
        if size > protocol.MAX_FRAME:
            raise QueryCrashed("The query process sent a message over the size limit.")
        payload = await self._reader.readexactly(size)
        if kind not in Kind.__members__.values():
            raise _invalid_message()
        return Frame(Kind(kind), payload)

    async def _died(self) -> InterlockError:
        """Returns the error for a dead process: a timeout, a failed store or a crash."""
        self._fork.kill()
        status = await self._fork.end()
        if self._left <= 0:
            return QueryTooLarge(
                f"The query took longer than {self.job.limits.seconds:g} seconds. {_BATCH}", code="query_timeout"
            )
        if self.lanes.failed is not None:
            return self.lanes.failed
        return QueryCrashed(f"The query process ended with status {status}; other queries are unaffected. {_BATCH}")

    def _failure(self, failed: Failed) -> InterlockError:
        limits = self.job.limits
        match failed.why:
            case "invalid":
                return InvalidQuery(failed.message + self._cast_hint(failed.message))
            case "memory":
                return QueryTooLarge(
                    f"The query needs more than {limits.memory_mb} MB of memory and {limits.temp_mb} MB of temp space. "
                    f"{_BATCH}",
                    code="query_memory",
                )
            case "temp":
                return QueryTooLarge(f"The result is larger than {limits.temp_mb} MB. {_BATCH}", code="query_temp")
            case "row":
                limit = min(limits.bytes, protocol.MAX_FRAME)
                return QueryTooLarge(
                    f"A row of the result is larger than {limit} bytes: select less of it.", code="query_row"
                )
            case "store":
                return self.lanes.failed or Unavailable("The data is currently unavailable; retry later.")
            case _:
                return QueryCrashed(f"DuckDB failed with an internal error; other queries are unaffected. {_BATCH}")

    def _cast_hint(self, message: str) -> str:
        if not self.unsized_numbers or not message.startswith(("Conversion Error", "Binder Error")):
            return ""
        names = ", ".join(sorted(set(self.unsized_numbers)))
        return f" Numbers without a declared size are read as text ({names}): cast them, for example with ::DOUBLE."

    async def close(self) -> None:
        """Kills the process and removes its folder. Completes even if the caller is cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._fork.kill()
        if self._writer is not None:
            self._writer.close()
        await asyncio.to_thread(self.lanes.close)
        await self._fork.end()
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)


class Result:
    """The result of a running statement. Use `async with`: leaving the block ends the process in any state."""

    def __init__(self, statement: Statement, relations: tuple[str, ...], details: dict[str, Any]) -> None:
        self._statement = statement
        self._relations, self._details = relations, details
        self._schema_message = b""
        self.schema: pa.Schema = pa.schema([])
        self.columns: list[tuple[str, str]] = []
        self._summary: Summary | None = None

    async def begin(self) -> None:
        frame = await self._statement.receive(Kind.SCHEMA)
        schema = decoded(frame, protocol.Schema)
        self._schema_message, self.columns = schema.arrow, schema.columns
        try:
            self.schema = pa.ipc.read_schema(pa.py_buffer(schema.arrow))
        except (pa.ArrowException, OSError):
            raise _invalid_message() from None
        if self._statement.export is not None:
            self._end(await self._statement.receive(Kind.DONE))

    @property
    def relations(self) -> tuple[str, ...]:
        """Granted relations that the statement reads, known from the start."""
        return self._relations

    @property
    def summary(self) -> Summary:
        """The outcome, available after all rows are read."""
        if self._summary is None:
            raise RuntimeError("not all rows have been read yet")
        return self._summary

    @property
    def said_all(self) -> bool:
        """True if the statement is complete."""
        return self._summary is not None

    async def _messages(self) -> AsyncIterator[bytes]:
        while self._summary is None:
            frame = await self._statement.receive(Kind.BATCH, Kind.DONE)
            if frame.kind is Kind.DONE:
                self._end(frame)
            else:
                yield frame.payload

    def _end(self, frame: Frame) -> None:
        done = decoded(frame, Done)
        self._summary = Summary(
            rows=done.rows,
            bytes=done.bytes,
            truncated=done.truncated,
            seconds=time.monotonic() - self._statement.started,
            relations=self._relations,
            file=self._statement.export,
            details=self._details,
        )

    async def batches(self) -> AsyncIterator[pa.RecordBatch]:
        async for message in self._messages():
            yield self._batch(message)

    def _batch(self, message: bytes) -> pa.RecordBatch:
        """Decodes and fully validates a batch: this process would follow invalid offsets."""
        try:
            batch = pa.ipc.read_record_batch(pa.py_buffer(message), self.schema)
            batch.validate(full=True)
        except (pa.ArrowException, OSError):
            raise _invalid_message() from None
        return batch

    async def arrow(self) -> AsyncIterator[bytes]:
        """Yields an Arrow IPC stream, message by message, as the process wrote it."""
        yield self._schema_message
        async for message in self._messages():
            yield message
        yield _END_OF_STREAM

    async def close(self) -> None:
        await self._statement.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
