"""An attempt on Spark: its reads, its writes, and its error messages."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession, functions

from interlock.schemas import hash_of
from interlock.spark import Scope, TaskContext, TaskFailed, operator
from interlock.spark.attempt import run_attempt
from interlock.spark.errors import explained, raised_in
from interlock.spark.operators import give
from interlock.wire.attempts import InputData, TaskFile
from interlock.workers.catalogue import OperatorNotFound, sources
from interlock.workers.failures import (
    BadOperator,
    CorruptFile,
    DuplicateKey,
    NoScope,
    RowOutsideScope,
    SchemaMismatch,
    SparkStopped,
    WrongColumns,
    WrongInputs,
    WrongOutputs,
)
from tests.spark import sample_operators
from tests.spark.local_attempts import (
    Store,
    attempt,
    context,
    files_under,
    marker_of,
    nothing_left,
    output,
    parquet_input,
    path_of,
    rows_of,
    schema,
    task,
)

LOGS = schema("block_number bigint not null, address string, data string")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def logs(store: Store, blocks: range | list[int], scope: tuple[int, int] = (0, 99), data: str = "0x") -> InputData:
    table = pa.table(
        {"block_number": list(blocks), "address": ["a"] * len(blocks), "data": [data] * len(blocks)},
        schema=pa.schema([("block_number", pa.int64()), ("address", pa.string()), ("data", pa.string())]),
    )
    return parquet_input("logs", [store.file(table, 0, 199)], scope, LOGS)


@pytest.fixture(scope="module", autouse=True)
def given() -> Iterator[None]:
    """Gives this process the operators of the tests."""
    give(sources([str(Path(__file__).parents[2])]))
    yield
    give(())


def test_attempt_writes_one_file_and_its_marker_and_reports_both(spark: SparkSession, store: Store) -> None:
    counted = output(store, "counts")
    data = task([logs(store, [1, 1, 5, 150])], [counted])
    ctx = context(spark, data, operator="tests.spark.sample_operators:counts")
    result, [reported], [event] = run_attempt(spark, ctx, data, None)

    assert reported.location == f"{counted.write_prefix}counts_0_99.parquet"
    assert sorted(map(str, rows_of(reported.location))) == [
        "{'block_number': 1, 'logs': 2}",
        "{'block_number': 5, 'logs': 1}",
    ]
    marker = marker_of(counted)
    expected = schema("block_number bigint not null, logs bigint not null")
    assert marker.schema == expected
    size = path_of(reported.location).stat().st_size
    assert (marker.file, marker.row_count, marker.bytes) == ("counts_0_99.parquet", 2, size)
    assert (marker.min, marker.max, marker.based_on) == (1, 5, None)
    assert (reported.row_count, reported.bytes, reported.schema_hash) == (2, size, hash_of(expected))
    assert (reported.min, reported.max) == (1, 5)
    assert (reported.partition_key, reported.start, reported.end) == ("0-99", 0, 99)
    assert (event.dataset_version, event.partition_key) == (counted.dataset_version, "0-99")
    assert result == {"outputs": {"counts": {"rows": 2, "bytes": size}}}
    assert files_under(counted.write_prefix) == ["_marker.json", "counts_0_99.parquet"]


def test_each_of_several_outputs_gets_its_own_rows(spark: SparkSession, store: Store) -> None:
    outputs = [output(store, "even", 0), output(store, "odd", 1)]
    _, reported, events = attempt(spark, sample_operators.parted, [logs(store, range(5))], outputs)
    assert [[row["block_number"] for row in rows_of(one.location)] for one in reported] == [[0, 2, 4], [1, 3]]
    assert [one.output_index for one in reported] == [0, 1]
    assert [event.dataset_uuid for event in events] == [one.dataset_uuid for one in outputs]
    # Under other names, the declared order counts, not the order of the returned dict.
    renamed = [output(store, "first", 0), output(store, "second", 1)]
    _, reported, _ = attempt(spark, sample_operators.parted, [logs(store, range(5))], renamed)
    assert [one.row_count for one in reported] == [3, 2]


def test_persisted_frame_of_several_outputs_is_computed_once_and_released(spark: SparkSession, store: Store) -> None:
    kept: list[DataFrame] = []

    @operator(inputs={"logs": sample_operators.LOGS}, outputs={"a": "chance double", "b": "chance double"})
    def by_chance(logs: DataFrame, ctx: TaskContext) -> dict[str, DataFrame]:
        frame = ctx.persist(logs.select(functions.rand().alias("chance")))
        kept.append(frame)
        return {"a": frame, "b": frame}

    outputs = [output(store, "a", 0), output(store, "b", 1)]
    _, [a, b], _ = attempt(spark, by_chance, [logs(store, range(5))], outputs)
    assert rows_of(a.location) == rows_of(b.location)
    assert not kept[0].is_cached
    assert not spark._jsparkSession.sharedState().cacheManager().lookupCachedData(kept[0]._jdf).isDefined()


def test_job_without_outputs_has_the_returned_value_as_its_result(spark: SparkSession, store: Store) -> None:
    result, outputs, events = attempt(spark, sample_operators.total, [logs(store, range(5))], [], config={"factor": 2})
    assert (result, outputs, events) == ({"logs": 5, "factor": 2}, [], [])


def test_output_without_rows_is_written_as_an_empty_file(spark: SparkSession, store: Store) -> None:
    _, [reported], _ = attempt(spark, sample_operators.counts, [logs(store, [150])], [output(store, "counts")])
    assert (reported.row_count, rows_of(reported.location)) == (0, [])

    @operator(inputs={}, output=sample_operators.COUNTS)
    def nothing(ctx: TaskContext) -> DataFrame:
        return ctx.spark.createDataFrame([], sample_operators.COUNTS)

    _, [reported], _ = attempt(spark, nothing, [], [output(store, "counts")], payload={"start": 0, "end": 9})
    assert (reported.row_count, reported.partition_key) == (0, "0-9")


def test_all_column_types_round_trip(spark: SparkSession, store: Store) -> None:
    rows: dict[str, Any] = {
        "flag": True,
        "tiny": 1,
        "wide": 2**62,
        "exact": Decimal("-12345678901234567890.123456789012345678"),
        "real": 1.5,
        "text": "é\0x",
        "raw": b"\x00\xff",
        "day": date(1850, 1, 2),
        "moment": datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
        "local": datetime(2026, 1, 2, 3, 4, 5, 6),  # noqa: DTZ001 - a timestamp without a time zone
        "many": [1, None],
        "pairs": [("a", 1)],
        "inner": {"x": 1, "y": ["z"]},
    }
    ddl = (
        "flag boolean, tiny tinyint, wide bigint, exact decimal(38,18), real double, text string, raw binary, "
        "day date, moment timestamp, local timestamp_ntz, many array<int>, pairs map<string,int>, "
        "inner struct<x:int,y:array<string>>"
    )
    values = tuple(dict(value) if name == "pairs" else value for name, value in rows.items())
    frame = spark.createDataFrame([values], ddl)

    @operator(inputs={}, output=ddl)
    def everything(ctx: TaskContext) -> DataFrame:
        return frame

    everything_there = output(store, "all")
    _, [reported], _ = attempt(spark, everything, [], [everything_there], payload={"start": 0, "end": 9})
    assert rows_of(reported.location) == [rows]
    there = TaskFile(start=0, end=9, location=reported.location, commit=1)
    again = parquet_input("all", [there], (0, 9), marker_of(everything_there).schema)

    @operator(inputs={"all": ddl}, output=ddl)
    def same(all_: DataFrame, ctx: TaskContext) -> DataFrame:
        return all_

    _, [reported], _ = attempt(spark, same, [again], [output(store, "all")])
    assert rows_of(reported.location) == [rows]


# Schemas


def test_only_nullable_columns_can_be_added_to_a_schema(spark: SparkSession, store: Store) -> None:
    @operator(output="block_number bigint not null, logs bigint not null, tip string")
    def wider(inputs: dict[str, DataFrame], ctx: TaskContext) -> DataFrame:
        return inputs["logs"].selectExpr("block_number", "1L as logs", "data as tip")

    known = schema(sample_operators.COUNTS)
    _, [reported], _ = attempt(spark, wider, [logs(store, [1])], [output(store, "counts", schema=known)])
    assert rows_of(reported.location) == [{"block_number": 1, "logs": 1, "tip": "0x"}]

    other = schema("block_number bigint not null, logs int not null")
    outputs = [output(store, "counts", schema=other)]
    with nothing_left(outputs), pytest.raises(SchemaMismatch, match="logs changed its type from int to bigint"):
        attempt(spark, wider, [logs(store, [1])], outputs)


def test_rows_are_merged_into_the_partition_by_unique_key(spark: SparkSession, store: Store) -> None:
    @operator(inputs={"logs": sample_operators.LOGS}, output="block_number bigint not null, data string")
    def latest(logs: DataFrame, ctx: TaskContext) -> DataFrame:
        return logs.select("block_number", "data")

    known = schema("block_number bigint not null, data string, tip string")
    there = store.file(pa.table({"block_number": [1, 2], "data": ["old", "old"], "tip": ["t", "t"]}), 0, 99)
    added = output(store, "latest", schema=known, unique_key=["block_number"], current=there)
    _, [reported], _ = attempt(spark, latest, [logs(store, [2, 3], data="new")], [added])
    assert sorted(rows_of(reported.location), key=lambda row: int(row["block_number"])) == [
        {"block_number": 1, "data": "old", "tip": "t"},
        {"block_number": 2, "data": "new", "tip": None},
        {"block_number": 3, "data": "new", "tip": None},
    ]
    assert marker_of(added).based_on == there.commit
    outputs = [output(store, "latest", schema=known, unique_key=["block_number"], current=there)]
    with nothing_left(outputs), pytest.raises(DuplicateKey, match="unique key block_number 2"):
        attempt(spark, latest, [logs(store, [2, 2])], outputs)


def test_rewrite_committed_during_an_attempt_does_not_affect_it(spark: SparkSession, store: Store) -> None:
    before = logs(store, [1, 2])

    @operator(inputs={"logs": sample_operators.LOGS}, output=sample_operators.LOGS)
    def slow(logs: DataFrame, ctx: TaskContext) -> DataFrame:
        store.file(pa.table({"block_number": [9], "address": ["b"], "data": ["new"]}), 0, 199)
        return logs

    _, [reported], _ = attempt(spark, slow, [before], [output(store, "copy")])
    assert [row["block_number"] for row in rows_of(reported.location)] == [1, 2]


# Failures


def outputs_of(store: Store) -> list[Any]:
    return [output(store, "counts")]


@pytest.mark.parametrize(
    ("function", "failure", "sentence"),
    [
        (sample_operators.wrong_columns, WrongColumns, "not declared: address; logs is string, not bigint"),
        (sample_operators.raising, TaskFailed, "not today"),
        (sample_operators.raising_inside, TaskFailed, "invalid literal for int"),
    ],
)
def test_failed_operator_leaves_no_files(
    spark: SparkSession, store: Store, function: Any, failure: type[Exception], sentence: str
) -> None:
    outputs = outputs_of(store)
    with nothing_left(outputs), pytest.raises(failure, match=sentence):
        attempt(spark, function, [logs(store, [1])], outputs)


def test_exception_in_an_executor_keeps_its_class(spark: SparkSession, store: Store) -> None:
    with pytest.raises(TaskFailed) as raised:
        attempt(spark, sample_operators.raising_inside, [logs(store, [1])], outputs_of(store))
    assert raised.value.error_class == "ValueError"
    assert "Traceback" not in str(raised.value)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("one\nTwo: three\n"), ("ValueError", "one\nTwo: three")),
        (KeyError("x"), ("KeyError", "'x'")),
        (StopIteration(), ("StopIteration", "StopIteration")),
        (WrongColumns("a: b"), ("WrongColumns", "a: b")),
    ],
)
def test_traceback_is_reported_by_its_last_exception(error: Exception, expected: tuple[str, str]) -> None:
    with pytest.raises(type(error)) as raised:
        raise error from RuntimeError("before")
    assert raised_in("".join(traceback.format_exception(raised.value))) == expected


def test_rows_outside_the_scope_are_refused(spark: SparkSession, store: Store) -> None:
    @operator(inputs={"logs": sample_operators.LOGS}, output=sample_operators.COUNTS)
    def shifted(logs: DataFrame, ctx: TaskContext) -> DataFrame:
        assert ctx.scope == Scope(10, 19)
        return logs.selectExpr("block_number + 5 as block_number", "1L as logs")

    outputs = outputs_of(store)
    with (
        nothing_left(outputs),
        pytest.raises(RowOutsideScope, match=r"block_number 2[0-4], outside the task's range 10-19"),
    ):
        attempt(spark, shifted, [logs(store, range(100), (10, 19))], outputs)


def test_corrupt_input_fails_the_attempt_with_its_name(spark: SparkSession, store: Store) -> None:
    damaged = logs(store, [1])
    path_of(damaged.files[0].location).write_bytes(b"PAR1 and no more")
    outputs = outputs_of(store)
    with nothing_left(outputs), pytest.raises(CorruptFile, match=r"rows_0_199\.parquet is not readable"):
        attempt(spark, sample_operators.counts, [damaged], outputs)


def test_invalid_cast_is_reported_with_sparks_message(spark: SparkSession, store: Store) -> None:
    @operator(inputs={"logs": sample_operators.LOGS}, output=sample_operators.COUNTS)
    def casting(logs: DataFrame, ctx: TaskContext) -> DataFrame:
        return logs.select("block_number", functions.col("data").cast("bigint").alias("logs"))

    with pytest.raises(TaskFailed, match='\'0x\' of the type "STRING" cannot be cast to "BIGINT"') as raised:
        attempt(spark, casting, [logs(store, [1])], outputs_of(store))
    assert raised.value.error_class == "CastInvalidInput"


def test_untyped_and_duplicate_columns_are_refused(spark: SparkSession, store: Store) -> None:
    @operator()
    def typeless(inputs: dict[str, DataFrame], ctx: TaskContext) -> DataFrame:
        return inputs["logs"].selectExpr("null as a")

    @operator()
    def twice(inputs: dict[str, DataFrame], ctx: TaskContext) -> DataFrame:
        return inputs["logs"].selectExpr("1 as a", "2 as A")

    for function, sentence in ((typeless, "a of output counts has the type void"), (twice, "column A twice")):
        with pytest.raises(WrongColumns, match=sentence):
            attempt(spark, function, [logs(store, [1])], outputs_of(store))


def test_mismatched_inputs_and_outputs_are_listed_for_operator_and_job(spark: SparkSession, store: Store) -> None:
    one = logs(store, [1])
    with pytest.raises(WrongInputs, match="takes the inputs logs, but its job has none"):
        attempt(spark, sample_operators.counts, [], outputs_of(store))
    with pytest.raises(WrongOutputs, match="declares the outputs even, odd, but its job has counts"):
        attempt(spark, sample_operators.parted, [one], outputs_of(store))
    with pytest.raises(WrongOutputs, match="returns logs, factor, but its job has the outputs counts"):
        attempt(spark, sample_operators.total, [one], outputs_of(store))
    with pytest.raises(WrongOutputs, match="returns a DataFrame, but its job has no output"):
        attempt(spark, sample_operators.counts, [one], [])


def test_output_without_a_range_is_refused(spark: SparkSession, store: Store) -> None:
    no_part = parquet_input("logs", [], None, LOGS)
    with pytest.raises(NoScope, match="Output counts has no range"):
        attempt(spark, sample_operators.counts, [no_part], outputs_of(store))


def test_range_column_must_exist_and_be_an_integer(spark: SparkSession, store: Store) -> None:
    @operator(range_column="height")
    def absent(inputs: dict[str, DataFrame], ctx: TaskContext) -> DataFrame:
        return inputs["logs"]

    @operator(range_column="data")
    def textual(inputs: dict[str, DataFrame], ctx: TaskContext) -> DataFrame:
        return inputs["logs"]

    for function, sentence in ((absent, "has the range column height"), (textual, "must be an integer")):
        with pytest.raises(BadOperator, match=sentence):
            attempt(spark, function, [logs(store, [1])], outputs_of(store))


def test_unknown_operator_error_explains_how_to_declare_one(spark: SparkSession, store: Store) -> None:
    data = task([], [])
    for name, sentence in (
        ("tests.spark.sample_operators:undecorated", "declare the function with @operator"),
        ("tests.spark.sample_operators:absent", "no operator 'tests.spark.sample_operators:absent'"),
        ("nothing", "built-in ones are block_ingest"),
    ):
        with pytest.raises(OperatorNotFound, match=sentence):
            run_attempt(spark, context(spark, data, operator=name), data, None)


def test_ended_session_is_not_reported_as_an_error_of_the_operator() -> None:
    data = task([], [])
    from py4j.protocol import Py4JNetworkError  # type: ignore[import-untyped]

    with pytest.raises(SparkStopped, match="next attempt gets a new one"), explained(data):
        raise Py4JNetworkError("Answer from Java side is empty")
    with pytest.raises(ConnectionError), explained(data):
        raise ConnectionRefusedError("the chain does not answer")
