"""The reader returns exactly the granted rows and columns, from files and tables."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import sql
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from interlock.dags.where import Condition, parse
from interlock.dags.where import sql as canonical
from interlock.schemas import Column, DatasetSchema
from interlock.spark.columns import parsed
from interlock.spark.errors import explained
from interlock.spark.reader import Reader
from interlock.wire.attempts import InputData
from interlock.workers.failures import CorruptFile, DataDatabaseAway, FileMissing, SchemaMismatch
from tests.spark.local_attempts import Store, parquet_input, path_of, schema, task
from tests.spark.random_conditions import FLAG, ODD, conditions, holds, numbers, texts

CRYO = Path(__file__).parent / "data"

COLUMNS = {
    "block_number": (pa.int64(), "bigint", "bigint"),
    "number": (pa.int32(), "int", "int"),
    "amount": (pa.decimal128(38, 0), "decimal(38,0)", "numeric"),
    "text": (pa.string(), "string", "text"),
    ODD: (pa.string(), "string", "text"),
    FLAG: (pa.bool_(), "boolean", "boolean"),
}
"""Types in Arrow, Spark and PostgreSQL."""
ARROW = pa.schema([(name, kind) for name, (kind, _, _) in COLUMNS.items()])
KNOWN = DatasetSchema([Column(name, kind) for name, (_, kind, _) in COLUMNS.items()], "block_number")
LAST = 59

Rows = list[dict[str, Any]]


@st.composite
def partitions(draw: st.DrawFn) -> list[tuple[int, int, Rows]]:
    """Draws ranges that do not overlap, with gaps, each with its own rows."""
    bounds = sorted(draw(st.sets(st.integers(1, LAST), max_size=5)))
    ranges = [(a, b - 1) for a, b in itertools.pairwise([0, *bounds, LAST + 1])]
    return [(a, b, draw(st.lists(rows(a, b), max_size=6))) for a, b in ranges if draw(st.integers(0, 3))]


def rows(start: int, end: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "block_number": st.integers(start, end),
            "number": st.none() | numbers,
            "amount": st.none() | (numbers | st.just(10**37)).map(Decimal),
            "text": st.none() | texts,
            ODD: st.none() | texts,
            FLAG: st.none() | st.booleans(),
        }
    )


scopes = st.tuples(st.integers(0, LAST), st.integers(0, LAST)).map(sorted).map(tuple)
wanted = st.none() | st.lists(st.sampled_from(list(COLUMNS)), min_size=1, unique=True)


def expected(
    parts: Sequence[tuple[int, int, Rows]], scope: tuple[int, int], where: Condition | None, names: list[str]
) -> Counter[tuple[Any, ...]]:
    there = (row for _, _, part in parts for row in part)
    kept = [
        row
        for row in there
        if scope[0] <= row["block_number"] <= scope[1] and (where is None or holds(where, row) is True)
    ]
    return Counter(tuple(row[name] for name in names) for row in kept)


def read(
    spark: SparkSession, data: InputData, names: list[str] | None, url: str | None = None
) -> Counter[tuple[Any, ...]]:
    declared = None if names is None else struct(names)
    frame = Reader(spark, lambda: str(url)).frame(data, declared)
    assert frame.columns == (names or list(COLUMNS))
    return Counter(tuple(row) for row in frame.collect())


def struct(names: list[str]) -> StructType:
    quoted = [f"`{name.replace('`', '``')}` {COLUMNS[name][1]}" for name in names]
    return parsed(", ".join(quoted), "a test")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "a [b]{c} %20 ö" / "x=1")


ONE_SPARK = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@ONE_SPARK
@given(parts=partitions(), scope=scopes, where=st.none() | conditions, names=wanted)
def test_files_give_exactly_the_rows_of_scope_and_condition(
    spark: SparkSession,
    store: Store,
    parts: list[tuple[int, int, Rows]],
    scope: tuple[int, int],
    where: Condition | None,
    names: list[str] | None,
) -> None:
    start, end = scope
    files = [
        store.file(pa.Table.from_pylist(part, schema=ARROW), first, last)
        for first, last, part in parts
        if first <= end and last >= start
    ]
    text = None if where is None else canonical(where)
    data = parquet_input("rows", files, scope, KNOWN, where=text)
    assert read(spark, data, names) == expected(parts, scope, where, names or list(COLUMNS))


@pytest.fixture
def table(state_url: str) -> Iterator[tuple[str, str, Callable[[Rows], None]]]:
    """Returns the URL and name of a table of the data database, and a function that fills it."""
    name = f"dataset_{uuid4().hex}"
    with psycopg.connect(state_url, autocommit=True) as connection:
        columns = sql.SQL(", ").join(
            sql.SQL("{} {}").format(sql.Identifier(column), sql.SQL(kind)) for column, (_, _, kind) in COLUMNS.items()
        )
        connection.execute("create schema if not exists datasets")
        relation = sql.Identifier("datasets", name)
        connection.execute(sql.SQL("create table {} ({})").format(relation, columns))

        def fill(rows: Rows) -> None:
            connection.execute(sql.SQL("truncate {}").format(relation))
            slots = sql.SQL(", ").join([sql.Placeholder()] * len(COLUMNS))
            insert = sql.SQL("insert into {} values ({})").format(relation, slots)
            with connection.cursor() as cursor:
                cursor.executemany(insert, [tuple(row[column] for column in COLUMNS) for row in rows])

        yield state_url, name, fill


def table_input(name: str, scope: tuple[int, int], known: DatasetSchema | None, where: str | None = None) -> InputData:
    return InputData(
        input_index=0,
        name="rows",
        dataset_uuid=uuid4(),
        dataset_version=uuid4(),
        storage="postgres",
        start=scope[0],
        end=scope[1],
        where=where,
        schema=known,
        table=name,
    )


@ONE_SPARK
@given(part=st.lists(rows(0, LAST), max_size=12), scope=scopes, where=st.none() | conditions, names=wanted)
def test_tables_give_exactly_the_rows_of_scope_and_condition(
    spark: SparkSession,
    table: tuple[str, str, Callable[[Rows], None]],
    part: Rows,
    scope: tuple[int, int],
    where: Condition | None,
    names: list[str] | None,
) -> None:
    url, name, fill = table
    fill(part)
    data = table_input(name, scope, KNOWN, None if where is None else canonical(where))
    parts = [(0, LAST, part)]
    assert read(spark, data, names, url) == expected(parts, scope, where, names or list(COLUMNS))


def test_large_scope_is_read_in_parts_without_gaps(
    spark: SparkSession, table: tuple[str, str, Callable[[Rows], None]]
) -> None:
    url, name, fill = table
    blocks = [0, 1, 4_999, 5_000, 5_001, 9_999, 10_000, 12_344, 12_345, 12_346]
    fill([dict.fromkeys(COLUMNS) | {"block_number": block} for block in blocks])
    frame = Reader(spark, lambda: url).frame(table_input(name, (1, 12_345), KNOWN), struct(["block_number"]))
    assert sorted(row.block_number for row in frame.collect()) == blocks[1:-1]
    assert frame.rdd.getNumPartitions() == 3


def test_table_without_a_schema_keeps_large_numbers_exact(
    spark: SparkSession, table: tuple[str, str, Callable[[Rows], None]]
) -> None:
    url, name, fill = table
    fill([dict.fromkeys(COLUMNS) | {"block_number": 1, "amount": Decimal(2**256 - 1)}])
    reader = Reader(spark, lambda: url)
    frame = reader.frame(table_input(name, (0, 9), None), None)
    assert frame.select("block_number", "amount").collect() == [(1, str(2**256 - 1))]

    data = table_input(name, (0, 9), KNOWN)
    with (
        pytest.raises(SchemaMismatch, match="amount has a value that does not fit into decimal128"),
        explained(task([data], [])),
    ):
        reader.frame(data, struct(["amount"])).collect()


def test_unavailable_data_database_is_reported_without_its_password(spark: SparkSession) -> None:
    data = table_input("dataset_x", (0, 9), KNOWN)
    reader = Reader(spark, lambda: "postgresql://me:secret@127.0.0.1:1/none")
    with pytest.raises(DataDatabaseAway) as raised, explained(task([data], [])):
        reader.frame(data, None).collect()
    assert "secret" not in str(raised.value)


def test_ranges_conditions_and_columns_are_pushed_down_to_the_scan(
    spark: SparkSession, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [store.file(pa.table({"block_number": [1, 50]}), 0, 99)]
    known = schema("block_number bigint, address string, topic0 string, data string")
    where = canonical(parse("topic0 = '0xdd' AND block_number <> 3"))
    data = parquet_input("logs", files, (10, 50), known, where=where)
    Reader(spark, str).frame(data, parsed("address string", "a test")).explain("formatted")
    plan = capsys.readouterr().out
    pushed = plan.partition("PushedFilters: [")[2].partition("]")[0]
    for part in (
        "GreaterThanOrEqual(block_number,10)",
        "LessThanOrEqual(block_number,50)",
        "EqualTo(topic0,0xdd)",
        "Not(EqualTo(block_number,3))",
    ):
        assert part in pushed
    assert "ReadSchema: struct<address:string,block_number:bigint,topic0:string>" in plan


def test_files_within_the_scope_are_read_without_a_filter(
    spark: SparkSession, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [store.file(pa.table({"block_number": [1]}), 0, 9), store.file(pa.table({"block_number": [11]}), 10, 19)]
    data = parquet_input("logs", files, (0, 19), schema("block_number bigint"))
    Reader(spark, str).frame(data, None).explain()
    assert "PushedFilters: []" in capsys.readouterr().out


def test_dataset_without_a_range_column_is_read_by_whole_partitions(spark: SparkSession, store: Store) -> None:
    files = [store.file(pa.table({"hour": [1, 2]}), 0, 99)]
    data = parquet_input("hours", files, (10, 20), schema("hour bigint", None))
    assert Reader(spark, str).frame(data, None).count() == 2


def test_older_files_have_nulls_for_columns_added_later(spark: SparkSession, store: Store) -> None:
    files = [
        store.file(pa.table({"block_number": [1]}), 0, 9),
        store.file(pa.table({"tip": ["x"], "block_number": [11]}), 10, 19),
    ]
    data = parquet_input("logs", files, (0, 19), schema("block_number bigint not null, tip string"))
    assert sorted(Reader(spark, str).frame(data, None).collect()) == [(1, None), (11, "x")]


@pytest.mark.parametrize(("files", "scope"), [([], (0, 9)), ([], None)], ids=["nothing there", "no part in the task"])
def test_input_without_files_is_empty_with_its_columns(
    spark: SparkSession, files: list[Any], scope: tuple[int, int] | None
) -> None:
    data = parquet_input("logs", files, scope, schema("block_number bigint not null, tip string"))
    frame = Reader(spark, str).frame(data, None)
    assert (frame.columns, frame.count()) == (["block_number", "tip"], 0)


def test_missing_columns_of_a_dataset_are_named(spark: SparkSession, store: Store) -> None:
    data = parquet_input("logs", [], (0, 9), schema("block_number bigint, data string"))
    with pytest.raises(SchemaMismatch, match="it has no column gas; data is string, not binary"):
        Reader(spark, str).frame(data, parsed("block_number bigint, gas bigint, data binary", "a test"))
    files = [store.file(pa.table({"block_number": [1]}), 0, 9)]
    asking = parquet_input("logs", files, (0, 9), data.schema, where='"Data" IS NULL')
    with pytest.raises(SchemaMismatch, match="where of input logs uses the column Data"):
        Reader(spark, str).frame(asking, None)


# Files from other tools


def test_real_files_of_another_tool_are_read_losslessly(spark: SparkSession, store: Store) -> None:
    names = sorted(path for path in CRYO.glob("*.parquet"))
    files = [store.file(pa.table({"x": [1]}), number, number) for number, _ in enumerate(names)]
    for source, file in zip(names, files, strict=True):
        shutil.copy(source, path_of(file.location))
    frame = Reader(spark, str).frame(parquet_input("transactions", files, (0, 9), None), None)
    assert dict(frame.dtypes)["nonce"] == "decimal(20,0)"
    assert dict(frame.dtypes)["block_number"] == "bigint"  # int32 in one file, uint32 in the others
    plain = [row for source in names for row in pq.read_table(source).to_pylist()]
    key = ("block_number", "transaction_hash")
    read = [row.asDict() for row in frame.collect()]
    assert sorted(read, key=lambda row: [row[k] for k in key]) == sorted(plain, key=lambda row: [row[k] for k in key])


def test_unsigned_and_large_types_keep_every_value(spark: SparkSession, store: Store) -> None:
    table = pa.table(
        {
            "tiny": pa.array([0, 2**8 - 1], pa.uint8()),
            "small": pa.array([0, 2**16 - 1], pa.uint16()),
            "medium": pa.array([0, 2**32 - 1], pa.uint32()),
            "large": pa.array([0, 2**64 - 1], pa.uint64()),
            "hash": pa.array([b"\x00\xff", b""], pa.large_binary()),
            "name": pa.array(["a", "é"], pa.large_string()),
            "fixed": pa.array([b"ab", b"cd"], pa.binary(2)),
            "kind": pa.array(["x", "y"]).dictionary_encode(),
            "list": pa.array([[1], []], pa.list_(pa.int64())),
        }
    )
    data = parquet_input("foreign", [store.file(table, 0, 9)], (0, 9), None)
    frame = Reader(spark, str).frame(data, None)
    assert [row.asDict() for row in frame.collect()] == table.to_pylist()
    with pytest.raises(SchemaMismatch, match=r"large is decimal\(20,0\), not bigint"):
        Reader(spark, str).frame(data, parsed("large bigint", "a test"))


def test_incompatible_files_are_reported(spark: SparkSession, store: Store) -> None:
    one, other = pa.table({"a": [1]}), pa.table({"a": ["x"]})
    data = parquet_input("foreign", [store.file(one, 0, 4), store.file(other, 5, 9)], (0, 9), None)
    with pytest.raises(SchemaMismatch, match="a of input foreign is bigint in one file and string in another"):
        Reader(spark, str).frame(data, None)
    fine = pa.table({"at": pa.array([1], pa.timestamp("ns"))})
    data = parquet_input("foreign", [store.file(fine, 0, 9)], (0, 9), None)
    with pytest.raises(SchemaMismatch, match="nanosecond timestamps"):
        Reader(spark, str).frame(data, None)


def test_foreign_file_with_a_large_footer_is_refused_before_it_is_parsed(spark: SparkSession, store: Store) -> None:
    """Untrusted code may have written it, and the driver is shared."""
    table = pa.table({"a": [1]}).replace_schema_metadata({"k": "x" * (5 << 20)})
    data = parquet_input("foreign", [store.file(table, 0, 9)], (0, 9), None)
    with pytest.raises(CorruptFile, match="bytes; the limit is 4194304"):
        Reader(spark, str).frame(data, None)


# Faults


def damaged(store: Store, kind: str) -> InputData:
    table = pa.table({"block_number": list(range(1_000)), "data": ["x" * 50] * 1_000})
    file = store.file(table, 0, 999)
    path = path_of(file.location)
    whole = path.read_bytes()
    match kind:
        case "truncated":
            path.write_bytes(whole[: len(whole) // 2])
        case "no parquet":
            path.write_text("this is not a Parquet file, whatever its name says")
        case "damaged inside":
            path.write_bytes(whole[:200] + bytes(len(whole) - 600) + whole[-400:])
        case "other type":
            pq.write_table(pa.table({"block_number": ["1"], "data": ["x"]}), path)
        case "missing":
            path.unlink()
    return parquet_input("logs", [file], (0, 999), schema("block_number bigint, data string"))


@pytest.mark.parametrize(
    ("kind", "failure"),
    [
        ("truncated", CorruptFile),
        ("no parquet", CorruptFile),
        ("damaged inside", CorruptFile),
        ("other type", SchemaMismatch),
        ("missing", FileMissing),
    ],
)
def test_damaged_file_is_named(spark: SparkSession, store: Store, kind: str, failure: type[Exception]) -> None:
    data = damaged(store, kind)
    with pytest.raises(failure) as raised, explained(task([data], [])):
        Reader(spark, str).frame(data, None).collect()
    assert data.files[0].location in str(raised.value)
    assert "recompute its range (interlock dataset invalidate)" in str(raised.value)


def test_file_deleted_during_a_read_is_named(spark: SparkSession, store: Store) -> None:
    data = damaged(store, "no damage")
    frame: DataFrame = Reader(spark, str).frame(data, None)
    path_of(data.files[0].location).unlink()
    with (
        pytest.raises(FileMissing, match=r"rows_0_999\.parquet is committed but no longer exists"),
        explained(task([data], [])),
    ):
        frame.collect()
