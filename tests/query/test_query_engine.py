"""The query engine: statements on Parquet files, S3 and tables, their limits, and crashes."""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, cast
from uuid import UUID, uuid4

import asyncpg
import duckdb
import obstore
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from interlock.errors import BadRequest, InvalidQuery, QueryCrashed, QueryTooLarge, Unavailable
from interlock.query.engine import (
    DataFile,
    Engine,
    Files,
    Format,
    Limits,
    QueryJob,
    Relation,
    Table,
    csv_header,
    csv_of,
    rows_of,
)
from interlock.query.engine.files import Lanes
from interlock.query.engine.pool import Fork, Warm
from interlock.query.engine.result import Statement
from interlock.query.engine.tables import UnknownType, duckdb_type
from interlock.query.statement.protocol import HEADER, MAX_FRAME, Kind
from interlock.schemas import Column
from tests.query.corpus import HONEST
from tests.support.polls import answered, eventually
from tests.support.s3 import S3

ENDLESS = "with recursive r(n) as (select 1 union all select n + 1 from r) select max(n) from r"
MANY_ROWS = "select unnest(range(1000000)) as n, 'a text that takes some room' as t"
ORG, OTHER_ORG = uuid4(), uuid4()


@pytest.fixture(scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory, postgres_url: str, s3: S3) -> AsyncIterator[Engine]:
    running = Engine(tmp_path_factory.mktemp("engine") / "temp", store=lambda _root: s3.store(), data_url=postgres_url)
    await running.start()
    yield running
    await running.stop()


