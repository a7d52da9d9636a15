"""Runs one SELECT on granted data, in a child process that can access nothing else.

    engine = Engine(folder, store=open_store, data_url=…)  # once per process; `folder` is for its temp files only
    await engine.start()                                    # starts the warm process that is forked per statement
    result = await engine.run(QueryJob(sql, relations, limits, Format.ROWS))
    async with result:                                      # leaving the block ends the process in any state
        result.schema                                       # pyarrow.Schema, known when `run` returns
        result.columns                                      # [(name, DuckDB type name)]
        async for batch in result.batches(): ...            # pyarrow.RecordBatch
        # or, for `format: arrow`:
        async for part in result.arrow(): ...               # bytes; joined they are an Arrow IPC stream
        result.summary                                      # Summary, after all batches are read
    await engine.stop()

`run` returns when the first rows are available, or raises: InvalidQuery (400) if the gate or DuckDB rejects the
statement; QueryTooLarge (413) if it exceeds a limit on time, memory or temp space, which `code` names, so that a batch
query is needed; Unavailable (503) if a store is unavailable; QueryCrashed (500) if the process died. `batches` may
raise the same errors. `Format.PARQUET` yields no batches: `result.summary.file` is the path of the file until the
result is closed.

`await engine.check(sql, relations)` returns the scans of a statement without running it, or raises InvalidQuery.
`rows_of(batch)`, and `csv_header(names)` with `csv_of(batch)`, render rows: numbers that JSON parsers would round
(integers beyond 2**53, all decimals) are strings, timestamps are ISO 8601 in UTC, binary is base64, NaN and infinities
are strings.

An Engine does not limit the number of concurrent statements; the caller does.
"""

from interlock.query.engine.engine import Engine
from interlock.query.engine.jobs import DataFile, Files, Format, Limits, QueryJob, Relation, Summary, Table
from interlock.query.engine.result import Result, csv_header, csv_of, rows_of

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
