"""Runs one SELECT over granted data, in a process of its own that can reach nothing else.

    engine = Engine(folder, store=open_store, data_url=…)  # once per process; `folder` is its own, for temp files
    await engine.start()                                    # warms the process that others are forked from
    result = await engine.run(QueryJob(sql, relations, limits, Format.ROWS))
    async with result:                                      # leaving it ends the process, wherever it is
        result.schema                                       # pyarrow.Schema, known as soon as `run` returns
        result.columns                                      # [(name, DuckDB's word for its type)]
        async for batch in result.batches(): ...            # pyarrow.RecordBatch
        # or, for `format: arrow`:
        async for part in result.arrow(): ...               # bytes; joined they are an Arrow IPC stream
        result.summary                                      # Summary, once the batches are all read
    await engine.stop()

`run` returns when the first rows are there, or raises: a refusal of the gate or of DuckDB (InvalidQuery, 400), a limit
(QueryTooLarge, 413: time, memory, temp space; its `code` says which, and a batch query is the way out), a store that is
away (Unavailable, 503), or a process that died (QueryCrashed, 500). The same may be raised from `batches`.
`Format.PARQUET` gives no batches: `result.summary.file` names the file, until the result is left.

`await engine.check(sql, relations)` says without running it what a statement reads, or raises InvalidQuery.
`rows_of(batch)`, and `csv_header(names)` with `csv_of(batch)`, render: a number that JSON's readers would round is a
string (integers beyond 2**53, every decimal), timestamps are ISO 8601 in UTC, binary is base64, NaN and infinities are
strings.

An Engine does not count how many run at once: the caller caps that.
"""

from interlock.access.query.engine import Engine
from interlock.access.query.jobs import DataFile, Files, Format, Limits, QueryJob, Relation, Summary, Table
from interlock.access.query.rendering import csv_header, csv_of, rows_of
from interlock.access.query.result import Result

__all__ = [
    "DataFile",
    "Engine",
    "Files",
    "Format",
    "Limits",
    "QueryJob",
    "Relation",
    "Result",
    "Summary",
    "Table",
    "csv_header",
    "csv_of",
    "rows_of",
]
