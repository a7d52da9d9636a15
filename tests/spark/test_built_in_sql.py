"""The operator `sql` on Spark."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from interlock.spark import TaskContext
from interlock.spark.attempt import call
from interlock.spark.built_in.sql import selected, sql
from interlock.spark.built_in.sql_gate import UnsafeQuery
from interlock.spark.operators import declared
from interlock.spark.testing import run
from interlock.workers.failures import BadConfig
from tests.spark.local_attempts import Store, context, parquet_input, schema, task

pytestmark = pytest.mark.usefixtures("spark")

LOGS = [{"block_number": number, "address": f"0x{number % 3}", "data": "x" * number} for number in range(10)]
BLOCKS = [{"block_number": number, "miner": f"miner {number}"} for number in range(5)]


def rows(query: str, **inputs: Any) -> list[dict[str, Any]]:
    return run(sql, inputs or {"logs": LOGS, "blocks": BLOCKS}, config={"query": query}).rows


def test_query_joins_and_aggregates_its_inputs() -> None:
    query = """
        WITH early AS (SELECT * FROM logs WHERE block_number < 4), logs AS (SELECT address, block_number FROM early)
        SELECT address, count(*) AS n, max(miner) AS miner  -- of any
        FROM logs JOIN blocks USING (block_number) GROUP BY address ORDER BY address
    """
    assert rows(query) == [
        {"address": "0x0", "n": 2, "miner": "miner 3"},
        {"address": "0x1", "n": 1, "miner": "miner 1"},
        {"address": "0x2", "n": 1, "miner": "miner 2"},
    ]


def test_input_names_are_quoted_and_braces_are_kept() -> None:
    assert rows("SELECT '{a}' AS a, max(x) AS x FROM `logs.v-1`", **{"logs.v-1": [{"x": 1}, {"x": 2}]}) == [
        {"a": "{a}", "x": 2}
    ]
    assert rows("SELECT 1 AS one", logs=LOGS) == [{"one": 1}]


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({}, BadConfig, "query"),
        ({"query": "SELECT 1", "catalog": "x"}, BadConfig, "unknown field `catalog`"),
        ({"query": "SELECT nothing FROM logs"}, BadConfig, "`nothing`"),
        ({"query": "SELECT * FROM logs JOIN ON logs"}, BadConfig, "ON is neither|[Ss]yntax error"),
        ({"query": "SELECT a b c FROM logs"}, BadConfig, "[Ss]yntax error"),
        ({"query": "SELECT * FROM secret"}, UnsafeQuery, "secret is neither an input"),
    ],
)
def test_query_that_cannot_run_fails_with_the_reason(
    config: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as refused:
        run(sql, {"logs": LOGS}, config=config)
    assert "interlock_" not in str(refused.value)
    assert "Project" not in str(refused.value)


ESCAPES = [
    "SELECT * FROM secret",
    "SELECT * FROM logs, global_temp.secret_of_all",
    "WITH secret AS (SELECT * FROM secret) SELECT * FROM secret",
    "SELECT is DISTINCT FROM secret",
    "SELECT is DISTINCT FROM text.`{path}`",
    "SELECT 1 UNION FROM text.`{path}`",
    "SELECT * FROM (SELECT 1 UNION FROM csv.`{path}`)",
    "SELECT (SELECT max(value) FROM text.`{path}`) FROM logs",
    "SELECT nothing FROM csv.`{path}`",
    "SELECT * FROM csv.`{path}.missing`",
    "SELECT * FROM json.`webhdfs://127.0.0.1:{port}/a`",
    "SELECT is DISTINCT FROM parquet.`webhdfs://127.0.0.1:{port}/a`",
    "SELECT * FROM text.`http://127.0.0.1:{port}/a`",
]


@contextmanager
def listener() -> Iterator[socket.socket]:
    """Records connections that Hadoop's file systems make."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def test_escape_reads_no_file_and_sends_no_request(spark: SparkSession, tmp_path: Path) -> None:
    spark.range(3).selectExpr("id AS hidden_column").createOrReplaceTempView("secret")
    spark.range(3).createOrReplaceGlobalTempView("secret_of_all")
    path = tmp_path / "secret.csv"
    path.write_text("hidden_column\nhidden value\n")
    try:
        with listener() as server:
            for query in ESCAPES:
                text = query.format(path=path, port=server.getsockname()[1])
                with pytest.raises(UnsafeQuery) as refused:
                    selected(spark, text, {"logs": spark.createDataFrame(LOGS)})
                assert "hidden" not in str(refused.value)
                assert "exist" not in str(refused.value)
            with pytest.raises(BlockingIOError):
                server.accept()
    finally:
        spark.catalog.dropTempView("secret")
        spark.catalog.dropGlobalTempView("secret_of_all")


