"""The operator `batch_query` on Spark: the rows of a query as files, at the location that the dispatcher chose."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from interlock.bus.path.delivery import packed
from interlock.bus.replay.archive import SCHEMA, parquet
from interlock.bus.replay.requests import selection
from interlock.spark.attempt import run_operator
from interlock.spark.built_in.sql_gate import UnsafeQuery
from interlock.spark.operators import BUILT_IN, resolve
from interlock.wire.attempts import ExportGrant, InputData, TaskData
from interlock.wire.bus_messages import ReplayFilters
from interlock.workers.failures import BadConfig
from tests.spark.local_attempts import Store, context, parquet_input, schema
from tests.support.dataset_files import path_of

BLOCKS = schema("block_number bigint not null, miner string")
EVERYTHING = (-(2**62), 2**62)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def blocks(store: Store) -> InputData:
    tables = [
        pa.table({"block_number": list(range(start, start + 10)), "miner": [f"miner {n % 3}" for n in range(10)]})
        for start in (0, 10)
    ]
    files = [store.file(table, start, start + 9) for table, start in zip(tables, (0, 10), strict=True)]
    return parquet_input("blocks_of_a_job", files, EVERYTHING, BLOCKS)


def asked(
    spark: SparkSession,
    store: Store,
    sql: str,
    *,
    relations: tuple[str, ...] = ("chain",),
    granted: bool = True,
    read: InputData | None = None,
) -> dict[str, Any]:
    export = ExportGrant(prefix=store.prefix(), org_id=uuid4()) if granted else None
    data = TaskData(task_id=uuid4(), inputs=[read or blocks(store)], outputs=[], export=export)
    payload = {"query_id": str(uuid4()), "sql": sql, "relations": relations, "start": EVERYTHING[0]}
    ctx = context(spark, data, operator="batch_query", payload=payload)
    result, outputs, events = run_operator(resolve("batch_query"), spark, ctx, data)
    assert (outputs, events) == ([], [])
    assert isinstance(result, dict)
    return result


def test_result_is_exported_in_the_order_of_the_statement(spark: SparkSession, store: Store) -> None:
    result = asked(spark, store, "select block_number, miner from chain where block_number > 4 order by 1 desc")
    assert result["row_count"] == 15
    assert all(file["uri"].startswith(result["prefix"]) for file in result["files"])
    rows = [number for file in result["files"] for number in pq.read_table(path_of(file["uri"]))[0].to_pylist()]
    assert rows == list(range(19, 4, -1))
    assert [path_of(file["uri"]).stat().st_size for file in result["files"]] == [
        file["bytes"] for file in result["files"]
    ]


def test_empty_result_is_a_file_with_its_columns(spark: SparkSession, store: Store) -> None:
    result = asked(spark, store, "select miner, count(*) as n from chain where block_number < 0 group by miner")
    (file,) = result["files"]
    assert result["row_count"] == 0
    assert pq.read_schema(path_of(file["uri"])).names == ["miner", "n"]


@pytest.mark.parametrize(
    ("sql", "error", "message"),
    [
        ("select * from blocks_of_a_job", UnsafeQuery, "blocks_of_a_job"),
        ("select * from parquet.`/etc/passwd`", UnsafeQuery, "refused|relation|input"),
        ("select 1 as a, 2 as A", BadConfig, "Two columns"),
        ("select nothing from chain", BadConfig, "nothing"),
    ],
)
def test_statement_that_cannot_run_fails_with_the_reason(
    spark: SparkSession, store: Store, sql: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        asked(spark, store, sql)


def test_forged_batch_query_task_is_refused(spark: SparkSession, store: Store) -> None:
    for made_up in ({"granted": False}, {"relations": ()}, {"relations": ("a", "b")}):
        with pytest.raises(BadConfig, match="batch_query runs only in tasks that the query service creates"):
            asked(spark, store, "select 1", **made_up)


def _body(n: int, source: str) -> str:
    metadata = {"id": str(UUID(int=n)), "timestamp": "2026-01-31T12:00:00Z", "version_id": "hmac-v1"}
    command = {"source": source, "target": "mailer", "name": "send-mail", "payload": {"n": n}}
    return msgspec.json.encode({"metadata": metadata, "command": command}).decode()


def test_statement_of_a_replay_over_the_archive_runs(spark: SparkSession, store: Store) -> None:
    accepted = datetime(2026, 1, 31, 12, tzinfo=UTC)
    bodies = [_body(n, "acme/billing" if n % 2 else "acme/crm") for n in range(10)]
    kept = [(packed([body]), accepted + timedelta(minutes=n)) for n, body in enumerate(bodies)]
    file = store.file(pq.read_table(io.BytesIO(parquet(kept, 0))), 0, 9)
    archive = parquet_input("bus_commands", [file], EVERYTHING, SCHEMA)
    filters = ReplayFilters(
        target="mailer",
        name="send-mail",
        since=accepted + timedelta(minutes=2),
        until=accepted + timedelta(minutes=8),
        command_ids=[UUID(int=n) for n in range(1, 10)],
    )
    result = asked(spark, store, selection(filters, "acme/billing", 2), relations=("bus_commands",), read=archive)
    rows = [row for file in result["files"] for row in pq.read_table(path_of(file["uri"])).to_pylist()]
    assert [(row["command_id"], row["payload"]) for row in rows] == [
        (str(UUID(int=3)), '{"n":3}'),
        (str(UUID(int=5)), '{"n":5}'),
    ]


def test_batch_query_is_refused_in_a_dag() -> None:
    assert "batch_query" not in BUILT_IN
