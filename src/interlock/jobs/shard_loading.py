"""Loads rows into the run's own shard: Arrow batches as binary COPY, with the ledger row in the same transaction."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from uuid import UUID

import adbc_driver_manager
import adbc_driver_postgresql.dbapi as postgres
import pyarrow as pa

from interlock.errors import Unavailable
from interlock.jobs.run_sources import Batch
from interlock.jobs.task_rows import not_json
from interlock.stores.postgres import queries

_sql = queries("jobs", "ingest")
_SCHEMA: Final = "interlock"
_COPIED: Final = re.compile(r"COPY tasks_\d+, line (\d+), column")
# SQLSTATE classes of errors about a value: malformed text, invalid encoding, or nesting beyond the server's stack.
_OF_A_VALUE: Final = ("22", "54001")
_GONE: Final = "42P01"


class ShardGone(Exception):
    """The run was deleted together with its shard."""


class ShardLoader:
    """Loads one run over its own connection, which has no limits for short statements. All methods block."""

    def __init__(self, url: str, run_id: UUID, shard: int, load_task: UUID | None = None) -> None:
        self._run_id = run_id
        self._shard = shard
        self._load_task = load_task
        """The Spark task that loads the list; None if the ingest process loads it."""
        with _translated_errors():
            self._connection = postgres.connect(url)

    def close(self) -> None:
        self._connection.close()

    def load(self, batch: Batch) -> bool:
        """Returns False if the batch was loaded before, or the run was canceled or deleted."""
        try:
            with self._transaction() as cursor:
                if not self._begin(cursor, batch, batch.table.num_rows):
                    return False
                if batch.table.num_rows:
                    copy(cursor, self._shard, batch.table.to_reader())
        except adbc_driver_manager.Error as error:
            raise _meaning(error, batch.table) from None
        return True

    def load_all(self, batch: Batch, tables: Iterable[pa.Table]) -> bool:
        """Like `load`, for rows that arrive in several tables and are counted on the way. `batch` has their origin."""
        rows, table = 0, batch.table
        try:
            with self._transaction() as cursor:
                if not self._begin(cursor, batch, 0):
                    return False
                for table in tables:
                    if table.num_rows:
                        copy(cursor, self._shard, table.to_reader())
                    rows += table.num_rows
                _execute(cursor, "set_chunk_rows", **self._named(batch), rows=rows, lines=batch.lines)
        except adbc_driver_manager.Error as error:
            raise _meaning(error, table) from None
        return True

    def finish(self) -> bool:
        """Adds keys and indexes, and attaches the shard as a partition. Returns False if the shard is gone."""
        with _translated_errors(), self._transaction() as cursor:
            cursor.execute(_sql.finish_shard.sql, (self._shard,))
            row = cursor.fetchone()
        return bool(row and row[0])

    def _begin(self, cursor: Any, batch: Batch, rows: int) -> bool:
        ours = "" if self._load_task is None else str(self._load_task)
        place = {"end_byte": batch.end_byte, "first_line": batch.first_line, "lines": batch.lines}
        more = {"reached": batch.reached or "", "load_task": ours}
        _execute(cursor, "begin_chunk", **self._named(batch), **place, **more, rows=rows)
        return cursor.fetchone() is not None

    def _named(self, batch: Batch) -> dict[str, Any]:
        return {"run_id": str(self._run_id), "part": batch.part, "first_byte": batch.first_byte}

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        """Any: the driver has no type information."""
        try:
            with self._connection.cursor() as cursor:
                # Rows and ledger commit together. The following step commits synchronously, and so flushes them too.
                cursor.execute("set local synchronous_commit = off")
                yield cursor
            self._connection.commit()
        except BaseException:
            self._connection.rollback()
            raise


def _execute(cursor: Any, name: str, **values: Any) -> None:
    statement = getattr(_sql, name)
    cursor.execute(statement.sql, [values[one] for one in _sql.driver_adapter.var_sorted[name]])


def copy(cursor: Any, shard: int, rows: pa.RecordBatchReader) -> None:
    cursor.adbc_ingest(f"tasks_{shard}", rows, mode="append", db_schema_name=_SCHEMA)


def _meaning(error: adbc_driver_manager.Error, table: pa.Table) -> Exception:
    """Converts a database error. The server's message may quote a payload, so only the line number is used."""
    state = error.sqlstate or ""
    if state == _GONE:
        return ShardGone()
    copied = _COPIED.findall(str(error))
    if state.startswith(_OF_A_VALUE) and copied:
        # Earlier matches may be quoted data; the last one is from the server itself.
        return not_json(table.column("task_index")[int(copied[-1]) - 1].as_py())
    return _unavailable(error)


@contextmanager
def _translated_errors() -> Iterator[None]:
    try:
        yield
    except adbc_driver_manager.Error as error:
        raise _unavailable(error) from None


def _unavailable(error: adbc_driver_manager.Error) -> Unavailable:
    state = f" (SQLSTATE {error.sqlstate})" if error.sqlstate else ""
    return Unavailable(f"The state database cannot load the rows of a list{state}; the load will be retried.")
