"""An attempt on Spark: what it reads, what it writes, what it says when it fails."""

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

from interlock.pipeline import Scope, TaskContext, TaskFailed, operator
from interlock.pipeline.attempt import run_attempt
from interlock.pipeline.failures import (
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
from interlock.pipeline.operators import give
from interlock.pipeline.spark_errors import explained, raised_in
from interlock.schemas import hash_of
from interlock.wire import InputData, TaskFile
from interlock.workers.catalogue import OperatorNotFound, sources
from tests.spark import sample_operators
from tests.spark.attempts import (
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
    """This process was given the operators of the tests."""
    give(sources([str(Path(__file__).parents[2])]))
    yield
    give(())


def test_an_attempt_writes_one_file_with_its_marker_and_reports_both(spark: SparkSession, store: Store) -> None:
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


def test_several_outputs_get_what_is_theirs(spark: SparkSession, store: Store) -> None:
    outputs = [output(store, "even", 0), output(store, "odd", 1)]
    _, reported, events = attempt(spark, sample_operators.parted, [logs(store, range(5))], outputs)
    assert [[row["block_number"] for row in rows_of(one.location)] for one in reported] == [[0, 2, 4], [1, 3]]
    assert [one.output_index for one in reported] == [0, 1]
    assert [event.dataset_uuid for event in events] == [one.dataset_uuid for one in outputs]
    # Under other names, the declared order counts, not that in which a dict was filled.
    renamed = [output(store, "first", 0), output(store, "second", 1)]
    _, reported, _ = attempt(spark, sample_operators.parted, [logs(store, range(5))], renamed)
    assert [one.row_count for one in reported] == [3, 2]


def test_what_several_outputs_are_made_of_is_computed_once_and_not_kept(spark: SparkSession, store: Store) -> None:
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


def test_a_job_without_outputs_gets_what_the_function_returns(spark: SparkSession, store: Store) -> None:
    result, outputs, events = attempt(spark, sample_operators.total, [logs(store, range(5))], [], config={"factor": 2})
    assert (result, outputs, events) == ({"logs": 5, "factor": 2}, [], [])


def test_no_rows_are_a_file_all_the_same(spark: SparkSession, store: Store) -> None:
    _, [reported], _ = attempt(spark, sample_operators.counts, [logs(store, [150])], [output(store, "counts")])
    assert (reported.row_count, rows_of(reported.location)) == (0, [])

    @operator(inputs={}, output=sample_operators.COUNTS)
    def nothing(ctx: TaskContext) -> DataFrame:
        return ctx.spark.createDataFrame([], sample_operators.COUNTS)

    _, [reported], _ = attempt(spark, nothing, [], [output(store, "counts")], payload={"start": 0, "end": 9})
    assert (reported.row_count, reported.partition_key) == (0, "0-9")


def test_all_types_come_back_as_they_were(spark: SparkSession, store: Store) -> None:
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
        "local": datetime(2026, 1, 2, 3, 4, 5, 6),  # noqa: DTZ001 - it is one without a zone
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


def test_a_column_that_may_be_null_can_join_and_nothing_else(spark: SparkSession, store: Store) -> None:
    @operator(output="block_number bigint not null, logs bigint not null, tip string")
    def wider(inputs: dict[str, DataFrame], ctx: TaskContext) -> DataFrame:
        return inputs["logs"].selectExpr("block_number", "1L as logs", "data as tip")

    known = schema(sample_operators.COUNTS)
    _, [reported], _ = attempt(spark, wider, [logs(store, [1])], [output(store, "counts", schema=known)])
    assert rows_of(reported.location) == [{"block_number": 1, "logs": 1, "tip": "0x"}]

    other = schema("block_number bigint not null, logs int not null")
    outputs = [output(store, "counts", schema=other)]
    with nothing_left(outputs), pytest.raises(SchemaMismatch, match="logs was int and is bigint now"):
        attempt(spark, wider, [logs(store, [1])], outputs)


def test_rows_are_added_to_those_of_the_partition(spark: SparkSession, store: Store) -> None:
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


def test_a_rewrite_that_commits_meanwhile_changes_nothing_for_the_attempt(spark: SparkSession, store: Store) -> None:
    before = logs(store, [1, 2])

    @operator(inputs={"logs": sample_operators.LOGS}, output=sample_operators.LOGS)
    def slow(logs: DataFrame, ctx: TaskContext) -> DataFrame:
        store.file(pa.table({"block_number": [9], "address": ["b"], "data": ["new"]}), 0, 199)
        return logs

    _, [reported], _ = attempt(spark, slow, [before], [output(store, "copy")])
    assert [row["block_number"] for row in rows_of(reported.location)] == [1, 2]


# How it fails


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
def test_an_operator_that_fails_leaves_nothing_behind(
    spark: SparkSession, store: Store, function: Any, failure: type[Exception], sentence: str
) -> None:
    outputs = outputs_of(store)
    with nothing_left(outputs), pytest.raises(failure, match=sentence):
        attempt(spark, function, [logs(store, [1])], outputs)


def test_what_a_function_raises_inside_spark_keeps_its_class(spark: SparkSession, store: Store) -> None:
    with pytest.raises(TaskFailed) as raised:
        attempt(spark, sample_operators.raising_inside, [logs(store, [1])], outputs_of(store))
    assert raised.value.error_class == "ValueError"
    assert "Traceback" not in str(raised.value)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("one\nTwo: three\n"), ("ValueError", "one\nTwo: three")),
        (KeyError("x"), ("KeyError", "'x'")),
        (StopIteration(), ("StopIteration", "StopIteration")),
        (WrongColumns("a: b"), ("WrongColumns", "a: b")),
    ],
)
def test_a_trace_is_told_by_its_last_exception(error: Exception, told: tuple[str, str]) -> None:
    with pytest.raises(type(error)) as raised:
        raise error from RuntimeError("before")
    assert raised_in("".join(traceback.format_exception(raised.value))) == told


