"""Writing the file of a partition from Arrow batches, without Spark."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlock.spark.context import Scope
from interlock.spark.partition_file import PartitionFile, Written
from interlock.workers.failures import (
    CorruptFile,
    DuplicateKey,
    FileMissing,
    NullInColumn,
    PrefixSwept,
    RowOutsideScope,
    SchemaMismatch,
)
from tests.spark.local_attempts import path_of, rows_of

SCHEMA = pa.schema(
    [pa.field("block_number", pa.int64(), nullable=False), pa.field("log", pa.int64()), pa.field("data", pa.string())]
)
Row = dict[str, Any]


def file(folder: Path, name: str = "transfers_0_99.parquet", **more: Any) -> PartitionFile:
    plan: dict[str, Any] = {
        "output": "transfers",
        "location": f"file://{folder}/{name}",
        "schema": SCHEMA,
        "scope": Scope(0, 99),
        "range_column": "block_number",
    }
    return PartitionFile(**plan | more)


def batches(*groups: list[Row], schema: pa.Schema = SCHEMA) -> Iterator[pa.RecordBatch]:
    return iter([pa.RecordBatch.from_pylist(rows, schema=schema) for rows in groups])


def row(block: int | None, log: int | None = 0, data: str | None = None) -> Row:
    return {"block_number": block, "log": log, "data": data}


def test_all_batches_are_written_to_one_file_with_statistics(tmp_path: Path) -> None:
    plan = file(tmp_path)
    written = plan.written(batches([row(7), row(3)], [], [row(50, data="x")]))
    path = path_of(plan.location)
    assert written == Written(3, path.stat().st_size, 3, 50)
    assert rows_of(plan.location) == [row(7), row(3), row(50, data="x")]
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    stored = pq.ParquetFile(path)
    assert stored.metadata.row_group(0).column(0).compression == "ZSTD"
    assert not stored.schema_arrow.field("block_number").nullable


def test_no_rows_are_written_as_a_file_with_columns(tmp_path: Path) -> None:
    plan = file(tmp_path)
    assert plan.written(batches()).row_count == 0
    assert pq.read_schema(path_of(plan.location)).names == SCHEMA.names


@pytest.mark.parametrize(
    ("rows", "failure", "sentence"),
    [
        ([row(None)], NullInColumn, "null in column block_number, a key or range column"),
        ([row(100)], RowOutsideScope, "a row with block_number 100, outside the task's range 0-99"),
        ([row(5), row(-1)], RowOutsideScope, "a row with block_number -1"),
        ([row(5, log=None)], NullInColumn, "null in column log"),
        ([row(5), row(5)], DuplicateKey, "2 new rows with the unique key block_number 5, log 0"),
    ],
)
def test_invalid_rows_leave_no_file(tmp_path: Path, rows: list[Row], failure: type[Exception], sentence: str) -> None:
    plan = file(tmp_path, unique_key=("block_number", "log"))
    with pytest.raises(failure, match=sentence):
        plan.written(batches([row(1)], rows))
    assert list(tmp_path.iterdir()) == []


def test_decimal_range_column_is_supported(tmp_path: Path) -> None:
    schema = pa.schema([("block_number", pa.decimal128(20, 0))])
    plan = file(tmp_path, schema=schema)
    rows = [{"block_number": Decimal(7)}]
    assert plan.written(batches(rows, schema=schema)).max == 7
    with pytest.raises(RowOutsideScope, match=str(2**64 - 1)):
        plan.written(batches([{"block_number": Decimal(2**64 - 1)}], schema=schema))


# Merging with existing rows

keys = st.tuples(st.integers(0, 9), st.integers(0, 3))
additions = st.dictionaries(keys, st.none() | st.text(max_size=3), max_size=12)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rounds=st.lists(additions, min_size=1, max_size=4))
def test_new_rows_replace_rows_with_the_same_key_only(
    tmp_path: Path, rounds: list[dict[tuple[int, int], str | None]]
) -> None:
    model: dict[tuple[int, int], str | None] = {}
    current: str | None = None
    for number, new in enumerate(rounds):
        plan = file(
            tmp_path, f"{number}.parquet", unique_key=("block_number", "log"), current=current, scope=Scope(0, 9)
        )
        written = plan.written(batches([row(block, log, data) for (block, log), data in new.items()]))
        model |= new
        current = plan.location
        assert {(one["block_number"], one["log"]): one["data"] for one in rows_of(current)} == model
        assert written.row_count == len(model)
        assert (written.min, written.max) == (
            min((k[0] for k in model), default=None),
            max((k[0] for k in model), default=None),
        )


def test_existing_rows_get_nulls_for_an_added_column(tmp_path: Path) -> None:
    before = file(tmp_path, "before.parquet", schema=SCHEMA.remove(2), unique_key=("log",))
    before.written(batches([{"block_number": 1, "log": 1}], schema=SCHEMA.remove(2)))
    after = file(tmp_path, unique_key=("log",), current=before.location)
    after.written(batches([row(2, 2, "x")]))
    assert rows_of(after.location) == [row(2, 2, "x"), row(1, 1)]


def test_column_of_existing_rows_cannot_be_dropped(tmp_path: Path) -> None:
    before = file(tmp_path, "before.parquet", unique_key=("log",))
    before.written(batches([row(1, 1, "x")]))
    narrow = SCHEMA.remove(2)
    after = file(tmp_path, schema=narrow, unique_key=("log",), current=before.location)
    with pytest.raises(SchemaMismatch, match="data of the existing rows would be lost"):
        after.written(batches([{"block_number": 2, "log": 2}], schema=narrow))


def test_unreadable_current_file_is_named(tmp_path: Path) -> None:
    gone = file(tmp_path, unique_key=("log",), current=f"file://{tmp_path}/gone.parquet")
    with pytest.raises(FileMissing, match=r"gone\.parquet no longer exists"):
        gone.written(batches([row(1)]))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    broken = file(tmp_path, unique_key=("log",), current=f"file://{tmp_path}/broken.parquet")
    with pytest.raises(CorruptFile, match=r"broken\.parquet, the current file to which rows are added"):
        broken.written(batches([row(1)]))


# Faults


def test_current_file_with_a_large_footer_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    """The same file with a smaller footer is read."""

    def current(footer_bytes: int) -> str:
        metadata = {"k": "x" * footer_bytes}
        table = pa.Table.from_pylist([row(1, 1, "x")], schema=SCHEMA).replace_schema_metadata(metadata)
        pq.write_table(table, tmp_path / "current.parquet")
        return f"file://{tmp_path}/current.parquet"

    after = file(tmp_path, unique_key=("log",), current=current(1 << 10))
    assert after.written(batches([row(2, 2, "y")])).row_count == 2
    after = file(tmp_path, unique_key=("log",), current=current(5 << 20))
    with pytest.raises(CorruptFile, match="the limit is 4194304"):
        after.written(batches([row(2, 2, "y")]))


def test_folder_swept_during_a_write_is_reported(tmp_path: Path) -> None:
    plan = file(tmp_path / "attempt")

    def swept() -> Iterator[pa.RecordBatch]:
        yield from batches([row(1)])
        for left in (tmp_path / "attempt").iterdir():
            left.unlink()
        (tmp_path / "attempt").rmdir()

    with pytest.raises(PrefixSwept, match="lost its lease"):
        plan.written(swept())
    assert list(tmp_path.iterdir()) == []


NO_ROOM = """
import os, resource, sys
import pyarrow as pa
from interlock.spark.context import Scope
from interlock.spark.partition_file import PartitionFile
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
schema = pa.schema([("data", pa.binary())])
plan = PartitionFile("transfers", sys.argv[1], schema, Scope(0, 99))
rows = [{"data": os.urandom(1_000)} for _ in range(1_000)]
batches = (pa.RecordBatch.from_pylist(rows, schema=schema) for _ in range(9))
[answer] = plan.write(batches)
print(answer.to_pylist()[0]["error_class"])
"""


def test_full_disk_is_reported_and_leaves_no_partial_file(tmp_path: Path) -> None:
    """Uses a limit on the size of files, which makes the system refuse the write like a full disk."""
    finished = subprocess.run(
        [sys.executable, "-c", NO_ROOM, f"file://{tmp_path}/transfers_0_99.parquet"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert finished.stdout.strip() == "DiskFull"
    assert list(tmp_path.iterdir()) == []
