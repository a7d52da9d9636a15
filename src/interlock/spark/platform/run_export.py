"""`run_export`: exports a run to files, from its staged rows and packed results. Runs in tasks that exports create.

Each stretch of rows is one Spark task and becomes one file, named by the number of the stretch. Sorting the files by
name therefore sorts the tasks by index. The manifest is written last.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Raw, Struct
from pyspark.sql.pandas.types import from_arrow_schema

from interlock.spark import objects
from interlock.spark.context import TaskContext
from interlock.spark.operators import operator
from interlock.wire.attempts import RunExport
from interlock.wire.jobs import ExportFormat, ExportManifest, ExportPart
from interlock.workers.failures import BadConfig, FileMissing

_ANSWER: Final = pa.schema(
    [
        ("name", pa.string()),
        ("rows", pa.int64()),
        ("bytes", pa.int64()),
        ("sha256", pa.string()),
        ("first", pa.int64()),
        ("last", pa.int64()),
    ]
)
_COLUMNS: Final = pa.schema(
    [
        pa.field("index", pa.int64(), nullable=False),
        pa.field("task_id", pa.string(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("payload", pa.string(), nullable=False),
        ("result", pa.string()),
        ("error_class", pa.string()),
        ("error_message", pa.string()),
        ("started_at", pa.timestamp("us", "UTC")),
        ("ended_at", pa.timestamp("us", "UTC")),
    ]
)
_NULL: Final = Raw(b"null")


class _Row(Struct, kw_only=True):
    """A staged row. The exported row is the same without `pack`, `offset` and `length`."""

    index: int
    task_id: UUID
    id: str
    status: str
    attempt: int
    payload: Raw
    result: Raw = _NULL
    error_class: str | None = None
    error_message: str | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    pack: UUID | None = None
    offset: int | None = None
    length: int | None = None


_row = msgspec.json.Decoder(_Row)
_OF_PACKS: Final = frozenset({"pack", "offset", "length"})
_SHOWN: Final = tuple(name for name in _Row.__struct_fields__ if name not in _OF_PACKS)


@operator(inputs={})
def run_export(ctx: TaskContext) -> dict[str, Any]:
    """Writes the export and returns its row and byte counts."""
    export = ctx.data.run_export
    if export is None:
        raise BadConfig(
            "run_export runs only in tasks that an export creates: request one with POST /v1/jobs/{job}/exports."
        )
    parts = _parts(ctx, Exporter(export))
    manifest = ExportManifest(
        export_id=export.export_id,
        run_id=export.run_id,
        format=ExportFormat(export.format),
        rows=sum(part.rows for part in parts),
        bytes=sum(part.bytes for part in parts),
        parts=parts,
    )
    objects.write(f"{export.prefix}manifest.json", msgspec.json.format(msgspec.json.encode(manifest), indent=2))
    return {"rows": manifest.rows, "bytes": manifest.bytes}


def _parts(ctx: TaskContext, exporter: Exporter) -> list[ExportPart]:
    count = exporter.export.stretches
    if count == 0:
        return []
    numbers = ctx.spark.range(0, count, 1, count)
    found = numbers.mapInArrow(exporter.export_stretches, from_arrow_schema(_ANSWER)).collect()
    parts = [ExportPart(**{name: answer[name] for name in _ANSWER.names}) for answer in found]
    return sorted(parts, key=lambda part: part.name)


@dataclass(frozen=True)
class Exporter:
    """Writes the files of an export. Spark pickles it and sends it to the executors."""

    export: RunExport

    def export_stretches(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Function for `mapInArrow` over the numbers of the stretches."""
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield pa.RecordBatch.from_pylist([self._stretch(number)], schema=_ANSWER)

    def _stretch(self, number: int) -> dict[str, Any]:
        rows = self._rows(number)
        name = f"part-{number:06}.{self.export.format}"
        with objects.replacing(f"{self.export.prefix}{name}") as draft:
            _WRITERS[self.export.format](rows, draft)
            digest, size = _digest(draft), draft.stat().st_size
        first, last = (rows[0].index, rows[-1].index) if rows else (-1, -1)
        return {"name": name, "rows": len(rows), "bytes": size, "sha256": digest, "first": first, "last": last}

    def _rows(self, number: int) -> list[_Row]:
        staged = objects.read(f"{self.export.rows_prefix}{number:06}.jsonl")
        rows = [_row.decode(line) for line in staged.split(b"\n") if line]
        packs: dict[UUID, bytes] = {}
        for row in rows:
            if row.pack is not None:
                if row.pack not in packs:
                    packs[row.pack] = objects.read(f"{self.export.packs_prefix}{row.pack}.pack")
                row.result = _sliced(packs[row.pack], row)
        return rows


def _sliced(pack: bytes, row: _Row) -> Raw:
    start, length = row.offset or 0, row.length or 0
    if len(pack) < start + length:
        raise FileMissing(
            f"The pack {row.pack} ends before the result of task {row.index}: it has {len(pack)} bytes and needs "
            f"{start + length}. The file is damaged or was edited by hand."
        )
    return Raw(pack[start : start + length])


def _shown(row: _Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in _SHOWN}


def _parquet(rows: list[_Row], draft: Path) -> None:
    columns = [_shown(row) for row in rows]
    for row in columns:
        row["task_id"] = str(row["task_id"])
        row["payload"] = bytes(row["payload"]).decode()
        row["result"] = None if row["result"] == _NULL else bytes(row["result"]).decode()
    pq.write_table(pa.Table.from_pylist(columns, schema=_COLUMNS), draft, compression="zstd")


def _jsonl(rows: list[_Row], draft: Path) -> None:
    with draft.open("wb") as out:
        for row in rows:
            # A result may contain line feeds as whitespace between JSON tokens; inside strings JSON escapes them.
            out.write(msgspec.json.encode(_shown(row)).replace(b"\n", b" ") + b"\n")


def _zip(rows: list[_Row], draft: Path) -> None:
    """Writes each result as its own entry, and all rows without their results as `tasks.jsonl`."""
    with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as archive:
        lines = [msgspec.json.encode(_shown(row) | {"result": None}).replace(b"\n", b" ") for row in rows]
        archive.writestr(_entry("tasks.jsonl"), b"".join(line + b"\n" for line in lines))
        for row in rows:
            if row.status == "Completed":
                archive.writestr(_entry(f"results/{row.index}.json"), bytes(row.result))


def _entry(name: str) -> zipfile.ZipInfo:
    """A zip entry with a fixed timestamp, so that equal rows produce equal bytes."""
    entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry


_WRITERS: Final[dict[str, Callable[[list[_Row], Path], None]]] = {"parquet": _parquet, "jsonl": _jsonl, "zip": _zip}


def _digest(draft: Path) -> str:
    with draft.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
