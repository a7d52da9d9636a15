"""What a statement is asked to do, what it may read, and how much it may use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final
from uuid import UUID

from interlock.schemas import Column

MAX_SQL: Final = 100_000
"""Characters."""
MAX_RELATIONS: Final = 1_000


class Format(StrEnum):
    ROWS = "rows"
    """Arrow batches to the caller, who renders them."""
    PARQUET = "parquet"
    """A file in the statement's folder, for the caller to carry away."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """One committed Parquet file: an absolute path, `file://…` or `s3://…`."""

    location: str
    bounds: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Smallest and largest value of a column, both inclusive, where known: files that no row can come from are left
    out. Rows whose value is null must not be in a file with bounds."""
    size: int | None = None
    """Bytes, where known."""
    schema_hash: str | None = None
    """Files with the same one have the same columns: then one is looked at for all of them."""


@dataclass(frozen=True, slots=True)
class Files:
    """Rows in Parquet. A file may lack a column that joined later: it reads as null."""

    files: Sequence[DataFile]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows in a table of the data database, read in one snapshot for the whole statement."""

    schema: str
    table: str
    org_id: UUID | None = None
    """Only rows of this org; None only for a table without a column `org_id`."""
    whole_numbers: bool = False
    """Its numbers of no declared size are integers, and shown as such; else as text, which holds any number."""


@dataclass(frozen=True, slots=True)
class Relation:
    """What a statement sees under one name. `columns` are those of the dataset version, in Spark's words for types."""

    name: str
    source: Files | Table
    columns: Sequence[Column] | None = None
    """None: whatever the first file or the table has. Without files and without columns the relation has none, and the
    statement is refused."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one statement."""

    seconds: float = 30.0
    memory_mb: int = 512
    threads: int = 2
    temp_mb: int = 1024
    """What may be spilled, and what may be exported, each."""
    rows: int = 10_000
    """Of the reply; more are cut off and `truncated` says so. An export is not cut."""
    bytes: int = 16 << 20
    """Of the reply as Arrow."""


@dataclass(frozen=True, slots=True)
class QueryJob:
    sql: str
    relations: Sequence[Relation]
    limits: Limits = Limits()
    format: Format = Format.ROWS


@dataclass(frozen=True, slots=True)
class Summary:
    """How a statement ended."""

    rows: int
    bytes: int
    truncated: bool
    seconds: float
    relations: Sequence[str]
    """Names of the granted relations that the statement reads."""
    file: str | None = None
    """The exported Parquet file, until the result is closed."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Files read and left out, for the log and for tests."""
