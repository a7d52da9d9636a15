"""dedupe, rollup and parquet_compact against models in plain Python."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from interlock.spark.built_in.dedupe import dedupe
from interlock.spark.built_in.parquet_compact import parquet_compact
from interlock.spark.built_in.rollup import rollup
from interlock.spark.testing import run, session
from interlock.workers.failures import BadConfig, WrongInputs
from tests.spark.local_attempts import Store, attempt, output, parquet_input, path_of, schema

pytestmark = pytest.mark.usefixtures("spark")

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
ROWS = pa.schema(
    [
        ("block_number", pa.int64()),
        ("token", pa.string()),
        ("version", pa.int32()),
        ("amount", pa.decimal128(38, 0)),
        ("at", pa.timestamp("us", "UTC")),
        ("note", pa.string()),
    ]
)
rows = st.fixed_dictionaries(
    {
        "block_number": st.integers(0, 50),
        "token": st.sampled_from([None, "a", "b", "c"]),
        "version": st.one_of(st.none(), st.integers(0, 3)),
        "amount": st.one_of(st.none(), st.integers(0, 10), st.just(10**38 - 1)),
        "at": st.datetimes(datetime(1960, 1, 1), datetime(2040, 1, 1)).map(lambda at: at.replace(tzinfo=UTC)),  # noqa: DTZ001 - the time zone is added below
        "note": st.sampled_from([None, "x", "y"]),
    }
)
tables = st.lists(rows, min_size=20, max_size=120).map(lambda drawn: pa.Table.from_pylist(drawn, schema=ROWS))
few = settings(max_examples=3, deadline=None)


def multiset(found: list[dict[str, Any]]) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row.values()) for row in found)


# dedupe


@few
@given(tables, st.sampled_from(["first", "last"]))
def test_dedupe_keeps_one_row_per_key_deterministically(table: pa.Table, keep: str) -> None:
    config = {"key": ["block_number", "token"], "order_by": ["version"], "keep": keep}
    kept = run(dedupe, {"rows": table}, config=config).rows
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in table.to_pylist():
        groups[row["block_number"], row["token"]].append(row)
    assert {(row["block_number"], row["token"]) for row in kept} == groups.keys()
    assert len(kept) == len(groups)
    for row in kept:
        versions = [one["version"] for one in groups[row["block_number"], row["token"]] if one["version"] is not None]
        best = (max if keep == "last" else min)(versions, default=None)
        assert row["version"] == best
        assert row in groups[row["block_number"], row["token"]]
    shuffled = table.take(list(reversed(range(table.num_rows))))
    assert multiset(run(dedupe, {"rows": shuffled}, config=config).rows) == multiset(kept)


def test_rows_that_differ_only_in_a_map_are_ordered(spark: SparkSession) -> None:
    pairs = [{"id": 1, "m": [("a", number)], "s": {"m": [("b", 1)]}} for number in range(5)]
    kind = pa.map_(pa.string(), pa.int64())
    shape = pa.schema([("id", pa.int64()), ("m", kind), ("s", pa.struct([("m", kind)]))])
    for given_rows in (pairs, pairs[::-1]):
        kept = run(dedupe, {"rows": pa.Table.from_pylist(given_rows, schema=shape)}, config={"key": ["id"]}).rows
        assert [row["m"] for row in kept] == [[("a", 4)]]
    assert run(dedupe, {"rows": [{"id": 1}, {"id": 1}]}, config={"key": ["id"]}).rows == [{"id": 1}]


# rollup

SIZES = {"hour": 3600, "15 minutes": 900, "day": 86_400, "2 days": 172_800, "week": 604_800, "1 second": 1}


def bucket_of(at: datetime, bucket: str) -> datetime:
    size = timedelta(seconds=SIZES[bucket])
    start = EPOCH + timedelta(days=4) if bucket == "week" else EPOCH
    return at - (at - start) % size


@few
@given(tables, st.sampled_from(sorted(SIZES)))
def test_rollup_equals_the_model(table: pa.Table, bucket: str) -> None:
    measures = {"n": "count", "amounts": "count(amount)", "total": "sum(amount)", "least": "min(version)"}
    config = {"bucket": bucket, "time_column": "at", "keys": ["token"], "measures": measures}
    made = run(rollup, {"rows": table}, config=config | {"range_column": "block_number"}).rows
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in table.to_pylist():
        groups[bucket_of(row["at"], bucket), row["token"]].append(row)
    wanted = [{"bucket": key[0], "token": key[1]} | summed(group) for key, group in groups.items()]
    assert multiset(made) == multiset(wanted)


def summed(group: list[dict[str, Any]]) -> dict[str, Any]:
    amounts = [row["amount"] for row in group if row["amount"] is not None]
    versions = [row["version"] for row in group if row["version"] is not None]
    numbers = [row["block_number"] for row in group]
    total = sum(map(int, amounts))
    return {
        "n": len(group),
        "amounts": len(amounts),
        "total": total if amounts and total < 10**38 else None,
        "least": min(versions, default=None),
        "first_block_number": min(numbers),
        "last_block_number": max(numbers),
    }


def test_rollups_of_several_ranges_merge_to_the_rollup_of_one(spark: SparkSession) -> None:
    seconds = [{"block_number": n, "at": 1_700_000_000 + 600 * n, "who": f"w{n % 17}"} for n in range(60)]
    measures = {"n": "count", "last": "max(block_number)", "people": "distinct_sketch(who)"}
    config = {"bucket": "hour", "time_column": "at", "measures": measures}
    whole = run(rollup, {"rows": seconds}, config=config, scope=(0, 59)).table
    parts = [run(rollup, {"rows": seconds}, config=config, scope=(n, n + 19)).table for n in (0, 20, 40)]
    assert sum(part.num_rows for part in parts) > whole.num_rows
    merged = """
        SELECT bucket, sum(n) AS n, max(last) AS last, hll_sketch_estimate(hll_union_agg(people)) AS people
        FROM {rows} GROUP BY bucket ORDER BY bucket
    """
    together = [
        session().sql(merged, rows=session().createDataFrame(table)).collect()
        for table in (whole, pa.concat_tables(parts))
    ]
    assert together[0] == together[1]
    assert sum(row.n for row in together[0]) == 60


# parquet_compact


def test_compacted_file_has_the_same_rows_sorted(spark: SparkSession, tmp_path: Path) -> None:
    store = Store(tmp_path)
    known = schema("block_number bigint, token string, amount decimal(38,0)")
    numbers = [(n * 7919) % 1000 for n in range(1000)]
    table = pa.Table.from_pylist(
        [{"block_number": n, "token": None if n % 5 else f"t{n % 11}", "amount": n} for n in (*numbers, *numbers[:50])],
        schema=pa.schema([("block_number", pa.int64()), ("token", pa.string()), ("amount", pa.decimal128(38, 0))]),
    )
    files = []
    for start in range(0, 1000, 50):
        within = [start <= row < start + 50 for row in table["block_number"].to_pylist()]
        files.append(store.file(table.filter(pa.array(within)), start, start + 49))
    for config, order in (({}, ["block_number"]), ({"sort_by": ["token", "amount"]}, ["token", "amount"])):
        out = output(store, "compacted")
        read = parquet_input("rows", files, (100, 899), known)
        _, outputs, _ = attempt(spark, parquet_compact, [read], [out], operator="parquet_compact", config=config)
        made = pq.read_table(path_of(outputs[0].location)).to_pylist()
        assert multiset(made) == multiset([row for row in table.to_pylist() if 100 <= row["block_number"] <= 899])
        places = [[(row[name] is not None, row[name]) for name in order] for row in made]
        assert all(before <= after for before, after in itertools.pairwise(places))


# Refused configs


@pytest.mark.parametrize(
    ("function", "config", "message"),
    [
        (dedupe, {}, "missing required field `key`"),
        (dedupe, {"key": []}, "length >= 1"),
        (dedupe, {"key": ["id"], "keep": "any"}, "keep"),
        (dedupe, {"key": ["Id"]}, "key names 'Id', but the input has no such column. Columns of the input: id, at"),
        (dedupe, {"key": ["id"], "order_by": ["x"]}, "order_by names 'x'"),
        (dedupe, {"key": ["id"], "keys": ["id"]}, "unknown field `keys`"),
        (rollup, {}, "missing required field `bucket`"),
        (rollup, {"bucket": "fortnight"}, "such as hour, day, week or 15 minutes, got 'fortnight'"),
        (rollup, {"bucket": "0 hours"}, "such as hour"),
        (rollup, {"bucket": "400 days"}, "at most 366 days"),
        (rollup, {"bucket": "hour"}, "time_column names 'block_timestamp'"),
        (rollup, {"bucket": "hour", "time_column": "note"}, "must be a timestamp"),
        (rollup, {"bucket": "hour", "time_column": "at", "keys": ["x"]}, "keys names 'x'"),
        (rollup, {"bucket": "hour", "time_column": "at", "measures": {}}, "measures"),
        (
            rollup,
            {"bucket": "hour", "time_column": "at", "measures": {"a": "avg(id)"}},
            r"must be count, count\(column\)",
        ),
        (rollup, {"bucket": "hour", "time_column": "at", "measures": {"a": "sum"}}, "must be count"),
        (
            rollup,
            {"bucket": "hour", "time_column": "at", "measures": {"a": "sum(note)"}},
            "has type string: sum needs a numeric",
        ),
        (rollup, {"bucket": "hour", "time_column": "at", "measures": {"Bucket": "count"}}, "column 'Bucket' twice"),
        (parquet_compact, {"sort_by": ["x"]}, "sort_by names 'x'"),
        (parquet_compact, {"row_group_rows": 5}, "unknown field `row_group_rows`"),
    ],
)
def test_invalid_config_fails_with_advice(function: Any, config: dict[str, Any], message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        run(function, {"rows": [{"id": 1, "at": EPOCH, "note": "n"}]}, config=config)


def test_second_input_is_refused() -> None:
    with pytest.raises(WrongInputs, match="takes exactly one input, but this job has 2"):
        run(dedupe, {"a": [{"id": 1}], "b": [{"id": 1}]}, config={"key": ["id"]})
