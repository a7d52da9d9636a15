"""The input of a statement: its text, relations and limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final
from uuid import UUID

from interlock.schemas import Column

MAX_RELATIONS: Final = 1_000


class Format(StrEnum):
    ROWS = "rows"
    """Arrow batches, which the caller renders."""
    PARQUET = "parquet"
    """A file in the folder of the statement, which the caller copies."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """One committed Parquet file: an absolute path, `file://…` or `s3://…`."""

    location: str
    bounds: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Smallest and largest value per column, inclusive, if known. They allow skipping files without matching rows. A
    file
    with bounds must not contain rows with null in that column."""
    size: int | None = None
    """Bytes, if known."""
    schema_hash: str | None = None
    """Files with the same hash have the same columns, so that only one of them is inspected."""


@dataclass(frozen=True, slots=True)
class Files:
    """Rows in Parquet files. A column that a file lacks, because it was added later, reads as null."""

    files: Sequence[DataFile]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of a table in the data database. The whole statement reads one snapshot."""

    schema: str
    table: str
    org_id: UUID | None = None
    """Restricts to rows of this org; None only for a table without a column `org_id`."""
    whole_numbers: bool = False
    """If true, numeric columns without a declared precision contain integers; otherwise they are shown as text."""


@dataclass(frozen=True, slots=True)
class Relation:
    """The data behind one name. `columns` are those of the dataset version, with Spark types."""

    name: str
    source: Files | Table
    columns: Sequence[Column] | None = None
    """If None, the columns of the first file or the table. Without files and columns, the statement is rejected."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one statement."""

    seconds: float = 30.0
    memory_mb: int = 512
    threads: int = 2
    temp_mb: int = 1024
    """Maximum size of spilled data, and separately of an export."""
    rows: int = 10_000
    """Maximum rows of the response; further rows are dropped and `truncated` is set. Exports are not truncated."""
    bytes: int = 16 << 20
    """Maximum size of the response as Arrow."""


@dataclass(frozen=True, slots=True)
class QueryJob:
    sql: str
    relations: Sequence[Relation]
    limits: Limits = Limits()
    format: Format = Format.ROWS


@dataclass(frozen=True, slots=True)
class Summary:
    """The outcome of a statement."""

    rows: int
    bytes: int
    truncated: bool
    seconds: float
    relations: Sequence[str]
    """Granted relations that the statement reads."""
    file: str | None = None
    """Path of the exported Parquet file, until the result is closed."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Numbers of files read and skipped, for logs and tests."""
