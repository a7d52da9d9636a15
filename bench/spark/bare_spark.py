"""The same work by hand: a loop over files in one session with the settings of a worker."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from bench.spark.source import Partition
from bench.spark.transformation import ROWS, derived
from interlock.settings import Settings
from interlock.spark import session
from interlock.workers.protocol import SparkOptions


@dataclass(frozen=True)
class Bare:
    spark: SparkSession
    folder: Path

    def loop(self, partitions: Sequence[Partition], threads: int = 1) -> float:
        """Reads, transforms and writes each file, and returns the seconds."""
        self._clear()
        started = time.perf_counter()
        if threads == 1:
            for partition in partitions:
                self.derive(partition)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(self.derive, partitions))
        return time.perf_counter() - started

    def derive(self, partition: Partition) -> None:
        rows = self.spark.read.schema(ROWS).parquet(str(partition.path))
        derived(rows).coalesce(1).write.parquet(str(self.folder / partition.path.stem))

    def compact(self, partitions: Sequence[Partition]) -> float:
        """Combines all files into one sorted file, and returns the seconds."""
        self._clear()
        started = time.perf_counter()
        rows = self.spark.read.schema(ROWS).parquet(*(str(partition.path) for partition in partitions))
        one = rows.coalesce(1).sortWithinPartitions("block_number")
        one.write.parquet(str(self.folder / "compacted"))
        return time.perf_counter() - started

    def rows(self) -> int:
        """Returns the number of rows that the last loop has written."""
        files = self.folder.glob("*/*.parquet")
        return sum(pq.ParquetFile(file).metadata.num_rows for file in files)

    def _clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)


@contextmanager
def bare(folder: Path, lanes: int) -> Iterator[Bare]:
    """Starts a session in this process. Its files are on the same disk as Interlock's."""
    defaults = Settings()
    options = SparkOptions(
        master=defaults.spark_master,
        remote=None,
        memory=defaults.spark_memory,
        conf={},
        tasks=lanes,
        objects_root=folder.as_uri(),
    )
    with TemporaryDirectory(prefix="interlock-bench-spark-") as scratch:
        started = session.start(options, Path(scratch))
        try:
            yield Bare(started.for_task("bare", "default", "hand-written"), folder)
        finally:
            started.stop()