def test_spark_connect_is_refused_without_a_call_to_the_server() -> None:
    """The session was never connected, so any call to the server would fail with another error."""
    remote: Any = object.__new__(pytest.importorskip("pyspark.sql.connect.session").SparkSession)
    with pytest.raises(BadConfig, match=r"Spark Connect.*spark_master"):
        selected(remote, "SELECT 1", {})


def test_input_named_like_a_view_of_the_session_is_the_input(spark: SparkSession) -> None:
    spark.range(3).createOrReplaceTempView("logs")
    try:
        frame = selected(spark, "SELECT count(*) AS n FROM (SELECT * FROM Logs)", {"logs": spark.createDataFrame(LOGS)})
        assert frame.collect() == [(len(LOGS),)]
    finally:
        spark.catalog.dropTempView("logs")


def analysed(spark: SparkSession, store: Store, query: str) -> DataFrame:
    """Returns the DataFrame of the operator, before it is computed."""
    known = schema("block_number bigint, address string, data string")
    files = [store.file(pa.Table.from_pylist(LOGS), 0, 9)]
    data = task([parquet_input("logs", files, (0, 9), known)], [])
    returned = call(declared(sql), spark, context(spark, data, operator="sql", config={"query": query}), data)
    assert isinstance(returned, DataFrame)
    return returned


def test_columns_and_filters_are_pushed_down_to_the_files(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    query = "WITH l AS (SELECT * FROM logs) SELECT count(address) AS n FROM l WHERE block_number > 7"
    frame = analysed(spark, Store(tmp_path), query)
    frame.explain()
    plan = capsys.readouterr().out
    assert "ReadSchema: struct<block_number:bigint,address:string>" in plan
    assert "GreaterThan(block_number,7)" in plan
    assert frame.collect() == [(2,)]


def test_concurrent_queries_do_not_see_each_others_inputs(spark: SparkSession, tmp_path: Path) -> None:
    stores = [Store(tmp_path / str(number)) for number in range(6)]

    def one(number: int) -> int:
        query = f"SELECT sum(block_number) + {number} AS n FROM logs WHERE block_number <= {number}"
        return int(analysed(spark, stores[number], query).collect()[0].n)

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(one, range(6))) == [sum(range(n + 1)) + n for n in range(6)]
    assert [view.name for view in spark.catalog.listTables() if view.name.startswith("interlock")] == []


def test_query_uses_only_config_and_session_of_the_context(spark: SparkSession) -> None:
    data = task([], [])
    ctx: TaskContext = context(spark, data, operator="sql", config={"query": "SELECT 41 + 1 AS answer"})
    assert sql({}, ctx).collect() == [(42,)]


def test_query_that_spark_cannot_analyse_is_a_bad_config() -> None:
    views = "".join(f" LATERAL VIEW explode(split(address, ',')) t{number} AS e{number}" for number in range(60))
    with pytest.raises(BadConfig, match="Max iterations"):
        rows(f"SELECT 1 AS one FROM logs{views}")
