"""The measurements, their order, and the table. Both sides are warmed up, then alternate."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import uvloop
from rich.console import Console
from rich.table import Table

from bench.harness import installation, machine
from bench.spark.bare_spark import Bare, bare
from bench.spark.source import DAG, Partition, Pipeline, Shape
from bench.spark.task_steps import STEPS, steps
from interlock.wire.tasks import OperatorsReport

BAR: Final = 1.10
WARM: Final = 10
STEPPED: Final = 25
console = Console(stderr=True)

TEXT: Final = """
name: bench
defaults: {{ heartbeat_timeout_seconds: 600, timeout_seconds: 7200 }}
jobs:
  - {{ name: large, activation: source, source: {{ kind: manual }}, operator: echo, outputs: [rows] }}
  - {{ name: small, activation: source, source: {{ kind: manual }}, operator: echo, outputs: [rows] }}
  - {{ name: pieces, activation: source, source: {{ kind: manual }}, operator: echo, outputs: [rows] }}
  - name: derive
    runtime: spark
    operator: bench.spark.transformation:derive
    inputs: [{{ from: {{ job: large, output: rows }} }}]
    outputs: [derived]
  - name: tiny
    runtime: spark
    operator: bench.spark.transformation:derive
    inputs: [{{ from: {{ job: small, output: rows }} }}]
    outputs: [derived]
  - name: by_hand
    operator: bench.spark.transformation:derive
    inputs: [{{ from: {{ job: small, output: rows }} }}]
    outputs: [derived]
  - name: windows
    runtime: dispatcher
    operator: range_aggregator
    inputs: [{{ from: {{ job: pieces, output: rows }} }}]
    outputs: [windows]
    config: {{ size: {window} }}
  - name: compact
    runtime: spark
    operator: parquet_compact
    inputs: [{{ from: {{ job: windows, output: windows }} }}]
    outputs: [compacted]
