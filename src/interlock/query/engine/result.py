"""The rows of a running statement, its outcome, and the rows as JSON and CSV.

No format loses precision. Integers up to 2**53 are numbers; larger ones and all decimals are strings. Times are ISO
8601, in UTC if they have a zone. Binary is base64, an interval is an ISO 8601 duration, NaN and infinities are strings.
A map is a list of [key, value] pairs.
"""

from __future__ import annotations

import asyncio
import base64
import csv
import datetime as dt
import io
import math
import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import msgspec
import pyarrow as pa

from interlock.errors import InterlockError, InvalidQuery, QueryCrashed, QueryTooLarge, Unavailable
from interlock.query.engine.files import Lanes
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


_EXACT: Final = 2**53
"""Larger integers would be rounded by parsers that use floats."""

Render = Callable[[Any], Any]


def rows_of(batch: pa.RecordBatch) -> list[list[Any]]:
    """Returns rows with values that any JSON encoder supports."""
    if not batch.num_columns:
        return [[] for _ in range(batch.num_rows)]
    try:
        columns = [
            [None if value is None else render(value) for value in _values(column)]
            for column, render in zip(batch.columns, map(_renderer, batch.schema.types), strict=True)
        ]
    except (OverflowError, ValueError):
        raise InvalidQuery(
            "A date or time in the result is out of range: cast it to varchar, or request arrow."
        ) from None
    return [list(row) for row in zip(*columns, strict=True)]


def csv_header(names: Sequence[str]) -> bytes:
    return _csv([list(names)])


def csv_of(batch: pa.RecordBatch) -> bytes:
    """Renders as RFC 4180. Null and empty text are both empty fields; nested values are JSON."""
    return _csv([[_csv_value(value) for value in row] for row in rows_of(batch)])


def _csv(rows: list[list[Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_MINIMAL)
    writer.writerows(rows)
    return text.getvalue().encode()


def _csv_value(value: Any) -> Any:
    if isinstance(value, list | dict):
        return msgspec.json.encode(value).decode()
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else value


def _values(column: pa.Array) -> list[Any]:
    """Returns the values, with timestamps as integers in their unit, because Python datetimes have no nanoseconds."""
    kind = column.type
    if pa.types.is_timestamp(kind) or pa.types.is_time64(kind):
        return list(column.cast(pa.int64()).to_pylist())
    found = column.storage if isinstance(kind, pa.ExtensionType) else column
    return list(found.to_pylist())


def _renderer(kind: pa.DataType) -> Render:
    """Returns the renderer for the values that `_values` returns for this type."""
    if pa.types.is_timestamp(kind):
        return _timestamp(kind.unit, zoned=kind.tz is not None)
    if pa.types.is_time64(kind):
        return _time(kind.unit)
    return _plain


def _plain(value: Any) -> Any:
    if value is None:
        return None
    render = _RENDER.get(type(value), str)
    return render(value)


def _integer(value: int) -> int | str:
    return value if -_EXACT <= value <= _EXACT else str(value)


def _float(value: float) -> float | str:
    return value if math.isfinite(value) else _word(value)


def _struct(value: dict[str, Any]) -> dict[str, Any]:
    return {name: _plain(item) for name, item in value.items()}


def _moment(value: dt.datetime) -> str:
    zoned = value.tzinfo is not None
    return (value.astimezone(dt.UTC) if zoned else value).isoformat().replace("+00:00", "Z")


def _list(values: Sequence[Any]) -> list[Any]:
    return [_plain(value) for value in values]


def _duration(value: Any) -> str:
    seconds, parts = divmod(value.nanoseconds, 10**9)
    return f"P{value.months}M{value.days}DT{seconds}{_fraction(parts, 'ns')}S"


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


_PER_SECOND: Final = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def _fraction(parts: int, unit: str) -> str:
    digits = len(str(_PER_SECOND[unit])) - 1
    return f".{parts:0{digits}d}".rstrip("0").rstrip(".") if parts else ""


def _timestamp(unit: str, *, zoned: bool) -> Render:
    def render(value: int) -> str:
        seconds, parts = divmod(value, _PER_SECOND[unit])
        try:
            moment = dt.datetime(1970, 1, 1) + dt.timedelta(seconds=seconds)  # noqa: DTZ001 - the zone is written below
        except OverflowError:
            return str(value)
        return f"{moment.isoformat()}{_fraction(parts, unit)}{'Z' if zoned else ''}"

    return render


def _time(unit: str) -> Render:
    def render(value: int) -> str:
        seconds, parts = divmod(value, _PER_SECOND[unit])
        return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}{_fraction(parts, unit)}"

    return render


_RENDER: Final[dict[type, Render]] = {
    bool: bool,
    bytes: lambda value: base64.b64encode(value).decode(),
    Decimal: lambda value: format(value, "f"),
    dict: _struct,
    dt.date: dt.date.isoformat,
    dt.datetime: _moment,
    dt.time: dt.time.isoformat,
    float: _float,
    int: _integer,
    list: _list,
    pa.MonthDayNano: _duration,
    tuple: _list,
}
"""Renderers by the Python types that Arrow returns. Entries of a map are tuples."""
