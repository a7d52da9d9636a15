"""Events through HTTP to tasks, compared with bare inserts of the same rows, in one run: `python -m bench.routing`.

The limit is one connection that inserts the rows of a routed event (event, partition, scope, task and message) into
tables of the same shape with the same indexes, in batches of 1,000.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import asyncpg
import uvloop
from rich.console import Console
from rich.table import Table

from bench.harness import Installation, installation, machine, spread
from interlock.client import Fence, TaskClient
from interlock.wire.attempts import ClaimRequest, Event

BATCH: Final = 1000
DEPENDENTS: Final = 10_000
FEW: Final = 10
TABLES: Final = ("dataset_events", "partitions", "materialisations", "tasks_0", "queue_messages")
console = Console(stderr=True)

DAG: Final = """
name: bench
defaults: { heartbeat_timeout_seconds: 3600, timeout_seconds: 7200 }
jobs:
  - name: source
    activation: source
    source: { kind: always_on }
    operator: echo
    outputs: [rows]
  - name: wide
    activation: source
    source: { kind: always_on }
    operator: echo
    outputs: [rows]
  - name: reader
    operator: echo
    inputs: [{ from: { job: source, output: rows } }]
  - name: one_of_many
    operator: echo
    inputs: [{ from: { job: wide, output: rows } }]
"""


class Producer:
    """An attempt of a source that reports one partition after another, each once."""

    def __init__(self, task: TaskClient, dataset: UUID, version: UUID) -> None:
        self._task = task
        self._names: dict[str, Any] = {"dataset_uuid": dataset, "dataset_version": version}
        self._place = 0

    async def report(self, count: int) -> None:
        starts = range(self._place, self._place + count * 10, 10)
        self._place += count * 10
        events = [Event(start=start, end=start + 9, **self._names) for start in starts]
        await self._task.events(events)


async def producer(here: Installation, connection: asyncpg.Connection[Any], job: str) -> Producer:
    query = "select t.task_id, j.outputs from interlock.tasks t join interlock.jobs j using (job_id) where j.name = $1"
    while (row := await connection.fetchrow(query, job)) is None:  # noqa: ASYNC110 - the dispatcher makes it
        await asyncio.sleep(0.05)
    async with here.worker_client() as worker:
        (claim,) = (await worker.claim(ClaimRequest(worker_id="bench", task_ids=[row["task_id"]]))).claims
    assert claim.capability_token
    assert claim.attempt
    assert claim.lease_token
    fence = Fence(row["task_id"], claim.attempt, claim.lease_token)
    (output,) = json.loads(row["outputs"])
    task = TaskClient(here.info["internal"], claim.capability_token, fence)
    return Producer(task, UUID(output["dataset_uuid"]), UUID(output["dataset_version"]))


async def tasks_of(connection: asyncpg.Connection[Any], job: str, count: int) -> None:
    """Waits until `count` tasks of the job are queued."""
    query = (
        "select count(*) from (select 1 from interlock.tasks t join interlock.jobs j using (job_id)"
        " where j.name = $1 and t.run_id is null and t.listed_status = 'Queued' limit $2) t"
    )
    while await connection.fetchval(query, job, count) < count:  # noqa: ASYNC110 - the dispatcher makes them
        await asyncio.sleep(0.01)


async def through_http(connection: asyncpg.Connection[Any], source: Producer, count: int, before: int) -> float:
    """Returns events per second, from the first request until the last task is queued, with two requests in flight."""
    started = time.perf_counter()
    for _ in range(0, count, 2 * BATCH):
        await asyncio.gather(source.report(BATCH), source.report(BATCH))
    await tasks_of(connection, "reader", before + count)
    return count / (time.perf_counter() - started)


async def bare(connection: asyncpg.Connection[Any], count: int) -> float:
    """Inserts the rows of `count` routed events again. Returns events per second."""
    for table in TABLES:
        await connection.execute(
            f"drop table if exists bare_{table}; create table bare_{table} (like interlock.{table} including all)"
        )
    columns = {table: await _written(connection, table) for table in TABLES}
    rows = {table: await connection.fetch(_SAMPLE[table], count) for table in TABLES}
    started = time.perf_counter()
    for at in range(0, count, BATCH):
        async with connection.transaction():
            for table in TABLES:
                batch = rows[table][at : at + BATCH]
                await connection.copy_records_to_table(f"bare_{table}", records=batch, columns=columns[table])
    return count / (time.perf_counter() - started)


async def _written(connection: asyncpg.Connection[Any], table: str) -> list[str]:
    rows = await connection.fetch(
        "select attname from pg_attribute where attrelid = ('interlock.' || $1)::regclass and attnum > 0"
        " and not attisdropped and attgenerated = '' order by attnum",
        table,
    )
    return [row["attname"] for row in rows]


_SAMPLE: Final = {
    "dataset_events": "select * from interlock.dataset_events order by event_id limit $1",
    "partitions": "select * from interlock.partitions order by dataset_version, range_start limit $1",
    "materialisations": "select * from interlock.materialisations order by job_id, range_start limit $1",
    "tasks_0": "select * from interlock.tasks_0 where status = 'Queued' order by task_id limit $1",
    "queue_messages": "select * from interlock.queue_messages order by message_id limit $1",
}


async def clone_reader(connection: asyncpg.Connection[Any], name: str, copies: int) -> None:
    """Inserts copies of a job that read the same inputs."""
    await connection.execute(
        """
        with many as (
            insert into interlock.jobs
            select (jsonb_populate_record(j, jsonb_build_object(
                       'job_id', gen_random_uuid(), 'name', $1::text || gen_random_uuid()))).*
            from interlock.jobs j, generate_series(1, $2) n where j.name = $1 and j.current
            returning job_id
        )
        insert into interlock.edges (job_id, input_index, org_id, dataset_uuid, dataset_version, floating)
        select m.job_id, 0, e.org_id, e.dataset_uuid, e.dataset_version, false
        from many m, interlock.edges e join interlock.jobs j using (job_id) where j.name = $1 and j.current
        """,
        name,
        copies,
    )


async def fan_out(connection: asyncpg.Connection[Any], wide: Producer, dependents: int) -> float:
    """Returns seconds from one event's request until every dependent job has its task."""
    query = (
        "select count(*) from interlock.tasks t join interlock.jobs j using (job_id) where j.name like 'one_of_many%'"
    )
    before = await connection.fetchval(query)
    started = time.perf_counter()
    await wide.report(1)
    while await connection.fetchval(query) < before + dependents:  # noqa: ASYNC110 - the dispatcher makes them
        await asyncio.sleep(0.01)
    return time.perf_counter() - started