"""
"""The platform runtime has no workers: the benchmark does the tasks of `by_hand` and of the sources itself."""


def say(line: str) -> None:
    console.print(f"  {line}", style="dim")


class Comparison:
    """The same work on both sides, in seconds."""

    def __init__(self, pipeline: Pipeline, job: str, output: str, count: int, end: int) -> None:
        self._pipeline, self._job, self._output, self._count, self._end = pipeline, job, output, count, end
        self.seconds: dict[str, list[float]] = {}
        self.rows: set[int] = set()

    def note(self, side: str, seconds: float) -> None:
        self.seconds.setdefault(side, []).append(seconds)
        say(f"{self._job}, {side}: {seconds:.2f} s")

    async def through_interlock(self) -> None:
        """Invalidates the whole output, and measures until the last file is committed."""
        before = await self._pipeline.last_commit()
        started = time.perf_counter()
        await self._pipeline.again(self._job, self._output, self._end)
        rows = await self._pipeline.made(self._job, self._count, before)
        self.note("Interlock", time.perf_counter() - started)
        self.rows.add(rows)

    async def by_hand(self, side: str, here: Bare, work: Callable[[], float]) -> None:
        self.note(side, await asyncio.to_thread(work))
        self.rows.add(here.rows())

    def checked(self) -> dict[str, list[float]]:
        assert len(self.rows) == 1, f"the sides wrote different rows: {self.rows}"
        return self.seconds


async def looped(here: Bare, compared: Comparison, files: Sequence[Partition], lanes: int, rounds: int) -> None:
    await asyncio.to_thread(here.loop, files[:WARM])
    for _ in range(rounds):
        await compared.by_hand("loop", here, lambda: here.loop(files))
        await compared.through_interlock()
        await compared.by_hand("threads", here, lambda: here.loop(files, lanes))


async def compacted(here: Bare, compared: Comparison, files: Sequence[Partition], rounds: int) -> None:
    await asyncio.to_thread(here.compact, files[:WARM])
    for _ in range(rounds):
        await compared.by_hand("loop", here, lambda: here.compact(files))
        await compared.through_interlock()


async def run(large: Shape, small: Shape, pieces: Shape, rounds: int) -> dict[str, Any]:
    lanes = 2 * (os.cpu_count() or 1)
    figures: dict[str, Any] = {"machine": machine(), "lanes": lanes}
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(installation())
        connection = await here.connect()
        worker = await stack.enter_async_context(here.worker_client())
        pipeline = Pipeline(here, connection, worker)
        declared = OperatorsReport(queue="spark", worker_id="bench", operators=["bench.spark.transformation:derive"])
        await worker.report_operators(declared)
        async with here.client() as client:
            await client.dags.deploy(TEXT.format(window=pieces.end + 1))
        await here.start_worker(runtime="spark")
        by_hand = stack.enter_context(bare(here.directory / "bare", lanes))
        say(f"DAG {DAG} is deployed; a worker of the spark runtime and a session in this process are running")
        files = {
            job: await pipeline.bring(job, shape, say)
            for job, shape in (("large", large), ("small", small), ("pieces", pieces))
        }
        for job, count in (("derive", large.partitions), ("tiny", small.partitions), ("compact", 1)):
            await pipeline.made(job, count, 0)
            say(f"{job}: warm")
        derive = Comparison(pipeline, "derive", "derived", large.partitions, large.end)
        await looped(by_hand, derive, files["large"], lanes, rounds)
        tiny = Comparison(pipeline, "tiny", "derived", small.partitions, small.end)
        await looped(by_hand, tiny, files["small"], lanes, rounds)
        compact = Comparison(pipeline, "compact", "compacted", 1, pieces.end)
        await compacted(by_hand, compact, files["pieces"], rounds)
        tasks = await pipeline.tasks("by_hand", small.partitions)
        stepped = await steps(worker, by_hand.spark, tasks[: STEPPED + WARM])
        figures |= {"derive": derive.checked(), "tiny": tiny.checked(), "compact": compact.checked()}
        figures |= {"steps": {name: seconds[WARM:] for name, seconds in stepped.items()}}
        figures |= {"bytes": {job: sum(one.bytes for one in made) for job, made in files.items()}}
        figures |= {"partitions": {job: len(made) for job, made in files.items()}, "rows": large.rows}
        await connection.close()
    return figures


# Table


def report(figures: dict[str, Any]) -> None:
    files, lanes = figures["partitions"], figures["lanes"]
    table = Table(title=f"bench/spark; {figures['machine']}")
    for column in ("measure", "figure", "vs loop", "vs threads", "bar"):
        table.add_column(column)
    of = f"{files['large']} partitions of {figures['rows']:,} rows"
    _rows_of_loops(table, figures["derive"], of, "s", 1.0, lanes, f"{BAR:.2f} of the loop")
    _rows_of_loops(table, figures["tiny"], "a task of 1 row", "ms", 1000 / files["small"], lanes, "")
    for name in STEPS:
        table.add_row(f"  of which {name}, one task at a time, ms", _shown(figures["steps"][name], 1000), "", "", "")
    loop, ours = figures["compact"]["loop"], figures["compact"]["Interlock"]
    megabytes = figures["bytes"]["pieces"] / 1e6
    of = f"{files['pieces']} files ({megabytes:,.0f} MB) combined, MB/s"
    table.add_row(f"{of}, by hand", _rate(loop, megabytes), "1.00", "", "")
    table.add_row(f"{of}, parquet_compact", _rate(ours, megabytes), _ratio(ours, loop), "", "")
    Console().print(table)


def _rows_of_loops(
    table: Table, seconds: dict[str, list[float]], of: str, unit: str, scale: float, lanes: int, bar: str
) -> None:
    loop, threads, ours = seconds["loop"], seconds["threads"], seconds["Interlock"]
    table.add_row(f"{of}, a loop by hand, {unit}", _shown(loop, scale), "1.00", "", "")
    table.add_row(
        f"{of}, a loop with {lanes} threads, {unit}", _shown(threads, scale), _ratio(threads, loop), "1.00", ""
    )
    table.add_row(f"{of}, Interlock, {unit}", _shown(ours, scale), _ratio(ours, loop), _ratio(ours, threads), bar)


def _shown(seconds: Sequence[float], scale: float) -> str:
    values = [scale * value for value in seconds]
    return f"{statistics.median(values):,.1f} ({min(values):,.1f}-{max(values):,.1f})"


def _rate(seconds: Sequence[float], megabytes: float) -> str:
    return f"{megabytes / statistics.median(seconds):,.1f}"


def _ratio(one: Sequence[float], other: Sequence[float]) -> str:
    return f"{statistics.median(one) / statistics.median(other):.2f}"


def main() -> None:
    description = "Spark through Interlock, compared with Spark by hand."
    parser = argparse.ArgumentParser(prog="bench.spark", description=description)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="run a small version, to check that everything works")
    arguments = parser.parse_args()
    shapes = (
        (Shape(12, 5_000), Shape(40, 1), Shape(20, 1_000))
        if arguments.small
        else (Shape(100, 100_000), Shape(100, 1), Shape(100, 10_000))
    )
    figures = uvloop.run(run(*shapes, 1 if arguments.small else arguments.rounds))
    report(figures)
    target = Path("bench/results/spark.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
