"""Ingest of a staged list, compared with a bare COPY of the same rows, in one run: `python -m bench.bulk.ingest`.

The limit is one connection that copies the rows, ready in memory as Arrow, into a table like the run's. Our time starts
with the submission and ends when every task is visible and claimable: `interlock serve ingest`, a separate process,
fetches, splits, checks and hashes the list, copies the rows, adds the keys, attaches the shard, and enqueues the tasks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import adbc_driver_postgresql.dbapi as postgres
import asyncpg
import numpy as np
import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from bench.harness import Installation, installation, machine, spread
from interlock.client import Client
from interlock.jobs.task_rows import Chunk, PartReader, Shape, Unpacked, rows_of, task_ids
from interlock.wire.jobs import JobRequest, ListFormat, ListSource

LIMIT = 262_144
console = Console(stderr=True)


def write_list(path: Path, lines: int) -> None:
    with path.open("wb") as file:
        for first in range(0, lines, 100_000):
            numbers = range(first, min(first + 100_000, lines))
            file.write(
                b"".join(
                    b'{"url": "https://example.com/a/path/to/page/%d", "depth": 3, "tag": "abcdefghijk"}\n' % n
                    for n in numbers
                )
            )


# The limit


async def bare(site: Installation, path: Path) -> float:
    """Returns rows per second."""
    connection = await site.connect()
    try:
        run_id, shard = await _bare_table(connection)
        table = await asyncio.to_thread(_rows, path, run_id)
        started = time.perf_counter()
        await asyncio.to_thread(_copy, site.info["state_url"], shard, table)
        rate = float(table.num_rows / (time.perf_counter() - started))
        await connection.execute(f"drop table interlock.tasks_{shard:d}")
        await connection.execute("delete from interlock.runs where run_id = $1", run_id)
        return rate
    finally:
        await connection.close()


async def _bare_table(connection: asyncpg.Connection[Any]) -> tuple[UUID, int]:
    """Creates a table like a run's. Its run is a copy of another one, ended long ago so that no loop picks it up."""
    run_id = uuid4()
    shard = await connection.fetchval("select nextval('interlock.shards')::int")
    await connection.execute(
        "insert into interlock.runs (run_id, org_id, job_id, shard, state, last_index, range_size, latched)"
        " select $1, org_id, job_id, $2, 'Running', -1, 100, false from interlock.jobs limit 1",
        run_id,
        shard,
    )
    await connection.fetchval(
        "select interlock.create_shard($1, org_id, run_id, job_id, 3, 0) from interlock.runs where run_id = $2",
        shard,
        run_id,
    )
    return run_id, shard


def _rows(path: Path, run_id: UUID) -> Any:
    """Any: Arrow has no type information."""
    return rows_of(Chunk(1, 0, path.read_bytes(), 0), Shape(ListFormat.JSONL, LIMIT), run_id).table


def _copy(url: str, shard: int, table: Any) -> None:
    with postgres.connect(url) as connection, connection.cursor() as cursor:
        cursor.adbc_ingest(f"tasks_{shard}", table.to_reader(), mode="append", db_schema_name="interlock")
        connection.commit()


# Interlock


async def ours(site: Installation, client: Client, source: ListSource) -> tuple[float, float, float, UUID]:
    """Returns seconds until the 202, seconds until every task is claimable, seconds for the keys, and the run."""
    started = time.perf_counter()
    accepted = await client.submit_request(JobRequest(operator="echo", runtime="udf", source=source))
    answered = time.perf_counter() - started
    connection = await site.connect()
    try:
        built = 0.0
        while True:
            row = await connection.fetchrow(
                "select i.step, r.state, r.reason from interlock.ingests i join interlock.runs r using (run_id)"
                " where run_id = $1",
                accepted.run_id,
            )
            assert row is not None
            assert row["state"] != "Failed", row["reason"]
            now = time.perf_counter()
            if row["step"] == "Finishing" and not built:
                built = now
            if row["step"] == "Done":
                return answered, now - started, now - (built or now), accepted.run_id
            await asyncio.sleep(0.01)
    finally:
        await connection.close()


async def dropped(site: Installation, client: Client, run_id: UUID) -> None:
    """Deletes the run, so that the next round starts with the same disk usage."""
    run = await client.run(run_id)
    connection = await site.connect()
    try:
        shard = await connection.fetchval("select shard from interlock.runs where run_id = $1", run_id)
        await connection.execute("update interlock.jobs set deleted_at = now() where job_id = $1", run.job_id)
        await connection.execute("update interlock.runs set delete_requested = true where run_id = $1", run_id)
        while await connection.fetchval("select to_regclass($1)", f"interlock.tasks_{shard}"):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    finally:
        await connection.close()


