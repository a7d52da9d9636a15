"""The kernel, compared with bare SQL on the same server, in one run: `make bench`.

The limit is one connection that claims and completes known rows in batches of 100, in a table with only a primary key.
Including creation, it also inserts them before, in batches of 1,000. Interlock's side goes through HTTP, a gateway
process, a dispatcher process and a worker process. Every round also measures other queues, which talk to the server
directly: see `bench.peers`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import uvloop
from msgspec import Raw
from rich.console import Console
from rich.table import Table

from bench.harness import Installation, installation, machine, percentile, spread
from bench.peers.measure import PEERS, add_peer_rows, measure_peers
from interlock.client import Client, Fence, TaskClient, WorkerClient
from interlock.wire.attempts import ClaimGroup, ClaimRequest, Completion, CompletionBatch
from interlock.wire.jobs import JobRequest

BATCH = 100
CREATED = 1000
"""Tasks created per request."""
console = Console(stderr=True)


async def bare_sql(connection: asyncpg.Connection[Any], count: int) -> tuple[float, float]:
    """Returns tasks per second of create, claim and complete, and of claim and complete alone."""
    await connection.execute(
        "drop table if exists bare; create table bare (id uuid primary key, status text not null default 'Queued',"
        " leased_at timestamptz, payload json)"
    )
    ids = [uuid4() for _ in range(count)]
    begun = time.perf_counter()
    for at in range(0, count, CREATED):
        await connection.execute(
            "insert into bare (id, payload) select i, '{\"n\": 1}' from unnest($1::uuid[]) i", ids[at : at + CREATED]
        )
    started = time.perf_counter()
    for at in range(0, count, BATCH):
        batch = ids[at : at + BATCH]
        await connection.fetch(
            "update bare set status = 'Running', leased_at = now() where id = any($1) and status = 'Queued'"
            " returning id, payload",
            batch,
        )
        await connection.fetch(
            "update bare set status = 'Completed' where id = any($1) and status = 'Running' returning id", batch
        )
    ended = time.perf_counter()
    return count / (ended - begun), count / (ended - started)


async def submit(client: Client, count: int, **job: Any) -> list[UUID]:
    """Submits runs of 1,000 tasks each, with four requests in flight."""
    gate = asyncio.Semaphore(4)

    async def one(size: int) -> UUID:
        async with gate:
            request = JobRequest(name="bench", operator="echo", tasks=[Raw(b'{"n":1}')] * size, **job)
            return (await client.submit_request(request)).run_id

    sizes = [min(CREATED, count - at) for at in range(0, count, CREATED)]
    return list(await asyncio.gather(*(one(size) for size in sizes)))


async def all_completed(connection: asyncpg.Connection[Any], runs: list[UUID]) -> None:
    """Waits until every run has ended. Reads run rows only."""
    while await connection.fetchval(  # noqa: ASYNC110 - another process ends them
        "select exists (select 1 from interlock.runs where run_id = any($1) and ended_at is null)", runs
    ):
        await asyncio.sleep(0.02)


async def through_worker(here: Installation, count: int) -> tuple[float, float]:
    """Returns tasks per second from the first submission to the last completion, and of claim to complete alone."""
    connection = await here.connect()
    async with here.client() as client:
        started = time.perf_counter()
        runs = await submit(client, count)
        await all_completed(connection, runs)
        whole = count / (time.perf_counter() - started)
        await here.stop_workers()
        runs = await submit(client, count)
        started = time.perf_counter()
        await here.start_worker()
        # Timed from the first claim: the worker's start-up is not included.
        leased = "select exists (select 1 from interlock.tasks where lease_expires_at is not null)"
        while not await connection.fetchval(leased):  # noqa: ASYNC110 - another process claims them
            await asyncio.sleep(0.002)
        started = time.perf_counter()
        await all_completed(connection, runs)
        drain = count / (time.perf_counter() - started)
    await connection.close()
    return whole, drain


async def one_at_a_time(here: Installation, count: int) -> float:
    """Claims and completes single tasks with capability tokens, 32 in flight. Returns tasks per second."""
    connection = await here.connect()
    async with here.client() as client, here.worker_client() as worker:
        runs = await submit(client, count)
        rows = await connection.fetch("select task_id from interlock.tasks where run_id = any($1)", runs)
        ids = iter([row["task_id"] for row in rows])
        started = time.perf_counter()
        attempts = [TaskClient(here.info["internal"], "", Fence(uuid4(), 1, uuid4())) for _ in range(32)]
        await asyncio.gather(*(_singles(attempt, worker, ids) for attempt in attempts))
        rate = count / (time.perf_counter() - started)
        for attempt in attempts:
            attempt.close()
        await all_completed(connection, runs)
    await connection.close()
    return rate


async def _singles(attempt: TaskClient, worker: WorkerClient, ids: Iterator[UUID]) -> None:
    for task_id in ids:
        (claim,) = (await worker.claim(ClaimRequest(worker_id="bench", task_ids=[task_id]))).claims
        assert claim.capability_token
        assert claim.attempt
        assert claim.lease_token
        attempt.fence = Fence(task_id, claim.attempt, claim.lease_token)
        attempt.use_token(claim.capability_token)
        await attempt.complete("Completed")


async def latency(here: Installation, seconds: float) -> tuple[float, float]:
    """Returns milliseconds from creation to the claim by a waiting worker, at 100 tasks per second."""
    connection = await here.connect()
    async with here.client() as client:
        runs: list[UUID] = []
        begun = time.perf_counter()
        count = int(seconds * 100)
        for n in range(count):
            await asyncio.sleep(max(0.0, begun + n / 100 - time.perf_counter()))
            runs.append((await client.submit([1], operator="echo")).run_id)
        await all_completed(connection, runs)
    rows = await connection.fetch(
        "select extract(epoch from started_at - created_at)::float8 * 1000 as ms from interlock.tasks"
        " where run_id = any($1)",
        runs,
    )
    await connection.close()
    values = [row["ms"] for row in rows]
    return percentile(values, 0.5), percentile(values, 0.99)


async def claim_latency(here: Installation, rounds: int = 300) -> float:
    """Returns median milliseconds of a claim of 100 queued tasks through HTTP, by range, as workers claim."""
    async with here.client() as client, here.worker_client() as worker:
        runs = await submit(client, rounds * BATCH)
        times = []
        for run_id in runs:
            for start in range(0, 1000, BATCH):
                request = ClaimRequest(
                    worker_id="bench", tokens=False, run_id=run_id, start=start, end=start + BATCH - 1
                )
                started = time.perf_counter()
                (group,) = (await worker.claim(request)).groups
                times.append((time.perf_counter() - started) * 1000)
                assert len(group.tasks) == BATCH
                await worker.complete(CompletionBatch(items=[_completed(group, task.task_id) for task in group.tasks]))
    return percentile(times, 0.5)


def _completed(group: ClaimGroup, task_id: UUID) -> Completion:
    return Completion(task_id=task_id, attempt=group.attempt, lease_token=group.lease_token, status="Completed")


async def fill(connection: asyncpg.Connection[Any], terminal: int, queued: int) -> None:
    """Inserts history and backlog, too recent for the reconciler to notice that their messages are missing."""
    job = await connection.fetchrow("select job_id, org_id from interlock.jobs limit 1")
    assert job is not None
    for status, count in (("Completed", terminal), ("Queued", queued)):
        run = await connection.fetchval(_FILL_RUN, job["org_id"], job["job_id"], count, status == "Queued")
        await connection.execute(_FILL_TASKS, run, job["org_id"], job["job_id"], status, count, timeout=600)
    await connection.execute(
        "insert into interlock.queue_messages (queue, priority, body, dedupe_key)"
        " select 'bench', 1, '{}', 'bench:' || i from generate_series(1, $1::bigint / 100) i",
        queued,
    )
    await connection.execute("vacuum analyze interlock.tasks_0")


_FILL_RUN = """
insert into interlock.runs (org_id, job_id, state, total, last_index, range_size, latched, queued, completed)
values ($1, $2, 'Running', $3::bigint, $3::bigint - 1, 100, true, case when $4 then $3 else 0 end,
        case when $4 then 0 else $3 end)
