"""A run with its own shard, from claim to complete, compared with bare SQL on the same server; with status reads.

The limit is that of `bench.kernel`: one connection that claims and completes known rows in batches of 100. Interlock's
side goes through HTTP, a dispatcher and one worker. During the run, the gateway is polled for its status; after the
run, for pages of its tasks, at the beginning and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import uvloop
from rich.console import Console
from rich.table import Table

from bench.harness import Installation, installation, machine, percentile
from bench.kernel import all_completed, bare_sql, measured
from interlock.client import Client

_RANGE = 100
_READ_SECONDS = 0.02
_PAGE = 100


async def sharded_run(connection: asyncpg.Connection[Any], client: Client, count: int) -> tuple[UUID, UUID]:
    """Creates a job and a run of no-op tasks, loaded and enqueued as an ingest leaves them."""
    small = await client.submit([{"n": 1}], operator="echo", name=f"bulk-{time.time_ns()}")
    await client.cancel_run(small.run_id)
    run_id: UUID = await connection.fetchval(
        "insert into interlock.runs (org_id, job_id, shard, state, total, last_index, range_size, latched, queued)"
        " select org_id, job_id, nextval('interlock.shards'), 'Running', $2::bigint, $2::bigint - 1, $3, true,"
        " $2::bigint"
        " from interlock.runs where run_id = $1 returning run_id",
        small.run_id,
        count,
        _RANGE,
    )
    shard: int = await connection.fetchval("select shard from interlock.runs where run_id = $1", run_id)
    await connection.execute(
        "select interlock.create_shard(shard, org_id, run_id, job_id, 3, 0) from interlock.runs where run_id = $1",
        run_id,
    )
    await connection.execute(
        f"insert into interlock.tasks_{shard:d} (task_id, task_index, payload)"  # noqa: S608 - a number
        " select interlock.run_task_id($1, i), i, '{\"n\": 1}' from generate_series(0, $2::bigint - 1) i",
        run_id,
        count,
    )
    await connection.execute("select interlock.finish_shard($1)", shard)
    await connection.execute(
        "insert into interlock.queue_messages (queue, priority, org_id, share_id, dedupe_key, body)"
        " select 'platform', 1, r.org_id, r.run_id, r.run_id || ':' || c, json_build_object('job_id', $2::uuid,"
        " 'run_id', r.run_id, 'start', c * $4, 'end', least((c + 1) * $4 - 1, $3::bigint - 1))"
        " from interlock.runs r cross join generate_series(0, ($3::bigint - 1) / $4) c where r.run_id = $1",
        run_id,
        small.job_id,
        count,
        _RANGE,
    )
    return small.job_id, run_id


async def reads(client: Client, job_id: UUID, over: asyncio.Event) -> list[float]:
    """Returns milliseconds of each status read until the run is over."""
    took = []
    while not over.is_set():
        begun = time.perf_counter()
        await client.job(job_id)
        took.append((time.perf_counter() - begun) * 1000)
        await asyncio.sleep(_READ_SECONDS)
    return took


async def drained(here: Installation, client: Client, count: int) -> tuple[float, list[float], UUID]:
    """Returns tasks per second from the first claim to the end, and the durations of concurrent status reads."""
    connection = await here.connect()
    job_id, run_id = await sharded_run(connection, client, count)
    over = asyncio.Event()
    await here.start_worker()
    alarmed = "select exists (select 1 from interlock.lease_alarms where run_id = $1)"
    while not await connection.fetchval(alarmed, run_id):  # noqa: ASYNC110 - another process claims them
        await asyncio.sleep(0.002)
    started = time.perf_counter()
    reading = asyncio.create_task(reads(client, job_id, over))
    await all_completed(connection, [run_id])
    rate = count / (time.perf_counter() - started)
    over.set()
    await here.stop_workers()
    await connection.close()
    return rate, await reading, run_id


async def pages(client: Client, run_id: UUID, count: int) -> tuple[float, float]:
    """Returns median milliseconds of the first page and of a page at the far end."""
    cursor: str | None = None
    for _ in range(count // 1000 - 1):
        page = await client.task_page(run=run_id, cursor=cursor, limit=1000)
        cursor = page.next_cursor
    first, last = [], []
    for _ in range(50):  # alternating, so that other load on the machine affects both
        first.append(await _page(client, run_id, None))
        last.append(await _page(client, run_id, cursor))
    return statistics.median(first), statistics.median(last)


async def _page(client: Client, run_id: UUID, cursor: str | None) -> float:
    begun = time.perf_counter()
    assert len((await client.task_page(run=run_id, cursor=cursor, limit=_PAGE)).tasks) == _PAGE
    return (time.perf_counter() - begun) * 1000


async def run(tasks: int, rounds: int, depth: int, calm_seconds: int = 60) -> dict[str, Any]:
    figures: dict[str, Any] = {"machine": machine(), "tasks": tasks, "depth": depth}
    limits, rates, p99s = [], [], []
    every: list[float] = []
    async with installation() as here, here.client() as client:
        connection = await here.connect()
        await here.settle(calm_seconds)
        for n in range(rounds):
            limits.append((await measured(f"bare SQL, round {n + 1}", lambda: bare_sql(connection, tasks)))[1])
            rate, took, run_id = await measured(f"own shard, round {n + 1}", lambda: drained(here, client, tasks))
            rates.append(rate)
            p99s.append(percentile(took, 0.99))
            every += took
        if depth > tasks:
            _, run_id = await measured(f"{depth:,} tasks to page in", lambda: sharded_run(connection, client, depth))
        figures["pages_ms"] = await measured("pages", lambda: pages(client, run_id, max(depth, tasks)))
        await connection.close()
    return figures | {"limit": limits, "drain": rates, "status_p99_ms": p99s, "status_ms": every}


def report(figures: dict[str, Any]) -> None:
    limit, rate = statistics.median(figures["limit"]), statistics.median(figures["drain"])
    table = Table(title=f"bench/bulk, running: {figures['tasks']:,} no-op tasks; {figures['machine']}")
    for column in ("measure", "figure", "vs limit", "bar"):
        table.add_column(column)
    table.add_row("bare SQL, claim + complete, tasks/s", f"{limit:,.0f}", "1.00", "")
    table.add_row("claim + complete of ranges, one worker, tasks/s", f"{rate:,.0f}", f"{rate / limit:.2f}", "> 20,000")
    table.add_row("status read meanwhile, p99, ms", f"{percentile(figures['status_ms'], 0.99):.1f}", "", "< 20")
    first, last = figures["pages_ms"]
    table.add_row(
        f"page of {_PAGE}, at the start and at depth {figures['depth']:,}, ms",
        f"{first:.1f}, {last:.1f}",
        f"{last / first:.2f}",
        "1.2",
    )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--depth", type=int, default=1_000_000, help="number of tasks in the run used for paging")
    arguments = parser.parse_args()
    figures = uvloop.run(run(arguments.tasks, arguments.rounds, arguments.depth))
    report(figures)
    target = Path("bench/results/bulk_running.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
