"""Objects in a store instead of a folder, read and written with the real client."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from interlock.spark import objects
from interlock.spark.context import Scope
from interlock.spark.partition_file import PartitionFile
from interlock.spark.reader import inferred
from interlock.workers.failures import FileMissing, ObjectStoreAway
from tests.spark.s3_bucket import Bucket, bucket

SCHEMA = pa.schema([("block_number", pa.int64()), ("data", pa.string())])


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with bucket() as started:
        for name, value in started.environment.items():
            monkeypatch.setenv(name, value)
        yield started


def batches(*blocks: int, data: str = "x") -> Iterator[pa.RecordBatch]:
    return iter([pa.RecordBatch.from_pylist([{"block_number": n, "data": data} for n in blocks], schema=SCHEMA)])


def test_partition_is_one_object_into_which_rows_are_merged(store: Bucket) -> None:
    key = "dataset/a b/rows_0_9.parquet"
    first = PartitionFile("rows", f"s3://bucket/{key}", SCHEMA, Scope(0, 9), "block_number")
    written = first.written(batches(1, 2))
    assert list(store.objects) == [key]
    assert written.bytes == len(store.objects[key])

    second = PartitionFile(
        "rows", "s3://bucket/second", SCHEMA, Scope(0, 9), "block_number", ("block_number",), first.location
    )
    assert second.written(batches(2, 3, data="y")).row_count == 3
    rows = pq.read_table(io.BytesIO(store.objects["second"])).to_pylist()
    assert sorted((row["block_number"], row["data"]) for row in rows) == [(1, "x"), (2, "y"), (3, "y")]
    assert (
        inferred([first.location, second.location], "rows").simpleString() == "struct<block_number:bigint,data:string>"
    )


def test_only_the_objects_of_an_attempt_are_removed(store: Bucket) -> None:
    for key in ("a/1/_marker.json", "a/1/rows.parquet", "a/10/rows.parquet"):
        objects.write(f"s3://bucket/{key}", b"x")
    objects.remove_prefix("s3://bucket/a/1/")
    assert list(store.objects) == ["a/10/rows.parquet"]


def test_missing_object_and_unavailable_store_are_distinguished(store: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileMissing, match="s3://bucket/none no longer exists"):
        objects.read("s3://bucket/none")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(ObjectStoreAway, match="check objects_url"):
        objects.read("s3://bucket/x")