def peak_mib() -> float:
    """Returns the peak memory of the ingest process since it started."""
    for process in psutil.Process().children(recursive=True):
        if "ingest" in process.cmdline():
            status = Path(f"/proc/{process.pid}/status").read_text()
            return int(status.split("VmHWM:")[1].split()[0]) / 1024
    raise RuntimeError("no ingest process is running")


# Steps, one after the other, each measured alone


def steps(path: Path) -> dict[str, float]:
    """Returns seconds per step for the whole list, in this process. COPY and keys are measured in the rounds."""
    stream = Unpacked(path, 1)
    chunks: list[tuple[int, bytes]] = []
    times = {"read": _timed(lambda: chunks.extend(PartReader(stream, 1, ListFormat.JSONL, line_limit=LIMIT).chunks()))}
    stream.close()
    counts: list[int] = []

    def split() -> None:
        for first, data in chunks:
            counts.append(rows_of(Chunk(1, first, data, sum(counts)), Shape(ListFormat.JSONL, LIMIT), uuid4()).lines)

    both = _timed(split)
    times["hash"] = _timed(lambda: [task_ids(uuid4(), np.arange(count)) for count in counts] and None)
    times["split and check"] = both - times["hash"]
    return times


def _timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


async def accepted(lines: int, times: int, calm_seconds: int) -> list[float]:
    """Returns milliseconds until each submission of a list was answered, with no ingest running meanwhile."""
    with tempfile.TemporaryDirectory(prefix="interlock-bench-") as folder:
        path = Path(folder) / "list.jsonl"
        write_list(path, lines)
        async with installation() as site, site.client() as client:
            request = JobRequest(operator="echo", runtime="udf", source=await client.lists.put(path))
            await site.settle(calm_seconds)
            took = []
            for _ in range(times):
                started = time.perf_counter()
                reply = await client.submit_request(request)
                took.append((time.perf_counter() - started) * 1000)
                await client.delete_job(reply.job_id)
            return took


async def memory(lines: int, factor: int) -> dict[str, float]:
    """Returns the peak MiB of an ingest process that reads a list, and of one that reads `factor` times as much."""
    found = {}
    for name, length in (("short", lines), ("long", lines * factor)):
        with tempfile.TemporaryDirectory(prefix="interlock-bench-") as folder:
            path = Path(folder) / "list.jsonl"
            write_list(path, length)
            async with installation() as site, site.client() as client:
                await client.submit([1], operator="echo")
                await ours(site, client, await client.lists.put(path))
                found[name] = peak_mib()
        console.print(f"{length:,} lines: {found[name]:,.0f} MiB", style="dim")
    return found


async def measure(lines: int, rounds: int, factor: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="interlock-bench-") as folder:
        path, long = Path(folder) / "list.jsonl", Path(folder) / "long.jsonl"
        write_list(path, lines)
        async with installation() as site, site.client() as client:
            await client.submit([1], operator="echo")
            source = await client.lists.put(path)
            results: dict[str, Any] = {"bare": [], "ours": [], "202": [], "keys": []}
            for number in range(rounds):
                console.print(f"round {number + 1} of {rounds}")
                answered, seconds, keys, run_id = await ours(site, client, source)
                await dropped(site, client, run_id)
                results["202"].append(answered * 1000)
                results["ours"].append(lines / seconds)
                results["keys"].append(keys)
                results["bare"].append(await bare(site, path))
            results["peak"] = peak_mib()
            if factor > 1:
                write_list(long, lines * factor)
                _, _, _, run_id = await ours(site, client, await client.lists.put(long))
                results["peak_of_long"] = peak_mib()
        results["steps"] = steps(path)
    return results


def shown(results: dict[str, Any], lines: int, factor: int) -> Table:
    table = Table(title=f"{lines:,} lines, {machine()}")
    for column in ("", "measured", "limit", "wanted"):
        table.add_column(column)
    share = statistics.median(o / b for o, b in zip(results["ours"], results["bare"], strict=True))
    table.add_row("202, ms", spread(results["202"]), "", "under 50")
    table.add_row("staged to claimable, tasks/s", spread(results["ours"]), spread(results["bare"]), "")
    table.add_row("share of the bare COPY", f"{share:.0%}", "100%", "60%")
    if factor > 1:
        ratio = results["peak_of_long"] / results["peak"]
        table.add_row(f"peak memory, {factor} times the list", f"{ratio:.2f} x", f"{results['peak']:,.0f} MiB", "1.2 x")
    for name, seconds in results["steps"].items():
        table.add_row(f"{name}, s", f"{seconds:.2f}", "", "")
    table.add_row("keys, attach, total, messages, s", f"{statistics.median(results['keys']):.2f}", "", "")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--factor", type=int, default=10, help="length of the long list in the memory measurement, as a multiple"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    given = parser.parse_args()
    results = uvloop.run(measure(given.lines, given.rounds, given.factor))
    Console().print(shown(results, given.lines, given.factor))
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