returning run_id
"""
_FILL_TASKS = """
insert into interlock.tasks (task_id, org_id, job_id, run_id, task_index, status, max_attempts, priority, payload,
                             queued_at)
select interlock.run_task_id($1, i), $2, $3, $1, i, $4::text::interlock.task_status, 3, 1, '{"n":1}',
       now() + interval '1 day'
from generate_series(0, $5::bigint - 1) i
"""


async def measured(name: str, work: Callable[[], Awaitable[Any]]) -> Any:
    with console.status(name):
        started = time.perf_counter()
        result = await work()
    console.print(f"  {name}: {time.perf_counter() - started:.1f} s", style="dim")
    return result


async def run(tasks: int, rows: int, rounds: int, peers: Sequence[str]) -> dict[str, Any]:
    figures: dict[str, Any] = {"machine": machine(), "tasks": tasks}
    async with installation() as here:
        connection = await here.connect()
        limits, wholes, drains = [], [], []
        state_url, peer_figures = here.info["state_url"], dict[str, Any]()
        for n in range(rounds):
            limits.append(await measured(f"bare SQL, round {n + 1}", lambda: bare_sql(connection, tasks)))
            if not here.workers:
                await here.start_worker()
            whole, drain = await measured(f"through HTTP, round {n + 1}", lambda: through_worker(here, tasks))
            wholes.append(whole)
            drains.append(drain)
            await measured(f"peers, round {n + 1}", lambda: measure_peers(state_url, tasks, peer_figures, peers))
        limits.append(await measured("bare SQL, again", lambda: bare_sql(connection, tasks)))
        created, claimed = zip(*limits, strict=True)
        figures |= {"limit_created": created, "limit": claimed, "whole": wholes, "drain": drains, "peers": peer_figures}
        figures["latency_ms"] = await measured("created to claimed at 100/s", lambda: latency(here, 10))
        await here.stop_workers()
        figures["singles"] = await measured("one at a time, 32 in flight", lambda: one_at_a_time(here, tasks // 20))
        figures["claim_empty_ms"] = await measured("claim, empty table", lambda: claim_latency(here))
        await measured(f"filling with 2 x {rows:,} rows", lambda: fill(connection, rows, rows))
        figures["claim_full_ms"] = await measured("claim, full table", lambda: claim_latency(here))
        await connection.close()
    return figures


def report(figures: dict[str, Any]) -> None:
    names = ("limit_created", "limit", "whole", "drain")
    created, limit, whole, drain = (statistics.median(figures[name]) for name in names)
    p50, p99 = figures["latency_ms"]
    table = Table(title=f"bench/kernel: {figures['tasks']:,} no-op tasks; {figures['machine']}")
    for column in ("measure", "figure", "vs limit", "bar"):
        table.add_column(column)
    table.add_row("bare SQL, claim + complete, tasks/s", spread(figures["limit"]), "1.00", "")
    table.add_row("bare SQL, create + claim + complete, tasks/s", spread(figures["limit_created"]), "", "")
    table.add_row(
        "create + claim + complete through HTTP, tasks/s",
        spread(figures["whole"]),
        f"{whole / limit:.2f}; {whole / created:.2f} with creation",
        "0.70",
    )
    table.add_row("claim + complete through HTTP, tasks/s", spread(figures["drain"]), f"{drain / limit:.2f}", "0.70")
    table.add_row(
        "one task at a time, 32 in flight, tasks/s",
        f"{figures['singles']:,.0f}",
        f"{figures['singles'] / limit:.2f}",
        "reported",
    )
    table.add_row("created to claimed at 100/s, ms", f"p50 {p50:.1f}, p99 {p99:.1f}", "", "p50 < 10, p99 < 50")
    empty, full = figures["claim_empty_ms"], figures["claim_full_ms"]
    table.add_row("claim of 100, empty and full table, ms", f"{empty:.2f}, {full:.2f}", f"{full / empty:.2f}", "1.20")
    add_peer_rows(table, figures["peers"], limit)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--rows", type=int, default=1_000_000, help="number of terminal rows, and of queued rows")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", nargs="*", default=[*PEERS], choices=[*PEERS], help="other queues; empty for none")
    arguments = parser.parse_args()
    figures = uvloop.run(run(arguments.tasks, arguments.rows, arguments.rounds, arguments.peers))
    report(figures)
    target = Path("bench/results/kernel.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
