"""Files from other tools through reader, operators and writer: see data/README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from interlock.spark.built_in.dedupe import dedupe
from interlock.spark.built_in.integrity_check import IntegrityFindings, integrity_check
from interlock.spark.built_in.parquet_compact import parquet_compact
from interlock.spark.built_in.sql import sql
from interlock.wire.attempts import InputData, TaskFile
from tests.spark.local_attempts import Store, attempt, output, parquet_input, path_of, rows_of

pytestmark = pytest.mark.usefixtures("spark")

FOLDER = Path(__file__).parent / "data"
NAMES = ["transactions_45000_45999", "transactions_46000_46999", "transactions_99999_99999"]
DOUBLED = {
    "0xc9b4bbebb2e3c52d70297cfafe4e7726dbcac8d23a41672697028dd0637b2e52",
    "0xf36b0800ef832bc64c1f7fa3967407783a711bfaa76ee3dac7cd3102b0a02499",
}


def file(path: Path) -> TaskFile:
    start, end = path.stem.split("_")[-2:]
    return TaskFile(start=int(start), end=int(end), location=f"file://{path}", commit=1)


def transactions() -> InputData:
    return parquet_input("transactions", [file(FOLDER / f"{name}.parquet") for name in NAMES], (45_000, 99_999), None)


def originals() -> list[dict[str, Any]]:
    return [row for name in NAMES for row in pq.read_table(FOLDER / f"{name}.parquet").to_pylist()]


def written(spark: SparkSession, function: Any, store: Store, **config: Any) -> tuple[str, list[dict[str, Any]]]:
    name = function.__name__
    _, outputs, _ = attempt(spark, function, [transactions()], [output(store, name)], operator=name, config=config)
    return outputs[0].location, rows_of(outputs[0].location)


def test_every_value_of_a_foreign_file_is_preserved(spark: SparkSession, tmp_path: Path) -> None:
    location, rows = written(spark, parquet_compact, Store(tmp_path), sort_by=["block_number", "nonce"])
    assert rows == originals()
    kinds = {field.name: str(field.type) for field in pq.read_schema(path_of(location))}
    assert kinds["block_number"] == "int64"
    assert kinds["gas_price"] == "decimal128(20, 0)"
    assert kinds["transaction_hash"] == "binary"


def test_largest_unsigned_numbers_do_not_overflow(spark: SparkSession, tmp_path: Path) -> None:
    largest = {
        "block_number": pa.array([2**32 - 1], pa.uint32()),
        "small": pa.array([255], pa.uint8()),
        "medium": pa.array([65_535], pa.uint16()),
        "large": pa.array([2**64 - 1], pa.uint64()),
        "word": pa.array([b"\xff" * 32], pa.large_binary()),
        "name": pa.array(["é"], pa.large_string()).dictionary_encode(),
    }
    path = tmp_path / f"rows_0_{2**32}.parquet"
    pq.write_table(pa.table(largest), path)
    query = "SELECT *, large + 1 AS more, hex(word) AS hex FROM rows WHERE block_number > 4294967294"
    rows = parquet_input("rows", [file(path)], (0, 2**32), None)
    out = output(Store(tmp_path), "sql")
    _, outputs, _ = attempt(spark, sql, [rows], [out], operator="sql", config={"query": query})
    assert rows_of(outputs[0].location) == [
        {
            "block_number": 2**32 - 1,
            "small": 255,
            "medium": 65_535,
            "large": 2**64 - 1,
            "word": b"\xff" * 32,
            "name": "é",
            "more": 2**64,
            "hex": "FF" * 32,
        }
    ]


def test_integrity_check_finds_exactly_the_two_duplicate_hashes(spark: SparkSession, tmp_path: Path) -> None:
    _, findings = written(spark, integrity_check, Store(tmp_path))
    assert {row["key"] for row in findings} == DOUBLED
    assert [(row["kind"], row["input"], row["block_number"], row["expected"], row["found"]) for row in findings] == [
        ("duplicate_key", "transactions", 99_999, "1", "2")
    ] * 2
    report, _, _ = attempt(spark, integrity_check, [transactions()], [], operator="integrity_check")
    assert report["findings"] == 2
    assert report["kinds"] == {"duplicate_key": 2}
    assert {one["key"] for one in report["first"]} == DOUBLED
    with pytest.raises(IntegrityFindings, match="2 duplicate_key"):
        attempt(
            spark, integrity_check, [transactions()], [], operator="integrity_check", config={"on_findings": "fail"}
        )


def test_dedupe_restores_the_genuine_rows(spark: SparkSession, tmp_path: Path) -> None:
    config = {"key": ["transaction_hash"], "order_by": ["block_number"], "keep": "first"}
    location, rows = written(spark, dedupe, Store(tmp_path), **config)
    genuine = [row for row in originals() if row["block_number"] != 99_999]
    assert sorted(rows, key=lambda row: row["block_number"]) == genuine
    again = parquet_input("transactions", [file(path_of(location))], (45_000, 99_999), None)
    report, _, _ = attempt(spark, integrity_check, [again], [], operator="integrity_check")
    assert report == {"findings": 0, "kinds": {}, "first": []}
