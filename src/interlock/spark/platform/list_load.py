"""`list_load`: loads a staged list that is too long for one process. Spark reads, numbers and hashes its lines.

Spark splits the parts at line ends. A first pass counts the lines of each split, which gives every line its number.
Then each executor copies its splits into the run's shard, each split in one transaction with its row in the ledger. A
retried Spark task finds the row, and loads nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812 - PySpark's usual alias
from pyspark.sql.pandas.types import from_arrow_schema

from interlock.jobs.run_sources import Batch
from interlock.jobs.task_rows import BadList, Shape, ShardGone, ShardLoader, rows_of_lines
from interlock.spark.context import TaskContext
from interlock.spark.operators import operator
from interlock.wire.attempts import ListLoad
from interlock.wire.jobs import ListFormat
from interlock.workers.context import TaskFailed
from interlock.workers.failures import BadConfig

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_BOM: Final = b"\xef\xbb\xbf"
_ANSWER: Final = pa.schema([("part", pa.int64()), ("first_byte", pa.int64()), ("refusal", pa.string())])


@operator(inputs={})
def list_load(ctx: TaskContext) -> dict[str, Any]:
    """Loads the list and returns the number of splits."""
    load = ctx.data.list_load
    if load is None:
        raise BadConfig("list_load runs only in tasks that an ingest creates: submit a job with a `source` instead.")
    loader = Loader(ctx.state_url, ctx.task_id, load)
    answers = _numbered(ctx.spark, load).mapInArrow(loader.load, from_arrow_schema(_ANSWER)).collect()
    refused = sorted((row.part, row.first_byte, row.refusal) for row in answers if row.refusal is not None)
    if refused:
        raise TaskFailed(refused[0][2], "BadList")
    return {"splits": len(answers)}


def _numbered(spark: SparkSession, load: ListLoad) -> DataFrame:
    """Returns every line with its position and number.

    Line numbers within a split are consecutive; the first number of a split is the count of the lines before it.
    """
    place = F.col("_metadata.file_path"), F.col("_metadata.file_block_start"), F.col("_metadata.file_block_length")
    part = F.regexp_extract(place[0], r"(\d{5})$", 1).cast("bigint").alias("part")
    lines = (
        spark.read.option("lineSep", "\n")
        .text(load.parts)
        .select(
            part,
            place[1].alias("first_byte"),
            (place[1] + place[2]).alias("end_byte"),
            F.monotonically_increasing_id().alias("id"),
            F.col("value").cast("binary").alias("line"),
        )
    )
    splits = (
        lines.groupBy("part", "first_byte").agg(F.count("*").alias("lines"), F.min("id").alias("first_id")).collect()
    )
    offsets, before = [], 0
    for split in sorted(splits, key=lambda one: (one.part, one.first_byte)):
        offsets.append((split.part, split.first_byte, split.lines, split.first_id, before))
        before += split.lines
    known = spark.createDataFrame(
        offsets, "part bigint, first_byte bigint, lines bigint, first_id bigint, first_line bigint"
    )
    index = (F.col("first_line") + F.col("id") - F.col("first_id")).alias("task_index")
    hashed = F.sha2(F.concat(F.lit(f"{load.run_id}:"), F.col("task_index").cast("string")), 256)
    return (
        lines.join(F.broadcast(known), ["part", "first_byte"])
        .select("part", "first_byte", "end_byte", "first_line", "lines", index, "line")
        .withColumn("task_id", F.unhex(F.substring(hashed, 1, 32)))
    )


@dataclass(frozen=True)
class Loader:
    """Loads splits. Spark pickles it and sends it to the executors."""

    url: str
    load_task: UUID
    list: ListLoad

    @property
    def shape(self) -> Shape:
        return Shape(ListFormat(self.list.format), self.list.line_limit, slot_pointer=self.list.slot_pointer)

    def load(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Function for `mapInArrow`. One Spark task may have several splits, one after the other."""
        runs = (run for batch in batches for run in _by_split(batch))
        for split, tables in groupby(runs, key=lambda run: run[0]):
            refusal = self._one(split, (table for _, table in tables))
            yield pa.RecordBatch.from_pylist(
                [{"part": split.part, "first_byte": split.first_byte, "refusal": refusal}], schema=_ANSWER
            )

    def _one(self, split: Split, tables: Iterator[pa.Table]) -> str | None:
        """Loads one split. Returns the reason if the list is invalid, else None."""
        loader = ShardLoader(self.url, self.list.run_id, self.list.shard, self.load_task)
        where = Batch(split.part, split.first_byte, split.end_byte, split.first_line, split.lines, pa.table({}))
        try:
            loader.load_all(where, (self._rows(split, table) for table in tables))
        except BadList as bad:
            return bad.detail
        except ShardGone:
            return "The run was deleted."
        finally:
            loader.close()
        return None

    def _rows(self, split: Split, table: pa.Table) -> pa.Table:
        lines, indexes = table.column("line").combine_chunks(), table.column("task_index").to_numpy()
        if split.first_byte == 0 and len(indexes) and indexes[0] == split.first_line:
            head = lines[0].as_py()
            if head.startswith(_BOM):
                lines = pa.concat_arrays([pa.array([head.removeprefix(_BOM)], lines.type), lines[1:]])
        return rows_of_lines(lines, table.column("task_id").combine_chunks(), indexes, self.shape)


@dataclass(frozen=True)
class Split:
    part: int
    first_byte: int
    end_byte: int
    first_line: int
    lines: int


def _by_split(batch: pa.RecordBatch) -> Iterator[tuple[Split, pa.Table]]:
    """Cuts a batch at the bounds of splits. Rows arrive in file order, so those of a split are contiguous."""
    table = pa.Table.from_batches([batch])
    named = [table.column(name).to_pylist() for name in ("part", "first_byte", "end_byte", "first_line", "lines")]
    at = 0
    for key, rows in groupby(zip(*named, strict=True)):
        count = sum(1 for _ in rows)
        yield Split(*key), table.slice(at, count)
        at += count