async def measured(name: str, work: Any) -> Any:
    started = time.perf_counter()
    result = await work
    console.print(f"  {name}: {time.perf_counter() - started:.1f} s", style="dim")
    return result


async def run(events: int, rounds: int) -> dict[str, Any]:
    figures: dict[str, Any] = {"machine": machine(), "events": events}
    async with installation() as here:
        connection = await here.connect()
        async with here.client() as client:
            await client.dags.deploy(DAG)
        source, wide = await producer(here, connection, "source"), await producer(here, connection, "wide")
        limits, rates, made = [], [], 0
        for n in range(rounds):
            rates.append(await measured(f"through HTTP, round {n + 1}", through_http(connection, source, events, made)))
            made += events
            limits.append(await measured(f"bare inserts, round {n + 1}", bare(connection, events)))
        await clone_reader(connection, "one_of_many", FEW - 1)
        few = [await fan_out(connection, wide, FEW) for _ in range(5)]
        with_few = await measured(f"with {FEW} other jobs", through_http(connection, source, events // 5, made))
        made += events // 5
        await clone_reader(connection, "one_of_many", DEPENDENTS - FEW)
        many = f"with {DEPENDENTS:,} other jobs"
        with_many = await measured(many, through_http(connection, source, events // 5, made))
        wide_seconds = await measured("fan-out", fan_out(connection, wide, DEPENDENTS))
        figures |= {"limit": limits, "routed": rates, "fan_out_seconds": wide_seconds, "fan_out_few": few}
        figures |= {"beside_few": with_few, "beside_many": with_many}
        await connection.close()
    return figures


def report(figures: dict[str, Any]) -> None:
    limit, routed = statistics.median(figures["limit"]), statistics.median(figures["routed"])
    table = Table(title=f"bench/routing: {figures['events']:,} events; {figures['machine']}")
    for column in ("measure", "figure", "vs limit", "bar"):
        table.add_column(column)
    table.add_row("bare inserts of the same rows, events/s", spread(figures["limit"]), "1.00", "")
    table.add_row(
        "accepted and routed through HTTP, events/s", spread(figures["routed"]), f"{routed / limit:.2f}", "0.40"
    )
    table.add_row(f"one event to {DEPENDENTS:,} dependents, s", f"{figures['fan_out_seconds']:.2f}", "", "1.00")
    few, many = figures["beside_few"], figures["beside_many"]
    table.add_row(f"events/s with {FEW} other jobs", f"{few:,.0f}", "", "")
    table.add_row(f"events/s with {DEPENDENTS:,} other jobs", f"{many:,.0f}", f"{many / few:.2f}", "flat")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    figures = uvloop.run(run(arguments.events, arguments.rounds))
    report(figures)
    target = Path("bench/results/routing.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