def test_rows_of_another_task_are_refused(spark: SparkSession, store: Store) -> None:
    @operator(inputs={"logs": sample_operators.LOGS}, output=sample_operators.COUNTS)
    def shifted(logs: DataFrame, ctx: TaskContext) -> DataFrame:
        assert ctx.scope == Scope(10, 19)
        return logs.selectExpr("block_number + 5 as block_number", "1L as logs")

    outputs = outputs_of(store)
    with (
        nothing_left(outputs),
        pytest.raises(RowOutsideScope, match=r"block_number 2[0-4], and the task is about 10-19"),
    ):
        attempt(spark, shifted, [logs(store, range(100), (10, 19))], outputs)


def test_a_corrupt_input_fails_the_attempt_and_is_named(spark: SparkSession, store: Store) -> None:
    damaged = logs(store, [1])
    path_of(damaged.files[0].location).write_bytes(b"PAR1 and no more")
    outputs = outputs_of(store)
    with nothing_left(outputs), pytest.raises(CorruptFile, match=r"rows_0_199\.parquet cannot be read"):
        attempt(spark, sample_operators.counts, [damaged], outputs)


def test_a_value_that_cannot_be_cast_is_said_as_spark_says_it(spark: SparkSession, store: Store) -> None:
    @operator(inputs={"logs": sample_operators.LOGS}, output=sample_operators.COUNTS)
    def casting(logs: DataFrame, ctx: TaskContext) -> DataFrame:
        return logs.select("block_number", functions.col("data").cast("bigint").alias("logs"))

    with pytest.raises(TaskFailed, match='\'0x\' of the type "STRING" cannot be cast to "BIGINT"') as raised:
        attempt(spark, casting, [logs(store, [1])], outputs_of(store))
    assert raised.value.error_class == "CastInvalidInput"


def test_a_column_without_a_type_and_one_that_is_there_twice_are_refused(spark: SparkSession, store: Store) -> None:
    @operator()
    def typeless(inputs: dict[str, DataFrame], ctx: TaskContext) -> DataFrame:
        return inputs["logs"].selectExpr("null as a")

    @operator()
    def twice(inputs: dict[str, DataFrame], ctx: TaskContext) -> DataFrame:
        return inputs["logs"].selectExpr("1 as a", "2 as A")

    for function, sentence in ((typeless, "a of output counts has no type"), (twice, "column A twice")):
        with pytest.raises(WrongColumns, match=sentence):
            attempt(spark, function, [logs(store, [1])], outputs_of(store))


def test_inputs_and_outputs_that_do_not_match_are_named_on_both_sides(spark: SparkSession, store: Store) -> None:
    one = logs(store, [1])
    with pytest.raises(WrongInputs, match="takes logs, and its job has none as inputs"):
        attempt(spark, sample_operators.counts, [], outputs_of(store))
    with pytest.raises(WrongOutputs, match="declares even, odd, and its job has counts"):
        attempt(spark, sample_operators.parted, [one], outputs_of(store))
    with pytest.raises(WrongOutputs, match="gives logs, factor, and its job has counts"):
        attempt(spark, sample_operators.total, [one], outputs_of(store))
    with pytest.raises(WrongOutputs, match="returns a DataFrame, and its job has no output"):
        attempt(spark, sample_operators.counts, [one], [])


def test_an_output_needs_a_range(spark: SparkSession, store: Store) -> None:
    no_part = parquet_input("logs", [], None, LOGS)
    with pytest.raises(NoScope, match="Nothing says which range output counts is about"):
        attempt(spark, sample_operators.counts, [no_part], outputs_of(store))


def test_a_range_column_must_be_there_and_hold_whole_numbers(spark: SparkSession, store: Store) -> None:
    @operator(range_column="height")
    def absent(inputs: dict[str, DataFrame], ctx: TaskContext) -> DataFrame:
        return inputs["logs"]

    @operator(range_column="data")
    def textual(inputs: dict[str, DataFrame], ctx: TaskContext) -> DataFrame:
        return inputs["logs"]

    for function, sentence in ((absent, "has its range column height"), (textual, "must hold whole numbers")):
        with pytest.raises(BadOperator, match=sentence):
            attempt(spark, function, [logs(store, [1])], outputs_of(store))


def test_operators_that_are_none_say_how_to_make_them_one(spark: SparkSession, store: Store) -> None:
    data = task([], [])
    for name, sentence in (
        ("tests.spark.sample_operators:undecorated", "declare the function with @operator"),
        ("tests.spark.sample_operators:absent", "no operator 'tests.spark.sample_operators:absent'"),
        ("nothing", "built in are block_ingest"),
    ):
        with pytest.raises(OperatorNotFound, match=sentence):
            run_attempt(spark, context(spark, data, operator=name), data, None)


def test_a_session_that_has_ended_is_said_and_not_mistaken_for_the_operators_own_trouble() -> None:
    data = task([], [])
    from py4j.protocol import Py4JNetworkError  # type: ignore[import-untyped]

    with pytest.raises(SparkStopped, match="next attempt gets a new one"), explained(data):
        raise Py4JNetworkError("Answer from Java side is empty")
    with pytest.raises(ConnectionError), explained(data):
        raise ConnectionRefusedError("the chain does not answer")
