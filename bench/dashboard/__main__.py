"""Server time of the requests behind each page, for runs of up to 10,000,000 tasks; and the cost of open pages.

A page must not get slower with the size of what it shows: the bar is 1.2 times the time for the second run, the
smallest that fills every page; the first has 10 tasks, and its pages show fewer rows. Each run is in a shard of its
own, loaded by one statement; most tasks have completed, and one in a hundred failed. Open pages hold one live stream
each; their cost is the CPU time of the gateway over a few seconds.

    .venv/bin/python -m bench.dashboard
    .venv/bin/python -m bench.dashboard --sizes 10,2000,1000000 --streams 100
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any
from uuid import UUID

import asyncpg
import httpx
import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from bench.harness import Installation, installation, machine, percentile
from interlock.client import Client

PAGES = {
    "overview": "/v1/overview",
    "run": "/v1/runs/{run}",
    "run: failures grouped": "/v1/runs/{run}/failures",
    "run: timeline": "/v1/runs/{run}/timeline",
    "run: durations": "/v1/runs/{run}/durations",
    "tasks": "/v1/tasks?run={run}&limit=200",
    "tasks: failed": "/v1/tasks?run={run}&status=Failed&limit=200",
    "task: explain": "/v1/tasks/{task}/explain",
    "search by id": "/v1/search?q={task}",
}
BAR = 1.2
_FAILED_EVERY = 100
_ROUNDS = 40
_STREAM_SECONDS = 5.0


async def ended_run(connection: asyncpg.Connection[Any], client: Client, count: int) -> UUID:
    """Creates a run with its own shard, in which most tasks have completed and some failed for good."""
    small = await client.submit([{"n": 1}], operator="echo", name=f"dashboard-{count}-{time.time_ns()}")
    await client.cancel_run(small.run_id)
    failed = len(range(0, count, _FAILED_EVERY))
    run_id: UUID = await connection.fetchval(
        "insert into interlock.runs (org_id, job_id, shard, state, total, last_index, range_size, latched, completed,"
        " failed, dead, ended_at) select org_id, job_id, nextval('interlock.shards'), 'CompletedWithFailures',"
        " $2::bigint, $2::bigint - 1, 100, true, $2::bigint - $3::bigint, $3::bigint, $3::bigint, now()"
        " from interlock.runs where run_id = $1 returning run_id",
        small.run_id,
        count,
        failed,
    )
    shard: int = await connection.fetchval("select shard from interlock.runs where run_id = $1", run_id)
    await connection.execute(
        "select interlock.create_shard(shard, org_id, run_id, job_id, 3, 0) from interlock.runs where run_id = $1",
        run_id,
    )
    await connection.execute(
        f"insert into interlock.tasks_{shard:d} (task_id, task_index, payload, status, dead, worker_id, started_at,"  # noqa: S608
        " ended_at, lease_token)"
        " select interlock.run_task_id($1, i), i, '{\"n\": 1}',"
        " (case when i % $3 = 0 then 'Failed' else 'Completed' end)::interlock.task_status, i % $3 = 0,"
        " 'worker-' || i % 20, now() - make_interval(secs => 2 + i % 60), now() - make_interval(secs => 1),"
        " interlock.lease_token($4)"
        " from generate_series(0, $2::bigint - 1) i",
        run_id,
        count,
        _FAILED_EVERY,
        shard,
    )
    await connection.execute("select interlock.finish_shard($1)", shard)
    await connection.execute(
        "insert into interlock.attempts (shard, task_id, attempt, lease_token, outcome, worker_id, started_at,"
        " ended_at, error_class, error_message)"
        " select $4::int, interlock.run_task_id($1, i), 1, gen_random_uuid(), 'Failed', 'worker-1',"
        " now() - interval '2 seconds', now(), 'Timeout', 'host ' || i || ' gave no answer'"
        " from generate_series(0, $2::bigint - 1, $3) i",
        run_id,
        count,
        _FAILED_EVERY,
        shard,
    )
    await connection.execute(f"vacuum analyze interlock.tasks_{shard:d}")
    return run_id


async def page_times(here: Installation, sizes: Sequence[int]) -> dict[int, dict[str, float]]:
    """Returns the median milliseconds of each page, by the size of the run. Rounds alternate between the sizes."""
    connection = await here.connect()
    async with here.client() as client:
        runs = {size: await ended_run(connection, client, size) for size in sizes}
    took: dict[int, dict[str, list[float]]] = {size: {page: [] for page in PAGES} for size in sizes}
    headers = {"Authorization": f"Bearer {here.info['admin_key']}"}
    async with httpx.AsyncClient(base_url=here.info["gateway"], headers=headers, timeout=60) as http:
        for page, path in PAGES.items():
            for _ in range(_ROUNDS):
                for size, run_id in runs.items():
                    task = await connection.fetchval("select interlock.run_task_id($1, 0)", run_id)
                    took[size][page].append(await _request(http, path.format(run=run_id, task=task)))
    await connection.close()
    return {size: {page: statistics.median(each[3:]) for page, each in pages.items()} for size, pages in took.items()}


async def _request(http: httpx.AsyncClient, path: str) -> float:
    begun = time.perf_counter()
    reply = await http.get(path)
    assert reply.status_code == 200, reply.text
    return (time.perf_counter() - begun) * 1000


async def stream_cost(here: Installation, streams: int) -> tuple[float, float]:
    """Returns the share of one core that the gateway uses for open pages, and the p99 delay of a page request."""
    gateway = _gateway(here)
    cookie = await _signed_in(here)
    limits = httpx.Limits(max_connections=streams + 5)
    async with (
        httpx.AsyncClient(base_url=here.info["gateway"], timeout=60, limits=limits) as http,
        AsyncExitStack() as stack,
    ):
        readers = []
        for _ in range(streams):
            reply = await stack.enter_async_context(http.stream("GET", "/v1/live", headers={"Cookie": cookie}))
            readers.append(asyncio.create_task(_drain(reply)))
        before, took = sum(gateway.cpu_times()[:2]), list[float]()
        begun = time.perf_counter()
        while time.perf_counter() - begun < _STREAM_SECONDS:
            started = time.perf_counter()
            assert (await http.get("/v1/session", headers={"Cookie": cookie})).status_code == 200
            took.append((time.perf_counter() - started) * 1000)
            await asyncio.sleep(0.1)
        share = (sum(gateway.cpu_times()[:2]) - before) / (time.perf_counter() - begun)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    return share, percentile(took, 0.99)


async def _drain(reply: httpx.Response) -> None:
    async for _ in reply.aiter_bytes():
        continue


async def _signed_in(here: Installation) -> str:
    async with httpx.AsyncClient(base_url=here.info["gateway"]) as http:
        reply = await http.post("/v1/sign-in/key", json={"key": here.info["admin_key"]})
    return reply.headers["set-cookie"].partition(";")[0]


def _gateway(here: Installation) -> psutil.Process:
    port = int(here.info["gateway"].rpartition(":")[2])
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "gateway" in line and "serve" in line and _serves(process, port, here):
            return process
    raise RuntimeError("the gateway process was not found")


def _serves(process: psutil.Process, port: int, here: Installation) -> bool:
    listening = {each.laddr.port for each in process.net_connections() if each.status == psutil.CONN_LISTEN}
    return port in listening or str(here.directory) in " ".join(process.cmdline())


async def run(sizes: Sequence[int], streams: Sequence[int]) -> dict[str, Any]:
    figures: dict[str, Any] = {"machine": machine(), "sizes": list(sizes)}
    async with installation() as here:
        figures["streams"] = {count: await stream_cost(here, count) for count in streams}
        figures["pages"] = await page_times(here, sizes)
    return figures


def report(figures: dict[str, Any]) -> None:
    sizes, pages = figures["sizes"], figures["pages"]
    table = Table(title=f"bench/dashboard: median ms of the request behind each page; {figures['machine']}")
    for column in ("page", *(f"{size:,} tasks" for size in sizes), "largest vs second", "bar"):
        table.add_column(column)
    for page in PAGES:
        times = [pages[size][page] for size in sizes]
        table.add_row(
            page, *(f"{each:.1f}" for each in times), f"{times[-1] / times[min(1, len(times) - 1)]:.2f}", f"< {BAR}"
        )
    console = Console()
    console.print(table)
    costs = Table(title="open pages, each with a live stream")
    for column in ("pages", "share of one core, gateway", "request meanwhile, p99, ms"):
        costs.add_column(column)
    for count, (share, p99) in figures["streams"].items():
        costs.add_row(f"{count}", f"{share:.3f}", f"{p99:.1f}")
    console.print(costs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="10,2000,1000000,10000000", help="tasks of the runs, smallest first")
    parser.add_argument("--streams", default="1,100", help="numbers of open pages")
    given = parser.parse_args()
    numbers = [[int(each) for each in text.split(",")] for text in (given.sizes, given.streams)]
    report(uvloop.run(run(*numbers)))


if __name__ == "__main__":
    main()