@pytest.fixture(scope="module")
async def unlucky(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    """An engine without Landlock and data database, with files of an earlier engine in its folder."""
    temp = tmp_path_factory.mktemp("unlucky") / "temp"
    (temp / "7" / "spill").mkdir(parents=True)
    running = Engine(temp, data_url="postgresql://nobody:a-password@127.0.0.1:9/none")
    running.confined = False
    await running.start()
    yield running
    await running.stop()
    assert not temp.exists()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    pq.write_table(pa.table({"a": [1, 2, 3], "b": ["b1", "b2", "b1"]}), folder / "granted.parquet")
    pq.write_table(pa.table({"a": [2, 3, 4], "c": [20, 30, 40]}), folder / "more.parquet")
    return folder


def files(name: str, *paths: Path, **known: Any) -> Relation:
    return Relation(name, Files([DataFile(str(path)) for path in paths]), **known)


async def rows(engine: Engine, sql: str, *relations: Relation, limits: Limits | None = None) -> list[list[Any]]:
    async with await engine.run(QueryJob(sql, relations, limits or Limits())) as result:
        return [row async for batch in result.batches() for row in rows_of(batch)]


async def details(engine: Engine, sql: str, *relations: Relation) -> dict[str, int]:
    async with await engine.run(QueryJob(sql, relations)) as result:
        async for _ in result.batches():
            pass
        return dict(result.summary.details)


# Start


async def test_statement_runs_only_after_it_is_allowed(engine: Engine, folder: Path) -> None:
    """The query service allows it once the audit record is written."""
    asked = asyncio.Event()
    go = asyncio.Event()

    async def allowed() -> None:
        asked.set()
        await go.wait()

    job = QueryJob("select 'it ran'::integer", [files("granted", folder / "granted.parquet")])
    running = asyncio.create_task(engine.run(job, allowed=allowed))
    await asked.wait()
    # The process waits for its plan: if it had run, its error would already be here.
    assert not running.done()
    assert engine.running == 1
    go.set()
    with pytest.raises(InvalidQuery, match="it ran"):
        await running


async def test_disallowed_statement_never_runs(engine: Engine) -> None:
    async def refuse() -> None:
        raise Unavailable("The record cannot be written.")

    with pytest.raises(Unavailable, match="record"):
        await engine.run(QueryJob("select 'it ran'::integer", []), allowed=refuse)


# Results


async def test_honest_statements_return_the_same_rows_as_duckdb(engine: Engine, folder: Path) -> None:
    relations = [files("granted", folder / "granted.parquet"), files("more", folder / "more.parquet")]
    with duckdb.connect(":memory:", config={"threads": 1}) as bare:
        bare.execute("set timezone = 'UTC'")
        for name in ("granted", "more"):
            bare.execute(f"create view {name} as from '{folder / name}.parquet'")
        for sql in HONEST:
            found = await rows(engine, sql, *relations)
            wanted = [row for batch in bare.sql(sql).to_arrow_reader() for row in rows_of(_plain(batch))]
            assert sorted(map(str, found)) == sorted(map(str, wanted)), sql


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    fields = [
        field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
        for field in batch.schema
    ]
    return batch.cast(pa.schema(fields))


async def test_result_lists_columns_with_their_types(engine: Engine, folder: Path) -> None:
    sql = "select a, b, a::decimal(10, 2) as d, [a] as l, {'x': a} as s from granted order by a desc"
    async with await engine.run(QueryJob(sql, [files("granted", folder / "granted.parquet")])) as result:
        assert result.columns == [
            ("a", "BIGINT"),
            ("b", "VARCHAR"),
            ("d", "DECIMAL(10,2)"),
            ("l", "BIGINT[]"),
            ("s", "STRUCT(x BIGINT)"),
        ]
        got = [row async for batch in result.batches() for row in rows_of(batch)]
        assert got[0] == [3, "b1", "3.00", [3], {"x": 3}]
        summary = result.summary
    assert (summary.rows, summary.truncated, summary.relations) == (3, False, ("granted",))
    assert summary.bytes > 0
    assert summary.seconds > 0


async def test_arrow_result_is_a_valid_ipc_stream(engine: Engine, folder: Path) -> None:
    relation = files("granted", folder / "granted.parquet")
    async with await engine.run(QueryJob("select a, b::enum('b1', 'b2') as e from granted", [relation])) as result:
        stream = b"".join([part async for part in result.arrow()])
    with pa.ipc.open_stream(stream) as reader:
        assert reader.read_all().to_pydict() == {"a": [1, 2, 3], "e": ["b1", "b2", "b1"]}


async def test_empty_result_has_columns(engine: Engine, folder: Path) -> None:
    relation = files("granted", folder / "granted.parquet")
    async with await engine.run(QueryJob("select a from granted where false", [relation])) as result:
        assert [batch async for batch in result.batches()] == []
        assert result.schema.names == ["a"]
        assert result.summary.rows == 0


def test_json_rendering_loses_no_precision() -> None:
    batch = pa.record_batch(
        {
            "exact": pa.array([2**53, -(2**53)]),
            "large": pa.array([2**53 + 1, -(2**63)]),
            "decimal": pa.array([Decimal("1.10"), Decimal("-0.05")]),
            "float": pa.array([float("nan"), float("-inf")]),
            "binary": pa.array([b"\x00\xff", None]),
            "moment": pa.array([0, 1], pa.timestamp("ns", tz="UTC")),
            "local": pa.array([1_500_000, -1], pa.timestamp("us")),
            "date": pa.array([dt.date(2024, 1, 31), None]),
            "time": pa.array([3_661_000_001, 0], pa.time64("us")),
            "map": pa.array([[("k", 2**60)], []], pa.map_(pa.string(), pa.int64())),
            "struct": pa.array([{"n": 2**60, "t": [dt.datetime(2024, 1, 1, tzinfo=dt.UTC)]}, None]),
            "interval": pa.array([(1, 2, 3_500_000_000), None], pa.month_day_nano_interval()),
            "flag": pa.array([True, False]),
        }
    )
    assert rows_of(batch) == [
        [
            2**53,
            "9007199254740993",
            "1.10",
            "NaN",
            "AP8=",
            "1970-01-01T00:00:00Z",
            "1970-01-01T00:00:01.5",
            "2024-01-31",
            "01:01:01.000001",
            [["k", str(2**60)]],
            {"n": str(2**60), "t": ["2024-01-01T00:00:00Z"]},
            "P1M2DT3.5S",
            True,
        ],
        [
            -(2**53),
            "-9223372036854775808",
            "-0.05",
            "-Infinity",
            None,
            "1970-01-01T00:00:00.000000001Z",
            "1969-12-31T23:59:59.999999",
            None,
            "00:00:00",
            [],
            None,
            None,
            False,
        ],
    ]


def test_csv_quotes_only_where_needed() -> None:
    batch = pa.record_batch({"a": ['x "y"', None], "b": [[1, 2], None], "c": [True, False]})
    assert csv_header(["a", "b,c", "d"]) + csv_of(batch) == b'a,"b,c",d\r\n"x ""y""","[1,2]",true\r\n,,false\r\n'


# Limits


async def test_result_is_truncated_at_the_row_limit(engine: Engine) -> None:
    async with await engine.run(QueryJob(MANY_ROWS, [], Limits(rows=10_001))) as result:
        assert sum([batch.num_rows async for batch in result.batches()]) == 10_001
        assert result.summary.truncated
        assert result.summary.rows == 10_001


async def test_result_is_truncated_at_the_byte_limit(engine: Engine) -> None:
    async with await engine.run(QueryJob(MANY_ROWS, [], Limits(rows=10**9, bytes=1 << 20))) as result:
        size = sum([batch.nbytes async for batch in result.batches()])
        assert (1 << 19) < size <= (1 << 20)
        assert result.summary.truncated


async def test_row_larger_than_the_byte_limit_is_an_error(engine: Engine) -> None:
    with pytest.raises(QueryTooLarge) as refused:
        await rows(engine, "select repeat('x', 100000)", limits=Limits(bytes=50_000))
    assert refused.value.code == "query_row"


async def test_large_rows_are_split_into_limited_frames(engine: Engine) -> None:
    limits = Limits(rows=10**9, bytes=1 << 40)
    sql = "select repeat('x', 20 << 20) as x from (select unnest(range(5)))"
    async with await engine.run(QueryJob(sql, [], limits)) as result:
        sizes = [(batch.num_rows, batch.nbytes) async for batch in result.batches()]
    assert sum(count for count, _ in sizes) == 5
    assert max(size for _, size in sizes) <= MAX_FRAME
    with pytest.raises(QueryTooLarge) as refused:
        await rows(engine, "select repeat('x', 65 << 20)", limits=limits)
    assert refused.value.code == "query_row"


async def test_oversized_frame_of_a_process_is_refused(tmp_path: Path) -> None:
    ended = asyncio.get_running_loop().create_future()
    ended.set_result(0)
    dead = Fork(cast("Warm", None), 0, ended)
    statement = Statement(QueryJob("", [], Limits(bytes=1 << 40)), tmp_path, dead, Lanes([], None))
    ours, theirs = socket.socketpair()
    with theirs:
        await statement.connect(ours)
        theirs.sendall(HEADER.pack(Kind.BATCH, MAX_FRAME + 1))
        with pytest.raises(QueryCrashed, match="message over the size limit"):
            await statement.receive(Kind.BATCH)
    await statement.close()


async def test_first_rows_arrive_before_the_last_are_computed(engine: Engine) -> None:
    """Reading a few of a hundred million rows must be cheap."""
    limits = Limits(rows=5, memory_mb=128, temp_mb=1, seconds=20)
    sql = "select x.n from (select unnest(range(10000)) as n) x, (select unnest(range(10000)) as m) y"
    assert len(await rows(engine, sql, limits=limits)) == 5


async def test_statement_over_its_memory_limit_is_an_error(engine: Engine) -> None:
    sql = "select count(distinct (x.n, y.m)) from (select unnest(range(3000)) n) x, (select unnest(range(3000)) m) y"
    with pytest.raises(QueryTooLarge) as refused:
        await rows(engine, sql, limits=Limits(memory_mb=32, temp_mb=1, threads=1))
    assert refused.value.code == "query_memory"
    assert "batch" in refused.value.detail


async def test_statement_spills_to_its_folder(engine: Engine) -> None:
    pairs = "(select unnest(range(1500)) n) x, (select unnest(range(1500)) m) y"
    sql = f"select count(*) from (select n, m from {pairs} order by m, n desc limit 1000000)"
    assert await rows(engine, sql, limits=Limits(memory_mb=48, temp_mb=512, threads=2)) == [[1_000_000]]


async def test_timeout_applies_while_rows_are_read(engine: Engine) -> None:
    sql = f"select n from ({MANY_ROWS}) union all ({ENDLESS})"
    with pytest.raises(QueryTooLarge) as ended:
        await rows(engine, sql, limits=Limits(seconds=1, rows=10**9, bytes=1 << 30))
    assert ended.value.code == "query_timeout"


# Exports


async def test_export_file_exists_until_the_result_is_closed(engine: Engine, folder: Path) -> None:
    job = QueryJob(MANY_ROWS, [], Limits(rows=10), Format.PARQUET)
    async with await engine.run(job) as result:
        assert result.summary.rows == 1_000_000
        file = result.summary.file
        assert file is not None
        assert result.summary.bytes == os.stat(file).st_size  # noqa: PTH116 - a blocking call that is meant
        assert pq.read_metadata(file).num_rows == 1_000_000
        assert result.columns == [("n", "BIGINT"), ("t", "VARCHAR")]
    assert list(engine.folder.iterdir()) == []


async def test_export_over_the_temp_limit_is_refused(engine: Engine) -> None:
    sql = "select md5(n::varchar) as x from (select unnest(range(1000000)) as n)"
    with pytest.raises(QueryTooLarge) as refused:
        await engine.run(QueryJob(sql, [], Limits(temp_mb=1), Format.PARQUET))
    assert refused.value.code == "query_temp"


# Files


async def test_relation_without_files_is_empty_with_columns(engine: Engine) -> None:
    columns = [Column("n", "bigint"), Column("s", "struct<a:array<int>,`b c`:map<string,decimal(20,3)>>")]
    relation = Relation("nothing", Files([]), columns)
    async with await engine.run(QueryJob("from nothing", [relation])) as result:
        assert result.columns == [("n", "BIGINT"), ("s", 'STRUCT(a INTEGER[], "b c" MAP(VARCHAR, DECIMAL(20,3)))')]
        assert [batch async for batch in result.batches()] == []
    with pytest.raises(InvalidQuery, match="no rows yet"):
        await engine.run(QueryJob("from nothing", [Relation("nothing", Files([]))]))


async def test_column_added_later_is_null_in_older_files(engine: Engine, folder: Path) -> None:
    old, new = folder / "old.parquet", folder / "new.parquet"
    pq.write_table(pa.table({"a": [1]}), old)
    pq.write_table(pa.table({"b": ["x"], "a": [2]}), new)
    columns = [Column("a", "bigint"), Column("b", "string"), Column("c", "date")]
    relation = files("t", old, new, columns=columns)
    assert await rows(engine, "from t order by a", relation) == [[1, None, None], [2, "x", None]]


async def test_files_without_matching_rows_are_not_opened(engine: Engine, folder: Path) -> None:
    def part(number: int) -> DataFile:
        path = folder / f"part{number}.parquet"
        pq.write_table(pa.table({"n": list(range(number * 10, number * 10 + 10))}), path)
        return DataFile(str(path), {"N": (number * 10, number * 10 + 9)}, schema_hash="same")

    parts = Relation("t", Files([part(number) for number in range(4)]))
    for where, opened in [
        ("n = 15", 1),
        ("n >= 20", 2),
        ("n < 10", 1),
        ("n > 9 and n <= 20", 2),
        ("n between 12 and 13", 1),
        ("n in (1, 39)", 2),
        ("n = 15 or n = 1", 4),
        ("n is null", 0),
        ("n::varchar = '15'", 4),
    ]:
        found = await details(engine, f"select n from t where {where}", parts)
        assert (found["files"], found["files_left_out"]) == (opened, 4 - opened), where
    assert await rows(engine, "select n from t where n = 99", parts) == []
    assert await rows(engine, "select count(*) from t a, t b where a.n = 1", parts) == [[40]]


async def test_path_with_wildcards_is_one_file(engine: Engine, folder: Path) -> None:
    odd = folder / "it's [a] *.parquet"
    pq.write_table(pa.table({"a": [7]}), odd)
    assert await rows(engine, "from t", files("t", odd)) == [[7]]
    plain = folder / "it's.parquet"
    pq.write_table(pa.table({"a": [8]}), plain)
    assert await rows(engine, "from t", files("t", plain)) == [[8]]


async def test_missing_file_is_unavailable(engine: Engine, folder: Path) -> None:
    with pytest.raises(Unavailable):
        await rows(engine, "from t", files("t", folder / "gone.parquet"))


async def test_duplicate_relation_names_are_refused(engine: Engine, folder: Path) -> None:
    granted = folder / "granted.parquet"
    with pytest.raises(BadRequest, match="same name"):
        await engine.run(QueryJob("from t", [files("t", granted), files("T", granted)]))


async def test_s3_files_are_read_by_ranges(engine: Engine, s3: S3, tmp_path: Path) -> None:
    data = tmp_path / "data.parquet"
    table = pa.table({"n": list(range(200_000)), "t": [f"text {n}" for n in range(200_000)]})
    pq.write_table(table, data, row_group_size=20_000)
    for number in range(3):
        obstore.put(s3.store(), f"query/{number}.parquet", data.read_bytes())
    located = [DataFile(f"s3://{s3.bucket}/query/{number}.parquet") for number in range(3)]
    relation = Relation("t", Files(located), [Column("n", "bigint"), Column("t", "string"), Column("later", "int")])
    sql = "select count(*), sum(n), max(t), count(later) from t where n >= 199990"
    assert await rows(engine, sql, relation) == [[30, str(3 * sum(range(199_990, 200_000))), "text 199999", 0]]
    gone = Relation("t", Files([DataFile(f"s3://{s3.bucket}/query/gone.parquet", size=100)]))
    with pytest.raises(Unavailable):
        await rows(engine, "from t", gone)


async def test_without_landlock_duckdb_gets_no_path(unlucky: Engine, folder: Path) -> None:
    relations = [files("granted", folder / "granted.parquet"), files("more", folder / "more.parquet")]
    assert await rows(unlucky, "select sum(a * c) from granted join more using (a)", *relations) == [["130"]]


# Tables


@pytest.fixture(scope="module")
async def tables(postgres_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(postgres_url)
    await connection.execute(
        """create schema query_engine;
           create table query_engine.orders (
               org_id uuid not null, n bigint, name text, price numeric, paid numeric(10, 2), at timestamptz, day date,
               tag uuid, doc jsonb, raw bytea, small smallint, ok boolean, many int[]);
           create table query_engine.blocks (block_number bigint primary key, gas numeric);
           create table query_engine.whole (
               n bigint, value numeric, gas numeric(20, 0), fee numeric(10, 2), long numeric(78, 0));"""
    )
    await connection.executemany(
        "insert into query_engine.whole values ($1, $2, $3, $4, $5)",
        [
            (1, None, None, None, None),
            (2, 0, 0, Decimal("1.5"), 7),
            (3, 1000, 20_999, Decimal("2.25"), BIGGEST),
            (4, 2**200, 21_000, Decimal("-1"), -1),
            (5, BIGGEST, 21_001, Decimal("99999999.99"), 0),
        ],
    )
    await connection.executemany(
        """insert into query_engine.orders
           select $1, $2::bigint, $3, $2::bigint + 0.5, $2::bigint,
                  timestamptz '2024-01-01 00:00:00Z' + $2::int * interval '1 day',
                  date '2024-01-01' + $2::int, $4, '{"k": 1}', '\\x00ff', 1, true, array[1, 2]""",
        [(org, n, f"{'äÄaA'[n % 4]}{n}", UUID(int=n)) for org in (ORG, OTHER_ORG) for n in range(100)],
    )
    await connection.execute("insert into query_engine.blocks select n, n * 1e30 from generate_series(1, 1000) n")
    yield connection
    await connection.execute("drop schema query_engine cascade")
    await connection.close()


def orders(columns: Sequence[Column] | None = None) -> Relation:
    return Relation("orders", Table("query_engine", "orders", ORG), columns)


BLOCKS = Relation("blocks", Table("query_engine", "blocks"))


async def test_table_returns_only_rows_of_its_org(engine: Engine, tables: asyncpg.Connection) -> None:
    assert await rows(engine, "select count(*), sum(n) from orders", orders()) == [[100, "4950"]]
    (row,) = await rows(engine, "select * from orders where n = 7", orders())
    assert row == [
        7,
        "A7",
        "7.5",
        "7.00",
        "2024-01-08T00:00:00Z",
        "2024-01-08",
        str(UUID(int=7)),
        '{"k": 1}',
        "AP8=",
        1,
        True,
        "{1,2}",
    ]


async def test_table_that_cannot_be_filtered_by_org_is_refused(engine: Engine, tables: asyncpg.Connection) -> None:
    for relation in (
        Relation("t", Table("query_engine", "orders")),
        Relation("t", Table("query_engine", "blocks", ORG)),
    ):
        with pytest.raises(InvalidQuery, match="by org"):
            await rows(engine, "select * from t", relation)


@pytest.mark.parametrize(
    ("where", "count"),
    [
        ("n between 5 and 9", 5),
        ("n in (1, 2, 500)", 2),
        ("name = 'a2'", 1),
        ("name >= 'a'", 75),
        ("name < 'a'", 25),
        ("name = 'x'' or true --'", 0),
        ("tag = '00000000-0000-0000-0000-000000000003'", 1),
        ("day >= date '2024-04-01' and day < '2024-04-03'", 2),
        ("\"at\" > timestamptz '2024-04-08 12:00:00+00'", 1),
        ("\"at\" <= '2024-01-01'", 1),
        ("n is null", 0),
        ("n is not null and ok", 100),
        ("price::decimal(20, 1) = 7.5", 1),
        ("price > '9'", 11),
        ("paid = 7", 1),
        ("n = 9223372036854775808", 0),
        ("n = 1.0", 1),
        ("small = 70000", 0),
        ("name in ('a2', 'A3')", 2),
    ],
)
async def test_pushed_down_conditions_return_the_same_rows(
    engine: Engine, tables: asyncpg.Connection, where: str, count: int
) -> None:
    assert await rows(engine, f"select count(*) from orders where {where}", orders()) == [[count]]
    kept = f"select count(*) filter (where {where}) from orders"
    assert await rows(engine, kept, orders()) == [[count]]


BIGGEST = 2**256 - 1
WHOLE = Relation("whole", Table("query_engine", "whole", whole_numbers=True))


@pytest.mark.parametrize(
    ("where", "count"),
    [
        ("value > 1000", 2),
        ("value >= 1000", 3),
        ("1000 < value", 2),
        ("value = 1000", 1),
        ("value between 0 and 1000", 2),
        ("value in (1000, 5)", 1),
        ("value > '1000'", 2),
        ("value > 1e18", 2),
        ("value > 9223372036854775807", 2),
        (f"value = {BIGGEST}", 1),
        (f"value = '{BIGGEST}'", 1),
        ("value is null", 1),
        ("value < n", 1),
        ("value::double / 1e18 > 1", 2),
        ("gas > 21000", 1),
        ("gas = 1000000000000000000000000", 0),
        ("fee > 1.5 and fee < 3", 1),
        ("long = 7", 1),
    ],
)
async def test_big_integers_are_compared_as_numbers(
    engine: Engine, tables: asyncpg.Connection, where: str, count: int
) -> None:
    assert await rows(engine, f"select count(*) from whole where {where}", WHOLE) == [[count]]
    assert await rows(engine, f"select count(*) filter (where {where}) from whole", WHOLE) == [[count]]


async def test_big_integers_lose_no_digits(engine: Engine, tables: asyncpg.Connection) -> None:
    sql = "select value, value, [value] as l, {'v': value} as s, gas from whole where n > 3 order by value desc"
    async with await engine.run(QueryJob(sql, [WHOLE])) as result:
        assert [kind for _, kind in result.columns] == [
            "BIGNUM",
            "BIGNUM",
            "BIGNUM[]",
            "STRUCT(v BIGNUM)",
            "DECIMAL(20,0)",
        ]
        found = [row async for batch in result.batches() for row in rows_of(batch)]
    big, bigger = str(2**200), str(BIGGEST)
    assert found == [
        [bigger, bigger, [bigger], {"v": bigger}, "21001"],
        [big, big, [big], {"v": big}, "21000"],
    ]
    assert await rows(engine, "select sum(value), max(value) from whole", WHOLE) == [
        [str(BIGGEST + 2**200 + 1000), str(BIGGEST)]
    ]
    async with await engine.run(QueryJob("select value from whole", [WHOLE], format=Format.PARQUET)) as result:
        assert str(BIGGEST) in pq.read_table(result.summary.file)["value"].to_pylist()


async def test_fraction_among_integers_is_an_error(engine: Engine, tables: asyncpg.Connection) -> None:
    wrong = Relation("orders", Table("query_engine", "orders", ORG, whole_numbers=True))
    with pytest.raises(InvalidQuery, match="price has a number with a fraction"):
        await rows(engine, "select price from orders", wrong)


async def test_number_read_as_text_error_suggests_a_cast(engine: Engine, tables: asyncpg.Connection) -> None:
    with pytest.raises(InvalidQuery, match=r"read as text \(price\): cast them, for example with ::DOUBLE"):
        await rows(engine, "select count(*) from orders where price > 9", orders())
    assert await rows(engine, "select count(*) from orders where price::double > 9", orders()) == [[91]]


async def test_declared_columns_determine_table_columns(engine: Engine, tables: asyncpg.Connection) -> None:
    columns = [Column("n", "string"), Column("price", "decimal(20,1)"), Column("later", "int")]
    async with await engine.run(QueryJob("from orders where n = '7'", [orders(columns)])) as result:
        assert result.columns == [("n", "VARCHAR"), ("price", "DECIMAL(20,1)"), ("later", "INTEGER")]
        assert [row async for batch in result.batches() for row in rows_of(batch)] == [["7", "7.5", None]]


async def test_table_is_scanned_repeatedly_and_joined_with_files(
    engine: Engine, tables: asyncpg.Connection, folder: Path
) -> None:
    assert await rows(engine, "select count(*) from orders a join orders b using (n)", orders()) == [[100]]
    both = (
        "select sum(b.block_number), count(*) from blocks b join orders o on o.n = b.block_number "
        "join granted g on g.a = o.n"
    )
    assert await rows(engine, both, BLOCKS, orders(), files("granted", folder / "granted.parquet")) == [["6", 3]]
    walk = (
        "with recursive r(n) as (select 1::bigint union all "
        "select b.block_number + 1 from r join blocks b on b.block_number = r.n where r.n < 6) select max(n) from r"
    )
    assert await rows(engine, walk, BLOCKS) == [[6]]
    assert await rows(engine, "select max(gas) from blocks where block_number = 1000", BLOCKS) == [["1" + "0" * 33]]


async def test_all_scans_of_a_statement_use_one_snapshot(engine: Engine, tables: asyncpg.Connection) -> None:
    """The second scan starts after the first: rows written in between must appear in neither."""
    count = (
        "select (select count(*) from blocks), (select count(*) from blocks b where b.block_number > 0), "
        "(select count(*) from orders)"
    )
    writing = asyncio.create_task(_write_on(tables))
    try:
        for _ in range(5):
            ((first, second, _),) = await rows(engine, count, BLOCKS, orders())
            assert first == second
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await tables.execute("delete from query_engine.blocks where block_number > 1000")


async def _write_on(connection: asyncpg.Connection) -> None:
    number = 1000
    while True:
        number += 1
        await connection.execute("insert into query_engine.blocks values ($1, 0)", number)


async def test_missing_table_is_empty(engine: Engine, tables: asyncpg.Connection) -> None:
    missing = Table("query_engine", "missing", ORG)
    assert await rows(engine, "from t", Relation("t", missing, [Column("n", "bigint")])) == []
    with pytest.raises(InvalidQuery, match="no rows yet"):
        await rows(engine, "from t", Relation("t", missing))


async def test_unreachable_data_database_is_unavailable(unlucky: Engine) -> None:
    with pytest.raises(Unavailable) as away:
        await rows(unlucky, "from blocks", BLOCKS)
    assert "a-password" not in str(away.value)


async def test_scan_ends_with_its_statement(engine: Engine, tables: asyncpg.Connection) -> None:
    async with await engine.run(QueryJob("select a.n from orders a, orders b, orders c", [orders()])) as result:
        assert result.schema.names == ["n"]
    busy = (
        "select count(*) from pg_stat_activity "
        "where query like '%query_engine%' and state <> 'idle' and pid <> pg_backend_pid()"
    )

    async def none_left() -> bool:
        return bool(await tables.fetchval(busy) == 0)

    assert await answered(none_left)


# Crashes


async def test_closing_a_result_removes_its_process_and_folder(engine: Engine) -> None:
    async with await engine.run(QueryJob(MANY_ROWS, [], Limits(rows=10**9, bytes=1 << 30))) as result:
        assert engine.running == 1
        async for _ in result.batches():
            break
    assert engine.running == 0
    assert list(engine.folder.iterdir()) == []


async def test_cancelled_run_ends_its_process(engine: Engine) -> None:
    running = asyncio.create_task(engine.run(QueryJob(ENDLESS, [])))
    await eventually(lambda: engine.running)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert engine.running == 0
    assert list(engine.folder.iterdir()) == []


async def test_killed_process_fails_only_its_own_statement(engine: Engine) -> None:
    running = asyncio.create_task(engine.run(QueryJob(ENDLESS, [])))
    other = asyncio.create_task(rows(engine, MANY_ROWS, limits=Limits(rows=1000)))
    (child,) = await eventually(lambda: _burning(engine))
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(QueryCrashed):
        await running
    assert len(await other) == 1000
    assert engine.running == 0


def _burning(engine: Engine) -> list[psutil.Process] | None:
    """Returns the process that runs the endless statement."""
    found = []
    for child in psutil.Process(engine.warm_pid).children():
        try:
            found += [child] if child.cpu_times().user > 0.3 else []
        except psutil.NoSuchProcess:
            continue
    return found or None


async def test_dead_warm_process_fails_its_statements_and_is_restarted(engine: Engine) -> None:
    running = asyncio.create_task(engine.run(QueryJob(ENDLESS, [])))
    (child,) = await eventually(lambda: _burning(engine))
    os.kill(engine.warm_pid or 0, signal.SIGKILL)
    with pytest.raises(QueryCrashed):
        await running
    await eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert await rows(engine, "select 1") == [[1]]


SERVICE = """
import asyncio, sys
from pathlib import Path
from interlock.query.engine import Engine, QueryJob
async def main():
    engine = Engine(Path(sys.argv[1]))
    await engine.start()
    print(engine.warm_pid, flush=True)
    await engine.run(QueryJob(sys.argv[2], []))
asyncio.run(main())
"""


async def test_statements_end_with_a_killed_service(tmp_path: Path) -> None:
    arguments = ["-c", SERVICE, str(tmp_path / "temp"), ENDLESS]
    service = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    assert service.stdout is not None
    warm = psutil.Process(int(await service.stdout.readline()))
    children = await eventually(lambda: _statement_and_spare(warm))
    service.kill()
    await service.wait()
    await eventually(lambda: not any(process.is_running() for process in (warm, *children)))


def _statement_and_spare(warm: psutil.Process) -> list[psutil.Process] | None:
    children = warm.children()
    return children if len(children) >= 2 else None


async def test_spare_process_has_one_thread(engine: Engine) -> None:
    """Landlock restricts threads that start later, but not threads that already exist."""
    assert await rows(engine, "select 1") == [[1]]
    for spare in await eventually(lambda: _spares(engine)):
        assert spare.num_threads() == 1


async def test_killed_spare_processes_fail_no_statement(engine: Engine) -> None:
    assert await rows(engine, "select 1") == [[1]]
    spares = await eventually(lambda: _spares(engine))
    for spare in spares:
        spare.kill()
    await eventually(lambda: all(spare.status() == psutil.STATUS_ZOMBIE for spare in spares))
    assert await rows(engine, "select 2") == [[2]]


def _spares(engine: Engine) -> list[psutil.Process] | None:
    """Returns the spare processes once all of them wait and nothing else runs."""
    children = psutil.Process(engine.warm_pid).children()
    waiting = [child for child in children if child.status() == psutil.STATUS_SLEEPING]
    return waiting if len(waiting) == len(children) == 2 else None


async def test_engine_start_deletes_temp_files_of_a_killed_engine(unlucky: Engine) -> None:
    assert list(unlucky.folder.iterdir()) == []


async def test_check_returns_scans_without_running_the_statement(engine: Engine, folder: Path) -> None:
    relations = [files("granted", folder / "gone.parquet"), files("more", folder / "gone.parquet")]
    checked = await engine.check(f"select a from granted, ({ENDLESS})", relations)
    assert set(checked.scans) == {"granted"}
    with pytest.raises(InvalidQuery, match="is not a relation of this query"):
        await engine.check("from other", relations)


async def test_duckdb_error_does_not_repeat_the_statement(engine: Engine, folder: Path) -> None:
    with pytest.raises(InvalidQuery) as refused:
        await rows(engine, "select aa, 'a private text' from granted", files("granted", folder / "granted.parquet"))
    assert '"a"' in refused.value.detail
    assert "private" not in refused.value.detail
    assert "parquet" not in refused.value.detail


# Types


@pytest.mark.parametrize(
    ("spark", "duck"),
    [
        ("bigint", "BIGINT"),
        ("decimal(38,0)", "DECIMAL(38,0)"),
        ("decimal", "DECIMAL(10,0)"),
        ("varchar(20)", "VARCHAR"),
        ("timestamp", "TIMESTAMPTZ"),
        ("timestamp_ntz", "TIMESTAMP"),
        ("array<array<string>>", "VARCHAR[][]"),
        ("map<string,struct<a:int,B:date>>", 'MAP(VARCHAR, STRUCT("a" INTEGER, "B" DATE))'),
    ],
)
def test_spark_types_are_converted_to_duckdb_types(spark: str, duck: str) -> None:
    assert duckdb_type(spark) == duck


@pytest.mark.parametrize(
    "spark", ["geometry", "array<>", "struct<a>", "map<int>", "int); drop table x; --", "array<" * 60]
)
def test_unknown_type_never_becomes_part_of_a_statement(spark: str) -> None:
    with pytest.raises(UnknownType):
        duckdb_type(spark)
