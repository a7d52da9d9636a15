"""Tables of the data database, read for a statement in one snapshot, and the DuckDB types of declared columns.

The engine reads them and passes Arrow data on, so the process of a statement has no address and no password. A scan
contains the used columns and the simple conditions, always including the condition on the org. Values never become part
of the SQL text: they are bound to settings of the transaction, which the conditions read. (The driver streams only with
COPY, which supports no parameters.)
"""

from __future__ import annotations

import datetime as dt
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final

import adbc_driver_manager
import adbc_driver_postgresql.dbapi as postgres
import pyarrow as pa

from interlock.errors import InvalidQuery, Unavailable
from interlock.query.engine.jobs import Relation, Table
from interlock.query.sql_gate import Scan
from interlock.query.sql_pushdown import Filter, Typed, folded
from interlock.query.statement.protocol import SCAN_END, WHOLE, Named

_COLUMNS: Final = """
    select a.attname, format_type(a.atttypid, case when a.atttypid = 'numeric'::regtype then a.atttypmod end)
    from pg_attribute a
    join pg_class c on c.oid = a.attrelid
    join pg_namespace n on n.oid = c.relnamespace
    where n.nspname = current_setting('interlock.schema') and c.relname = current_setting('interlock.table')
      and c.relkind in ('r', 'p') and a.attnum > 0 and not a.attisdropped
    order by a.attnum
"""
_KINDS: Final = {
    "bigint": ("int8", "BIGINT"),
    "boolean": ("bool", "BOOLEAN"),
    "bytea": ("bytea", "BLOB"),
    "character varying": ("text", "VARCHAR"),
    "date": ("date", "DATE"),
    "double precision": ("float8", "DOUBLE"),
    "integer": ("int4", "INTEGER"),
    "json": ("text", "JSON"),
    "jsonb": ("text", "JSON"),
    "real": ("float4", "FLOAT"),
    "smallint": ("int2", "SMALLINT"),
    "text": ("text", "VARCHAR"),
    "timestamp with time zone": ("timestamptz", "TIMESTAMPTZ"),
    "timestamp without time zone": ("timestamp", "TIMESTAMP"),
    "uuid": ("text", "UUID"),
}
"""The PostgreSQL type to read a column as, and the DuckDB type to show. `_number` handles numeric; the rest is text."""
_NUMBER: Final = re.compile(r"numeric(?:\((?P<digits>\d+),(?P<scale>-?\d+)\))?")
_MAX_DIGITS: Final = 38
"""Maximum precision of decimals in DuckDB."""
_ARROW: Final = {
    "bool": pa.bool_(),
    "bytea": pa.binary(),
    "date": pa.date32(),
    "float4": pa.float32(),
    "float8": pa.float64(),
    "int2": pa.int16(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    "text": pa.string(),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", tz="UTC"),
}
_ORG: Final = "org_id"
_SNAPSHOT: Final = re.compile(r"[0-9A-Fa-f-]{1,64}")
_MOMENT: Final = re.compile(r"\d{4}-\d\d-\d\d(?:[ T]\d\d:\d\d(?::\d\d(?:\.\d{1,6})?)?)?(?:Z|\+00(?::00)?)?")
_UUID: Final = re.compile(r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
_INTEGERS: Final = {"smallint", "integer", "bigint"}


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    kind: str
    """The PostgreSQL type."""
    read_as: str
    shown_as: str
    own: str
    """The DuckDB type if the dataset declares no other."""

    @property
    def is_unsized_number(self) -> bool:
        """True for a number that only text can represent."""
        return self.shown_as == "VARCHAR" and _NUMBER.fullmatch(self.kind) is not None


@dataclass(frozen=True, slots=True)
class TableScan:
    """A planned statement with its bound values."""

    sql: str
    bound: Sequence[tuple[str, str]]
    columns: Sequence[_Column]

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([(column.name, _ARROW[column.read_as]) for column in self.columns])

    @property
    def types(self) -> list[Named]:
        """Columns that are shown as another type than they are read as."""
        return [
            Named(column.name, column.shown_as)
            for column in self.columns
            if column.read_as == "text" and column.shown_as != "VARCHAR"
        ]

    @property
    def unsized_numbers(self) -> list[str]:
        return [column.name for column in self.columns if column.is_unsized_number]


@dataclass(slots=True)
class Snapshot:
    """A snapshot of the data database for the duration of a statement."""

    url: str = field(repr=False)
    seconds: float
    _anchor: Any = None
    _name: str = ""
    _anchor_free: bool = True
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _open: list[Any] = field(default_factory=list)

    def open(self) -> None:
        with _database_errors():
            self._anchor = self._connect()
            with self._anchor.cursor() as cursor:
                cursor.execute("select pg_export_snapshot()")
                self._name = str(cursor.fetchone()[0])
        if not _SNAPSHOT.fullmatch(self._name):
            raise Unavailable("The data database returned no valid snapshot.")

    def _connect(self) -> Any:
        connection = postgres.connect(self.url)
        with self._lock:
            self._open.append(connection)
        with connection.cursor() as cursor:
            cursor.execute("set transaction isolation level repeatable read, read only")
            cursor.execute("set local timezone to 'UTC'")
            cursor.execute(f"set local statement_timeout to {max(1, int(self.seconds * 1000)):d}")
        return connection

    def planned(self, relation: Relation, table: Table, scan: Scan) -> TableScan | None:
        """Plans a scan. Returns None if the table does not exist yet."""
        with _database_errors(), self._anchor.cursor() as cursor:
            for name, value in (("schema", table.schema), ("table", table.table)):
                cursor.execute("select set_config($1, $2, true)", (f"interlock.{name}", value))
                cursor.fetchall()
            cursor.execute(_COLUMNS)
            there = {str(name): str(kind) for name, kind in cursor.fetchall()}
        return _planned(relation, table, scan, there) if there else None

    def stream(self, scan: TableScan, sink: BinaryIO) -> None:
        """Writes the rows as Arrow IPC, then the byte that marks completion."""
        connection = self._taken()
        with connection.cursor() as cursor:
            for name, value in scan.bound:
                cursor.execute("select set_config($1, $2, true)", (name, value))
                cursor.fetchall()
            cursor.execute(scan.sql)
            with pa.ipc.new_stream(sink, scan.schema) as writer:
                for batch in cursor.fetch_record_batch():
                    writer.write_batch(_bare(batch, scan.schema))
        sink.write(SCAN_END)
        sink.flush()

    def _taken(self) -> Any:
        """Returns a connection; the first scan uses the existing one."""
        with self._lock:
            first, self._anchor_free = self._anchor_free, False
        if first:
            return self._anchor
        return self._connect_at_snapshot()

    def _connect_at_snapshot(self) -> Any:
        connection = self._connect()
        with connection.cursor() as cursor:
            cursor.execute(f"set transaction snapshot '{self._name}'")
        return connection

    def cancel(self) -> None:
        """Cancels running scans in other threads, which get an error."""
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            with suppress(adbc_driver_manager.Error):
                connection.adbc_cancel()

    def close(self) -> None:
        """Closes the connections. No scan may be running: the driver crashes if a connection in use is closed."""
        with self._lock:
            connections, self._open = self._open, []
        for connection in connections:
            with suppress(adbc_driver_manager.Error, RuntimeError):
                connection.close()


def _bare(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    arrays = [
        (column.storage if isinstance(column.type, pa.ExtensionType) else column).cast(wanted.type)
        for column, wanted in zip(batch.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _planned(relation: Relation, table: Table, scan: Scan, there: dict[str, str]) -> TableScan:
    if (_ORG in there) != (table.org_id is not None):
        # Neither return rows of all orgs if the table has an org column, nor filter by a column that does not exist.
        raise InvalidQuery(f"Relation {relation.name} cannot be filtered by org, so queries cannot read it.")
    columns = _columns(relation, there, whole=table.whole_numbers)
    needed = [column for column in columns if scan.columns is None or folded(column.name) in scan.columns]
    conditions, bound = _conditions(scan.filters, columns)
    if table.org_id is not None:
        conditions.insert(0, f"{_quoted(_ORG)} = current_setting('interlock.org')::uuid")
        bound.append(("interlock.org", str(table.org_id)))
    read = needed or columns[:1]
    listed = ", ".join(f"{_quoted(column.name)}::{column.read_as} as {_quoted(column.name)}" for column in read)
    where = f" where {' and '.join(conditions)}" if conditions else ""
    # Names are quoted, types come from the fixed list above, values are bound.
    sql = f"select {listed} from {_quoted(table.schema)}.{_quoted(table.table)}{where}"  # noqa: S608
    return TableScan(sql, bound, read)


def _columns(relation: Relation, there: dict[str, str], *, whole: bool) -> list[_Column]:
    """Returns the columns of the table that the dataset schema declares; without a schema, all except the org."""
    by_name = {folded(name): name for name in there}
    if relation.columns is None:
        return [_column(name, kind, None, whole=whole) for name, kind in there.items() if name != _ORG]
    found = [(by_name.get(folded(column.name)), column) for column in relation.columns]
    return [_column(name, there[name], column.type, whole=whole) for name, column in found if name is not None]


def _column(name: str, kind: str, declared: str | None, *, whole: bool) -> _Column:
    read_as, own = _KINDS.get(kind) or ("text", _number(kind, whole=whole))
    if declared is None:
        return _Column(name, kind, read_as, own, own)
    try:
        wanted = duckdb_type(declared)
    except UnknownType:
        return _Column(name, kind, read_as, own, own)
    return _Column(name, kind, read_as if wanted == own else "text", wanted, own)


def _number(kind: str, *, whole: bool) -> str:
    """Returns a type that represents every number of the column exactly, or text."""
    number = _NUMBER.fullmatch(kind)
    if number is None:
        return "VARCHAR"
    if number["digits"] is None:
        return WHOLE if whole else "VARCHAR"
    digits, scale = int(number["digits"]), int(number["scale"])
    if digits <= _MAX_DIGITS and 0 <= scale <= digits:
        return f"DECIMAL({digits},{scale})"
    return WHOLE if scale <= 0 else "VARCHAR"


# Conditions


def _conditions(filters: Sequence[Filter], columns: Sequence[_Column]) -> tuple[list[str], list[tuple[str, str]]]:
    by_name = {folded(column.name): column for column in columns}
    conditions: list[str] = []
    bound: list[tuple[str, str]] = []
    for one in filters:
        column = by_name.get(folded(one.column))
        # DuckDB compares a column with another declared type as that type, which PostgreSQL would not do.
        if column is None or column.own != column.shown_as:
            continue
        if one.operator in ("is null", "is not null"):
            conditions.append(f"{_quoted(column.name)} {one.operator}")
            continue
        values = [_bindable(value, column, one.operator) for value in one.values]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            conditions.append(_condition(column, one.operator, known, bound))
    return conditions, bound


def _condition(column: _Column, operator: str, values: Sequence[str], bound: list[tuple[str, str]]) -> str:
    target = _compared_as(column)
    places = []
    for value in values:
        name = f"interlock.value_{len(bound)}"
        bound.append((name, value))
        places.append(f"current_setting('{name}')::{target}")
    # DuckDB compares text bytewise.
    collation = ' collate "C"' if target == "text" else ""
    if operator == "in":
        return f"{_quoted(column.name)} in ({', '.join(places)})"
    return f"{_quoted(column.name)}{collation} {operator} {places[0]}"


def _compared_as(column: _Column) -> str:
    if column.kind in _INTEGERS:
        return "int8"
    if column.kind == "uuid":
        return "uuid"
    return "numeric" if _NUMBER.fullmatch(column.kind) else column.read_as


def _bindable(value: object, column: _Column, operator: str) -> str | None:
    """Returns the value to bind, or None if PostgreSQL might interpret it differently than DuckDB."""
    kind = column.kind
    is_number = _NUMBER.fullmatch(kind) is not None and not column.is_unsized_number
    text = value.text if isinstance(value, Typed) else value if isinstance(value, str) else None
    of_type = value.type if isinstance(value, Typed) else None
    if kind in _INTEGERS or is_number:
        return str(value) if isinstance(value, int) and -(2**63) <= value < 2**63 else None
    if text is None or "\x00" in text:
        return None
    if kind in ("text", "character varying"):
        return text if of_type in (None, "varchar", "text", "string") else None
    if kind == "uuid":
        fits = of_type in (None, "uuid") and operator in ("=", "in") and _UUID.fullmatch(text)
        return text if fits else None
    if kind == "date":
        return _moment(text) if of_type in (None, "date") and len(text) == 10 else None
    if kind == "timestamp with time zone":
        return _moment(text) if of_type in (None, "timestamptz", "timestamp with time zone", "timestamp") else None
    return None


def _moment(text: str) -> str | None:
    if not _MOMENT.fullmatch(text):
        return None
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment.replace(tzinfo=None).isoformat()


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


@contextmanager
def _database_errors() -> Iterator[None]:
    try:
        yield
    except adbc_driver_manager.Error:
        # The driver's message for a malformed URL may quote parts of its password.
        raise Unavailable("The data database is unavailable; check query_data_url of the query service.") from None


_PLAIN: Final = {
    "bigint": "BIGINT",
    "binary": "BLOB",
    "boolean": "BOOLEAN",
    "byte": "TINYINT",
    "date": "DATE",
    "double": "DOUBLE",
    "float": "FLOAT",
    "int": "INTEGER",
    "integer": "INTEGER",
    "long": "BIGINT",
    "real": "FLOAT",
    "short": "SMALLINT",
    "smallint": "SMALLINT",
    "string": "VARCHAR",
    "timestamp": "TIMESTAMPTZ",
    "timestamp_ltz": "TIMESTAMPTZ",
    "timestamp_ntz": "TIMESTAMP",
    "tinyint": "TINYINT",
    "void": "INTEGER",
}
_DECIMAL: Final = re.compile(r"(?:decimal|dec|numeric)(?:\((\d{1,2})(?:,\s*(\d{1,2}))?\))?")
_TEXT: Final = re.compile(r"(?:varchar|char)\(\d+\)")
_NESTED: Final = re.compile(r"(array|map|struct)<(.*)>", re.DOTALL)
_MAX_DEPTH: Final = 50


class UnknownType(ValueError):
    """Raised for a declared type without a DuckDB equivalent."""


def duckdb_type(spark: str, depth: int = 0) -> str:
    """Converts `array<struct<a:int>>` to `STRUCT("a" INTEGER)[]`. Raises UnknownType."""
    word = spark.strip()
    lower = word.lower()
    if depth > _MAX_DEPTH:
        raise UnknownType(spark)
    if plain := _PLAIN.get(lower):
        return plain
    if _TEXT.fullmatch(lower):
        return "VARCHAR"
    if decimal := _DECIMAL.fullmatch(lower):
        return f"DECIMAL({int(decimal[1] or 10)},{int(decimal[2] or 0)})"
    nested = _NESTED.fullmatch(word) or _NESTED.fullmatch(lower)
    if nested is None:
        raise UnknownType(spark)
    return _nested(nested[1].lower(), _split(nested[2]), depth + 1)


def _nested(kind: str, parts: list[str], depth: int) -> str:
    if kind == "array" and len(parts) == 1:
        return f"{duckdb_type(parts[0], depth)}[]"
    if kind == "map" and len(parts) == 2:
        return f"MAP({duckdb_type(parts[0], depth)}, {duckdb_type(parts[1], depth)})"
    if kind == "struct" and parts:
        return f"STRUCT({', '.join(_field(part, depth) for part in parts)})"
    raise UnknownType(kind)


def _field(part: str, depth: int) -> str:
    name, colon, kind = part.partition(":")
    if not colon:
        raise UnknownType(part)
    bare = name.strip().removeprefix("`").removesuffix("`").replace("``", "`")
    kind = re.sub(r"\s+not null$", "", kind.strip(), flags=re.IGNORECASE)
    escaped = bare.replace('"', '""')
    return f'"{escaped}" {duckdb_type(kind, depth)}'


def _split(inner: str) -> list[str]:
    """Splits at commas outside brackets."""
    parts, depth, begin = [], 0, 0
    for at, character in enumerate(inner):
        if character in "<(":
            depth += 1
        elif character in ">)":
            depth -= 1
        elif character == "," and not depth:
            parts.append(inner[begin:at])
            begin = at + 1
    return [*parts, inner[begin:]]
